//! Builds the `train` binary and says where it lies. Cargo itself is asked for the place, so target folders, profiles
//! and platforms need no rules of ours.

use std::io::BufReader;
use std::path::PathBuf;
use std::process::Stdio;

use anyhow::{Context, Result, bail};
use cargo_metadata::Message;

use crate::backend::Choice;
use crate::workspace::{Workspace, shown};

/// Package and binary that all of `train`, `plan`, `generate`, ... live in.
const PACKAGE: &str = "firebrick-train";
const BINARY: &str = "train";

/// Arguments of the cargo call that builds `train` for `choice` under a cargo `profile`.
pub(crate) fn build_args(profile: &str, choice: &Choice) -> Vec<String> {
    let features = choice.backend.features();
    let args = ["build", "--profile", profile, "--package", PACKAGE, "--bin", BINARY];
    let flags = ["--no-default-features", "--features", &features, "--message-format=json-render-diagnostics"];
    args.into_iter().chain(flags).map(str::to_owned).collect()
}

/// Builds `train` and returns its path. Cargo's progress and diagnostics go to the terminal.
pub(crate) fn build_train(workspace: &Workspace, profile: &str, choice: &Choice) -> Result<PathBuf> {
    let features = choice.backend.features();
    eprintln!("xtask: building `{BINARY}` (profile {profile}, features {features}): {}", choice.reason);
    let mut command = workspace.cargo(&build_args(profile, choice));
    let mut child =
        command.stdout(Stdio::piped()).spawn().with_context(|| format!("could not start {}", shown(&command)))?;
    let output = child.stdout.take().context("cargo's output was not piped")?;
    let mut executable = None;
    for message in Message::parse_stream(BufReader::new(output)) {
        if let Message::CompilerArtifact(artifact) = message.context("could not read cargo's build messages")? {
            let is_train = artifact.target.name == BINARY && artifact.target.is_bin();
            executable = artifact.executable.filter(|_| is_train).or(executable);
        }
    }
    if !child.wait().context("waiting for cargo")?.success() {
        bail!("`{BINARY}` did not build; the compiler's messages are above");
    }
    match executable {
        Some(path) => Ok(path.into_std_path_buf()),
        None => bail!("cargo built {PACKAGE} but named no binary `{BINARY}`: is there a [[bin]] of that name?"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Backend;

    #[test]
    fn only_the_wanted_backend_and_flex_are_built() {
        let choice = Choice { backend: Backend::Wgpu, reason: String::new() };
        let typed = build_args("fast", &choice).join(" ");
        assert_eq!(
            typed,
            "build --profile fast --package firebrick-train --bin train --no-default-features --features flex,wgpu \
             --message-format=json-render-diagnostics"
        );
    }
}
