//! `cargo xtask test`, and the one set of cargo features that test, clippy and rustdoc share: with identical features
//! cargo reuses the compiled backends from one to the next, and on two cores that is the difference between one long
//! build and several.
//!
//! Trade-off: options of the test runner are not known here, so `--backends`, `--slow` and `--no-nextest` are found by name,
//! before or after filters, and everything else is passed on.

use std::process::ExitCode;
use std::{env, fs, thread};

use anyhow::{Context, Result, bail, ensure};
use tempfile::TempDir;

use crate::backend::{Backend, compiled_backends};
use crate::slowest;
use crate::workspace::{Workspace, exit_code, is_installed, shown, succeeds, words};

/// Package whose features enable the backends in the whole workspace.
const SWITCH: &str = "firebrick-tests";

/// Returns the Cargo arguments that select the whole workspace with `backends`.
pub(crate) fn selection(backends: &[Backend]) -> String {
    let features: Vec<String> = backends.iter().map(|backend| format!("{SWITCH}/{}", backend.name())).collect();
    format!("--workspace --features {}", features.join(","))
}

/// The request of the command line.
#[derive(Debug, PartialEq, Eq)]
struct Request {
    backends: Vec<Backend>,
    nextest: bool,
    /// All cases and whole corpora, which other runs sample, and builds of the packages.
    slow: bool,
    /// Options and filters for the test runner.
    rest: Vec<String>,
}

impl Request {
    fn parse(args: &[String]) -> Result<Self> {
        let mut request = Self { backends: compiled_backends(), nextest: true, slow: false, rest: Vec::new() };
        let mut typed = args.iter();
        while let Some(word) = typed.next() {
            match word.as_str() {
                "--no-nextest" => request.nextest = false,
                "--slow" => request.slow = true,
                "--backends" => match typed.next() {
                    Some(list) => request.backends = parse_list(list)?,
                    None => bail!("--backends needs a list, such as flex,candle"),
                },
                "--" => {
                    request.rest.push(word.clone());
                    request.rest.extend(typed.by_ref().cloned());
                }
                other => match other.strip_prefix("--backends=") {
                    Some(list) => request.backends = parse_list(list)?,
                    None => request.rest.push(word.clone()),
                },
            }
        }
        Ok(request)
    }

    /// Returns the cargo calls for the request, in order. nextest runs no doc tests, so they follow separately, unless a filter or option for nextest
    /// was given.
    fn calls(&self) -> Vec<Vec<String>> {
        let with = |verb: &str| [words(&format!("{verb} {}", selection(&self.backends))), self.rest.clone()].concat();
        match (self.nextest, self.rest.is_empty()) {
            (false, _) => vec![with("test")],
            (true, true) => vec![with("nextest run"), with("test --doc")],
            (true, false) => vec![with("nextest run")],
        }
    }
}

/// Backends from a comma-separated list.
fn parse_list(list: &str) -> Result<Vec<Backend>> {
    let auto = "--backends has no `auto`: name some of flex,candle,wgpu,cuda";
    let names = list.split(',').map(str::trim).filter(|name| !name.is_empty());
    let backends: Vec<_> =
        names.map(|name| Backend::parse(name, "--backends")?.context(auto)).collect::<Result<_>>()?;
    ensure!(!backends.is_empty(), "--backends is empty: name some of flex,candle,wgpu,cuda");
    Ok(backends)
}

/// Creates a folder in memory for the tests' files, if there is room. Checkpoints and caches wait until their files are on the disk; in memory a run
/// of the tests is much faster, and its files are temporary anyway. A `TMPDIR` that the user has set stays.
#[cfg(target_os = "linux")]
fn memory_folder() -> Option<TempDir> {
    use rustix::fs::{StatVfsMountFlags, statvfs};

    const MEMORY: &str = "/dev/shm";
    const ROOM: u64 = 4 << 30;
    let disk = statvfs(MEMORY).ok()?;
    // Some tests compile what they start.
    let may_execute = !disk.f_flag.contains(StatVfsMountFlags::NOEXEC);
    if env::var_os("TMPDIR").is_some() || !may_execute || disk.f_bavail * disk.f_frsize < ROOM {
        return None;
    }
    tempfile::Builder::new().prefix("firebrick-tests-").tempdir_in(MEMORY).ok()
}

