//! Rules about one `.rs` file: header, length, the allowed places of unsafe code, world sizes and sockets, and no ignored tests.
//!
//! Rationale: a header tells the reader what a file is for and what it does not do, before the first line of code. The compiler proves every safe
//! file; unsafe code is confined to a few files that a reviewer can read in full, and clippy requires a reason for each block. Ranks and the network
//! each have one owner among the crates, so that changes to them stay there. An ignored test looks like progress and guards nothing.
//!
//! Trade-off: code is searched for words, so a renamed import is not noticed.

use std::sync::LazyLock;

use regex::Regex;

use super::Finding;
use super::text::{line_of, pattern};

/// No file is this long or longer.
const MAX_LINES: usize = 800;

/// Longer files are listed, so that they are noticed before they reach the limit.
pub(super) const USUAL_LINES: usize = 300;

/// Code that is allowed in some files only.
struct Rule {
    name: &'static str,
    pattern: &'static str,
    /// Whether the file at a path may contain it.
    allows: fn(&str) -> bool,
    /// Advice to the developer.
    message: &'static str,
}

const RULES: [Rule; 4] = [
    Rule {
        name: "unsafe",
        pattern: r"\bunsafe\b|\b(?:allow|expect)\b.*\bunsafe_code\b",
        allows: may_be_unsafe,
        message: "`unsafe` outside crates/cuda, backends/cuda, backends/flex/*gemm*.rs and two files of wgpu of kernels, and \
                  two files of data: use a safe API, or put a safe wrapper there",
    },
    Rule {
        name: "world-size",
        pattern: r"\bworld_size\b",
        allows: may_know_the_world_size,
        message: "`world_size` outside parallel, trainer, train, data and the communicators of kernels: take the number that is \
                  needed (a denominator, a shard's length) as an argument",
    },
    // `hub` has the client of the Hub and of HTTP, `parallel` connects ranks, whole-system tests imitate servers.
    Rule {
        name: "sockets",
        pattern: r"(?m)\bstd\b.*\bnet\b(?:[^(]|$)|\b(?:Tcp(?:Stream|Listener)|UdpSocket|Unix(?:Stream|Listener))\b",
        allows: |path| path.starts_with("tests/") || matches!(crate_of(path), Some("hub" | "parallel")),
        message: "a socket outside crates/hub (its client) and crates/parallel: ask one of them",
    },
    Rule {
        name: "ignored",
        pattern: r"#\s*\[\s*ignore\b|\bcfg_attr\s*\(.*\bignore\b",
        allows: |_| false,
        message: "an ignored test guards nothing: make it pass, or delete it",
    },
];

static PATTERNS: LazyLock<[Regex; 4]> = LazyLock::new(|| RULES.map(|rule| pattern(rule.pattern)));

/// Checks the Rust file `text` at `path`, whose code without comments and literals is `code`.
pub(super) fn check(path: &str, text: &str, code: &str) -> Vec<Finding> {
    let mut findings: Vec<Finding> = header(path, text).into_iter().chain(length(path, text)).collect();
    for (rule, pattern) in RULES.iter().zip(&*PATTERNS).filter(|(rule, _)| !(rule.allows)(path)) {
        let lines = pattern.find_iter(code).map(|found| line_of(code, found.start()));
        findings.extend(lines.map(|line| Finding::new(rule.name, path, line, rule.message)));
    }
    findings
}

/// Counts the lines, if there are more than usual.
pub(super) fn is_long(text: &str) -> Option<usize> {
    Some(text.lines().count()).filter(|lines| *lines > USUAL_LINES)
}

fn header(path: &str, text: &str) -> Option<Finding> {
    let first = text.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or_default();
    let good = first.starts_with("//!") || first.starts_with("#![doc = include_str!(");
    let message = "no `//!` header: begin with a sentence or two on what the file is for";
    (!good).then(|| Finding::new("header", path, 1, message))
}

fn length(path: &str, text: &str) -> Option<Finding> {
    let lines = text.lines().count();
    let message = format!("{lines} lines; the limit is {MAX_LINES}: divide it by subject");
    (lines >= MAX_LINES).then(|| Finding::new("size", path, 0, message))
}

/// Returns the crate of the file at `path`; `None` for tests, benches and xtask.
fn crate_of(path: &str) -> Option<&str> {
    path.strip_prefix("crates/").and_then(|rest| rest.split('/').next())
}

