//! Builds programs with cargo and finds them. Cargo's own build messages name the place, so target folders, profiles and
//! platforms need no rules here.
//!
//! Trade-off: cargo is started as a child process; its messages are the interface, not its library.

use std::io::BufReader;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use cargo_metadata::Message;

use crate::backend::Choice;
use crate::workspace::{Workspace, shown};

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

/// Arguments of the cargo call that builds `program` for `choice` under a cargo `profile`.
fn build_args(program: Program, profile: &str, choice: &Choice) -> Vec<String> {
    let features = choice.features();
    let args = ["build", "--profile", profile, "--package", program.package, "--bin", program.binary];
    let flags = ["--no-default-features", "--features", &features, "--message-format=json-render-diagnostics"];
    args.into_iter().chain(flags).map(str::to_owned).collect()
}

/// Builds `program` and returns its path. Cargo's progress and diagnostics go to the terminal.
pub(crate) fn build(workspace: &Workspace, program: Program, profile: &str, choice: &Choice) -> Result<PathBuf> {
    let (Program { package, binary }, features) = (program, choice.features());
    eprintln!("xtask: building `{binary}` (profile {profile}, features {features}): {}", choice.reason);
    let built = build_programs(workspace.cargo(&build_args(program, profile, choice)), binary)?;
    match built.into_iter().rfind(|program| program.target == binary && program.is_bin) {
        Some(program) => Ok(program.path),
        None => bail!("cargo built {package} but named no binary `{binary}`: is there a [[bin]] of that name?"),
    }
}

/// A program that cargo built.
pub(crate) struct BuiltProgram {
    /// Name of the cargo target.
    pub(crate) target: String,
    /// Whether it is a binary, not a test program.
    pub(crate) is_bin: bool,
    /// Where it is.
    pub(crate) path: PathBuf,
}

/// Runs a cargo `command` that prints build messages as JSON, and returns the programs it built. `what` names them in the
/// error message.
pub(crate) fn build_programs(mut command: Command, what: &str) -> Result<Vec<BuiltProgram>> {
    let mut child =
        command.stdout(Stdio::piped()).spawn().with_context(|| format!("could not start {}", shown(&command)))?;
    let output = child.stdout.take().context("cargo's output was not piped")?;
    let mut built = Vec::new();
    for message in Message::parse_stream(BufReader::new(output)) {
        if let Message::CompilerArtifact(artifact) = message.context("could not read cargo's build messages")?
            && let Some(path) = artifact.executable
        {
            let is_bin = artifact.target.is_bin();
            built.push(BuiltProgram { target: artifact.target.name, is_bin, path: path.into_std_path_buf() });
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
    fn only_the_chosen_backend_and_flex_are_built() {
        let choice = Choice { backend: Backend::Wgpu, with_all: false, reason: String::new() };
        let typed = build_args(FIREBRICK, "fast", &choice).join(" ");
        assert_eq!(
            typed,
            "build --profile fast --package firebrick-train --bin firebrick --no-default-features --features flex,wgpu \
             --message-format=json-render-diagnostics"
        );
    }

    #[test]
    fn a_binary_of_all_backends_has_the_feature_of_each() {
        let typed = build_args(BENCH_MATRIX, "dist", &Choice::all(String::new())).join(" ");
        let expected = if cfg!(target_os = "macos") { "flex,candle,wgpu" } else { "flex,candle,wgpu,cuda" };
        assert!(typed.contains(&format!("--features {expected} ")), "{typed}");
        assert!(typed.contains("--package firebrick-benches --bin bench-matrix "), "{typed}");
    }
}
