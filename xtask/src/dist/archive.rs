//! Folders and archives: copying, and a gzipped tar whose bytes depend on the content only. Order, owners, times and mode
//! bits are fixed, so equal inputs give equal bytes.
//!
//! Not supported: links and empty folders, which these archives never contain.

use std::fs::{self, File};
use std::io::BufReader;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use firebrick_files::AtomicFile;
use flate2::Compression;
use flate2::write::GzEncoder;
use ring::digest::{SHA256, digest};
use tar::{Builder, EntryType, Header};

/// Creates `folder` empty; its old contents are removed.
pub(super) fn make_empty(folder: &Path) -> Result<()> {
    if folder.exists() {
        fs::remove_dir_all(folder).with_context(|| format!("could not clear {}", folder.display()))?;
    }
    fs::create_dir_all(folder).with_context(|| format!("could not create {}", folder.display()))
}

/// Copies a file, or a folder with everything in it.
pub(super) fn copy(from: &Path, to: &Path) -> Result<()> {
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

/// Lists the files below `folder`, as sorted relative paths with their sizes in bytes.
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

/// Sums the bytes of all files below `folder`.
pub(super) fn folder_size(folder: &Path) -> Result<u64> {
    Ok(files_below(folder)?.iter().map(|(_, size)| size).sum())
}

/// Writes `folder` as `name/...` into the gzipped tar `archive`, which appears when it is complete.
pub(super) fn pack(folder: &Path, name: &str, archive: &Path) -> Result<()> {
    let file = AtomicFile::create(archive).with_context(|| format!("could not write {}", archive.display()))?;
    let mut tar = Builder::new(GzEncoder::new(file, Compression::best()));
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
    let file = tar.into_inner().and_then(GzEncoder::finish).context("could not finish the archive")?;
    file.commit().with_context(|| format!("could not write {}", archive.display()))
}

/// Writes the SHA-256 of `archive` next to it, as `sha256sum` prints and checks it.
pub(super) fn write_checksum(archive: &Path) -> Result<()> {
    let bytes = fs::read(archive).with_context(|| format!("could not read {}", archive.display()))?;
    let sum: String = digest(&SHA256, &bytes).as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    let name = archive.file_name().context("an archive has a name")?.to_string_lossy();
    let path = archive.with_file_name(format!("{name}.sha256"));
    fs::write(&path, format!("{sum}  {name}\n")).with_context(|| format!("could not write {}", path.display()))
}

/// Returns whether a path inside the archive is a program: the trainer, the benchmark matrix, the script of the GPU suite, or one of its programs.
fn is_program(path: &Path) -> bool {
    let is_named = |name: &str| path.file_stem() == Some(name.as_ref());
    let at_the_top = path.parent() == Some(Path::new(""));
    at_the_top && (is_named("firebrick") || is_named("bench-matrix") || path.extension() == Some("sh".as_ref()))
        || path.parent() == Some(Path::new("bin"))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Lists the paths and modes of an archive's files, in order.
    pub(in super::super) fn entries(archive: &[u8]) -> Vec<(String, u32)> {
        let mut archive = tar::Archive::new(flate2::read::GzDecoder::new(archive));
        let entries = archive.entries().unwrap().map(|entry| entry.unwrap());
        entries.map(|entry| (entry.path().unwrap().display().to_string(), entry.header().mode().unwrap())).collect()
    }

    #[test]
    fn programs_and_scripts_are_executable_in_the_archive_and_data_is_not() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("suite");
        for file in ["run.sh", "bin/firebrick-cuda-gpu", "tests/golden/make.sh", "tests/golden/a.json"] {
            let path = folder.join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, file).unwrap();
        }
        let path = root.path().join("suite.tar.gz");
        pack(&folder, "suite", &path).unwrap();
        let expected = [
            ("suite/bin/firebrick-cuda-gpu", 0o755),
            ("suite/run.sh", 0o755),
            ("suite/tests/golden/a.json", 0o644),
            ("suite/tests/golden/make.sh", 0o644),
        ];
        assert_eq!(entries(&fs::read(&path).unwrap()), expected.map(|(path, mode)| (path.to_owned(), mode)));
        let left: Vec<_> = fs::read_dir(root.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left.len(), 2, "no temporary file is left: {left:?}");
    }

    #[test]
    fn the_checksum_is_one_that_sha256sum_checks() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("a.tar.gz"), "abc").unwrap();
        write_checksum(&folder.path().join("a.tar.gz")).unwrap();
        // Of "abc", FIPS 180-2, appendix B.1.
        let expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad  a.tar.gz\n";
        assert_eq!(fs::read_to_string(folder.path().join("a.tar.gz.sha256")).unwrap(), expected);
    }

    #[test]
    fn an_archive_that_cannot_be_finished_leaves_the_old_one() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("suite.tar.gz");
        fs::write(&path, "old").unwrap();
        assert!(pack(&root.path().join("missing"), "suite", &path).is_err());
        assert_eq!(fs::read_to_string(&path).unwrap(), "old");
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 1);
    }
}
