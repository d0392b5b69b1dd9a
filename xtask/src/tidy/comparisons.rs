//! Rule `comparisons`: only `firebrick_precision::difference` decides how far numbers are apart and whether that is close enough.
//!
//! Rationale: a NaN vanishes in `f32::max`, and `difference > tolerance` is false for it, so a comparison written out passes what is not a number.
//! Trade-off: recognized by the usual names; `difference < tolerance` in an `assert!` is fine, since it fails for a NaN.

use regex::Regex;

use super::Finding;
use super::text::{line_of, pattern};

/// Where such code belongs.
const HOME: &str = "crates/precision/src/difference.rs";

/// Refused code, and what to call instead.
const REFUSED: [(&str, &str); 3] = [
    (r"[^-=]>=? *-?([a-z_]+\.)*[A-Za-z0-9_]*(?i-u:tolerance|tol|bound)\b", "is_within"),
    (r"\babs\(\)+( as f64)?\)*\.fold\([^;]*?\bmax\b", "largest_difference"),
    (r"\b(error|difference|worst|largest_error|largest_difference)\.max\(", "worst"),
];

/// The compiled patterns.
pub(super) struct Comparisons(Vec<(Regex, &'static str)>);

impl Comparisons {
    /// Compiles them.
    pub(super) fn new() -> Self {
        Self(REFUSED.map(|(refused, instead)| (pattern(refused), instead)).to_vec())
    }

    /// Checks the code of the Rust file at `path`.
    pub(super) fn check(&self, path: &str, code: &str) -> Vec<Finding> {
        if path == HOME {
            return Vec::new();
        }
        let found = self.0.iter().flat_map(|(refused, instead)| {
            refused.find_iter(code).map(move |found| {
                let message = format!("a NaN passes `{}`: call `difference::{instead}`", found.as_str().trim());
                Finding::new("comparisons", path, line_of(code, found.start()), message)
            })
        });
        found.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comparisons_that_a_nan_passes_are_found_and_those_that_it_fails_are_not() {
        let count = |code: &str| Comparisons::new().check("a.rs", code).len();
        for code in [
            "if error > bound {",
            "if found.largest >= options.tolerance {",
            "x.iter().filter(|one| one.error > FP8_TOLERANCE)",
            "pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)",
            "pairs.map(|(a, b)| f64::from((a - b).abs())).fold(0.0, |most, next| most.max(next))",
            "largest = error.max(largest)",
        ] {
            assert_eq!(count(code), 1, "{code}");
        }
        for code in
            ["assert!(difference < tolerance)", "|x| -> Tol {", "match x { 1 => tolerance }", "width.max(error_width)"]
        {
            assert_eq!(count(code), 0, "{code}");
        }
    }
}