#[cfg(not(target_os = "linux"))]
fn memory_folder() -> Option<TempDir> {
    None
}

/// Variable for the number of tests that nextest runs at once, unless an option says another.
const THREADS: &str = "NEXTEST_TEST_THREADS";

/// Returns one more than there are cores: some tests only wait, for a rank that is silent or a Hub that does not answer.
fn threads() -> Option<String> {
    let cores = thread::available_parallelism().ok()?;
    env::var_os(THREADS).is_none().then(|| (cores.get() + 1).to_string())
}

/// Runs the tests, and lists the slowest; success only if every call succeeded.
pub(crate) fn run(workspace: &Workspace, args: &[String]) -> Result<ExitCode> {
    let mut request = Request::parse(args)?;
    request.nextest = request.nextest && is_installed("cargo-nextest", &["nextest", "--version"]);
    // nextest keeps its results there even if CARGO_TARGET_DIR names another folder.
    let junit = workspace.root().join("target/nextest/default/junit.xml");
    let _ = fs::remove_file(&junit);
    let memory = memory_folder();
    let (mut passed, mut timed) = (true, Vec::new());
    for call in request.calls() {
        let mut command = workspace.cargo(&call);
        if request.slow {
            command.env("FIREBRICK_SLOW_TESTS", "1");
        }
        if let Some(folder) = &memory {
            command.env("TMPDIR", folder.path());
        }
        if let Some(threads) = threads() {
            command.env(THREADS, threads);
        }
        eprintln!("xtask: {}", shown(&command));
        if request.nextest {
            passed &= succeeds(&mut command)?;
        } else {
            let (succeeded, programs) = slowest::run_programs(command)?;
            passed &= succeeded;
            timed = programs;
        }
    }
    // Absent if nothing was run, or under another profile of nextest.
    if let Ok(text) = fs::read_to_string(&junit) {
        timed = slowest::of_junit(&text);
    }
    let slowest = slowest::list(timed);
    if !slowest.is_empty() {
        eprintln!("xtask: what took longest\n{slowest}");
    }
    Ok(exit_code(passed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_backends_go_into_one_build() {
        let features = ["flex", "candle", "wgpu", "cuda"].map(|name| format!("firebrick-tests/{name}")).join(",");
        assert_eq!(selection(&Backend::ALL), format!("--workspace --features {features}"));
    }

    #[test]
    fn backends_can_be_restricted() {
        let request = Request::parse(&words("--backends flex,wgpu resume")).unwrap();
        assert_eq!(request.backends, [Backend::Flex, Backend::Wgpu]);
        assert_eq!(request.rest, ["resume"]);
        assert!(!request.slow && Request::parse(&words("resume --slow")).unwrap().slow);
        for wrong in ["--backends=auto", "--backends", "--backends ,"] {
            assert!(Request::parse(&words(wrong)).is_err(), "{wrong}");
        }
    }

    #[test]
    fn doc_tests_follow_nextest_and_are_part_of_cargo_test() {
        let all = Request::parse(&words("--backends flex")).unwrap().calls();
        assert_eq!(all[0].join(" "), "nextest run --workspace --features firebrick-tests/flex");
        assert_eq!(all[1].join(" "), "test --doc --workspace --features firebrick-tests/flex");
        let plain = Request::parse(&words("--backends flex --no-nextest -- --nocapture")).unwrap().calls();
        assert_eq!(plain.len(), 1);
        assert_eq!(plain[0].join(" "), "test --workspace --features firebrick-tests/flex -- --nocapture");
    }
}
