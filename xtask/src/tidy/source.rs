//! Rules about one `.rs` file: its header and length, where CubeCL, world sizes and sockets may be named, and what must not
//! be left in.
//!
//! Rationale: a header tells the reader what a file is for and what it does not do, before the first line of code. CubeCL,
//! ranks and the network each have one owner among the crates, so that a change of them stays there. Unfinished code and
//! ignored tests look like progress and guard nothing.
//!
//! Trade-off: lines of code are searched for words, so a renamed import is not noticed.

use super::finding::Finding;
use super::lexer::{has_word, words};

/// No file is this long or longer.
const MAX_LINES: usize = 800;

/// Longer files are listed, so that they are noticed before they reach the limit.
pub(super) const USUAL_LINES: usize = 300;

/// Library files longer than this say in their header what they trade away or do not support.
const SHORT_LINES: usize = 60;

/// Macros that mark unfinished or half-debugged code.
const LEFTOVERS: [&str; 3] = ["todo", "unimplemented", "dbg"];

/// Types of the standard library that open connections.
const SOCKETS: [&str; 5] = ["TcpStream", "TcpListener", "UdpSocket", "UnixStream", "UnixListener"];

/// What is wrong with the Rust file `text` at `path`, whose code without comments and literals is `code`.
pub(super) fn check(path: &str, text: &str, code: &str) -> Vec<Finding> {
    let mut findings: Vec<Finding> = header(path, text).into_iter().chain(length(path, text)).collect();
    for (index, line) in code.lines().enumerate() {
        let messages = [
            ("cubecl", names_cubecl(path, line)),
            ("world-size", world_size(path, line)),
            ("sockets", socket(path, line)),
            ("unfinished", leftover(line)),
            ("unfinished", ignored(line)),
        ];
        let found = messages.into_iter().filter_map(|(rule, message)| Some((rule, message?)));
        findings.extend(found.map(|(rule, message)| Finding::new(rule, path, index + 1, message)));
    }
    findings
}

/// The number of lines, if it is more than usual.
pub(super) fn is_long(text: &str) -> Option<usize> {
    Some(text.lines().count()).filter(|lines| *lines > USUAL_LINES)
}

fn header(path: &str, text: &str) -> Option<Finding> {
    let first = text.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or_default();
    let good = first.starts_with("//!") || first.starts_with("#![doc = include_str!(");
    let message = "no `//!` header: begin with a sentence or two on what the file is for, and a line `Trade-off: ...`";
    (!good).then(|| Finding::new("header", path, 1, message))
}

/// A warning for a library file of some length whose header says nothing about its limits.
pub(super) fn limits_not_stated(path: &str, text: &str) -> Option<Finding> {
    let in_library = path.strip_prefix("crates/").is_some_and(|rest| rest.contains("/src/"));
    let header = || text.lines().take_while(|line| line.starts_with("//!") || line.trim().is_empty());
    let states = header().any(|line| line.contains("Trade-off:") || line.contains("Not supported:"));
    let included = text.starts_with("#![doc = include_str!(");
    let message = "the header has no line `Trade-off: ...` or `Not supported: ...`";
    (in_library && text.lines().count() > SHORT_LINES && !states && !included)
        .then(|| Finding::new("limits", path, 1, message))
}

fn length(path: &str, text: &str) -> Option<Finding> {
    let lines = text.lines().count();
    let message = format!("{lines} lines; the limit is {MAX_LINES}: divide it by subject");
    (lines >= MAX_LINES).then(|| Finding::new("size", path, 0, message))
}

fn names_cubecl(path: &str, line: &str) -> Option<String> {
    let found = words(line).any(|(word, _)| word.starts_with("cubecl") || word == "burn_cubecl");
    let message = "CubeCL is named outside crates/kernels: add what is missing to the operations of `kernels`";
    (found && !path.starts_with("crates/kernels/")).then(|| message.to_owned())
}

/// The crate that the file at `path` belongs to; `None` for tests, benches and xtask.
fn crate_of(path: &str) -> Option<&str> {
    path.strip_prefix("crates/").and_then(|rest| rest.split('/').next())
}

/// `parallel` owns the world size; the communicators of `kernels` are built for one, `trainer` and `train` pass it on, and
/// `data` takes it as a number.
fn world_size(path: &str, line: &str) -> Option<String> {
    let of_backend = path.strip_prefix("crates/kernels/src/backends/").and_then(|rest| rest.split_once('/'));
    let is_communicator =
        path.starts_with("crates/kernels/src/comm") || of_backend.is_some_and(|(_, file)| file.starts_with("comm/"));
    let may_know =
        is_communicator || crate_of(path).is_none_or(|name| matches!(name, "parallel" | "trainer" | "train" | "data"));
    let message = "`world_size` outside parallel, trainer, train, data and the communicators of kernels: take the number that is \
                   needed (a denominator, a shard's length) as an argument";
    (!may_know && has_word(line, "world_size")).then(|| message.to_owned())
}

