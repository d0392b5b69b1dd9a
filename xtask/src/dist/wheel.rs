//! `cargo xtask dist --wheel`: the Python wheel, by maturin. It has the program of the archive, and its recipes and data in
//! `share/firebrick`; pyproject.toml describes the rest.
//!
//! Trade-off: maturin calls cargo itself; with the same target, features and variables it finds what was built for the archive.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};

use super::archive::{copy, make_empty};
use super::elf::GLIBC;
use crate::backend::Choice;
use crate::build::Platform;
use crate::workspace::{Workspace, is_installed, shown, succeeds, words};

/// The folder that `data` of pyproject.toml names; what lies in its `data` goes into the Python environment.
const DATA: &str = "target/wheel.data";

/// What the program looks for there.
const SHARED: [&str; 2] = ["configs", "assets"];

/// Builds the wheel with the backends of `choice` into `out`; `licenses` are those of the packages in the program.
pub(super) fn build(
    workspace: &Workspace,
    choice: &Choice,
    platform: &Platform,
    licenses: &str,
    out: &Path,
) -> Result<()> {
    ensure!(
        is_installed("maturin", &["--version"]),
        "maturin is not installed, which packs the wheel: pip install maturin==1.16.0"
    );
    fill(workspace.root(), licenses)?;
    let mut command = workspace.command("maturin");
    command.args(words(&arguments(choice, &platform.triple))).arg("--out").arg(out);
    command.envs(platform.environment.iter().cloned());
    eprintln!("xtask: {}", shown(&command));
    if !succeeds(&mut command)? {
        bail!("maturin failed; its messages are above");
    }
    Ok(())
}

/// Writes maturin's arguments, but for the folder of the result.
fn arguments(choice: &Choice, triple: &str) -> String {
    let features = choice.features();
    let (major, minor) = GLIBC;
    let compatibility = match triple.contains("-linux-gnu") {
        true => format!(" --compatibility manylinux_{major}_{minor}"),
        false => String::new(),
    };
    format!("build --target {triple} --no-default-features --features {features}{compatibility}")
}

/// Fills the folder whose content the wheel puts into `share/firebrick`.
fn fill(root: &Path, licenses: &str) -> Result<()> {
    make_empty(&root.join(DATA))?;
    let shared = root.join(DATA).join("data/share/firebrick");
    fs::create_dir_all(&shared)?;
    for folder in SHARED {
        copy(&root.join(folder), &shared.join(folder))?;
    }
    fs::write(shared.join(super::THIRD_PARTY), licenses).context("could not write the licenses of the wheel")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wheel_for_linux_promises_the_glibc_that_zig_links_for() {
        let arguments = |triple: &str| arguments(&Choice::release(triple), triple);
        assert_eq!(
            arguments("aarch64-unknown-linux-gnu"),
            "build --target aarch64-unknown-linux-gnu --no-default-features --features flex,wgpu,cuda --compatibility manylinux_2_28"
        );
        assert!(arguments("aarch64-apple-darwin").ends_with("--features flex,wgpu"));
    }

    #[test]
    fn the_data_of_the_wheel_is_what_pyproject_names_and_has_no_stale_file() {
        let project = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../pyproject.toml")).unwrap();
        assert!(project.contains(&format!("data = \"{DATA}\"")));

        let root = tempfile::tempdir().unwrap();
        for file in ["configs/a.toml", "assets/quickstart/train.jsonl", "target/wheel.data/data/share/firebrick/stale"]
        {
            let path = root.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, file).unwrap();
        }
        fill(root.path(), "texts").unwrap();
        let shared = root.path().join(DATA).join("data/share/firebrick");
        assert_eq!(fs::read_to_string(shared.join(super::super::THIRD_PARTY)).unwrap(), "texts");
        assert!(shared.join("configs/a.toml").is_file() && shared.join("assets/quickstart/train.jsonl").is_file());
        assert!(!shared.join("stale").exists());
    }
}
