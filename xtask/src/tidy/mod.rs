//! `cargo xtask tidy`: the house rules that no compiler checks. `graph` holds the floors, `source` what a `.rs` file
//! may say, `files` what any file may say, `code` the scanner that tells code from comments and strings. The rules
//! read text, not syntax trees: that keeps xtask small, and a determined author could fool them.

mod code;
mod files;
mod graph;
mod source;

use std::fmt;
use std::fs;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};

use crate::workspace::{Workspace, exit_code, shown};

/// A broken rule: where, what, and what to do.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Finding {
    /// Path from the workspace root, with `/`.
    path: String,
    /// Line from 1; 0 where the whole file is meant.
    line: usize,
    /// What is wrong and what to do, in one sentence or two.
    message: String,
}

impl Finding {
    fn new(path: &str, line: usize, message: impl Into<String>) -> Self {
        Self { path: path.to_owned(), line, message: message.into() }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            0 => write!(f, "{}: {}", self.path, self.message),
            line => write!(f, "{}:{line}: {}", self.path, self.message),
        }
    }
}

/// Checks everything; success only without findings.
pub(crate) fn run(workspace: &Workspace, args: &[String]) -> Result<ExitCode> {
    if let Some(unknown) = args.first() {
        bail!("`cargo xtask tidy` takes no options, got `{unknown}`");
    }
    Ok(exit_code(report(workspace)?))
}

/// Checks everything and prints what was found; true without findings.
pub(crate) fn report(workspace: &Workspace) -> Result<bool> {
    let (mut findings, mut long) = (graph::check(&graph::members(workspace)?), Vec::new());
    let paths = versioned_files(workspace)?;
    for path in &paths {
        // What is gone from disk but not yet from the index, and what is not text, has nothing to say.
        let Ok(bytes) = fs::read(workspace.root().join(path)) else { continue };
        let Some(text) = as_text(&bytes) else { continue };
        findings.extend(files::check(path, text));
        if Path::new(path).extension().is_some_and(|extension| extension == "rs") {
            findings.extend(source::check(path, text));
            long.extend(source::is_long(text).map(|lines| (lines, path)));
        }
    }
    findings.sort();
    long.sort_by(|a, b| b.cmp(a));
    if !long.is_empty() {
        println!("over {} lines (not an error; is it still one subject?):", source::USUAL_LINES);
        long.iter().for_each(|(lines, path)| println!("  {lines:4} {path}"));
    }
    findings.iter().for_each(|finding| println!("{finding}"));
    println!("tidy: {} files, {} findings", paths.len(), findings.len());
    Ok(findings.is_empty())
}

/// Files under version control and new ones that are not ignored, as sorted paths with `/`.
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

/// The bytes as text, or `None` for weights, images and the like.
fn as_text(bytes: &[u8]) -> Option<&str> {
    std::str::from_utf8(bytes).ok().filter(|text| !text.contains('\0'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finding_names_its_place() {
        assert_eq!(Finding::new("a.rs", 3, "x").to_string(), "a.rs:3: x");
        assert_eq!(Finding::new("a.rs", 0, "x").to_string(), "a.rs: x");
    }

    #[test]
    fn weights_are_not_text() {
        assert_eq!(as_text(b"a\0b"), None);
        assert_eq!(as_text(&[0xff, 0xfe]), None);
        assert_eq!(as_text(b"abc"), Some("abc"));
    }
}
