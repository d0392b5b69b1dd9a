//! Writing to disk so that a crash, a kill or a full disk at any moment loses nothing that was there before.
//!
//! Gives up: speed. Every write here waits for the disk, so it is for checkpoints and summaries, not for every step.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Why something could not be kept on disk.
#[derive(Debug, thiserror::Error)]
pub enum StorageError {
    /// Reading, writing or renaming failed.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// "write", "create", …
        action: &'static str,
        /// Of what.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// No room left.
    #[error(
        "the disk that holds {} is full: {}; free some space, lower checkpoint.keep, or set output_dir to a folder on \
         another disk, then go on with --resume; the checkpoints that were already saved are untouched",
        path.display(), amounts(*needed, *free)
    )]
    DiskFull {
        /// What was being written.
        path: PathBuf,
        /// Bytes that were to be written.
        needed: u64,
        /// Bytes that are free, where the system says it.
        free: Option<u64>,
    },
    /// The run folder cannot be made or written to.
    #[error(
        "cannot write the run folder {}: {source}; give yourself permission to write there, or set output_dir to another \
         folder", path.display()
    )]
    NotWritable {
        /// The folder.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Another process is training in the folder.
    #[error("another process is writing to {}; wait for it to end, or give this run another name", path.display())]
    InUse {
        /// The folder.
        path: PathBuf,
    },
    /// There is nothing to resume from.
    #[error(
        "nothing to resume in {}: {found}; start without --resume, or set name and output_dir to those of the run that \
         should go on", path.display()
    )]
    NothingToResume {
        /// The run folder.
        path: PathBuf,
        /// What is there instead.
        found: &'static str,
    },
}

impl StorageError {
    /// Wraps what the system said about a path.
    #[must_use]
    pub fn io(action: &'static str, path: &Path, source: io::Error) -> Self {
        StorageError::Io { action, path: path.to_path_buf(), source }
    }

    /// Wraps what the system said about writing `needed` bytes: a full disk gets its own message.
    #[must_use]
    pub fn writing(path: &Path, needed: u64, source: io::Error) -> Self {
        match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                StorageError::DiskFull { path: path.to_path_buf(), needed, free: free_space(path) }
            }
            _ => StorageError::io("write", path, source),
        }
    }
}

/// "3.2 GB are needed and 1.1 GB are free".
fn amounts(needed: u64, free: Option<u64>) -> String {
    match free {
        Some(free) => format!("{} are needed and {} are free", bytes_in_words(needed), bytes_in_words(free)),
        None => format!("{} are needed", bytes_in_words(needed)),
    }
}

/// A number of bytes for people: "512 bytes", "3.2 GB" (10^9 bytes).
#[must_use]
pub fn bytes_in_words(bytes: u64) -> String {
    let scaled = [(1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")];
    match scaled.into_iter().find(|(scale, _)| bytes as f64 >= *scale) {
        Some((scale, unit)) => format!("{:.1} {unit}", bytes as f64 / scale),
        None => format!("{bytes} bytes"),
    }
}

/// Bytes that this user may still write on the disk that holds `path`, where the system says it.
#[must_use]
pub fn free_space(path: &Path) -> Option<u64> {
    #[cfg(unix)]
    {
        // A path that does not exist yet will be on the disk of the nearest folder above it that does.
        let existing = path.ancestors().find(|ancestor| ancestor.exists()).unwrap_or(Path::new("."));
        let disk = rustix::fs::statvfs(existing).ok()?;
        Some(disk.f_bavail.saturating_mul(disk.f_frsize))
    }
    #[cfg(not(unix))]
    {
        let _ = path;
        None
    }
}

/// Refuses to begin writing `bytes` below `path` where they will not fit.
///
/// # Errors
/// [`StorageError::DiskFull`]; nothing where the system does not say how much is free.
pub fn ensure_free_space(path: &Path, bytes: u64) -> Result<(), StorageError> {
    match free_space(path) {
        Some(free) if free < bytes => {
            Err(StorageError::DiskFull { path: path.to_path_buf(), needed: bytes, free: Some(free) })
        }
        _ => Ok(()),
    }
}

/// Writes a whole file; after a crash at any moment it holds either the old bytes or the new ones.
///
/// # Errors
/// [`StorageError::DiskFull`] or [`StorageError::Io`]; the old file is untouched then.
pub fn write_atomically(path: &Path, bytes: &[u8]) -> Result<(), StorageError> {
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(".tmp");
    let temporary = path.with_file_name(name);
    let written = write_durably(&temporary, bytes).and_then(|()| rename_durably(&temporary, path));
    if written.is_err() {
        // Best effort: the first failure is the one to report.
        let _ = fs::remove_file(&temporary);
    }
    written
}

/// Writes a file and waits until it is on the disk.
pub(crate) fn write_durably(path: &Path, bytes: &[u8]) -> Result<(), StorageError> {
    let write = || {
        let mut file = File::create(path)?;
        file.write_all(bytes)?;
        file.sync_all()
    };
    write().map_err(|source| StorageError::writing(path, bytes.len() as u64, source))
}

/// Renames a file or folder and waits until the new name is on the disk.
pub(crate) fn rename_durably(from: &Path, to: &Path) -> Result<(), StorageError> {
    fs::rename(from, to).map_err(|source| StorageError::io("rename to", to, source))?;
    sync_folder(to.parent().unwrap_or(Path::new(".")))
}

/// Waits until a folder's list of names is on the disk. Windows does not offer this and does it by itself.
pub(crate) fn sync_folder(folder: &Path) -> Result<(), StorageError> {
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    if cfg!(unix) {
        File::open(folder)
            .and_then(|open| open.sync_all())
            .map_err(|source| StorageError::io("flush to disk", folder, source))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn atomic_write_replaces_the_file_and_leaves_no_temporary() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("summary.json");
        write_atomically(&path, b"old").unwrap();
        write_atomically(&path, b"new").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn full_disk_is_named_with_the_bytes_needed_and_the_old_file_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("summary.json");
        write_atomically(&path, b"old").unwrap();
        // Linux answers every write to /dev/full as a full disk does.
        std::os::unix::fs::symlink("/dev/full", folder.path().join("summary.json.tmp")).unwrap();
        let error = write_atomically(&path, &[0; 2000]).unwrap_err();
        assert!(matches!(error, StorageError::DiskFull { needed: 2000, .. }), "{error}");
        assert!(error.to_string().contains("2.0 kB are needed"), "{error}");
        assert_eq!(fs::read(&path).unwrap(), b"old");
    }

    #[cfg(unix)]
    #[test]
    fn more_than_the_disk_holds_is_refused_before_writing() {
        let folder = tempfile::tempdir().unwrap();
        ensure_free_space(&folder.path().join("not/there/yet"), 1).unwrap();
        let error = ensure_free_space(folder.path(), u64::MAX).unwrap_err();
        assert!(matches!(error, StorageError::DiskFull { free: Some(_), .. }), "{error}");
    }

    #[test]
    fn bytes_are_told_in_decimal_units() {
        assert_eq!(bytes_in_words(999), "999 bytes");
        assert_eq!(bytes_in_words(3_200_000_000), "3.2 GB");
    }
}