/// Returns whether the file may contain unsafe code: the FFI crate, the CUDA backend, the GEMM file of the CPU backend (its library takes raw
/// pointers), and the memory map and the allocator of `data`.
fn may_be_unsafe(path: &str) -> bool {
    let in_flex = path.strip_prefix("crates/kernels/src/backends/flex/");
    path.starts_with("crates/cuda/")
        || path.starts_with("crates/kernels/src/backends/cuda/")
        || ["on_cubecl/handle_number.rs", "wgpu/engine/program.rs"]
            .iter()
            .any(|file| path.strip_prefix("crates/kernels/src/backends/") == Some(file))
        || in_flex.is_some_and(|name| name.contains("gemm") && !name.contains('/'))
        || path == "crates/data/src/cache/map.rs"
        || path == "crates/data/src/chat_template/allocator.rs"
}

/// Returns whether the file may use the world size. `parallel` owns it; the communicators of `kernels` are built for one, `trainer` and `train` pass
/// it on, and `data` takes it as a number.
fn may_know_the_world_size(path: &str) -> bool {
    let of_backend = path.strip_prefix("crates/kernels/src/backends/").and_then(|rest| rest.split_once('/'));
    path.starts_with("crates/kernels/src/comm")
        || of_backend.is_some_and(|(_, file)| file.starts_with("comm/"))
        || matches!(crate_of(path), None | Some("parallel" | "trainer" | "train" | "data"))
}

#[cfg(test)]
mod tests {
    use super::super::text::Source;
    use super::*;

    /// Returns the rules that `code`, after a header, breaks at `path`.
    fn broken(path: &str, code: &str) -> Vec<String> {
        let text = format!("//! Header.\n{code}\n");
        let found = check(path, &text, &Source::read(&text).code);
        found.iter().map(|finding| format!("{}:{}", finding.rule, finding.line)).collect()
    }

    #[test]
    fn every_file_begins_with_its_purpose_and_stays_under_the_limit() {
        let found = |text: &str| check("a.rs", text, text).iter().map(ToString::to_string).collect::<Vec<_>>();
        let lines = |count: usize| format!("//! Header.\n{}", "x\n".repeat(count - 1));
        assert!(found("use x;\n//! late")[0].starts_with("a.rs:1: [header] no `//!` header"));
        assert!(found(&lines(800))[0].starts_with("a.rs: [size] 800 lines"));
        for text in ["\n//! What for.\n", "#![doc = include_str!(\"../README.md\")]\n", &lines(799)] {
            assert_eq!(found(text), [""; 0]);
        }
        assert_eq!((is_long(&lines(300)), is_long(&lines(301))), (None, Some(301)));
    }

    #[test]
    fn unsafe_code_world_sizes_and_sockets_stay_with_their_owners() {
        let (block, rank) = ("let m = unsafe { map(f) };", "fn f(world_size: usize) {}");
        for (rule, code, path, owner) in [
            ("unsafe:2", block, "crates/model/src/read.rs", "crates/cuda/src/driver.rs"),
            ("unsafe:2", block, "crates/kernels/src/a.rs", "crates/kernels/src/backends/cuda/attention/mod.rs"),
            ("unsafe:2", block, "crates/kernels/src/backends/flex/a.rs", "crates/kernels/src/backends/flex/gemm.rs"),
            ("unsafe:2", "#![allow(unsafe_code)]", "crates/data/src/cache/read.rs", "crates/data/src/cache/map.rs"),
            ("unsafe:2", block, "crates/data/src/chat_template/a.rs", "crates/data/src/chat_template/allocator.rs"),
            ("world-size:2", rank, "crates/model/src/block.rs", "crates/parallel/src/lib.rs"),
            ("world-size:2", rank, "crates/kernels/src/backends/comm.rs", "crates/kernels/src/comm/local.rs"),
            ("world-size:2", rank, "crates/kernels/src/gemm.rs", "crates/kernels/src/backends/cuda/comm/mod.rs"),
            ("sockets:2", "use std :: net;", "crates/train/src/a.rs", "crates/hub/src/http.rs"),
            ("sockets:2", "let s = UnixListener::bind(p);", "xtask/src/a.rs", "tests/tests/runs/a.rs"),
        ] {
            assert_eq!(broken(path, code), [rule], "{code}");
            assert_eq!(broken(owner, code), [""; 0], "{code}");
        }
        let others = "#![deny(unsafe_code)] // unsafe\nuse std::network; // std::net\nlet new_world_sizes = 1;";
        assert_eq!(broken("crates/model/src/a.rs", others), [""; 0]);
    }

    #[test]
    fn no_test_is_ignored() {
        for code in ["#[ignore]", "# [ ignore = \"slow\" ]", "#[cfg_attr(windows, ignore)]"] {
            assert_eq!(broken("a.rs", &format!("fn f() {{}}\n{code}")), ["ignored:3"], "{code}");
        }
        assert_eq!(broken("a.rs", "let ignore = parse(ignore);"), [""; 0]);
    }
}
