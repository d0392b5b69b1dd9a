//! `cargo xtask lint`: everything that judges the source without running it, cheap stages first. CI calls the same
//! stages by name. A stage whose tool is not installed says so and counts as passed: CI and desks may differ in that.

use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Result, bail};

use crate::test::{compiled_backends, selection};
use crate::tidy;
use crate::workspace::{Workspace, exit_code, is_installed, shown, succeeds};

/// The stages, in the order in which they run.
const STAGES: [&str; 6] = ["fmt", "tidy", "typos", "deny", "clippy", "doc"];

/// What a stage came to.
enum Outcome {
    Passed,
    Failed,
    /// The tool is missing; how to install it.
    Skipped(&'static str),
}

/// Runs the stages named in `args`, or all; success only if none failed.
pub(crate) fn run(workspace: &Workspace, args: &[String]) -> Result<ExitCode> {
    let mut failed = Vec::new();
    for stage in wanted(args)? {
        let start = Instant::now();
        let outcome = run_stage(workspace, stage)?;
        let seconds = start.elapsed().as_secs_f32();
        match outcome {
            Outcome::Passed => eprintln!("lint {stage}: passed ({seconds:.1} s)"),
            Outcome::Skipped(install) => eprintln!("lint {stage}: skipped, not installed ({install})"),
            Outcome::Failed => {
                eprintln!("lint {stage}: FAILED ({seconds:.1} s)");
                failed.push(stage);
            }
        }
    }
    if !failed.is_empty() {
        eprintln!("lint failed: {}", failed.join(", "));
    }
    Ok(exit_code(failed.is_empty()))
}

/// The stages to run, in their own order whatever the order asked for.
fn wanted(args: &[String]) -> Result<Vec<&'static str>> {
    if let Some(unknown) = args.iter().find(|arg| !STAGES.contains(&arg.as_str())) {
        bail!("no lint stage `{unknown}`: use {}", STAGES.join(", "));
    }
    Ok(STAGES.into_iter().filter(|stage| args.is_empty() || args.iter().any(|arg| arg == stage)).collect())
}

fn run_stage(workspace: &Workspace, stage: &str) -> Result<Outcome> {
    if stage == "tidy" {
        return Ok(if tidy::report(workspace)? { Outcome::Passed } else { Outcome::Failed });
    }
    if stage == "typos" && !is_installed("typos", &["--version"]) {
        return Ok(Outcome::Skipped("cargo install typos-cli"));
    }
    if stage == "deny" && !is_installed("cargo-deny", &["--version"]) {
        return Ok(Outcome::Skipped("cargo install cargo-deny"));
    }
    let mut command = match stage {
        "typos" => workspace.command("typos"),
        _ => workspace.cargo(&stage_args(stage)),
    };
    if stage == "doc" {
        command.env("RUSTDOCFLAGS", "-D warnings -D rustdoc::broken_intra_doc_links");
    }
    eprintln!("lint {stage}: {}", shown(&command));
    Ok(if succeeds(&mut command)? { Outcome::Passed } else { Outcome::Failed })
}

/// Arguments for cargo in those stages that are cargo calls.
fn stage_args(stage: &str) -> Vec<String> {
    let workspace = selection(&compiled_backends());
    let (before, selection, after): (&[&str], &[String], &[&str]) = match stage {
        "fmt" => (&["fmt", "--all", "--check"], &[], &[]),
        // Advisories need the network and change under a finished commit: they are for people to ask for.
        "deny" => (&["deny", "check", "bans", "licenses", "sources"], &[], &[]),
        "clippy" => (&["clippy", "--all-targets"], &workspace, &["--", "-D", "warnings"]),
        // `--examples` makes cargo count dev-dependencies into the features, as clippy and test do: without it rustdoc
        // would check Burn once more.
        _ => (&["doc", "--no-deps", "--lib", "--bins", "--examples"], &workspace, &[]),
    };
    let own = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
    [own(before), selection.to_vec(), own(after)].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_stages_run_unless_some_are_named() {
        assert_eq!(wanted(&[]).unwrap(), STAGES);
        assert_eq!(wanted(&["doc".to_owned(), "fmt".to_owned()]).unwrap(), ["fmt", "doc"]);
        assert!(wanted(&["format".to_owned()]).unwrap_err().to_string().contains("clippy"));
    }

    #[test]
    fn clippy_and_doc_select_exactly_what_test_selects() {
        let shared = selection(&compiled_backends()).join(" ");
        for stage in ["clippy", "doc"] {
            assert!(stage_args(stage).join(" ").contains(&shared), "{stage}");
        }
    }

    #[test]
    fn warnings_are_errors_in_clippy() {
        assert!(stage_args("clippy").join(" ").ends_with("-- -D warnings"));
    }
}
