//! Rule `unsafe`: where unsafe code may be, and what has to be written next to it.
//!
//! Rationale: the compiler proves every safe file. What it cannot prove is kept in a few files that a reviewer can read in
//! full, and each block states why it is sound, so that the next change can be checked against the reason.
//!
//! Trade-off: the presence of a reason is checked, not its truth. A comment counts if at most three lines of code are
//! between it and the block.

use super::finding::Finding;
use super::lexer::{has_word, words};

/// Lines of code that may be between a `SAFETY:` comment and its block: the beginning of a long statement.
const NEAR_LINES: usize = 3;

/// Whether `path` may hold unsafe code: the FFI crate, the CUDA backend, the GEMM file of the CPU backend (its library
/// takes raw pointers), and the memory map of `data`.
fn may_be_unsafe(path: &str) -> bool {
    let in_flex = path.strip_prefix("crates/kernels/src/backends/flex/");
    path.starts_with("crates/cuda/")
        || path.starts_with("crates/kernels/src/backends/cuda/")
        || in_flex.is_some_and(|name| name.contains("gemm") && !name.contains('/'))
        || path == "crates/data/src/cache/map.rs"
}

/// What is wrong with the unsafe code of the file `text` at `path`, whose code without comments and literals is `code`.
pub(super) fn check(path: &str, text: &str, code: &str) -> Vec<Finding> {
    let lines: Vec<&str> = text.lines().collect();
    let code: Vec<&str> = code.lines().collect();
    let mut findings = Vec::new();
    for (index, line) in code.iter().enumerate() {
        let waived = has_word(line, "unsafe_code") && (has_word(line, "allow") || has_word(line, "expect"));
        if (waived || has_word(line, "unsafe")) && !may_be_unsafe(path) {
            let message = "`unsafe` outside crates/cuda, backends/cuda and backends/flex/*gemm*.rs of kernels, and \
                           data/src/cache/map.rs: use a safe API, or put a safe wrapper there";
            findings.push(Finding::new("unsafe", path, index + 1, message));
        } else if let Some(missing) = words(line).filter(|(word, _)| *word == "unsafe").find_map(|(_, rest)| {
            let next = rest.trim_start();
            let next = if next.is_empty() { code.get(index + 1).map_or("", |line| line.trim_start()) } else { next };
            missing_reason(&lines, &code, index, next)
        }) {
            findings.push(Finding::new("unsafe", path, index + 1, missing));
        }
    }
    findings
}

/// What is missing at the `unsafe` in the line `index` that `next` follows.
fn missing_reason(lines: &[&str], code: &[&str], index: usize, next: &str) -> Option<String> {
    let first = words(next).next().map_or("", |(word, _)| word);
    if next.starts_with('{') || first == "impl" {
        let kind = if first == "impl" { "impl" } else { "block" };
        let message = format!("unsafe {kind} without a `// SAFETY: ...` comment above it: say why it is sound");
        return (!has_comment_above(lines, code, index, "SAFETY:")).then_some(message);
    }
    let declares = match first {
        "trait" => true,
        // `unsafe fn(` and `unsafe extern "C" fn(` are types; a block of extern declarations has a brace first.
        "fn" | "extern" => next.split_once("fn").is_some_and(|(before, name)| {
            !before.contains('{') && name.trim_start().starts_with(|c: char| c.is_alphabetic() || c == '_')
        }),
        _ => false,
    };
    let message = "unsafe function or trait without a `# Safety` section: say what the caller has to guarantee";
    (declares && !has_comment_above(lines, code, index, "# Safety")).then(|| message.to_owned())
}

/// Whether `mark` is in a comment on the line `index`, or above it with at most [`NEAR_LINES`] lines of code between.
fn has_comment_above(lines: &[&str], code: &[&str], index: usize, mark: &str) -> bool {
    let mut lines_of_code = 0;
    for at in (0..=index).rev() {
        if lines[at].contains(mark) && !code[at].contains(mark) {
            return true;
        }
        let is_attribute = code[at].trim_start().starts_with("#[");
        lines_of_code += usize::from(at < index && !code[at].trim().is_empty() && !is_attribute);
        if lines_of_code > NEAR_LINES {
            return false;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::super::lexer::code_only;
    use super::*;

    fn findings(path: &str, text: &str) -> usize {
        check(path, text, &code_only(text)).len()
    }

    #[test]
    fn unsafe_code_stays_in_its_places() {
        let code = "// SAFETY: the length was checked.\nlet m = unsafe { map(f) };";
        for path in ["crates/model/src/read.rs", "crates/kernels/src/attention.rs", "crates/data/src/cache/read.rs"] {
            assert_eq!(findings(path, code), 1, "{path}");
            assert_eq!(findings(path, "#![allow(unsafe_code)]"), 1, "{path}");
        }
        for path in [
            "crates/cuda/src/driver.rs",
            "crates/kernels/src/backends/cuda/attention/mod.rs",
            "crates/kernels/src/backends/flex/gemm.rs",
            "crates/data/src/cache/map.rs",
        ] {
            assert_eq!(findings(path, code), 0, "{path}");
        }
        assert_eq!(findings("crates/model/src/read.rs", "#![deny(unsafe_code)] // unsafe"), 0);
    }

    #[test]
    fn every_block_and_impl_has_its_reason() {
        let path = "crates/cuda/src/a.rs";
        assert_eq!(findings(path, "let m = unsafe { map(f) };"), 1);
        assert_eq!(findings(path, "unsafe impl Send for A {}"), 1);
        assert_eq!(findings(path, "// SAFETY: one\n// two\n// three\n// four\n// five\nunsafe impl Send for A {}"), 0);
        assert_eq!(findings(path, "// SAFETY: x\nlet a =\n    b(\n  unsafe {\n c() });"), 0);
        assert_eq!(findings(path, "// SAFETY: x\na();\nb();\nc();\nd();\nunsafe { e() };"), 1);
        assert_eq!(findings(path, "let a = \"SAFETY:\"; unsafe { e() };"), 0);
    }

    #[test]
    fn an_unsafe_function_says_what_it_needs() {
        let path = "crates/cuda/src/a.rs";
        assert_eq!(findings(path, "unsafe fn f() {}"), 1);
        assert_eq!(
            findings(path, "/// Reads.\n///\n/// # Safety\n/// `p` is valid.\n#[inline]\npub unsafe fn f() {}"),
            0
        );
        assert_eq!(findings(path, "type F = unsafe extern \"C\" fn(u8);\nlet f: unsafe fn(u8) = g;"), 0);
        assert_eq!(findings(path, "unsafe extern \"C\" { fn f(); }"), 0);
    }
}
