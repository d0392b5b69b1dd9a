//! Rules about one `.rs` file: its header and length, where `unsafe`, CubeCL and world sizes may stand, and what must
//! not be left behind.

use super::Finding;
use super::code::{code_only, has_word, words};

/// No file is this long or longer.
const MAX_LINES: usize = 800;

/// Longer files are listed, so that they are noticed before they reach the limit.
pub(crate) const USUAL_LINES: usize = 300;

/// Macros that mark unfinished or half-debugged code.
const LEFTOVERS: [&str; 3] = ["todo", "unimplemented", "dbg"];

/// What is wrong with the Rust file `text` at `path`.
pub(crate) fn check(path: &str, text: &str) -> Vec<Finding> {
    let mut findings: Vec<Finding> = header(path, text).into_iter().chain(length(path, text)).collect();
    for (index, line) in code_only(text).lines().enumerate() {
        let messages =
            [unsafe_code(path, line), names_cubecl(path, line), world_size(path, line), leftover(line), ignored(line)];
        findings.extend(messages.into_iter().flatten().map(|message| Finding::new(path, index + 1, message)));
    }
    findings
}

/// The number of lines, if it is more than usual.
pub(crate) fn is_long(text: &str) -> Option<usize> {
    Some(text.lines().count()).filter(|lines| *lines > USUAL_LINES)
}

fn header(path: &str, text: &str) -> Option<Finding> {
    let first = text.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or_default();
    let good = first.starts_with("//!") || first.starts_with("#![doc = include_str!(");
    let message = "no `//!` header: begin with a sentence or two on what the file is for and what it gives up";
    (!good).then(|| Finding::new(path, 1, message))
}

fn length(path: &str, text: &str) -> Option<Finding> {
    let lines = text.lines().count();
    let message = format!("{lines} lines; the limit is {MAX_LINES}: divide it by subject");
    (lines >= MAX_LINES).then(|| Finding::new(path, 0, message))
}

/// Whether `path` may hold unsafe code: the FFI crate, the files of `kernels` that launch GPU kernels, and the one file of
/// `data` that maps its cache into memory.
fn may_be_unsafe(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path);
    path.starts_with("crates/cuda/")
        || (path.starts_with("crates/kernels/src/") && name.starts_with("launch"))
        || path == "crates/data/src/cache/map.rs"
}

fn unsafe_code(path: &str, line: &str) -> Option<String> {
    let waived = has_word(line, "unsafe_code") && (has_word(line, "allow") || has_word(line, "expect"));
    let found = has_word(line, "unsafe") || waived;
    let message = "`unsafe` outside crates/cuda and crates/kernels/src/**/launch*.rs: use a safe API, or put a safe \
                   wrapper there";
    (found && !may_be_unsafe(path)).then(|| message.to_owned())
}

fn names_cubecl(path: &str, line: &str) -> Option<String> {
    let found = words(line).any(|(word, _)| word.starts_with("cubecl") || word == "burn_cubecl");
    let message = "CubeCL is named outside crates/kernels: add what is missing to the ops of `kernels`";
    (found && !path.starts_with("crates/kernels/")).then(|| message.to_owned())
}

/// `parallel` owns the world size; `train` passes it on, and `data` is handed it as a number.
fn world_size(path: &str, line: &str) -> Option<String> {
    let inside = path.strip_prefix("crates/").and_then(|rest| rest.split('/').next());
    let may_know = inside.is_none_or(|name| matches!(name, "parallel" | "train" | "data"));
    let message = "`world_size` outside parallel, train and data: take the number that is needed (a denominator, a \
                   shard's length) as an argument";
    (!may_know && has_word(line, "world_size")).then(|| message.to_owned())
}

fn leftover(line: &str) -> Option<String> {
    let (name, _) = words(line).find(|(word, rest)| LEFTOVERS.contains(word) && rest.starts_with('!'))?;
    Some(format!("`{name}!` is left over: finish it, or return an error that says what is not supported"))
}

