//! `manifest.json`: the format of a checkpoint, and the size and checksum of each of its files.
//!
//! The manifest is the last file of a checkpoint; a folder without one is not a checkpoint. Checksums are xxh3 (64 bits), which finds damage, not
//! forgery.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Component, Path, PathBuf};

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use crate::storage::{StorageError, write_atomically};

/// Version of all files in a checkpoint folder. Incremented when an older program could not read it, or this one an older folder.
pub const FORMAT_VERSION: u32 = 1;
pub(crate) const MANIFEST: &str = "manifest.json";
const BUFFER: usize = 1 << 20;

/// The description of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// [`FORMAT_VERSION`] of the program that saved it.
    pub format_version: u32,
    /// Every other file, sorted by path.
    pub files: Vec<ManifestFile>,
    /// Checksum of the two fields above.
    pub xxh3: String,
}

/// A file of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ManifestFile {
    /// Path inside the checkpoint folder, with `/`.
    pub path: String,
    /// Size of the file.
    pub bytes: u64,
    /// Checksum of the content, 16 hexadecimal digits.
    pub xxh3: String,
}

/// Only the version, which must be readable in every version.
#[derive(Deserialize)]
struct Version {
    format_version: u32,
}

impl Manifest {
    /// Describes the files of a folder.
    pub fn of_folder(folder: &Path) -> Result<Self, StorageError> {
        let mut files = Vec::new();
        for path in files_below(folder)? {
            let (bytes, xxh3) = checksum(&path).map_err(|source| StorageError::io("read", &path, source))?;
            let inside = path.strip_prefix(folder).unwrap_or(&path).components();
            // With `/` on every system.
            let inside: Vec<_> = inside.map(|part| part.as_os_str().to_string_lossy()).collect();
            files.push(ManifestFile { path: inside.join("/"), bytes, xxh3 });
        }
        files.sort_by(|one, other| one.path.cmp(&other.path));
        let xxh3 = own_checksum(&files);
        Ok(Self { format_version: FORMAT_VERSION, files, xxh3 })
    }

    /// Writes the manifest into its folder.
    pub fn write(&self, folder: &Path) -> Result<(), StorageError> {
        let text = serde_json::to_string_pretty(self).expect("a manifest of plain fields is expressible as JSON");
        write_atomically(&folder.join(MANIFEST), text.as_bytes())
    }

    /// Returns whether a folder is a checkpoint.
    pub fn is_in(folder: &Path) -> bool {
        folder.join(MANIFEST).is_file()
    }

    /// Reads the manifest of a checkpoint folder.
    ///
    /// # Errors
    /// [`StorageError::OtherFormat`] for another version, [`StorageError::Damaged`] for a manifest that is unreadable or was changed.
    pub fn read(folder: &Path) -> Result<Self, StorageError> {
        let path = folder.join(MANIFEST);
        let damaged = |problem: String| StorageError::Damaged { path: path.clone(), problem };
        let text = fs::read(&path).map_err(|error| damaged(format!("cannot be read: {error}")))?;
        let not_json = |error: serde_json::Error| damaged(format!("is not a manifest: {error}"));
        let Version { format_version } = serde_json::from_slice(&text).map_err(not_json)?;
        let manifest = serde_json::from_slice::<Self>(&text).map_err(not_json);
        let is_right = manifest.as_ref().ok().map(|manifest| manifest.xxh3 == own_checksum(&manifest.files));
        // The checksum is that of this format: if it is right, only the version itself can be damaged.
        match (format_version == FORMAT_VERSION, is_right) {
            (true, Some(true) | None) => manifest,
            (false, Some(false) | None) => Err(StorageError::OtherFormat {
                path: folder.to_path_buf(),
                found: format!("format {format_version}"),
                expected: FORMAT_VERSION,
            }),
            (true, Some(false)) | (false, Some(true)) => Err(damaged("does not have its own checksum".to_owned())),
        }
    }

    /// Compares every file of a checkpoint folder with its manifest.
    ///
    /// # Errors
    /// Those of [`Manifest::read`] and [`Manifest::verify`].
    pub fn check(folder: &Path) -> Result<(), StorageError> {
        Self::read(folder)?.verify(folder)
    }

    /// Compares every file with its size and checksum.
    ///
    /// # Errors
    /// [`StorageError::Damaged`] names the first file that differs.
    pub fn verify(&self, folder: &Path) -> Result<(), StorageError> {
        for file in &self.files {
            let path = folder.join(&file.path);
            let damaged = |problem: String| StorageError::Damaged { path: path.clone(), problem };
            let name = &file.path;
            let is_plain = Path::new(name).components().all(|part| matches!(part, Component::Normal(_)));
            let found =
                folder.canonicalize().and_then(|folder| Ok((folder.join(name), folder.join(name).canonicalize()?)));
            let outside = match found {
                Ok((typed, real)) if is_plain && typed != real => Some("a link, not a plain file"),
                Ok((_, real)) if is_plain && real.is_file() => None,
                // A file that is missing is named as such below.
                Err(_) if is_plain => None,
                _ => Some("not a plain file"),
            };
            if let Some(what) = outside {
                return Err(damaged(format!("is {name:?} in {MANIFEST}, and {what} in the checkpoint's folder")));
            }
            let (bytes, xxh3) = checksum(&path).map_err(|error| damaged(format!("cannot be read: {error}")))?;
            if bytes != file.bytes {
                return Err(damaged(format!("has {bytes} bytes, expected {}", file.bytes)));
            }
            if xxh3 != file.xxh3 {
                return Err(damaged(format!("has checksum {xxh3}, expected {}", file.xxh3)));
            }
        }
        Ok(())
    }
}

