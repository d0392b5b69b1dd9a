//! What a rule of tidy reports: where, which rule, what is wrong and what to do.
//!
//! Trade-off: one sentence as text, no machine-readable detail; the output is a list to work through.

use std::fmt;

/// A broken rule: where, what, and what to do.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Finding {
    /// Path from the workspace root, with `/`.
    path: String,
    /// Line from 1; 0 where the whole file is meant.
    line: usize,
    /// Name of the rule, as the summary counts it.
    rule: &'static str,
    /// What is wrong and what to do, in one sentence or two.
    message: String,
}

impl Finding {
    /// A finding of `rule` at `line` of `path`.
    pub(super) fn new(rule: &'static str, path: &str, line: usize, message: impl Into<String>) -> Self {
        Self { path: path.to_owned(), line, rule, message: message.into() }
    }

    /// Name of the rule.
    pub(super) fn rule(&self) -> &'static str {
        self.rule
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finding_names_its_place_and_its_rule() {
        assert_eq!(Finding::new("size", "a.rs", 3, "x").to_string(), "a.rs:3: [size] x");
        assert_eq!(Finding::new("size", "a.rs", 0, "x").to_string(), "a.rs: [size] x");
    }
}
