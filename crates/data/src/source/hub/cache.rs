//! The Hub's cache on disk, in the layout of `huggingface_hub`, so that both find each other's files.
//!
//! ```text
//! CACHE/datasets--OWNER--NAME/refs/REVISION         the commit of a branch or tag at the last request
//!                            /blobs/ETAG            the content of a file
//!                            /snapshots/COMMIT/PATH a link to its blob (a copy where links are not available)
//!                            /.firebrick/COMMIT.json the files and configurations of the dataset (written by
//! Firebrick)
//! CACHE/.locks/datasets--OWNER--NAME/ETAG.lock      held while a blob is downloaded
//! ```
//!
//! Trade-off: nothing is ever deleted. Source: huggingface_hub, "Understand caching".

use std::fs::{self, File};
use std::io::Error as IoError;
use std::path::{Path, PathBuf};

use super::super::error::SourceError;
use super::super::splits::list_files;
use crate::atomic_file;

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

    /// The commit of a revision, if it is known.
    pub(super) fn commit(&self, revision: &str) -> Option<String> {
        if self.root.join("snapshots").join(revision).is_dir() {
            return Some(revision.to_owned());
        }
        let text = fs::read_to_string(self.root.join("refs").join(revision)).ok()?;
        let commit = text.trim();
        (commit.len() == 40 && commit.bytes().all(|byte| byte.is_ascii_hexdigit())).then(|| commit.to_owned())
    }

    /// Stores the commit of a revision.
    pub(super) fn set_commit(&self, revision: &str, commit: &str) -> Result<(), SourceError> {
        if revision == commit {
            return Ok(());
        }
        write(&self.root.join("refs").join(revision), commit.as_bytes())
    }

    /// The path of a file.
    pub(super) fn file(&self, commit: &str, path: &str) -> PathBuf {
        path.split('/').fold(self.root.join("snapshots").join(commit), |folder, part| folder.join(part))
    }

    /// All files of a commit that are in the cache, as paths with `/`, with sizes.
    pub(super) fn files(&self, commit: &str) -> Vec<(String, u64)> {
        let (folder, mut paths) = (self.root.join("snapshots").join(commit), Vec::new());
        // What cannot be listed is not in the cache.
        let _ = list_files(&folder, "", 0, &mut paths);
        let size = |path: &String| fs::metadata(folder.join(path)).map_or(0, |file| file.len());
        paths.into_iter().map(|path| (path.clone(), size(&path))).collect()
    }

    /// The stored listing of a commit.
    pub(super) fn listing(&self, commit: &str) -> Option<serde_json::Value> {
        serde_json::from_slice(&fs::read(self.listing_path(commit)).ok()?).ok()
    }

    /// Stores a listing.
    pub(super) fn set_listing(&self, commit: &str, listing: &serde_json::Value) -> Result<(), SourceError> {
        write(&self.listing_path(commit), listing.to_string().as_bytes())
    }

    fn listing_path(&self, commit: &str) -> PathBuf {
        self.root.join(".firebrick").join(format!("{commit}.json"))
    }

    /// The path of a blob.
    pub(super) fn blob(&self, etag: &str) -> PathBuf {
        self.root.join("blobs").join(etag)
    }

    /// Waits until no other process downloads this content; the lock ends with the returned file.
    pub(super) fn lock(&self, etag: &str) -> Result<File, SourceError> {
        let path = self.locks.join(format!("{etag}.lock"));
        let failed = |reason: IoError| failed(&path, &reason);
        fs::create_dir_all(&self.locks).map_err(failed)?;
        let file = File::options().create(true).append(true).open(&path).map_err(failed)?;
        file.lock().map_err(failed)?;
        Ok(file)
    }

    /// Links a blob as a file of a commit.
    pub(super) fn link(&self, etag: &str, commit: &str, path: &str) -> Result<PathBuf, SourceError> {
        let (place, blob) = (self.file(commit, path), self.blob(etag));
        let failed = |reason: IoError| failed(&place, &reason);
        fs::create_dir_all(place.parent().expect("inside the snapshot")).map_err(failed)?;
        // A relative link stays valid when the cache is moved: it goes up from its folder to the dataset's.
        let up = "../".repeat(path.split('/').count() + 1);
        let target = format!("{up}blobs/{etag}");
        let folder = place.parent().expect("inside the snapshot");
        let link = tempfile::Builder::new()
            .make_in(folder, |link| symlink(Path::new(&target), link).or_else(|_| fs::copy(&blob, link).map(drop)));
        link.and_then(|link| link.persist(&place).map_err(|error| error.error)).map_err(failed)?;
        Ok(place)
    }
}

/// The error of a cache that cannot be written.
pub(super) fn failed(path: &Path, reason: &IoError) -> SourceError {
    SourceError::Hub(format!("cannot use the Hub cache at {}: {reason}", path.display()))
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), SourceError> {
    atomic_file::write(path, bytes).map_err(|reason| failed(path, &reason))
}

#[cfg(unix)]
fn symlink(target: &Path, link: &Path) -> std::io::Result<()> {
    std::os::unix::fs::symlink(target, link)
}

/// Links need a privilege on Windows that few users have: a copy is made instead.
#[cfg(not(unix))]
fn symlink(_: &Path, _: &Path) -> std::io::Result<()> {
    Err(IoError::from(std::io::ErrorKind::Unsupported))
}
