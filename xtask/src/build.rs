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

/// What a program is built for that may run on another machine.
pub(crate) struct Platform {
    /// The target triple.
    pub(crate) triple: String,
    /// Variables that name the linker and the C compiler for it.
    pub(crate) environment: Vec<(String, PathBuf)>,
}

/// Builds the arguments of the cargo call that builds `program` for `choice` under a cargo `profile`.
fn build_args(program: Program, profile: &str, choice: &Choice, platform: Option<&Platform>) -> Vec<String> {
    let Program { package, binary } = program;
    let target = platform.map_or_else(String::new, |platform| format!("--target {}", platform.triple));
    let flags =
        format!("--no-default-features --features {} --message-format=json-render-diagnostics", choice.features());
    words(&format!("build --profile {profile} --package {package} --bin {binary} {flags} {target}"))
}

/// Builds `program` for `platform`, or for this machine, and returns its path. Cargo's progress and diagnostics go to the terminal.
pub(crate) fn build(
    workspace: &Workspace,
    program: Program,
    profile: &str,
    choice: &Choice,
    platform: Option<&Platform>,
) -> Result<PathBuf> {
    let (Program { package, binary }, features) = (program, choice.features());
    eprintln!("xtask: building `{binary}` (profile {profile}, features {features}): {}", choice.reason);
    let mut command = workspace.cargo(&build_args(program, profile, choice, platform));
    command.envs(platform.into_iter().flat_map(|platform| platform.environment.iter().cloned()));
    let built = build_programs(command, binary)?;
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
            assert_eq!(build_args(program, "fast", &choice, None).join(" "), expected);
            let platform = Platform { triple: "aarch64-unknown-linux-gnu".to_owned(), environment: Vec::new() };
            let for_platform = build_args(program, "fast", &choice, Some(&platform)).join(" ");
            assert_eq!(for_platform, format!("{expected} --target aarch64-unknown-linux-gnu"));
        }
    }
}
