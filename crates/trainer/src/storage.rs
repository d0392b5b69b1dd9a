//! Writes to disk so that a crash, a kill or a full disk at any moment loses nothing that was there before.
//!
//! Trade-off: speed. Every write here waits for the disk, so use it for checkpoints and summaries, not for every step.

use std::io;
use std::path::{Path, PathBuf};

/// An error of storing something or reading it back.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // of fields, which the messages name
pub enum StorageError {
    /// Reading, writing or renaming failed.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// "write", "create", …
        action: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    /// The disk is full.
    #[error(
        "{}; free some space, lower checkpoint.keep, or set output_dir to a folder on \
         another disk, then continue with --resume; the newest saved checkpoint is untouched", full(path, *needed, *free)
    )]
    DiskFull {
        path: PathBuf,
        /// Bytes that were to be written.
        needed: u64,
        /// What is free, if the system reports it.
        free: Option<Free>,
    },
    /// The disk where another rank writes its part of a checkpoint is full.
    #[error(
        "another rank could not write its part of a checkpoint in {}, because the disk is full; free some space, lower \
         checkpoint.keep, or set output_dir to a folder on another disk, then continue with --resume; the newest \
         saved checkpoint is untouched", path.display()
    )]
    DiskOfOtherRankFull { path: PathBuf },
    /// The run folder cannot be created or written to.
    #[error(
        "cannot write the run folder {}: {}", path.display(), match source.kind() {
            io::ErrorKind::AlreadyExists | io::ErrorKind::NotADirectory =>
                "a file of that name is there, or one of the folders above is a file; set output_dir to another folder".to_owned(),
            _ => format!("{source}; give yourself permission to write there, or set output_dir to another folder"),
        }
    )]
    NotWritable { path: PathBuf, source: io::Error },
    /// Another process is training in the folder.
    #[error("another process is writing to {}; wait for it to end, or give this run another name", path.display())]
    InUse { path: PathBuf },
    /// There is nothing to resume from.
    #[error(
        "nothing to resume in {}: {found}; start without --resume, or name the run folder or checkpoint folder as in \
         `--resume runs/my-run`", path.display()
    )]
    NothingToResume { path: PathBuf, found: &'static str },
    /// A file of a checkpoint is not what was saved.
    #[error(
        "the checkpoint cannot be resumed: `{}` {problem}. The file changed after it was saved; resume from another checkpoint \
         of the run with `--resume FOLDER`", path.display()
    )]
    Damaged { path: PathBuf, problem: String },
    /// A checkpoint of another version of this program.
    #[error(
        "the checkpoint {} has {found}, and this version reads format {expected} only; resume it with the version of Firebrick \
         that saved it, or start a new run", path.display()
    )]
    OtherFormat { path: PathBuf, found: String, expected: u32 },
}

impl StorageError {
    /// Wraps the system's error about a path.
    pub fn io(action: &'static str, path: &Path, source: io::Error) -> Self {
        StorageError::Io { action, path: path.to_path_buf(), source }
    }

    /// Wraps the system's error about writing `needed` bytes; a full disk gets a separate message.
    pub fn writing(path: &Path, needed: u64, source: io::Error) -> Self {
        match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                StorageError::DiskFull { path: path.to_path_buf(), needed, free: free_space(path) }
            }
            _ => StorageError::io("write", path, source),
        }
    }

    /// Returns the problem, without the advice for a run that ends.
    pub fn problem(&self) -> String {
        match self {
            StorageError::DiskFull { path, needed, free } => full(path, *needed, *free),
            StorageError::DiskOfOtherRankFull { path } => {
                format!("the disk on which another rank writes {} is full", path.display())
            }
            StorageError::Damaged { path, problem } => format!("`{}` {problem}", path.display()),
            other => other.to_string(),
        }
    }
}

/// Formats "the disk that holds runs is full: 3.2 GB are needed and 1.1 GB are free", or that its inodes are used up.
fn full(path: &Path, needed: u64, free: Option<Free>) -> String {
    let amounts = match free {
        Some(Free { bytes, has_inodes: false }) => {
            format!(
                "its inodes are used up, so it takes no more files, and {} are free; delete some files",
                bytes_in_words(bytes)
            )
        }
        Some(Free { bytes, .. }) if needed == 0 => format!("{} are free", bytes_in_words(bytes)),
        Some(Free { bytes, .. }) => {
            format!("{} are needed and {} are free", bytes_in_words(needed), bytes_in_words(bytes))
        }
        None => format!("{} are needed", bytes_in_words(needed)),
    };
    format!("the disk that holds {} is full: {amounts}", path.display())
}

/// Returns whether this user may create something in a folder.
#[cfg(unix)]
pub fn may_write(folder: &Path) -> bool {
    use rustix::fs::{Access, access};
    access(folder, Access::WRITE_OK | Access::EXEC_OK).is_ok()
}

/// Returns whether this user may create something in a folder.
#[cfg(not(unix))]
pub fn may_write(folder: &Path) -> bool {
    std::fs::metadata(folder).is_ok_and(|found| !found.permissions().readonly())
}

