//! `cargo xtask dist`: the release binary with its recipes and licences in one compressed folder, for a machine without
//! Rust. Order, owners, times and mode bits inside the archive are fixed, so equal inputs give equal bytes.

use std::env;
use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use flate2::Compression;
use flate2::write::GzEncoder;
use tar::{Builder, EntryType, Header};

use crate::backend::{Backend, Choice};
use crate::build::build_train;
use crate::workspace::Workspace;

/// Files that go in beside the binary. Without one of the first four nothing is shipped.
const FILES: [&str; 5] = ["README.md", "LICENSE-MIT", "LICENSE-APACHE", "configs", "CHANGELOG.md"];
const REQUIRED: usize = 4;

/// Shipped data of the quickstart: goes in where it exists.
const ASSETS: &str = "assets";

/// Builds, copies, packs, and prints where it all is and how large.
pub(crate) fn run(workspace: &Workspace, args: &[String]) -> Result<ExitCode> {
    if args == ["--tests"] {
        return run_tests(workspace);
    }
    let choice = parse(args)?;
    let binary = build_train(workspace, "dist", &choice)?;
    let name = format!("firebrick-{}-{}", version(workspace)?, target(workspace)?);
    let out = workspace.root().join("dist");
    let folder = out.join(&name);
    assemble(workspace.root(), &binary, &folder)?;
    let archive = out.join(format!("{name}.tar.gz"));
    pack(&folder, &name, &archive)?;
    println!("dist/{name}/  {}", mebibytes(files_below(&folder)?.iter().map(|(_, size)| size).sum()));
    println!("dist/{name}.tar.gz  {}", mebibytes(fs::metadata(&archive)?.len()));
    Ok(ExitCode::SUCCESS)
}

/// The GPU suite instead of the trainer.
fn run_tests(workspace: &Workspace) -> Result<ExitCode> {
    let name = format!("firebrick-gpu-tests-{}-{}", version(workspace)?, target(workspace)?);
    let out = workspace.root().join("dist");
    let (folder, archive) = (out.join(&name), out.join(format!("{name}.tar.gz")));
    crate::dist_tests::assemble(workspace, &folder)?;
    pack(&folder, &name, &archive)?;
    println!("dist/{name}/run.sh runs the suite");
    println!("dist/{name}.tar.gz  {}", mebibytes(fs::metadata(&archive)?.len()));
    Ok(ExitCode::SUCCESS)
}

/// The backend to build in beside flex.
fn parse(args: &[String]) -> Result<Choice> {
    let words: Vec<&str> = args.iter().flat_map(|arg| arg.splitn(2, '=')).collect();
    match words[..] {
        [] => Ok(Choice { backend: Backend::Flex, reason: "the CPU backend runs everywhere".to_owned() }),
        ["--backend", name] => match Backend::parse(name, "--backend")? {
            Some(backend) => Ok(Choice { backend, reason: format!("--backend says {name}") }),
            None => bail!("`auto` looks at this machine, and the archive is for another: name a backend"),
        },
        _ => bail!("expected nothing, `--backend NAME` or `--tests`, got `{}`", args.join(" ")),
    }
}

/// Version of the `train` package.
fn version(workspace: &Workspace) -> Result<String> {
    let members = workspace.members()?;
    let train = members.packages.iter().find(|package| package.name.as_str() == "firebrick-train");
    Ok(train.context("no package firebrick-train in the workspace")?.version.to_string())
}

/// The target triple that cargo builds for: the one asked for, else this machine's.
fn target(workspace: &Workspace) -> Result<String> {
    if let Ok(asked) = env::var("CARGO_BUILD_TARGET") {
        return Ok(asked);
    }
    let output = workspace.command("rustc").arg("-vV").output().context("could not start rustc")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let host = text.lines().find_map(|line| line.strip_prefix("host: "));
    Ok(host.context("`rustc -vV` names no host")?.trim().to_owned())
}

/// Makes `folder` anew, with the binary and the project's files.
fn assemble(root: &Path, binary: &Path, folder: &Path) -> Result<()> {
    for required in &FILES[..REQUIRED] {
        anyhow::ensure!(root.join(required).exists(), "{required} is missing: an archive cannot go out without it");
    }
    if folder.exists() {
        fs::remove_dir_all(folder).with_context(|| format!("could not clear {}", folder.display()))?;
    }
    fs::create_dir_all(folder).with_context(|| format!("could not make {}", folder.display()))?;
    let name = binary.file_name().context("the binary has no name")?;
    copy(binary, &folder.join(name))?;
    for entry in FILES.into_iter().chain([ASSETS]).filter(|entry| root.join(entry).exists()) {
        copy(&root.join(entry), &folder.join(entry))?;
    }
    Ok(())
}

/// Copies a file, or a folder with all that is below it.
pub(crate) fn copy(from: &Path, to: &Path) -> Result<()> {
    if from.is_dir() {
        fs::create_dir_all(to)?;
        for entry in fs::read_dir(from)? {
            let entry = entry?;
            copy(&entry.path(), &to.join(entry.file_name()))?;
        }
        return Ok(());
    }
    fs::copy(from, to).with_context(|| format!("could not copy {} to {}", from.display(), to.display()))?;
    Ok(())
}

