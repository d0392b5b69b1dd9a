//! `cargo xtask tidy`: the project rules that no compiler checks. Each file here contains one rule or a few related ones, with the reason in its
//! header. `text` separates code from comments and strings for all of them; only the rule about circles needs the syntax tree.
//!
//! Trade-off: most rules search lines, so someone determined could fool them.

mod circles;
mod comparisons;
mod files;
mod launches;
mod layers;
mod links;
mod modules;
mod source;
mod text;
mod uses;
mod words;

use std::collections::BTreeMap;
use std::{fmt, fs};

use anyhow::{Context, Result, bail};

use self::comparisons::Comparisons;
use self::launches::Launches;
use self::links::Links;
pub(crate) use self::links::normal;
use self::text::Source;
pub(crate) use self::text::pattern;
use self::uses::FileNames;
use self::words::Words;
use crate::workspace::{Workspace, shown};

/// A broken rule: place, problem, and advice.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Finding {
    /// Path from the workspace root, with `/`.
    path: String,
    /// Line from 1; 0 for the whole file.
    line: usize,
    /// Name of the rule in the summary.
    rule: &'static str,
    /// The problem and advice, in one or two sentences.
    message: String,
}

impl Finding {
    /// Creates a finding of `rule` at `line` of `path`.
    fn new(rule: &'static str, path: &str, line: usize, message: impl Into<String>) -> Self {
        Self { path: path.to_owned(), line, rule, message: message.into() }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            0 => write!(f, "{}: [{}] {}", self.path, self.rule, self.message),
            line => write!(f, "{}:{line}: [{}] {}", self.path, self.rule, self.message),
        }
    }
}

/// The results of all rules for a workspace.
#[derive(Default)]
struct Report {
    /// Broken rules.
    findings: Vec<Finding>,
    /// Long files, with their lines.
    long: Vec<(usize, String)>,
    /// Number of files that were read.
    files: usize,
}

/// Checks everything and prints the findings; returns true if there are none.
pub(crate) fn run(workspace: &Workspace) -> Result<bool> {
    let report = check(workspace)?;
    if !report.long.is_empty() {
        println!("over {} lines (not an error; is it still one subject?):", source::USUAL_LINES);
        report.long.iter().for_each(|(lines, path)| println!("  {lines:4} {path}"));
    }
    report.findings.iter().for_each(|finding| println!("{finding}"));
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    report.findings.iter().for_each(|finding| *counts.entry(finding.rule).or_default() += 1);
    let counts: Vec<String> = counts.iter().map(|(rule, count)| format!("{rule} {count}")).collect();
    let by_rule = if counts.is_empty() { String::new() } else { format!(" ({})", counts.join(", ")) };
    println!("tidy: {} files, {} findings{by_rule}", report.files, report.findings.len());
    Ok(report.findings.is_empty())
}

/// Runs every rule.
fn check(workspace: &Workspace) -> Result<Report> {
    let mut report = Report { findings: layers::check(&layers::members(workspace)?), ..Report::default() };
    let (words, comparisons) = (Words::new(), Comparisons::new());
    let (mut launches, mut links) = (Launches::default(), Links::default());
    let mut crates: BTreeMap<String, BTreeMap<String, FileNames>> = BTreeMap::new();
    let paths = versioned_files(workspace)?;
    report.files = paths.len();
    for path in paths {
        // A file that is deleted but still in the index, or that is not text, is not checked.
        let Ok(bytes) = fs::read(workspace.root().join(&path)) else { continue };
        let Some(text) = as_text(&bytes) else { continue };
        let is_rust = path.ends_with(".rs");
        let source = (is_rust || path.ends_with(".cu") || path.ends_with(".cuh")).then(|| Source::read(text));
        report.findings.extend(files::check(&path, text));
        if path.ends_with(".md") {
            report.findings.extend(links.check(workspace.root(), &path, text));
        }
        report.findings.extend(words.check(&path, text, source.as_ref()));
        let Some(source) = source else { continue };
        launches.add(&path, text, &source);
        if is_rust {
            report.findings.extend(source::check(&path, text, &source.code));
            report.findings.extend(comparisons.check(&path, &source.code));
            report.long.extend(source::is_long(text).map(|lines| (lines, path.clone())));
            if let Some(folder) = source_folder(&path) {
                let names = FileNames::read(text).with_context(|| format!("{path} is not well-formed Rust"))?;
                crates.entry(folder.to_owned()).or_default().insert(path, names);
            }
        }
    }
    report.findings.extend(launches.check());
    report.findings.extend(crates.into_iter().flat_map(|(folder, files)| circles::check(&folder, files)));
    report.findings.sort();
    // Two marks of one rule on a line are one finding.
    report.findings.dedup();
    report.long.sort_by(|a, b| b.cmp(a));
    Ok(report)
}

/// Returns the `src` folder of the crate with the file at `path`; `None` for tests, benches and examples.
fn source_folder(path: &str) -> Option<&str> {
    let in_crate = path.starts_with("xtask/src/") || path.starts_with("crates/");
    in_crate.then(|| path.find("/src/").map(|end| &path[..end + 4])).flatten()
}

/// Lists the files under version control and new ones that are not ignored, as sorted paths with `/`.
fn versioned_files(workspace: &Workspace) -> Result<Vec<String>> {
    let mut command = workspace.command("git");
    command.args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"]);
    let output = command.output().context("could not start git: tidy asks it which files belong to the project")?;
    if !output.status.success() {
        bail!("`{}` failed: {}", shown(&command), String::from_utf8_lossy(&output.stderr).trim());
    }
    let listed = String::from_utf8(output.stdout).context("a path is not UTF-8: rename that file")?;
    let mut paths: Vec<String> = listed.split('\0').filter(|path| !path.is_empty()).map(str::to_owned).collect();
    paths.sort();
    paths.dedup();
    Ok(paths)
}

/// Returns the bytes as text, or `None` for binary data such as weights and images.
fn as_text(bytes: &[u8]) -> Option<&str> {
    std::str::from_utf8(bytes).ok().filter(|text| !text.contains('\0'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_not_text() {
        assert_eq!(as_text(b"a\0b"), None);
        assert_eq!(as_text(&[0xff, 0xfe]), None);
        assert_eq!(as_text(b"abc"), Some("abc"));
    }

    #[test]
    fn circles_are_looked_for_in_every_crate_on_its_own() {
        assert_eq!(source_folder("crates/a/src/b/c.rs"), Some("crates/a/src"));
        assert_eq!(source_folder("xtask/src/main.rs"), Some("xtask/src"));
        assert_eq!((source_folder("crates/a/tests/x.rs"), source_folder("tests/src/lib.rs")), (None, None));
    }
}