/// `hub` has the client of the Hub and of HTTP, `parallel` connects ranks, whole-system tests imitate servers; no other code opens a
/// connection.
fn socket(path: &str, line: &str) -> Option<String> {
    let may_connect =
        path.starts_with("tests/") || crate_of(path).is_some_and(|name| matches!(name, "hub" | "parallel"));
    let names_net = has_word(line, "std") && words(line).any(|(word, rest)| word == "net" && !rest.starts_with('('));
    let found = names_net || words(line).any(|(word, _)| SOCKETS.contains(&word));
    let message = "a socket outside crates/hub (its client) and crates/parallel: ask one of them";
    (found && !may_connect).then(|| message.to_owned())
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
    use super::super::lexer::code_only;
    use super::*;

    /// Messages for `text` at `path`, each after its line number.
    fn messages(path: &str, text: &str) -> Vec<String> {
        check(path, text, &code_only(text)).iter().map(ToString::to_string).collect()
    }

    fn clean(path: &str, code: &str) -> bool {
        messages(path, &format!("//! Header.\n{code}\n")).is_empty()
    }

    #[test]
    fn every_file_begins_with_its_purpose() {
        assert!(messages("a.rs", "use x;\n//! late")[0].starts_with("a.rs:1: [header] no `//!` header"));
        assert!(messages("a.rs", "").len() == 1);
        assert!(messages("a.rs", "\n//! What for.\n").is_empty());
        assert!(messages("crates/data/src/lib.rs", "#![doc = include_str!(\"../README.md\")]\n").is_empty());
    }

    #[test]
    fn a_long_library_file_states_its_limits_in_the_header() {
        let of = |header: &str, lines: usize| format!("//! Header.\n//! {header}\n\n{}", "x\n".repeat(lines));
        let path = "crates/data/src/a.rs";
        assert!(limits_not_stated(path, &of("More.", 60)).is_some());
        assert!(limits_not_stated(path, &of("More.", 57)).is_none());
        assert!(limits_not_stated(path, &of("Trade-off: speed.", 60)).is_none());
        assert!(limits_not_stated(path, &of("Not supported: sparse rows.", 60)).is_none());
        assert!(limits_not_stated("crates/data/tests/a.rs", &of("More.", 60)).is_none());
        assert!(limits_not_stated(path, &of("More.", 60).replace("x\nx", "// Trade-off: late\nx")).is_some());
    }

    #[test]
    fn a_file_stays_under_the_limit() {
        let of = |lines: usize| format!("//! Header.\n{}", "x\n".repeat(lines - 1));
        assert!(messages("a.rs", &of(799)).is_empty());
        assert!(messages("a.rs", &of(800))[0].contains("800 lines"));
        assert_eq!((is_long(&of(300)), is_long(&of(301))), (None, Some(301)));
    }

    #[test]
    fn only_kernels_names_cubecl() {
        assert!(!clean("crates/train/src/run.rs", "use cubecl::prelude::*;"));
        assert!(!clean("crates/optim/src/lib.rs", "type R = burn_cubecl::Tensor;"));
        assert!(clean("crates/kernels/src/wgpu.rs", "use cubecl::prelude::*;"));
        assert!(clean("crates/cuda/src/order.rs", "/// Ordered after cubecl's queue.\nfn f() {}"));
    }

    #[test]
    fn only_parallel_trainer_and_data_know_the_world_size() {
        assert!(!clean("crates/model/src/block.rs", "fn f(world_size: usize) {}"));
        for path in [
            "crates/parallel/src/lib.rs",
            "crates/trainer/src/step.rs",
            "crates/data/src/a.rs",
            "crates/kernels/src/comm/local.rs",
            "crates/kernels/src/backends/cuda/comm/mod.rs",
            "tests/a.rs",
        ] {
            assert!(clean(path, "fn f(world_size: usize) {}"), "{path}");
        }
        assert!(!clean("crates/kernels/src/backends/cuda/engine/gemm.rs", "fn f(world_size: usize) {}"));
        assert!(!clean("crates/kernels/src/backends/comm.rs", "fn f(world_size: usize) {}"));
        assert!(clean("crates/model/src/block.rs", "fn f(new_world_sizes: usize) {}"));
    }

    #[test]
    fn only_hub_and_parallel_open_sockets() {
        for code in ["use std::net::TcpStream;", "use std :: net;", "let s = UnixListener::bind(p);"] {
            assert!(!clean("crates/train/src/a.rs", code), "{code}");
            assert!(!clean("xtask/src/a.rs", code), "{code}");
            assert!(clean("crates/parallel/src/a.rs", code) && clean("crates/hub/src/http.rs", code), "{code}");
            assert!(clean("tests/tests/runs/a.rs", code) && !clean("crates/train/tests/a.rs", code), "{code}");
        }
        assert!(clean("crates/train/src/a.rs", "use std::network; // std::net"));
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
        assert!(
            messages("a.rs", "//! Header.\n\nfn f() {\n    todo!()\n}\n")[0]
                .starts_with("a.rs:4: [unfinished] `todo!`")
        );
    }
}