/// Returns the checksum of a manifest of this format with these files.
fn own_checksum(files: &[ManifestFile]) -> String {
    let text = serde_json::to_vec(&(FORMAT_VERSION, files)).expect("a manifest of plain fields is expressible as JSON");
    format!("{:016x}", xxh3_64(&text))
}

/// Returns size and checksum of a file.
fn checksum(path: &Path) -> io::Result<(u64, String)> {
    let mut file = File::open(path)?;
    let (mut hash, mut bytes) = (Xxh3::new(), 0);
    let mut buffer = vec![0; BUFFER];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok((bytes, format!("{:016x}", hash.digest()))),
            count => {
                hash.update(&buffer[..count]);
                bytes += count as u64;
            }
        }
    }
}

pub(crate) fn files_below(folder: &Path) -> Result<Vec<PathBuf>, StorageError> {
    let mut files = Vec::new();
    for path in list(folder)? {
        if path.is_dir() {
            files.extend(files_below(&path)?);
        } else {
            files.push(path);
        }
    }
    Ok(files)
}

/// Lists the paths in a folder; none if it does not exist.
pub(crate) fn list(folder: &Path) -> Result<Vec<PathBuf>, StorageError> {
    if !folder.exists() {
        return Ok(Vec::new());
    }
    fs::read_dir(folder)
        .and_then(|entries| entries.map(|entry| entry.map(|entry| entry.path())).collect())
        .map_err(|source| StorageError::io("list", folder, source))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checkpoint() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("adapter")).unwrap();
        fs::write(folder.path().join("adapter/weights"), [7; 3000]).unwrap();
        fs::write(folder.path().join("state.json"), "{\"step\": 3}").unwrap();
        Manifest::of_folder(folder.path()).unwrap().write(folder.path()).unwrap();
        folder
    }

    #[test]
    fn every_flipped_bit_is_found() {
        for name in ["state.json", "adapter/weights", MANIFEST] {
            let folder = checkpoint();
            let path = folder.path().join(name);
            let whole = fs::read(&path).unwrap();
            for bit in (0..8 * whole.len()).step_by(1 + whole.len() / 64) {
                let mut flipped = whole.clone();
                flipped[bit / 8] ^= 1 << (bit % 8);
                fs::write(&path, flipped).unwrap();
                let error = Manifest::check(folder.path()).expect_err("a flipped bit");
                assert!(matches!(error, StorageError::Damaged { .. }), "{name}, bit {bit}: {error}");
                assert!(error.to_string().contains(&path.display().to_string()), "{name}, bit {bit}: {error}");
            }
            fs::write(&path, &whole[..whole.len() / 2]).unwrap();
            let message = Manifest::check(folder.path()).unwrap_err().to_string();
            assert!(message.contains(&path.display().to_string()), "{message}");
            fs::remove_file(&path).unwrap();
            assert!(Manifest::check(folder.path()).is_err());
        }
    }

    #[test]
    fn checkpoints_of_other_versions_are_refused() {
        let folder = checkpoint();
        fs::write(folder.path().join(MANIFEST), "{\"format_version\": 2, \"shards\": []}").unwrap();
        let message = Manifest::check(folder.path()).unwrap_err().to_string();
        assert!(message.contains("has format 2, and this version reads format 1 only"), "{message}");
    }

    #[cfg(unix)]
    #[test]
    fn a_path_out_of_the_checkpoint_is_not_opened() {
        let (folder, outside) = (checkpoint(), tempfile::tempdir().unwrap());
        let secret = outside.path().join("secret");
        fs::write(&secret, "x").unwrap();
        std::os::unix::fs::symlink(&secret, folder.path().join("link")).unwrap();
        std::os::unix::fs::symlink(outside.path(), folder.path().join("linked")).unwrap();
        for path in
            ["link", "linked/secret", "../x", "adapter/../state.json", secret.to_str().unwrap(), "adapter", "", "."]
        {
            let files = vec![ManifestFile { path: path.to_owned(), bytes: 1, xxh3: checksum(&secret).unwrap().1 }];
            let manifest = Manifest { format_version: FORMAT_VERSION, xxh3: own_checksum(&files), files };
            let error = manifest.verify(folder.path()).unwrap_err().to_string();
            assert!(error.contains("not a plain file") && error.contains(&format!("{path:?}")), "{error}");
            assert_eq!(error.contains("a link"), path.starts_with("link"), "{error}");
        }
    }
}
