//! A key for the content of sources: the same rows give the same key, another content another.
//!
//! The hash is XXH3 with 128 bits: it tells files apart, it does not withstand someone who builds two files with the
//! same hash on purpose. Hashes of large files are remembered by path, size and times of change, so that the second run
//! reads no data; a file that changed in the last seconds is not remembered, as its times may not show the next change.

use std::fs::{self, File, Metadata};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Value as Json, json};
use xxhash_rust::xxh3::{Xxh3, xxh3_128};

use super::error::SourceError;
use super::format::Format;
use super::records::SourceFile;
use super::spec::SourceSpec;
use super::unfinished;

const BUFFER_BYTES: usize = 1 << 20;
/// File systems may keep times of change only to two seconds.
const SETTLED: Duration = Duration::from_secs(3);

/// Hashes files, and remembers what it hashed.
#[derive(Debug, Clone, Default)]
pub struct ContentKeys {
    folder: Option<PathBuf>,
}

impl ContentKeys {
    /// Remembers hashes in a folder, which is made when needed. Where it cannot be written, nothing is remembered.
    pub fn remembered_in(folder: impl Into<PathBuf>) -> Self {
        Self { folder: Some(folder.into()) }
    }

    /// Hashes anew each time.
    pub fn forgetful() -> Self {
        Self::default()
    }

    pub(super) fn of_source(
        &self,
        spec: &SourceSpec,
        format: Format,
        files: &[SourceFile],
    ) -> Result<u128, SourceError> {
        // Whatever changes which records come out belongs here; what only changes where they are found does not.
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

    /// The hash of a file's bytes. Error: it cannot be read.
    pub fn of_file(&self, path: &Path) -> Result<u128, SourceError> {
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

    fn memo(&self, path: &Path) -> Option<PathBuf> {
        let path = fs::canonicalize(path).ok()?;
        let name = xxh3_128(path.as_os_str().as_encoded_bytes());
        Some(self.folder.as_ref()?.join(format!("{name:032x}.json")))
    }

    fn recall(&self, path: &Path, stamp: &Json) -> Option<u128> {
        let memo: Json = serde_json::from_slice(&fs::read(self.memo(path)?).ok()?).ok()?;
        if memo["stamp"] != *stamp {
            return None;
        }
        u128::from_str_radix(memo["hash"].as_str()?, 16).ok()
    }

    fn remember(&self, path: &Path, stamp: &Json, hash: u128) {
        let Some(memo) = self.memo(path) else { return };
        let text = json!({ "stamp": stamp, "hash": format!("{hash:032x}") }).to_string();
        let half = memo.with_extension(unfinished());
        // A memory that cannot be written costs time, no correctness.
        let folder = memo.parent().expect("a file inside the folder");
        let written = fs::create_dir_all(folder).and_then(|()| fs::write(&half, text));
        if written.and_then(|()| fs::rename(&half, &memo)).is_err() {
            let _ = fs::remove_file(&half);
        }
    }
}

/// What changes when a file is written: none if the change is too fresh to tell the next one from it.
fn stamp(path: &Path, metadata: &Metadata) -> Option<Json> {
    let modified = metadata.modified().ok()?;
    let age = SystemTime::now().duration_since(modified).ok()?;
    let nanoseconds = modified.duration_since(UNIX_EPOCH).ok()?.as_nanos().to_string();
    let path = path.to_string_lossy();
    (age >= SETTLED).then(|| json!([path, metadata.len(), nanoseconds, unix_stamp(metadata)]))
}

/// The file's number and the time of its last change of any kind, which no program can set back.
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
    fn a_remembered_hash_is_used_until_the_file_changes() {
        let folder = tempfile::tempdir().unwrap();
        let (file, memory) = (folder.path().join("rows.jsonl"), folder.path().join("keys"));
        let keys = ContentKeys::remembered_in(&memory);
        let old = SystemTime::now() - Duration::from_secs(100);
        let write = |text: &str| {
            fs::write(&file, text).unwrap();
            File::options().write(true).open(&file).unwrap().set_modified(old).unwrap();
        };
        write("one");
        let one = keys.of_file(&file).unwrap();
        assert_eq!(one, ContentKeys::forgetful().of_file(&file).unwrap());
        // A memory with a wrong hash shows that it is asked.
        let memo = keys.memo(&file).unwrap();
        let text = fs::read_to_string(&memo).unwrap();
        fs::write(&memo, text.replace(&format!("{one:032x}"), &format!("{:032x}", 7))).unwrap();
        assert_eq!(keys.of_file(&file).unwrap(), 7);
        // The same size and time of writing: on Unix the time of change tells.
        write("two");
        if cfg!(unix) {
            assert_eq!(keys.of_file(&file).unwrap(), ContentKeys::forgetful().of_file(&file).unwrap());
        }
        write("three");
        assert_eq!(keys.of_file(&file).unwrap(), ContentKeys::forgetful().of_file(&file).unwrap());
    }

    #[test]
    fn a_file_that_just_changed_is_not_remembered() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("rows.jsonl");
        fs::write(&file, "one").unwrap();
        let keys = ContentKeys::remembered_in(folder.path().join("keys"));
        keys.of_file(&file).unwrap();
        assert!(!keys.memo(&file).unwrap().exists());
    }
}
