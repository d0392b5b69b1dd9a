//! Computes keys of the content of sources: the same rows give the same key, other content another.
//!
//! The hash is 128-bit XXH3. Hashes of large files are cached by path, size and modification times, so that the second run reads no data; a file that
//! changed in the last seconds is not cached, because its times may not show the next change. Trade-off: the hash is not safe against files that are
//! crafted to collide.

use std::fs::{self, File, Metadata};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use firebrick_hub::HubFile;
use serde_json::{Value as Json, json};
use xxhash_rust::xxh3::{Xxh3, xxh3_128};

use super::error::{SourceError, SourceResult};
use super::format::FileFormat;
use super::spec::SourceSpec;

const BUFFER_BYTES: usize = 1 << 20;
/// File systems may store modification times only to two seconds.
const SETTLED: Duration = Duration::from_secs(3);

#[derive(Debug, Clone, PartialEq)]
pub(super) enum SourceFile {
    /// On this machine, with its size in bytes.
    Local { path: PathBuf, size: u64 },
    /// On the Hub or in its cache; downloaded when it is read.
    Hub(HubFile),
}

/// Hashes files. By default it hashes every time.
#[derive(Debug, Clone, Default)]
pub struct ContentKeys {
    folder: Option<PathBuf>,
}

impl ContentKeys {
    /// Caches hashes in a folder, which is created when needed. If it cannot be written, nothing is cached.
    pub fn cached_in(folder: impl Into<PathBuf>) -> Self {
        Self { folder: Some(folder.into()) }
    }

    pub(super) fn of_source(&self, spec: &SourceSpec, format: FileFormat, files: &[SourceFile]) -> SourceResult<u128> {
        // Everything that changes which records result belongs here; what only changes where they are found does not.
        let reading = json!([1, format.name(), spec.field, spec.columns, spec.text_unit, spec.limit]);
        let mut hash = Xxh3::new();
        hash.update(reading.to_string().as_bytes());
        for file in files {
            let key = match file {
                SourceFile::Local { path, .. } => self.of_file(path)?,
                SourceFile::Hub(file) => xxh3_128(file.to_string().as_bytes()),
            };
            hash.update(&key.to_le_bytes());
        }
        Ok(hash.digest128())
    }

    /// Returns the hash of a file's bytes. Error: it cannot be read.
    fn of_file(&self, path: &Path) -> SourceResult<u128> {
        let refused = |reason| SourceError::Open { path: path.to_owned(), reason };
        let mut file = File::open(path).map_err(refused)?;
        let before = stamp(path, &file.metadata().map_err(refused)?);
        if let Some(hash) = before.as_ref().and_then(|stamp| self.recall(path, stamp)) {
            return Ok(hash);
        }
        let mut hash = Xxh3::new();
        let mut buffer = vec![0; BUFFER_BYTES];
        loop {
            match file.read(&mut buffer).map_err(refused)? {
                0 => break,
                count => hash.update(&buffer[..count]),
            }
        }
        let hash = hash.digest128();
        let after = stamp(path, &file.metadata().map_err(refused)?);
        if let Some(stamp) = after.filter(|after| before.as_ref() == Some(after)) {
            self.remember(path, &stamp, hash);
        }
        Ok(hash)
    }

    fn entry_path(&self, path: &Path) -> Option<PathBuf> {
        let path = fs::canonicalize(path).ok()?;
        let name = xxh3_128(path.as_os_str().as_encoded_bytes());
        Some(self.folder.as_ref()?.join(format!("{name:032x}.json")))
    }

    fn recall(&self, path: &Path, stamp: &Json) -> Option<u128> {
        let entry: Json = serde_json::from_slice(&fs::read(self.entry_path(path)?).ok()?).ok()?;
        if entry["stamp"] != *stamp {
            return None;
        }
        u128::from_str_radix(entry["hash"].as_str()?, 16).ok()
    }

    fn remember(&self, path: &Path, stamp: &Json, hash: u128) {
        let (Some(folder), Some(entry)) = (&self.folder, self.entry_path(path)) else { return };
        let text = json!({ "stamp": stamp, "hash": format!("{hash:032x}") }).to_string();
        // A cache that cannot be written costs time, not correctness.
        let _ = fs::create_dir_all(folder).and_then(|()| firebrick_files::write(&entry, &text));
    }
}

/// Returns values that change when a file is written; `None` if the last change is too recent to distinguish it from the next one.
fn stamp(path: &Path, metadata: &Metadata) -> Option<Json> {
    let modified = metadata.modified().ok()?;
    let age = SystemTime::now().duration_since(modified).ok()?;
    let nanoseconds = modified.duration_since(UNIX_EPOCH).ok()?.as_nanos().to_string();
    let path = path.to_string_lossy();
    (age >= SETTLED).then(|| json!([path, metadata.len(), nanoseconds, unix_stamp(metadata)]))
}

/// Returns the inode number and the time of the last status change, which programs cannot set back.
#[cfg(unix)]
fn unix_stamp(metadata: &Metadata) -> Json {
    use std::os::unix::fs::MetadataExt;
    json!([metadata.ino(), metadata.ctime(), metadata.ctime_nsec()])
}

#[cfg(not(unix))]
fn unix_stamp(_: &Metadata) -> Json {
    Json::Null
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cached_hash_is_used_until_the_file_changes() {
        let folder = tempfile::tempdir().unwrap();
        let (file, memory) = (folder.path().join("rows.jsonl"), folder.path().join("keys"));
        let keys = ContentKeys::cached_in(&memory);
        let old = SystemTime::now() - Duration::from_secs(100);
        let write = |text: &str| {
            fs::write(&file, text).unwrap();
            File::options().write(true).open(&file).unwrap().set_modified(old).unwrap();
        };
        write("one");
        let one = keys.of_file(&file).unwrap();
        assert_eq!(one, ContentKeys::default().of_file(&file).unwrap());
        // A wrong hash in the cache shows that the cache is used.
        let entry = keys.entry_path(&file).unwrap();
        let text = fs::read_to_string(&entry).unwrap();
        fs::write(&entry, text.replace(&format!("{one:032x}"), &format!("{:032x}", 7))).unwrap();
        assert_eq!(keys.of_file(&file).unwrap(), 7);
        // Size and modification time are the same; on Unix the status change time differs.
        write("two");
        if cfg!(unix) {
            assert_eq!(keys.of_file(&file).unwrap(), ContentKeys::default().of_file(&file).unwrap());
        }
        write("three");
        assert_eq!(keys.of_file(&file).unwrap(), ContentKeys::default().of_file(&file).unwrap());
    }

    #[test]
    fn a_file_that_just_changed_is_not_cached() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("rows.jsonl");
        fs::write(&file, "one").unwrap();
        let keys = ContentKeys::cached_in(folder.path().join("keys"));
        keys.of_file(&file).unwrap();
        assert!(!keys.entry_path(&file).unwrap().exists());
    }
}
