//! Rule `readme`: Rust in the README of a crate is compiled.
//!
//! Rationale: the README of a crate is its documentation page, included by `lib.rs`. An example that rustdoc compiles (a
//! block without a language, `rust` or `no_run`) stays correct; the same lines under `text` or `ignore` are wrong after the
//! next change of a signature, and nothing says so.
//!
//! Trade-off: Rust is recognized by three keywords; a block of pseudocode that uses them must be written differently.

use super::finding::Finding;

/// Beginnings of lines that only Rust has.
const RUST: [&str; 5] = ["use ", "let ", "fn ", "pub fn ", "impl "];

/// What is wrong with the file `text` at `path`; only READMEs of crates are looked at.
pub(super) fn check(path: &str, text: &str) -> Vec<Finding> {
    let is_readme = path.strip_prefix("crates/").is_some_and(|rest| rest.ends_with("/README.md"));
    if !is_readme {
        return Vec::new();
    }
    let (mut findings, mut block) = (Vec::new(), None);
    for (index, line) in text.lines().enumerate() {
        let Some(language) = line.trim_start().strip_prefix("```") else {
            if let Some((start, true)) = block
                && RUST.iter().any(|word| line.trim_start().starts_with(word))
            {
                let message =
                    "Rust that is not compiled: mark the block `rust` or `no_run`, and hide setup lines with `# `";
                findings.push(Finding::new("readme", path, start, message));
                block = Some((start, false));
            }
            continue;
        };
        let not_compiled = language.split(',').any(|word| matches!(word.trim(), "text" | "ignore"));
        block = if block.is_some() { None } else { Some((index + 1, not_compiled)) };
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(block: &str) -> usize {
        check("crates/data/README.md", &format!("# Data\n\n{block}\n\n```text\na file tree\n```\n")).len()
    }

    #[test]
    fn rust_under_text_or_ignore_is_found_once() {
        assert_eq!(findings("```text\nuse a::b;\nlet x = b();\n```"), 1);
        assert_eq!(findings("```rust,ignore\nfn f() {}\n```"), 1);
    }

    #[test]
    fn compiled_rust_and_other_text_are_fine() {
        for block in
            ["```\nlet x = 1;\n```", "```rust\nlet x = 1;\n```", "```no_run\nuse a;\n```", "```text\nL4 train\n```"]
        {
            assert_eq!(findings(block), 0, "{block}");
        }
        assert!(check("README.md", "```text\nlet x = 1;\n```").is_empty());
    }
}