/// Files below `folder`, as sorted relative paths with their sizes in bytes.
fn files_below(folder: &Path) -> Result<Vec<(PathBuf, u64)>> {
    let mut found = Vec::new();
    let mut open = vec![PathBuf::new()];
    while let Some(relative) = open.pop() {
        for entry in fs::read_dir(folder.join(&relative))? {
            let entry = entry?;
            let path = relative.join(entry.file_name());
            let metadata = fs::metadata(entry.path())?;
            if metadata.is_dir() {
                open.push(path);
            } else {
                found.push((path, metadata.len()));
            }
        }
    }
    found.sort();
    Ok(found)
}

/// Writes `folder` as `name/...` into the gzipped tar `archive`, under a temporary name until it is whole.
fn pack(folder: &Path, name: &str, archive: &Path) -> Result<()> {
    let unfinished = archive.with_extension("tmp");
    let file = File::create(&unfinished).with_context(|| format!("could not write {}", unfinished.display()))?;
    let mut tar = Builder::new(GzEncoder::new(BufWriter::new(file), Compression::best()));
    for (path, size) in files_below(folder)? {
        let mut header = Header::new_gnu();
        header.set_entry_type(EntryType::Regular);
        header.set_size(size);
        header.set_mode(if is_program(&path) { 0o755 } else { 0o644 });
        header.set_mtime(0);
        header.set_uid(0);
        header.set_gid(0);
        let content = BufReader::new(File::open(folder.join(&path))?);
        tar.append_data(&mut header, Path::new(name).join(&path), content)?;
    }
    tar.into_inner().and_then(GzEncoder::finish).and_then(flush).context("could not finish the archive")?;
    fs::rename(&unfinished, archive).with_context(|| format!("could not write {}", archive.display()))
}

fn flush(mut writer: BufWriter<File>) -> io::Result<()> {
    writer.flush()
}

/// Whether a path inside the archive is a program: the trainer, or one of the GPU suite.
fn is_program(path: &Path) -> bool {
    let at_the_top = path.parent() == Some(Path::new(""));
    at_the_top && (path.file_stem() == Some("train".as_ref()) || path.extension() == Some("sh".as_ref()))
        || path.parent() == Some(Path::new("bin"))
}

fn mebibytes(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / (1024.0 * 1024.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use flate2::read::GzDecoder;
    use tar::Archive;

    /// A project with everything that is required, and a binary.
    fn project() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("configs/sub")).unwrap();
        for file in ["README.md", "LICENSE-MIT", "LICENSE-APACHE", "configs/b.toml", "configs/sub/a.toml", "train"] {
            fs::write(root.path().join(file), file).unwrap();
        }
        root
    }

    #[test]
    fn equal_inputs_give_equal_bytes() {
        let archives: Vec<Vec<u8>> = (0..2)
            .map(|_| {
                let root = project();
                let folder = root.path().join("dist/fb");
                assemble(root.path(), &root.path().join("train"), &folder).unwrap();
                pack(&folder, "fb", &root.path().join("fb.tar.gz")).unwrap();
                fs::read(root.path().join("fb.tar.gz")).unwrap()
            })
            .collect();
        assert!(archives[0] == archives[1]);
        let mut archive = Archive::new(GzDecoder::new(&archives[0][..]));
        let entries: Vec<(String, u32)> = archive
            .entries()
            .unwrap()
            .map(|entry| entry.unwrap())
            .map(|entry| (entry.path().unwrap().display().to_string(), entry.header().mode().unwrap()))
            .collect();
        let expected =
            [("LICENSE-APACHE", 0o644), ("LICENSE-MIT", 0o644), ("README.md", 0o644), ("configs/b.toml", 0o644)];
        let expected = expected.into_iter().chain([("configs/sub/a.toml", 0o644), ("train", 0o755)]);
        assert_eq!(entries, expected.map(|(path, mode)| (format!("fb/{path}"), mode)).collect::<Vec<_>>());
    }

    #[test]
    fn nothing_is_shipped_without_its_licence() {
        let root = project();
        fs::remove_file(root.path().join("LICENSE-MIT")).unwrap();
        let error = assemble(root.path(), &root.path().join("train"), &root.path().join("out")).unwrap_err();
        assert!(error.to_string().contains("LICENSE-MIT"));
        assert!(!root.path().join("out").exists());
    }

    #[test]
    fn a_stale_file_does_not_survive() {
        let root = project();
        let folder = root.path().join("out");
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("stale"), "").unwrap();
        assemble(root.path(), &root.path().join("train"), &folder).unwrap();
        assert!(!folder.join("stale").exists());
    }

    #[test]
    fn the_backend_is_named_not_guessed() {
        assert_eq!(parse(&[]).unwrap().backend, Backend::Flex);
        assert_eq!(parse(&["--backend=cuda".to_owned()]).unwrap().backend, Backend::Cuda);
        assert!(parse(&["--backend".to_owned(), "auto".to_owned()]).is_err());
        assert!(parse(&["cuda".to_owned()]).is_err());
    }
}
