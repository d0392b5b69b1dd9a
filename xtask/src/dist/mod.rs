//! `cargo xtask dist`: the released program with its pages, recipes and licenses in one compressed folder, for a machine without Rust; with
//! `--wheel` a Python wheel as well, with `--tests` the GPU suite instead.
//!
//! Trade-off: only Linux programs are built for another machine, by zig; those for macOS and Windows are built there.

mod archive;
mod elf;
mod gpu_suite;
mod pages;
mod third_party;
mod wheel;
mod zig;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};

use self::archive::{copy, folder_size, make_empty, pack, write_checksum};
use crate::backend::{Backend, Choice};
use crate::build::{BENCH_MATRIX, FIREBRICK, Platform, build};
use crate::workspace::Workspace;

/// Files to pack with the binaries. If one is missing, no archive is written. `assets` is the data of the quickstart.
const REQUIRED: [&str; 5] = ["README.md", "LICENSE-MIT", "LICENSE-APACHE", "configs", "assets"];
/// Packed if it exists.
const OPTIONAL: [&str; 1] = ["CHANGELOG.md"];
/// The licenses of the packages in the program.
const THIRD_PARTY: &str = "THIRD-PARTY.txt";

/// Builds for `target` (this machine if none is named), copies, packs, and prints the path and size of the result.
pub(crate) fn run(workspace: &Workspace, target: Option<&str>, backend: Option<&str>, wheel: bool) -> Result<ExitCode> {
    let host = host(workspace)?;
    let triple = target.unwrap_or(&host);
    let choice = choose(backend, triple)?;
    let platform = Platform { triple: triple.to_owned(), environment: zig::environment(workspace, triple)? };
    let mut programs = vec![FIREBRICK];
    if backend == Some("all") {
        programs.push(BENCH_MATRIX);
    }
    let build = |program| build(workspace, program, "dist", &choice, Some(&platform));
    let binaries: Vec<PathBuf> = programs.into_iter().map(build).collect::<Result<_>>()?;
    if triple.contains("-linux-gnu") {
        for binary in &binaries {
            println!("{}: {}", file_name(binary)?, elf::check_portable(binary)?);
        }
    }
    let licenses = third_party::text(workspace, &choice, triple)?;
    let packed = packed(workspace, "firebrick", triple, |folder| {
        assemble(workspace.root(), &binaries, &licenses, folder)?;
        match pages::writer(&binaries[0], triple, &host) {
            Some(writer) => pages::write(&writer, folder)?,
            None => println!("no completions and manual pages: {triple} does not run here; pack for {host} first"),
        }
        Ok(format!("  {}", mebibytes(folder_size(folder)?)))
    })?;
    if wheel {
        wheel::build(workspace, &choice, &platform, &licenses, &workspace.root().join("dist"))?;
    }
    Ok(packed)
}

/// Packs the GPU suite instead of the trainer.
pub(crate) fn run_gpu_suite(workspace: &Workspace) -> Result<ExitCode> {
    packed(workspace, "firebrick-gpu-tests", &host(workspace)?, |folder| {
        gpu_suite::assemble(workspace, folder)?;
        Ok("run.sh runs the suite".to_owned())
    })
}

/// Fills a folder in `dist/` whose name begins with `what`, packs it, and prints the text that `fill` returns.
fn packed(
    workspace: &Workspace,
    what: &str,
    triple: &str,
    fill: impl FnOnce(&Path) -> Result<String>,
) -> Result<ExitCode> {
    let name = format!("{what}-{}-{triple}", version(workspace)?);
    let out = workspace.root().join("dist");
    let (folder, archive) = (out.join(&name), out.join(format!("{name}.tar.gz")));
    let note = fill(&folder)?;
    pack(&folder, &name, &archive)?;
    write_checksum(&archive)?;
    println!("dist/{name}/{note}");
    println!("dist/{name}.tar.gz  {}", mebibytes(fs::metadata(&archive)?.len()));
    Ok(ExitCode::SUCCESS)
}

/// Chooses the backends of a program for the target `triple`.
fn choose(backend: Option<&str>, triple: &str) -> Result<Choice> {
    let Some(name) = backend else { return Ok(Choice::release(triple)) };
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

/// Returns the target triple of this machine.
fn host(workspace: &Workspace) -> Result<String> {
    let output = workspace.command("rustc").arg("-vV").output().context("could not start rustc")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let host = text.lines().find_map(|line| line.strip_prefix("host: "));
    Ok(host.context("`rustc -vV` names no host")?.trim().to_owned())
}

/// Creates `folder`, empty before, with the binaries, the project's files, and the `licenses` of what is in the binaries.
fn assemble(root: &Path, binaries: &[PathBuf], licenses: &str, folder: &Path) -> Result<()> {
    for required in REQUIRED {
        anyhow::ensure!(root.join(required).exists(), "{required} is missing: an archive is incomplete without it");
    }
    make_empty(folder)?;
    for binary in binaries {
        copy(binary, &folder.join(file_name(binary)?))?;
    }
    for entry in REQUIRED.into_iter().chain(OPTIONAL).filter(|entry| root.join(entry).exists()) {
        copy(&root.join(entry), &folder.join(entry))?;
    }
    fs::write(folder.join(THIRD_PARTY), licenses).with_context(|| format!("could not write {THIRD_PARTY}"))
}

fn file_name(binary: &Path) -> Result<&str> {
    binary.file_name().and_then(|name| name.to_str()).context("the binary has no name")
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
        fs::create_dir_all(root.path().join("assets")).unwrap();
        let files =
            ["README.md", "LICENSE-MIT", "LICENSE-APACHE", "configs/b.toml", "configs/sub/a.toml", "assets/c.jsonl"];
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
                assemble(root.path(), &binaries(&root), "texts", &folder).unwrap();
                pack(&folder, "fb", &root.path().join("fb.tar.gz")).unwrap();
                fs::read(root.path().join("fb.tar.gz")).unwrap()
            })
            .collect();
        assert!(archives[0] == archives[1]);
        let expected = [
            ("LICENSE-APACHE", 0o644),
            ("LICENSE-MIT", 0o644),
            ("README.md", 0o644),
            ("THIRD-PARTY.txt", 0o644),
            ("assets/c.jsonl", 0o644),
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
        let error = assemble(root.path(), &binaries(&root), "texts", &root.path().join("out")).unwrap_err();
        assert!(error.to_string().contains("LICENSE-MIT"));
        assert!(!root.path().join("out").exists());
    }

    #[test]
    fn a_stale_file_does_not_survive() {
        let root = project();
        let folder = root.path().join("out");
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("stale"), "").unwrap();
        assemble(root.path(), &binaries(&root), "texts", &folder).unwrap();
        assert!(!folder.join("stale").exists());
    }

    #[test]
    fn the_backend_is_named_not_guessed() {
        let choose = |backend| choose(backend, "x86_64-unknown-linux-gnu");
        assert_eq!(choose(None).unwrap().features(), "flex,wgpu,cuda");
        assert_eq!(choose(Some("cuda")).unwrap().features(), "flex,cuda");
        assert!(choose(Some("all")).unwrap().features().starts_with("flex,candle,wgpu"));
        assert!(choose(Some("auto")).is_err() && choose(Some("vulkan")).is_err());
    }
}
