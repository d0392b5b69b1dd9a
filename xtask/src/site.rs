//! `cargo xtask site`: the pages of docs/ as a site, by mdBook, with llms.txt next to them. All it needs is in its folder, so it is readable without
//! a network.
//!
//! What pages link outside of docs/ is copied into the site; Markdown as text, since only the pages of docs/SUMMARY.md are rendered.
//! Trade-off: links are rewritten by their form, in a copy of docs/.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

use anyhow::{Context, Result, ensure};
use regex::{Captures, Regex};

use crate::tidy::{normal, pattern};
use crate::workspace::{Workspace, shown};

static OUTWARD: LazyLock<Regex> = LazyLock::new(|| pattern(r"\]\(\.\./([^()\s#]+)(#[^()\s]*)?\)"));
static ENTRY: LazyLock<Regex> = LazyLock::new(|| pattern(r"\[([^\]]+)\]\(([^)]+\.md)\)"));
static REFERENCE: LazyLock<Regex> = LazyLock::new(|| pattern(r#"(?:href|src)="([^"]*)""#));
static LOADED: LazyLock<Regex> = LazyLock::new(|| pattern(r#"<(?:script|link|img)[^>]*(?:src|href)="(?:https?:)?//"#));
static ID: LazyLock<Regex> = LazyLock::new(|| pattern(r#"\bid="([^"]+)""#));

/// The settings of mdBook.
const BOOK: &str =
    "[book]\ntitle = \"Firebrick\"\nlanguage = \"en\"\nsrc = \"source\"\n\n[output.html]\nno-section-label = true\n";

/// Writes the site into `out`, or target/site.
///
/// # Errors
/// A missing mdBook, a page that SUMMARY.md lacks, and links that lead nowhere.
pub(crate) fn run(workspace: &Workspace, out: Option<PathBuf>) -> Result<()> {
    let root = workspace.root();
    let site = out.unwrap_or_else(|| root.join("target/site"));
    let staged = tempfile::tempdir()?;
    let source = staged.path().join("source");
    stage(root, &source)?;
    fs::write(staged.path().join("book.toml"), BOOK)?;
    let here = root.join("target/tools/bin/mdbook");
    let mut mdbook = Command::new(if here.is_file() { here } else { PathBuf::from("mdbook") });
    mdbook.arg("build").arg(staged.path()).arg("--dest-dir").arg(&site);
    let status = mdbook.status().with_context(|| {
        format!("cannot start `{}`: cargo install mdbook --version 0.5.4 --locked --root target/tools", shown(&mdbook))
    })?;
    ensure!(status.success(), "`{}` failed", shown(&mdbook));
    fs::write(site.join("llms.txt"), overview(&source)?)?;
    let (pages, broken) = check(&site)?;
    broken.iter().for_each(|link| println!("{link}"));
    ensure!(broken.is_empty(), "{} links of {} lead nowhere", broken.len(), site.display());
    println!("{pages} pages in {}; no link leads nowhere, and nothing is loaded from elsewhere", site.display());
    Ok(())
}

/// Copies docs/ with what its pages link outside of it.
fn stage(root: &Path, source: &Path) -> Result<()> {
    let docs = root.join("docs");
    let summary = fs::read_to_string(docs.join("SUMMARY.md")).context("cannot read docs/SUMMARY.md")?;
    // mdBook would make an empty page of a name that is not there.
    for entry in ENTRY.captures_iter(&summary) {
        ensure!(docs.join(&entry[2]).is_file(), "docs/SUMMARY.md names {}, which is not there", &entry[2]);
    }
    for entry in walk(&docs)? {
        let name = entry.strip_prefix(&docs)?;
        let to = source.join(name);
        fs::create_dir_all(to.parent().unwrap_or(source))?;
        if entry.extension().is_none_or(|extension| extension != "md") {
            fs::copy(&entry, &to)?;
            continue;
        }
        let shown = name.display();
        let is_listed = name == Path::new("SUMMARY.md") || summary.contains(&format!("({shown})"));
        ensure!(is_listed, "docs/SUMMARY.md does not name {shown}");
        let text = fs::read_to_string(&entry)?;
        let mut linked = BTreeSet::new();
        let text = OUTWARD.replace_all(&text, |link: &Captures<'_>| {
            linked.insert(link[1].to_owned());
            format!("](files/{})", copied_as(&link[1]))
        });
        fs::write(&to, &*text)?;
        for path in linked {
            let from = root.join(&path);
            ensure!(from.is_file(), "docs/{shown} links {path}, which is no file: a site can show files alone");
            let to = source.join("files").join(copied_as(&path));
            fs::create_dir_all(to.parent().unwrap_or(source))?;
            fs::copy(from, to)?;
        }
    }
    Ok(())
}

/// Returns the name of a file in the site.
fn copied_as(path: &str) -> String {
    path.strip_suffix(".md").map_or_else(|| path.to_owned(), |stem| format!("{stem}.txt"))
}

/// Returns llms.txt: the pages with their first sentences.
fn overview(source: &Path) -> Result<String> {
    let summary = fs::read_to_string(source.join("SUMMARY.md"))?;
    let mut text = "# Firebrick\n\n> Trains and fine-tunes language models from one TOML recipe, in Rust: QLoRA, LoRA, full fine-tuning, DPO. One \
                    program, no Python.\n\n## Pages\n\n"
        .to_owned();
    for entry in ENTRY.captures_iter(&summary) {
        let page = fs::read_to_string(source.join(&entry[2]))?;
        let prose = page.lines().filter(|line| !line.starts_with('#') && !line.is_empty());
        let first: Vec<&str> = prose.take(3).collect();
        let first = first.join(" ");
        let sentence = first.split(". ").next().unwrap_or_default().trim_end_matches('.');
        text += &format!("- [{}]({}): {sentence}\n", &entry[1], entry[2].replace(".md", ".html"));
    }
    Ok(text)
}

/// Returns the number of pages, and each link that leads nowhere or loads something from elsewhere.
fn check(site: &Path) -> Result<(usize, Vec<String>)> {
    let pages: Vec<PathBuf> =
        walk(site)?.into_iter().filter(|path| path.extension().is_some_and(|extension| extension == "html")).collect();
    let mut broken = Vec::new();
    for page in &pages {
        let text = fs::read_to_string(page)?;
        let name = page.strip_prefix(site)?.display().to_string();
        broken.extend(LOADED.find_iter(&text).map(|tag| format!("{name} loads {}", tag.as_str())));
        for link in REFERENCE.captures_iter(&text) {
            let target = link[1].replace("&#x2F;", "/");
            // The page of errors is for a server's root.
            let is_relative = !target.contains(':') && !target.starts_with("//") && name != "404.html";
            let (file, anchor) = target.split_once('#').unwrap_or((&target, ""));
            let folder = page.parent().unwrap_or(site);
            let to = if file.is_empty() { page.clone() } else { normal(&folder.join(file)) };
            if !is_relative {
                continue;
            }
            let has_anchor = || {
                let text = fs::read_to_string(&to).unwrap_or_default();
                ID.captures_iter(&text).any(|id| id[1] == *anchor)
            };
            let is_page = to.extension().is_some_and(|extension| extension == "html");
            if !to.exists() || (is_page && !anchor.is_empty() && !has_anchor()) {
                broken.push(format!("{name}: {target}"));
            }
        }
    }
    Ok((pages.len(), broken))
}

/// Lists the files below a folder, sorted.
fn walk(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let entries = fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    for entry in entries {
        let path = entry?.path();
        if path.is_dir() { found.extend(walk(&path)?) } else { found.push(path) }
    }
    found.sort();
    Ok(found)
}
