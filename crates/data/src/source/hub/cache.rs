//! The Hub's cache on disk, laid out as `huggingface_hub` does, so that both find what the other fetched.
//!
//! ```text
//! CACHE/datasets--OWNER--NAME/refs/REVISION         the commit that a branch or tag meant when it was asked last
//!                            /blobs/ETAG            a file's content
//!                            /snapshots/COMMIT/PATH a link to its blob (a copy where links cannot be made)
//!                            /.firebrick/COMMIT.json which files the dataset had, and its configurations (ours)
//! CACHE/.locks/datasets--OWNER--NAME/ETAG.lock      held while a blob is fetched
//! ```
//! Source: huggingface_hub, "Understand caching".

use std::fs::{self, File};
use std::io::Error as IoError;
use std::path::{Path, PathBuf};

use super::super::error::SourceError;
use super::super::unfinished;

/// The part of the cache that belongs to one dataset.
pub(super) struct DatasetCache {
    root: PathBuf,
    locks: PathBuf,
}

impl DatasetCache {
    /// `name` is `owner/name`.
    pub(super) fn new(cache: &Path, name: &str) -> Self {
        let folder = format!("datasets--{}", name.replace('/', "--"));
        Self { root: cache.join(&folder), locks: cache.join(".locks").join(folder) }
    }

    /// The commit that a revision meant, if it is known.
    pub(super) fn commit(&self, revision: &str) -> Option<String> {
        if self.root.join("snapshots").join(revision).is_dir() {
            return Some(revision.to_owned());
        }
        let text = fs::read_to_string(self.root.join("refs").join(revision)).ok()?;
        let commit = text.trim();
        (commit.len() == 40 && commit.bytes().all(|byte| byte.is_ascii_hexdigit())).then(|| commit.to_owned())
    }

    /// Remembers what a revision means.
    pub(super) fn set_commit(&self, revision: &str, commit: &str) -> Result<(), SourceError> {
        if revision == commit {
            return Ok(());
        }
        write_whole(&self.root.join("refs").join(revision), commit.as_bytes())
    }

    /// The place of a file.
    pub(super) fn file(&self, commit: &str, path: &str) -> PathBuf {
        path.split('/').fold(self.root.join("snapshots").join(commit), |folder, part| folder.join(part))
    }

    /// All files of a commit that are in the cache, as paths with `/`, with sizes.
    pub(super) fn files(&self, commit: &str) -> Vec<(String, u64)> {
        let mut files = Vec::new();
        collect(&self.root.join("snapshots").join(commit), "", 0, &mut files);
        files
    }

    /// The listing that was kept of a commit.
    pub(super) fn listing(&self, commit: &str) -> Option<serde_json::Value> {
        serde_json::from_slice(&fs::read(self.listing_path(commit)).ok()?).ok()
    }

    /// Keeps a listing.
    pub(super) fn set_listing(&self, commit: &str, listing: &serde_json::Value) -> Result<(), SourceError> {
        write_whole(&self.listing_path(commit), listing.to_string().as_bytes())
    }

    fn listing_path(&self, commit: &str) -> PathBuf {
        self.root.join(".firebrick").join(format!("{commit}.json"))
    }

    /// The place of a content.
    pub(super) fn blob(&self, etag: &str) -> PathBuf {
        self.root.join("blobs").join(etag)
    }

    /// Waits until no other process fetches this content; the lock ends with the file.
    pub(super) fn lock(&self, etag: &str) -> Result<File, SourceError> {
        let path = self.locks.join(format!("{etag}.lock"));
        let failed = |reason: IoError| failed(&path, &reason);
        fs::create_dir_all(&self.locks).map_err(failed)?;
        let file = File::options().create(true).append(true).open(&path).map_err(failed)?;
        file.lock().map_err(failed)?;
        Ok(file)
    }

    /// Makes a content the file of a commit.
    pub(super) fn link(&self, etag: &str, commit: &str, path: &str) -> Result<PathBuf, SourceError> {
        let (place, blob) = (self.file(commit, path), self.blob(etag));
        let failed = |reason: IoError| failed(&place, &reason);
        fs::create_dir_all(place.parent().expect("inside the snapshot")).map_err(failed)?;
        // The link stays right when the cache is moved: it climbs from its folder to the dataset's.
        let up = "../".repeat(path.split('/').count() + 1);
        let half = place.with_extension(unfinished());
        symlink(Path::new(&format!("{up}blobs/{etag}")), &half)
            .or_else(|_| fs::copy(&blob, &half).map(|_| ()))
            .map_err(failed)?;
        fs::rename(&half, &place).map_err(failed)?;
        Ok(place)
    }
}

/// The error of a cache that cannot be written.
pub(super) fn failed(path: &Path, reason: &IoError) -> SourceError {
    SourceError::HubCache { path: path.to_owned(), reason: reason.to_string() }
}

/// Writes a file so that others see all of it or nothing.
fn write_whole(path: &Path, bytes: &[u8]) -> Result<(), SourceError> {
    let failed = |reason: IoError| failed(path, &reason);
    let folder = path.parent().expect("inside the cache");
    fs::create_dir_all(folder).map_err(failed)?;
    // Hidden: a stray name below `refs` would look like a revision.
    let half = folder.join(format!(".{}", unfinished()));
    fs::write(&half, bytes).map_err(failed)?;
    fs::rename(&half, path).map_err(failed)
}

fn collect(folder: &Path, prefix: &str, depth: usize, files: &mut Vec<(String, u64)>) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
        // Follows links; one whose content is gone is no file.
        match fs::metadata(entry.path()) {
            Ok(metadata) if metadata.is_dir() && depth < 32 => {
                collect(&entry.path(), &format!("{name}/"), depth + 1, files);
            }
            Ok(metadata) if metadata.is_file() => files.push((name, metadata.len())),
            _ => {}
        }
    }
}

#[cfg(unix)]
fn symlink(target: &Path, link: &Path) -> std::io::Result<()> {
    std::os::unix::fs::symlink(target, link)
}

/// Links need a right on Windows that few have: a copy does as well.
#[cfg(not(unix))]
fn symlink(_: &Path, _: &Path) -> std::io::Result<()> {
    Err(IoError::from(std::io::ErrorKind::Unsupported))
}
