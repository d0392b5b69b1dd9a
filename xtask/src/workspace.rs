//! The workspace folder, and commands that are started in it. Child processes get the environment of the user's shell, not the one that `cargo run`
//! created for xtask.
//!
//! Not supported: another workspace layout than `xtask/` directly below the root.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, Result};
use cargo_metadata::{Metadata, MetadataCommand};

/// Variables that `cargo run` sets for the package it runs; they describe xtask and must not reach its children.
const OF_CARGO_RUN: [&str; 4] = ["CARGO_MANIFEST_DIR", "CARGO_MANIFEST_PATH", "CARGO_BIN_NAME", "CARGO_CRATE_NAME"];

/// The checked-out workspace that this xtask belongs to.
pub(crate) struct Workspace {
    root: PathBuf,
}

impl Workspace {
    /// Finds the workspace whose `xtask` folder is running; fails if the folder above has no `Cargo.toml`.
    pub(crate) fn find() -> Result<Self> {
        // The run-time variable is right even if the checkout was moved together with its target folder.
        let xtask = env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| OsString::from(env!("CARGO_MANIFEST_DIR")));
        Self::at(Path::new(&xtask).parent().unwrap_or(Path::new("")))
    }

    /// Opens the workspace in `root`; fails if that folder has no `Cargo.toml`.
    pub(crate) fn at(root: &Path) -> Result<Self> {
        anyhow::ensure!(
            root.join("Cargo.toml").is_file(),
            "no Cargo.toml in {}: name, or run `cargo xtask` inside, a checkout of the project",
            root.display()
        );
        // Commands are started in the root, where a relative path would mean another folder.
        let root = std::path::absolute(root).with_context(|| format!("no such folder: {}", root.display()))?;
        Ok(Self { root })
    }

    /// Returns the folder of the workspace's `Cargo.toml`.
    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// Creates a command for `program` in the workspace root. The project's target folder is cargo's own choice there: `CARGO_TARGET_DIR` as the user
    /// set it, else `target/`. xtask's `--target-dir` is not inherited.
    pub(crate) fn command(&self, program: impl Into<OsString>) -> Command {
        let mut command = Command::new(program.into());
        command.current_dir(&self.root);
        forget_cargo_run(&mut command);
        // A relative folder is relative to the user's folder, as in cargo itself.
        if let Some(folder) = env::var_os("CARGO_TARGET_DIR").filter(|folder| !folder.is_empty()) {
            command.env("CARGO_TARGET_DIR", std::path::absolute(&folder).unwrap_or_else(|_| PathBuf::from(&folder)));
        }
        command
    }

    /// Creates a `cargo` command with `args` in the workspace root.
    pub(crate) fn cargo<S: AsRef<str>>(&self, args: &[S]) -> Command {
        let mut command = self.command(cargo_path());
        command.args(args.iter().map(AsRef::as_ref));
        command
    }

    /// Reads the workspace's own packages without resolving their dependencies: needs neither network nor a build.
    pub(crate) fn members(&self) -> Result<Metadata> {
        self.metadata(MetadataCommand::new().no_deps())
    }

    /// Reads all packages that a build for the target `triple` with `features` (as `PACKAGE/FEATURE`) needs, and which needs which. Fetches them
    /// where they are missing.
    pub(crate) fn dependencies(&self, features: &[String], triple: &str) -> Result<Metadata> {
        let (platform, features) = (["--filter-platform", triple], ["--features".to_owned(), features.join(",")]);
        self.metadata(MetadataCommand::new().other_options([platform.map(str::to_owned), features].concat()))
    }

    fn metadata(&self, command: &mut MetadataCommand) -> Result<Metadata> {
        command
            .cargo_path(cargo_path())
            .manifest_path(self.root.join("Cargo.toml"))
            .exec()
            .context("`cargo metadata` failed: is every Cargo.toml of the workspace well-formed?")
    }
}

/// Returns the cargo that started xtask, so that the pinned toolchain is used throughout.
fn cargo_path() -> PathBuf {
    env::var_os("CARGO").map_or_else(|| PathBuf::from("cargo"), PathBuf::from)
}

/// Removes the variables of `cargo run` from `command`'s environment.
pub(crate) fn forget_cargo_run(command: &mut Command) {
    for (name, _) in env::vars_os() {
        let of_cargo = name.to_str().is_some_and(|name| OF_CARGO_RUN.contains(&name) || name.starts_with("CARGO_PKG_"));
        if of_cargo {
            command.env_remove(&name);
        }
    }
}

/// Runs `command` to its end with our terminal; returns true if it succeeded. Fails only if it cannot be started.
pub(crate) fn succeeds(command: &mut Command) -> Result<bool> {
    let status = command.status().with_context(|| format!("could not start {}", shown(command)))?;
    Ok(status.success())
}

/// Returns whether `program args` can be started and succeeds, with its output discarded: "is this tool installed?".
pub(crate) fn is_installed(program: &str, args: &[&str]) -> bool {
    Command::new(program).args(args).stdin(Stdio::null()).output().is_ok_and(|output| output.status.success())
}

/// Formats the command as it would be typed.
pub(crate) fn shown(command: &Command) -> String {
    let program = Path::new(command.get_program()).file_stem().unwrap_or(command.get_program());
    let words: Vec<_> = [program].into_iter().chain(command.get_args()).map(|word| word.to_string_lossy()).collect();
    words.join(" ")
}

/// Splits a command line without quotes into words.
pub(crate) fn words(text: &str) -> Vec<String> {
    text.split_whitespace().map(str::to_owned).collect()
}

/// Converts success or failure to an exit code.
pub(crate) fn exit_code(success: bool) -> ExitCode {
    if success { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_does_not_see_the_package_that_cargo_runs() {
        // `cargo test` sets the same variables for us as `cargo run` does.
        let mut command = Command::new("cargo");
        forget_cargo_run(&mut command);
        let removed: Vec<_> = command.get_envs().filter(|(_, value)| value.is_none()).map(|(name, _)| name).collect();
        assert!(removed.contains(&"CARGO_MANIFEST_DIR".as_ref()));
        assert!(removed.contains(&"CARGO_PKG_NAME".as_ref()));
        assert!(!removed.contains(&"PATH".as_ref()));
    }

    #[test]
    fn a_command_is_shown_as_typed() {
        let mut command = Command::new("/opt/toolchain/bin/cargo");
        command.args(["fmt", "--all"]);
        assert_eq!(shown(&command), "cargo fmt --all");
    }
}
