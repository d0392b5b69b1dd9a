//! Builds programs with cargo and finds them. Cargo's build messages contain their paths, so target folders, profiles and platforms need no rules
//! here.
//!
//! Trade-off: cargo is started as a child process; its messages are the interface, not its library.

use std::io::BufReader;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use cargo_metadata::{Message, Target};

use crate::backend::Choice;
use crate::workspace::{Workspace, shown, words};

/// A binary and its package; its cargo features are the names of backends.
#[derive(Clone, Copy)]
pub(crate) struct Program {
    package: &'static str,
    binary: &'static str,
}

/// All commands: `train`, `plan`, `generate`, ...
pub(crate) const FIREBRICK: Program = Program { package: "firebrick-train", binary: "firebrick" };
/// Every operation on every backend.
pub(crate) const BENCH_MATRIX: Program = Program { package: "firebrick-benches", binary: "bench-matrix" };

/// Builds the arguments of the cargo call that builds `program` for `choice` under a cargo `profile`.
fn build_args(program: Program, profile: &str, choice: &Choice) -> Vec<String> {
    let Program { package, binary } = program;
    let flags =
        format!("--no-default-features --features {} --message-format=json-render-diagnostics", choice.features());
    words(&format!("build --profile {profile} --package {package} --bin {binary} {flags}"))
}

/// Builds `program` and returns its path. Cargo's progress and diagnostics go to the terminal.
pub(crate) fn build(workspace: &Workspace, program: Program, profile: &str, choice: &Choice) -> Result<PathBuf> {
    let (Program { package, binary }, features) = (program, choice.features());
    eprintln!("xtask: building `{binary}` (profile {profile}, features {features}): {}", choice.reason);
    let built = build_programs(workspace.cargo(&build_args(program, profile, choice)), binary)?;
    match built.into_iter().rfind(|(target, _)| target.name == binary && target.is_bin()) {
        Some((_, path)) => Ok(path),
        None => bail!("cargo built {package} but named no binary `{binary}`: is there a [[bin]] of that name?"),
    }
}

/// Runs a cargo `command` that prints build messages as JSON, and returns the programs it built. `what` names them in the
/// error message.
pub(crate) fn build_programs(mut command: Command, what: &str) -> Result<Vec<(Target, PathBuf)>> {
    let mut child =
        command.stdout(Stdio::piped()).spawn().with_context(|| format!("could not start {}", shown(&command)))?;
    let output = child.stdout.take().context("cargo's output was not piped")?;
    let mut built = Vec::new();
    for message in Message::parse_stream(BufReader::new(output)) {
        if let Message::CompilerArtifact(artifact) = message.context("could not read cargo's build messages")?
            && let Some(path) = artifact.executable
        {
            built.push((artifact.target, path.into_std_path_buf()));
        }
    }
    if !child.wait().context("waiting for cargo")?.success() {
        bail!("`{what}` did not build; the compiler's messages are above");
    }
    Ok(built)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Backend;

    #[test]
    fn the_chosen_backend_and_flex_are_built_or_all() {
        let all = if cfg!(target_os = "macos") { "flex,candle,wgpu" } else { "flex,candle,wgpu,cuda" };
        for (program, choice, package, features) in [
            (FIREBRICK, Choice::one(Backend::Wgpu, String::new()), "firebrick-train --bin firebrick", "flex,wgpu"),
            (BENCH_MATRIX, Choice::all(String::new()), "firebrick-benches --bin bench-matrix", all),
        ] {
            let expected = format!(
                "build --profile fast --package {package} --no-default-features --features {features} \
                 --message-format=json-render-diagnostics"
            );
            assert_eq!(build_args(program, "fast", &choice).join(" "), expected);
        }
    }
}
