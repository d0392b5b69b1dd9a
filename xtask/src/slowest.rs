//! Lists the slowest parts of a test run: tests from nextest's JUnit file, programs from the output of `cargo test`.
//!
//! Trade-off: test programs of stable Rust do not time their tests, so without nextest only the program of a slow test is found.

use std::io::{BufRead, BufReader, pipe};
use std::process::Command;

use crate::tidy::pattern;
use crate::workspace::shown;
use anyhow::{Context, Result};

/// Number of listed tests or programs.
const LISTED: usize = 20;
/// Shorter times are not listed.
const LEAST_SECONDS: f64 = 0.5;

/// A test or a test program, and its time.
#[derive(Debug, PartialEq)]
pub(crate) struct Timed {
    seconds: f64,
    name: String,
}

/// Reads the tests from nextest's JUnit file.
pub(crate) fn of_junit(text: &str) -> Vec<Timed> {
    let case = pattern(r#"<testcase name="([^"]*)" classname="([^"]*)"[^>]* time="([0-9.]+)""#);
    let cases = case.captures_iter(text).map(|found| found.extract().1);
    let timed = |[test, program, seconds]: [&str; 3]| {
        Some(Timed { seconds: seconds.parse().ok()?, name: format!("{program} {test}") })
    };
    cases.filter_map(timed).collect()
}

/// Reads the test programs of `cargo test` from the lines that it and they print.
fn of_lines<'a>(lines: impl Iterator<Item = &'a str>) -> Vec<Timed> {
    // Cargo may color the word.
    let begins = pattern(r"(?:Running|Doc-tests)(?:\x1b\[[0-9;]*m)* (.+)$");
    let ends = pattern(r"^test result: .* finished in ([0-9.]+)s");
    let (mut program, mut all) = (String::new(), Vec::new());
    for line in lines {
        if let Some(found) = ends.captures(line) {
            all.extend(found[1].parse().ok().map(|seconds| Timed { seconds, name: program.clone() }));
        } else if let Some(found) = begins.captures(line) {
            program = found[1].to_owned();
        }
    }
    all
}

/// Runs `cargo test`, showing its output; returns whether it succeeded, and its programs. Fails if it cannot be started.
pub(crate) fn run_programs(mut command: Command) -> Result<(bool, Vec<Timed>)> {
    // One pipe keeps the lines of cargo and of the programs in order.
    let (reader, writer) = pipe().context("could not make a pipe")?;
    command.stdout(writer.try_clone().context("could not make a pipe")?).stderr(writer);
    let mut child = command.spawn().with_context(|| format!("could not start {}", shown(&command)))?;
    // The command holds the pipe's other end, which has to be closed for the last line to come.
    drop(command);
    let mut lines = Vec::new();
    for line in BufReader::new(reader).split(b'\n') {
        let line = String::from_utf8_lossy(&line.context("could not read what the tests print")?).into_owned();
        println!("{line}");
        lines.push(line);
    }
    let status = child.wait().context("could not wait for cargo")?;
    Ok((status.success(), of_lines(lines.iter().map(String::as_str))))
}

/// Formats the slowest, one per line; empty if none took long.
pub(crate) fn list(mut timed: Vec<Timed>) -> String {
    timed.retain(|one| one.seconds >= LEAST_SECONDS);
    timed.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    timed.truncate(LISTED);
    timed.iter().map(|one| format!("{:8.2} s  {}\n", one.seconds, one.name)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timed(seconds: f64, name: &str) -> Timed {
        Timed { seconds, name: name.to_owned() }
    }

    #[test]
    fn tests_come_from_the_file_of_nextest() {
        let text = r#"<testsuite name="firebrick-files" tests="2" disabled="0" errors="0" failures="1">
        <testcase name="tests::one" classname="firebrick-files" timestamp="2026-01-01T00:00:00.000+00:00" time="0.065">
        </testcase>
        <testcase name="two" classname="firebrick-files::it" timestamp="2026-01-01T00:00:00.000+00:00" time="12.500">"#;
        assert_eq!(
            of_junit(text),
            [timed(0.065, "firebrick-files tests::one"), timed(12.5, "firebrick-files::it two")]
        );
    }

    #[test]
    fn programs_come_from_the_lines_of_cargo_and_of_the_tests() {
        let text = "   Compiling a v0.1.0\n     Running unittests src/lib.rs (target/debug/deps/a-1)\n\nrunning 1 test\n\
                    test one ... ok\n\ntest result: ok. 1 passed; 0 failed; 0 ignored; finished in 0.08s\n\n\
                    \x1b[1m\x1b[92m     Running\x1b[0m tests/b.rs (target/debug/deps/b-2)\n\
                    test result: FAILED. 0 passed; 1 failed; finished in 2.50s\n   Doc-tests a\n\
                    test result: ok. 1 passed; finished in 1.00s\n";
        let expected = [
            timed(0.08, "unittests src/lib.rs (target/debug/deps/a-1)"),
            timed(2.5, "tests/b.rs (target/debug/deps/b-2)"),
            timed(1.0, "a"),
        ];
        assert_eq!(of_lines(text.lines()), expected);
    }

    #[test]
    fn the_slowest_are_listed_in_order() {
        let many = (0..40).map(|number| timed(f64::from(number) / 10.0, &format!("test {number}")));
        let text = list(many.collect());
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!((lines.len(), lines[0], lines[19]), (20, "    3.90 s  test 39", "    2.00 s  test 20"));
        assert_eq!(list(vec![timed(0.1, "quick")]), "");
    }

    #[test]
    fn what_a_program_prints_is_read_to_its_end() {
        let mut command = Command::new("rustc");
        command.arg("--version");
        assert_eq!(run_programs(command).unwrap(), (true, Vec::new()));
    }
}