fn ignored(line: &str) -> Option<String> {
    let dense: String = line.split_whitespace().collect();
    let found = dense.contains("#[ignore") || (dense.contains("cfg_attr(") && has_word(line, "ignore"));
    found.then(|| "an ignored test guards nothing: make it pass, or delete it".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Messages for `text` at `path`, each behind its line number.
    fn messages(path: &str, text: &str) -> Vec<String> {
        check(path, text).iter().map(|finding| format!("{} {}", finding.line, finding.message)).collect()
    }

    fn clean(path: &str, code: &str) -> bool {
        check(path, &format!("//! Header.\n{code}\n")).is_empty()
    }

    #[test]
    fn every_file_begins_with_its_purpose() {
        assert!(messages("a.rs", "use x;\n//! late")[0].starts_with("1 no `//!` header"));
        assert!(messages("a.rs", "").len() == 1);
        assert!(messages("a.rs", "\n//! What for.\n").is_empty());
        assert!(messages("crates/data/src/lib.rs", "#![doc = include_str!(\"../README.md\")]\n").is_empty());
    }

    #[test]
    fn a_file_stays_under_the_limit() {
        let of = |lines: usize| format!("//! Header.\n{}", "x\n".repeat(lines - 1));
        assert!(check("a.rs", &of(799)).is_empty());
        assert!(messages("a.rs", &of(800))[0].contains("800 lines"));
        assert_eq!((is_long(&of(300)), is_long(&of(301))), (None, Some(301)));
    }

    #[test]
    fn unsafe_stays_in_its_two_places() {
        assert!(!clean("crates/model/src/read.rs", "let m = unsafe { map(f) };"));
        assert!(!clean("crates/model/src/read.rs", "#![allow(unsafe_code)]"));
        assert!(!clean("crates/kernels/src/attention.rs", "unsafe fn f() {}"));
        assert!(clean("crates/kernels/src/cuda/launch_attention.rs", "unsafe fn f() {}"));
        assert!(clean("crates/cuda/src/driver.rs", "unsafe { f() }"));
        assert!(clean("crates/model/src/read.rs", "#![deny(unsafe_code)] // unsafe"));
    }

    #[test]
    fn only_kernels_names_cubecl() {
        assert!(!clean("crates/train/src/run.rs", "use cubecl::prelude::*;"));
        assert!(!clean("crates/optim/src/lib.rs", "type R = burn_cubecl::Tensor;"));
        assert!(clean("crates/kernels/src/wgpu.rs", "use cubecl::prelude::*;"));
        assert!(clean("crates/cuda/src/order.rs", "/// Ordered after cubecl's queue.\nfn f() {}"));
    }

    #[test]
    fn only_parallel_and_its_customers_know_the_world_size() {
        assert!(!clean("crates/model/src/block.rs", "fn f(world_size: usize) {}"));
        for path in ["crates/parallel/src/lib.rs", "crates/train/src/step.rs", "crates/data/src/a.rs", "tests/a.rs"] {
            assert!(clean(path, "fn f(world_size: usize) {}"), "{path}");
        }
        assert!(clean("crates/model/src/block.rs", "fn f(new_world_sizes: usize) {}"));
    }

    #[test]
    fn nothing_unfinished_is_left() {
        for code in ["todo!()", "unimplemented!(\"x\")", "dbg!(x)"] {
            assert!(!clean("a.rs", code), "{code}");
        }
        assert!(clean("a.rs", "let todo = \"todo!()\"; // todo!()"));
    }

    #[test]
    fn no_test_is_ignored() {
        for code in ["#[ignore]", "# [ ignore = \"slow\" ]", "#[cfg_attr(windows, ignore)]"] {
            assert!(!clean("a.rs", code), "{code}");
        }
        assert!(clean("a.rs", "let ignore = parse(ignore);"));
    }

    #[test]
    fn a_finding_points_at_its_line() {
        assert!(messages("a.rs", "//! Header.\n\nfn f() {\n    todo!()\n}\n")[0].starts_with("4 `todo!`"));
    }
}
