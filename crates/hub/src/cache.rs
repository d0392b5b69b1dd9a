//! The Hub's cache on disk, in the layout of `huggingface_hub`, so that both find each other's files.
//!
//! ```text
//! CACHE/models--OWNER--NAME/refs/REVISION          the commit of a branch or tag at the last request
//!                          /blobs/ETAG             the content of a file
//!                          /snapshots/COMMIT/PATH  a link to its blob (a copy where links are not available)
//!                          /.no_exist/COMMIT/PATH  empty: the commit has no such file (written by huggingface_hub)
//!                          /.firebrick/COMMIT.json the files of the repository and a part of its card (written by Firebrick)
//! CACHE/.locks/models--OWNER--NAME/ETAG.lock       held while a blob is downloaded
//! ```
//!
//! Trade-off: nothing is ever deleted. Source: huggingface_hub, "Understand caching".

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use firebrick_files::files_below;
use tempfile::Builder;

use crate::error::HubError;
use crate::id::{RepoKind, is_commit};

/// One repository's part of the cache.
pub(crate) struct RepoCache {
    root: PathBuf,
    locks: PathBuf,
}

impl RepoCache {
    /// Creates the cache of a repository; `name` is `owner/name`.
    pub(crate) fn new(cache: &Path, kind: RepoKind, name: &str) -> Self {
        let folder = format!("{}--{}", kind.plural(), name.replace('/', "--"));
        Self { root: cache.join(&folder), locks: cache.join(".locks").join(folder) }
    }

    pub(crate) fn commit(&self, revision: &str) -> Option<String> {
        if is_commit(revision) && self.snapshot(revision).is_dir() {
            return Some(revision.to_owned());
        }
        let text = fs::read_to_string(self.root.join("refs").join(revision)).ok()?;
        let commit = text.trim();
        is_commit(commit).then(|| commit.to_owned())
    }

    /// Stores the commit of a revision, unless it is known.
    pub(crate) fn set_commit(&self, revision: &str, commit: &str) -> Result<(), HubError> {
        if revision == commit || self.commit(revision).as_deref() == Some(commit) {
            return Ok(());
        }
        write(&self.root.join("refs").join(revision), commit.as_bytes())
    }

    pub(crate) fn snapshot(&self, commit: &str) -> PathBuf {
        self.root.join("snapshots").join(commit)
    }

    pub(crate) fn file(&self, commit: &str, path: &str) -> PathBuf {
        path.split('/').fold(self.snapshot(commit), |folder, part| folder.join(part))
    }

    /// Returns all files of a commit that are in the cache, as paths with `/`, with sizes.
    pub(crate) fn files(&self, commit: &str) -> Vec<(String, Option<u64>)> {
        let files = files_below(&self.snapshot(commit)).unwrap_or_default();
        files.into_iter().map(|(name, path)| (name, fs::metadata(path).ok().map(|file| file.len()))).collect()
    }

    /// Returns whether `huggingface_hub` recorded that a commit has no such file.
    pub(crate) fn is_known_absent(&self, commit: &str, path: &str) -> bool {
        self.root.join(".no_exist").join(commit).join(path).is_file()
    }

    pub(crate) fn listing(&self, commit: &str) -> Option<serde_json::Value> {
        serde_json::from_slice(&fs::read(self.listing_path(commit)).ok()?).ok()
    }

    /// Stores a listing, unless it is there.
    pub(crate) fn set_listing(&self, commit: &str, listing: &serde_json::Value) -> Result<(), HubError> {
        if self.listing(commit).as_ref() == Some(listing) {
            return Ok(());
        }
        write(&self.listing_path(commit), listing.to_string().as_bytes())
    }

    fn listing_path(&self, commit: &str) -> PathBuf {
        self.root.join(".firebrick").join(format!("{commit}.json"))
    }

    pub(crate) fn blob(&self, etag: &str) -> PathBuf {
        self.root.join("blobs").join(etag)
    }

    /// Waits until no other process downloads this content; dropping the returned file releases the lock. `None`: the file system has no locks (NFS
    /// and Lustre are often mounted without).
    pub(crate) fn lock(&self, etag: &str) -> Result<Option<File>, HubError> {
        let path = self.locks.join(format!("{etag}.lock"));
        let failed = HubError::cache(&path);
        fs::create_dir_all(&self.locks).map_err(&failed)?;
        let file = File::options().create(true).append(true).open(&path).map_err(&failed)?;
        Ok(file.lock().is_ok().then_some(file))
    }

    pub(crate) fn link(&self, etag: &str, commit: &str, path: &str) -> Result<PathBuf, HubError> {
        let (place, blob) = (self.file(commit, path), self.blob(etag));
        let failed = |reason| HubError::Cache { path: place.clone(), reason };
        let folder = place.parent().expect("inside the snapshot");
        fs::create_dir_all(folder).map_err(failed)?;
        // A relative link stays valid when the cache is moved: it goes up to the repository's folder.
        let up = "../".repeat(path.split('/').count() + 1);
        let target = format!("{up}blobs/{etag}");
        let link = Builder::new()
            .make_in(folder, |link| symlink(Path::new(&target), link).or_else(|_| fs::copy(&blob, link).map(drop)));
        link.and_then(|link| link.persist(&place).map_err(|error| error.error)).map_err(failed)?;
        Ok(place)
    }
}

/// Returns the snapshot to use if the folder is a repository of a cache (`models--OWNER--NAME`): that of `refs/main`, or the only one. Otherwise it
/// returns the folder itself.
///
/// # Errors
/// A repository of a cache with no snapshot, or with several and no `refs/main`.
pub fn snapshot_of(folder: &Path) -> Result<PathBuf, HubError> {
    let snapshots = folder.join("snapshots");
    let is_repository = folder.join("blobs").is_dir() || folder.join("refs").is_dir();
    if folder.join(firebrick_arch::CONFIG_FILE).exists() || !snapshots.is_dir() || !is_repository {
        return Ok(folder.to_owned());
    }
    let missing = |missing: String| HubError::NoSnapshot { folder: folder.to_owned(), missing };
    if let Ok(commit) = fs::read_to_string(folder.join("refs/main")) {
        let snapshot = snapshots.join(commit.trim());
        let is_there = is_commit(commit.trim()) && snapshot.is_dir();
        return if is_there { Ok(snapshot) } else { Err(missing(format!("the snapshot {} of main", commit.trim()))) };
    }
    let found: Vec<PathBuf> =
        fs::read_dir(&snapshots).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    match found.as_slice() {
        [only] => Ok(only.clone()),
        [] => Err(missing("any snapshot".to_owned())),
        _ => Err(missing(format!("refs/main, and with {} snapshots", found.len()))),
    }
}

/// Writes a file so that readers see all of it or nothing.
fn write(path: &Path, bytes: &[u8]) -> Result<(), HubError> {
    let folder = path.parent().expect("inside the cache");
    fs::create_dir_all(folder).and_then(|()| firebrick_files::write(path, bytes)).map_err(HubError::cache(path))
}

#[cfg(unix)]
fn symlink(target: &Path, link: &Path) -> std::io::Result<()> {
    std::os::unix::fs::symlink(target, link)
}

/// Fails on Windows, where links need a privilege that few users have: the caller makes a copy instead.
#[cfg(not(unix))]
fn symlink(_: &Path, _: &Path) -> std::io::Result<()> {
    Err(std::io::ErrorKind::Unsupported.into())
}
