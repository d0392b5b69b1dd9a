//! Rule `link`: a relative link of a Markdown file leads to a file that exists, and its anchor to a heading there.
//!
//! Trade-off: links are found by their form, so a link that is split over two lines is not seen, and none in a comment of the code is.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::sync::LazyLock;

use regex::Regex;

use super::{Finding, pattern};

static LINK: LazyLock<Regex> = LazyLock::new(|| pattern(r"\]\(([^()\s]+)\)"));
static INLINE_CODE: LazyLock<Regex> = LazyLock::new(|| pattern(r"`[^`]*`"));

/// Headings of files that were read, by path.
#[derive(Default)]
pub(super) struct Links {
    anchors: BTreeMap<PathBuf, Vec<String>>,
}

impl Links {
    /// Checks the Markdown file at `path` below `root`.
    pub(super) fn check(&mut self, root: &Path, path: &str, text: &str) -> Vec<Finding> {
        let folder = Path::new(path).parent().unwrap_or(Path::new(""));
        let finding = |line: usize, message: String| Finding::new("link", path, line, message);
        let mut findings = Vec::new();
        for (line, target) in links(text) {
            let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
            let at = if file.is_empty() { PathBuf::from(path) } else { normal(&folder.join(file)) };
            if !root.join(&at).exists() {
                findings.push(finding(line, format!("{target} leads nowhere: there is no {}", at.display())));
            } else if !anchor.is_empty() && !self.anchors_of(root, &at).iter().any(|known| known == anchor) {
                findings.push(finding(line, format!("{target}: {} has no heading #{anchor}", at.display())));
            }
        }
        findings
    }

    fn anchors_of(&mut self, root: &Path, path: &Path) -> &[String] {
        self.anchors.entry(path.to_owned()).or_insert_with(|| {
            let text = fs::read_to_string(root.join(path)).unwrap_or_default();
            anchors(&text)
        })
    }
}

/// Returns each relative link of a Markdown text with its line, from 1; those in code are none.
fn links(text: &str) -> impl Iterator<Item = (usize, &str)> {
    prose(text).flat_map(|(line, text)| {
        let codes: Vec<_> = INLINE_CODE.find_iter(text).map(|code| code.range()).collect();
        let found = LINK.captures_iter(text).filter_map(|link| link.get(1));
        let is_code = move |at: usize| codes.iter().any(|code| code.contains(&at));
        let is_relative = |target: &str| !target.contains("://") && !target.starts_with("mailto:");
        found
            .filter(move |link| !is_code(link.start()) && is_relative(link.as_str()))
            .map(move |link| (line, link.as_str()))
    })
}

/// Returns the lines outside of fenced code with their numbers, from 1.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut is_code = false;
    (1..).zip(text.lines()).filter(move |(_, line)| {
        let is_fence = line.trim_start().starts_with("```");
        is_code ^= is_fence;
        !is_code && !is_fence
    })
}

/// Returns the anchors of a text's headings, as GitHub and mdBook make them.
fn anchors(text: &str) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    for (_, line) in prose(text) {
        let Some(title) = line.strip_prefix('#').map(|rest| rest.trim_start_matches('#')) else { continue };
        let Some(title) = title.strip_prefix(' ') else { continue };
        let kept = title.trim().to_lowercase();
        let kept = kept.chars().filter(|sign| sign.is_alphanumeric() || " -_".contains(*sign));
        let anchor: String = kept.map(|sign| if sign == ' ' { '-' } else { sign }).collect();
        let times = found.iter().filter(|known| **known == anchor || known.starts_with(&format!("{anchor}-"))).count();
        let is_new = !found.contains(&anchor);
        found.push(if is_new { anchor } else { format!("{anchor}-{times}") });
    }
    found
}

/// Returns a path without `.` and `..`.
pub(crate) fn normal(path: &Path) -> PathBuf {
    path.components().fold(PathBuf::new(), |mut normal, part| {
        match part {
            Component::ParentDir => drop(normal.pop()),
            Component::CurDir => {}
            other => normal.push(other),
        }
        normal
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_lead_to_files_and_headings_and_code_has_none() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("docs")).unwrap();
        fs::write(root.path().join("docs/b.md"), "# B\n\n## What `it` is, and why\n").unwrap();
        let text = "# A\n[b](b.md) [x](nowhere.md) [h](b.md#what-it-is-and-why) [n](b.md#absent) [web](https://a.b/c)\n\
                    `[code](no.md)` [here](#a)\n```text\n[code](no.md)\n```\n[up](../docs/b.md)\n";
        fs::write(root.path().join("docs/a.md"), text).unwrap();
        let findings = Links::default().check(root.path(), "docs/a.md", text);
        let found: Vec<_> = findings.iter().map(|finding| (finding.line, &*finding.message)).collect();
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].1.starts_with("nowhere.md leads nowhere") && found[1].1.contains("no heading #absent"));
    }
}
