//! `cargo xtask dist`: the release binary with its recipes and licenses in one compressed folder, for a machine without
//! Rust; with `--tests` the GPU suite instead.
//!
//! Not supported: cross-compilation beyond what cargo does with `CARGO_BUILD_TARGET`; installers.

mod archive;
mod gpu_suite;

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};

use self::archive::{copy, folder_size, make_empty, pack};
use crate::backend::{Backend, Choice};
use crate::build::{BENCH_MATRIX, FIREBRICK, build};
use crate::workspace::Workspace;

/// Files to pack with the binaries. If one is missing, no archive is written.
const REQUIRED: [&str; 4] = ["README.md", "LICENSE-MIT", "LICENSE-APACHE", "configs"];
/// Packed if it exists; `assets` is the data of the quickstart.
const OPTIONAL: [&str; 2] = ["CHANGELOG.md", "assets"];

/// Builds, copies, packs, and prints the path and size of the result.
pub(crate) fn run(workspace: &Workspace, backend: Option<&str>) -> Result<ExitCode> {
    let choice = choose(backend)?;
    let binaries = [build(workspace, FIREBRICK, "dist", &choice)?, build(workspace, BENCH_MATRIX, "dist", &choice)?];
    packed(workspace, "firebrick", |folder| {
        assemble(workspace.root(), &binaries, folder)?;
        Ok(format!("  {}", mebibytes(folder_size(folder)?)))
    })
}

/// Packs the GPU suite instead of the trainer.
pub(crate) fn run_gpu_suite(workspace: &Workspace) -> Result<ExitCode> {
    packed(workspace, "firebrick-gpu-tests", |folder| {
        gpu_suite::assemble(workspace, folder)?;
        Ok("run.sh runs the suite".to_owned())
    })
}

/// Fills a folder in `dist/` whose name begins with `what`, packs it, and prints the text that `fill` returns.
fn packed(workspace: &Workspace, what: &str, fill: impl FnOnce(&Path) -> Result<String>) -> Result<ExitCode> {
    let name = format!("{what}-{}-{}", version(workspace)?, target(workspace)?);
    let out = workspace.root().join("dist");
    let (folder, archive) = (out.join(&name), out.join(format!("{name}.tar.gz")));
    let note = fill(&folder)?;
    pack(&folder, &name, &archive)?;
    println!("dist/{name}/{note}");
    println!("dist/{name}.tar.gz  {}", mebibytes(fs::metadata(&archive)?.len()));
    Ok(ExitCode::SUCCESS)
}

/// Chooses the backend to compile in together with flex.
fn choose(backend: Option<&str>) -> Result<Choice> {
    let Some(name) = backend else {
        return Ok(Choice::one(Backend::Flex, "the CPU backend runs everywhere".to_owned()));
    };
    let reason = format!("--backend says {name}");
    if name == "all" {
        return Ok(Choice::all(reason));
    }
    match Backend::parse(name, "--backend")? {
        Some(backend) => Ok(Choice::one(backend, reason)),
        None => bail!("`auto` depends on this machine, and the archive is for another: name a backend"),
    }
}

/// Reads the version of the `train` package.
fn version(workspace: &Workspace) -> Result<String> {
    let members = workspace.members()?;
    let train = members.packages.iter().find(|package| package.name.as_str() == "firebrick-train");
    Ok(train.context("no package firebrick-train in the workspace")?.version.to_string())
}

/// Returns the target triple that cargo builds for: the requested one, else this machine's.
fn target(workspace: &Workspace) -> Result<String> {
    if let Ok(requested) = env::var("CARGO_BUILD_TARGET") {
        return Ok(requested);
    }
    let output = workspace.command("rustc").arg("-vV").output().context("could not start rustc")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let host = text.lines().find_map(|line| line.strip_prefix("host: "));
    Ok(host.context("`rustc -vV` names no host")?.trim().to_owned())
}

/// Creates `folder`, empty before, with the binaries and the project's files.
fn assemble(root: &Path, binaries: &[PathBuf], folder: &Path) -> Result<()> {
    for required in REQUIRED {
        anyhow::ensure!(root.join(required).exists(), "{required} is missing: an archive is incomplete without it");
    }
    make_empty(folder)?;
    for binary in binaries {
        copy(binary, &folder.join(binary.file_name().context("the binary has no name")?))?;
    }
    for entry in REQUIRED.into_iter().chain(OPTIONAL).filter(|entry| root.join(entry).exists()) {
        copy(&root.join(entry), &folder.join(entry))?;
    }
    Ok(())
}

fn mebibytes(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / (1024.0 * 1024.0))
}

#[cfg(test)]
mod tests {
    use super::archive::tests::entries;
    use super::*;

    const BINARIES: [&str; 2] = ["bench-matrix", "firebrick"];

    /// Creates a project with everything that is required, and two binaries.
    fn project() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("configs/sub")).unwrap();
        let files = ["README.md", "LICENSE-MIT", "LICENSE-APACHE", "configs/b.toml", "configs/sub/a.toml"];
        for file in files.into_iter().chain(BINARIES) {
            fs::write(root.path().join(file), file).unwrap();
        }
        root
    }

    fn binaries(root: &tempfile::TempDir) -> [PathBuf; 2] {
        BINARIES.map(|name| root.path().join(name))
    }

    #[test]
    fn equal_inputs_give_equal_bytes() {
        let archives: Vec<Vec<u8>> = (0..2)
            .map(|_| {
                let root = project();
                let folder = root.path().join("dist/fb");
                assemble(root.path(), &binaries(&root), &folder).unwrap();
                pack(&folder, "fb", &root.path().join("fb.tar.gz")).unwrap();
                fs::read(root.path().join("fb.tar.gz")).unwrap()
            })
            .collect();
        assert!(archives[0] == archives[1]);
        let expected = [
            ("LICENSE-APACHE", 0o644),
            ("LICENSE-MIT", 0o644),
            ("README.md", 0o644),
            ("bench-matrix", 0o755),
            ("configs/b.toml", 0o644),
            ("configs/sub/a.toml", 0o644),
            ("firebrick", 0o755),
        ];
        assert_eq!(entries(&archives[0]), expected.map(|(path, mode)| (format!("fb/{path}"), mode)));
    }

    #[test]
    fn nothing_is_shipped_without_its_license() {
        let root = project();
        fs::remove_file(root.path().join("LICENSE-MIT")).unwrap();
        let error = assemble(root.path(), &binaries(&root), &root.path().join("out")).unwrap_err();
        assert!(error.to_string().contains("LICENSE-MIT"));
        assert!(!root.path().join("out").exists());
    }

    #[test]
    fn a_stale_file_does_not_survive() {
        let root = project();
        let folder = root.path().join("out");
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("stale"), "").unwrap();
        assemble(root.path(), &binaries(&root), &folder).unwrap();
        assert!(!folder.join("stale").exists());
    }

    #[test]
    fn the_backend_is_named_not_guessed() {
        assert_eq!(choose(None).unwrap().features(), "flex");
        assert_eq!(choose(Some("cuda")).unwrap().features(), "flex,cuda");
        assert!(choose(Some("all")).unwrap().features().starts_with("flex,candle,wgpu"));
        assert!(choose(Some("auto")).is_err() && choose(Some("vulkan")).is_err());
    }
}