/// Formats a number of bytes: "512 bytes", "3.2 GB" (10^9 bytes).
pub fn bytes_in_words(bytes: u64) -> String {
    let scaled = [(1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")];
    match scaled.into_iter().find(|(scale, _)| bytes as f64 >= *scale) {
        Some((scale, unit)) => format!("{:.1} {unit}", bytes as f64 / scale),
        None => format!("{bytes} bytes"),
    }
}

/// Fewer inodes than this hold no checkpoint. What failed for want of one may have given back some.
#[cfg(unix)]
const FEW_INODES: u64 = 16;

/// What is free on a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Free {
    /// Bytes that this user may still write.
    pub bytes: u64,
    /// Whether there are inodes for new files; some systems do not count them.
    pub has_inodes: bool,
}

/// Returns what is free on the disk that holds `path`, if the system reports it.
pub fn free_space(path: &Path) -> Option<Free> {
    #[cfg(unix)]
    {
        // A path that does not exist yet will be on the disk of its nearest existing parent.
        let existing = path.ancestors().find(|ancestor| ancestor.exists()).unwrap_or(Path::new("."));
        let disk = rustix::fs::statvfs(existing).ok()?;
        let has_inodes = disk.f_files == 0 || disk.f_favail >= FEW_INODES;
        Some(Free { bytes: disk.f_bavail.saturating_mul(disk.f_frsize), has_inodes })
    }
    #[cfg(not(unix))]
    {
        let _ = path;
        None
    }
}

/// Refuses to begin writing `bytes` inside `path` if they will not fit.
///
/// # Errors
/// [`StorageError::DiskFull`]; none if the system does not report the free space.
pub fn ensure_free_space(path: &Path, bytes: u64) -> Result<(), StorageError> {
    match free_space(path) {
        Some(free) if free.bytes < bytes || !free.has_inodes => {
            Err(StorageError::DiskFull { path: path.to_path_buf(), needed: bytes, free: Some(free) })
        }
        _ => Ok(()),
    }
}

/// Writes a whole file; after a crash at any moment it contains either the old bytes or the new ones.
///
/// # Errors
/// [`StorageError::DiskFull`] or [`StorageError::Io`]; the old file is untouched then.
pub fn write_atomically(path: &Path, bytes: &[u8]) -> Result<(), StorageError> {
    firebrick_files::write(path, bytes).map_err(|source| StorageError::writing(path, bytes.len() as u64, source))
}

/// Renames a file or folder and waits until the new name is on the disk.
pub(crate) fn rename_durably(from: &Path, to: &Path) -> Result<(), StorageError> {
    firebrick_files::rename(from, to).map_err(|source| StorageError::io("rename to", to, source))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_folder_that_is_a_file_needs_another_name_and_no_permission() {
        let message =
            |kind: io::ErrorKind| StorageError::NotWritable { path: "runs".into(), source: kind.into() }.to_string();
        for kind in [io::ErrorKind::AlreadyExists, io::ErrorKind::NotADirectory] {
            assert!(message(kind).contains("set output_dir to another folder"), "{}", message(kind));
            assert!(!message(kind).contains("permission"), "{}", message(kind));
        }
        assert!(message(io::ErrorKind::PermissionDenied).contains("give yourself permission"));
    }

    #[test]
    fn full_disk_is_named_with_the_bytes_needed() {
        let full = io::Error::from(io::ErrorKind::StorageFull);
        let error = StorageError::writing(Path::new("summary.json"), 2000, full);
        assert!(matches!(error, StorageError::DiskFull { needed: 2000, .. }), "{error}");
        assert!(error.to_string().contains("2.0 kB are needed"), "{error}");
        // Older ones may have made room.
        let message = StorageError::DiskOfOtherRankFull { path: "runs/a".into() }.to_string();
        for message in [message, error.to_string()] {
            assert!(message.ends_with("the newest saved checkpoint is untouched"), "{message}");
        }
    }

    #[cfg(unix)]
    #[test]
    fn more_than_the_disk_holds_is_refused_before_writing() {
        let folder = tempfile::tempdir().unwrap();
        ensure_free_space(&folder.path().join("not/there/yet"), 1).unwrap();
        let error = ensure_free_space(folder.path(), u64::MAX).unwrap_err();
        assert!(matches!(error, StorageError::DiskFull { free: Some(_), .. }), "{error}");
        let free = Some(Free { bytes: 4000, has_inodes: false });
        let error = StorageError::DiskFull { path: "runs".into(), needed: 2000, free };
        for message in [error.to_string(), error.problem()] {
            assert!(message.starts_with("the disk that holds runs is full: its inodes are used up"), "{message}");
        }
    }

    #[test]
    fn bytes_are_written_in_decimal_units() {
        assert_eq!(bytes_in_words(999), "999 bytes");
        assert_eq!(bytes_in_words(3_200_000_000), "3.2 GB");
    }
}
