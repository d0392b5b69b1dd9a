//! `cargo xtask lint`: all checks of the source that do not run it, cheap stages first. CI calls the same stages by name.
//!
//! Trade-off: a stage whose tool is not installed reports that and counts as passed, so CI may find what a local run skipped.

use std::process::ExitCode;
use std::time::Instant;

use anyhow::Result;
use clap::ValueEnum;

use crate::backend::compiled_backends;
use crate::test::selection;
use crate::tidy;
use crate::workspace::{Workspace, exit_code, is_installed, shown, succeeds, words};

/// The stages, in the order in which they run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Stage {
    /// cargo fmt --all --check
    Fmt,
    /// The project rules, as `cargo xtask tidy`
    Tidy,
    /// Spelling, if the `typos` tool is installed
    Typos,
    /// Licenses, bans and sources, if cargo-deny is installed
    Deny,
    /// cargo clippy over every target with all backends compiled in; warnings are errors
    Clippy,
    /// rustdoc over the workspace; broken links are errors
    Doc,
}

impl Stage {
    /// Returns the name on the command line.
    fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

/// The result of a stage.
enum Outcome {
    Passed,
    Failed,
    /// The tool is missing; how to install it.
    Skipped(&'static str),
}

/// Runs the `named` stages, or all; success only if none failed.
pub(crate) fn run(workspace: &Workspace, named: &[Stage]) -> Result<ExitCode> {
    let mut failed = Vec::new();
    for stage in selected(named) {
        let (name, start) = (stage.name(), Instant::now());
        let outcome = run_stage(workspace, stage)?;
        let seconds = start.elapsed().as_secs_f32();
        match outcome {
            Outcome::Passed => eprintln!("lint {name}: passed ({seconds:.1} s)"),
            Outcome::Skipped(install) => eprintln!("lint {name}: skipped, not installed ({install})"),
            Outcome::Failed => {
                eprintln!("lint {name}: FAILED ({seconds:.1} s)");
                failed.push(name);
            }
        }
    }
    if !failed.is_empty() {
        eprintln!("lint failed: {}", failed.join(", "));
    }
    Ok(exit_code(failed.is_empty()))
}

/// Returns the stages to run, in their fixed order.
fn selected(named: &[Stage]) -> Vec<Stage> {
    Stage::value_variants().iter().copied().filter(|stage| named.is_empty() || named.contains(stage)).collect()
}

fn run_stage(workspace: &Workspace, stage: Stage) -> Result<Outcome> {
    let outcome = |passed| if passed { Outcome::Passed } else { Outcome::Failed };
    let mut command = match stage {
        Stage::Tidy => return tidy::run(workspace).map(outcome),
        Stage::Typos if !is_installed("typos", &["--version"]) => {
            return Ok(Outcome::Skipped("cargo install typos-cli"));
        }
        Stage::Deny if !is_installed("cargo-deny", &["--version"]) => {
            return Ok(Outcome::Skipped("cargo install cargo-deny"));
        }
        Stage::Typos => workspace.command("typos"),
        Stage::Fmt | Stage::Deny | Stage::Clippy | Stage::Doc => workspace.cargo(&stage_args(stage)),
    };
    if stage == Stage::Doc {
        command.env("RUSTDOCFLAGS", "-D warnings -D rustdoc::broken_intra_doc_links");
    }
    eprintln!("lint {}: {}", stage.name(), shown(&command));
    succeeds(&mut command).map(outcome)
}

/// Returns cargo's arguments for the stages that are cargo calls.
fn stage_args(stage: Stage) -> Vec<String> {
    let workspace = selection(&compiled_backends());
    words(&match stage {
        Stage::Fmt => "fmt --all --check".to_owned(),
        // Advisories need the network and change after a commit is finished: run that check by hand.
        Stage::Deny => "deny check bans licenses sources".to_owned(),
        Stage::Clippy => format!("clippy --all-targets {workspace} -- -D warnings"),
        // `--examples` makes cargo include the features of dev-dependencies, as clippy and test do: otherwise rustdoc would check Burn once more.
        _ => format!("doc --no-deps --lib --bins --examples {workspace}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_stages_run_unless_some_are_named() {
        assert_eq!(selected(&[]), Stage::value_variants());
        assert_eq!(selected(&[Stage::Doc, Stage::Fmt]), [Stage::Fmt, Stage::Doc]);
        assert_eq!(Stage::Fmt.name(), "fmt");
    }

    #[test]
    fn clippy_and_doc_select_exactly_what_test_selects_and_warnings_are_errors() {
        let shared = selection(&compiled_backends());
        for stage in [Stage::Clippy, Stage::Doc] {
            assert!(stage_args(stage).join(" ").contains(&shared), "{stage:?}");
        }
        assert!(stage_args(Stage::Clippy).join(" ").ends_with("-- -D warnings"));
    }
}
