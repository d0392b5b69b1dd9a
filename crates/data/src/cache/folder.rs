//! The folder of token files, one per key.
//!
//! Two processes that miss the same file both build it under different temporary names. The second to finish replaces the first's file with an equal
//! one, which readers of the first do not notice. Trade-off: the second build is not avoided (waiting for a process that may hang is worse), and
//! files of old keys stay until the folder is deleted.

use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};
use std::time::Duration;

use firebrick_files::cache_folder;

use super::CacheError;
use super::key::CacheKey;
use super::store::TokenStore;
use super::writer::{PARTIAL, StoreWriter};

/// A build locks its file right after creating it, so only older files without a lock count as dead.
const SWEPT_UNLOCKED: Duration = Duration::from_secs(600);
/// If files cannot be locked, a build that has written nothing for this long counts as dead.
const SWEPT_WITHOUT_LOCKS: Duration = Duration::from_secs(3 * 24 * 3600);

/// Finds tokenized data or builds it.
#[derive(Debug, Clone)]
pub struct TokenCache {
    folder: PathBuf,
}

/// Tokenized data and where it came from.
#[derive(Debug)]
pub struct Cached {
    /// The documents.
    pub store: TokenStore,
    /// Whether the documents were built now rather than found.
    pub is_new: bool,
    /// A sentence for the log if a damaged file was found and replaced.
    pub note: Option<String>,
}

impl TokenCache {
    /// Creates a cache in a folder; the folder is created when something is built.
    pub fn in_folder(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into() }
    }

    /// Uses the folder `data` of all caches ([`cache_folder`]). Errors: the environment defines neither the folder nor a home.
    pub fn in_default_folder() -> Result<Self, CacheError> {
        cache_folder("data").map(Self::in_folder).ok_or(CacheError::NoFolder)
    }

    /// Returns the folder of the cache.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Opens the documents of a key and a vocabulary, if they were built before. Errors: the file is damaged or cannot be read.
    pub fn open(&self, key: CacheKey, vocab_size: usize) -> Result<Option<TokenStore>, CacheError> {
        let key = key.with_vocabulary(vocab_size);
        TokenStore::open(&self.path_of(key), key)
    }

    /// Opens the documents of a key. If there are none, or the file is damaged, `build` writes them and returns the metadata to store with them. All
    /// tokens must be below `vocab_size`. Errors: the errors of `build`; a folder that cannot be written; a token outside the vocabulary.
    pub fn get_or_build<E: From<CacheError>>(
        &self,
        key: CacheKey,
        vocab_size: usize,
        build: impl FnOnce(&mut StoreWriter) -> Result<Vec<u8>, E>,
    ) -> Result<Cached, E> {
        let note = match self.open(key, vocab_size) {
            Ok(Some(store)) => return Ok(Cached { store, is_new: false, note: None }),
            Ok(None) => None,
            Err(CacheError::Damaged { path, what }) => {
                Some(format!("{} was damaged ({what}); the data is tokenized again", path.display()))
            }
            Err(error) => return Err(error.into()),
        };
        let create_failed = |reason| CacheError::Io { doing: "create the folder", path: self.folder.clone(), reason };
        fs::create_dir_all(&self.folder).map_err(create_failed)?;
        self.sweep(SWEPT_UNLOCKED);
        let of_file = key.with_vocabulary(vocab_size);
        let path = self.path_of(of_file);
        let mut writer = StoreWriter::in_folder(&self.folder, of_file, vocab_size)?;
        let metadata = build(&mut writer)?;
        writer.publish(&path, &metadata)?;
        let store = self
            .open(key, vocab_size)?
            .ok_or_else(|| CacheError::Damaged { path, what: "it was deleted right after it was built".to_owned() })?;
        Ok(Cached { store, is_new: true, note })
    }

    fn path_of(&self, key: CacheKey) -> PathBuf {
        self.folder.join(format!("{key}.tokens"))
    }

    /// Removes the remains of dead builds: files that are old enough and not locked. Files that cannot be inspected or removed stay and cost only
    /// space.
    fn sweep(&self, unlocked_age: Duration) {
        let Ok(entries) = fs::read_dir(&self.folder) else { return };
        let paths = entries.flatten().map(|entry| entry.path());
        for path in paths.filter(|path| path.extension().is_some_and(|ending| ending == PARTIAL)) {
            // Locking needs a writable handle on some systems; nothing is written.
            let Ok(file) = File::options().append(true).open(&path) else { continue };
            let modified = file.metadata().and_then(|metadata| metadata.modified());
            let age = modified.ok().and_then(|time| time.elapsed().ok());
            let min_age = match file.try_lock() {
                Ok(()) => unlocked_age,
                Err(TryLockError::WouldBlock) => continue,
                Err(TryLockError::Error(_)) => SWEPT_WITHOUT_LOCKS,
            };
            if age.is_some_and(|age| age >= min_age) {
                let _ = fs::remove_file(&path);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::thread::scope;

    use tempfile::TempDir;

    use super::*;
    use crate::cache::Example;
    use crate::cache::Origin;

    const VOCABULARY: usize = 70_000;
    const ORIGIN: Origin = Origin { source: 3, record: 1 << 40, file: 2, line: 9 };

    fn examples() -> Vec<Example> {
        let example = |number: u32| Example {
            tokens: (0..=number).map(|index| 100 * index + number).collect(),
            loss_mask: (0..=number).map(|index| index > 0 && index % 3 != 0).collect(),
        };
        (0..200).map(example).collect()
    }

    fn key(data: &[u8]) -> CacheKey {
        CacheKey::from_parts([("data", data)])
    }

    fn build(cache: &TokenCache, data: &[u8]) -> Cached {
        let write = |writer: &mut StoreWriter| -> Result<Vec<u8>, CacheError> {
            examples().iter().try_for_each(|example| writer.push(example, ORIGIN))?;
            Ok(data.to_vec())
        };
        cache.get_or_build(key(data), VOCABULARY, write).unwrap()
    }

    fn never(_: &mut StoreWriter) -> Result<Vec<u8>, CacheError> {
        panic!("built although it was there")
    }

    fn assert_holds_examples(store: &TokenStore) {
        assert_eq!(store.documents(), 200);
        for (index, example) in examples().iter().enumerate() {
            assert_eq!(store.document(index).to_example(), *example);
            assert_eq!(store.entry(index).tokens as usize, example.tokens.len());
            assert_eq!(store.entry(index).loss_tokens as usize, example.loss_tokens());
            assert_eq!(store.entry(index).origin, ORIGIN);
        }
        assert_eq!(store.tokens(), 200 * 201 / 2);
        assert_eq!(store.loss_tokens(), examples().iter().map(|example| example.loss_tokens() as u64).sum::<u64>());
        store.verify().unwrap();
    }

    fn files(folder: &TempDir) -> Vec<PathBuf> {
        fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path()).collect()
    }

    #[test]
    fn built_documents_are_found_again_and_equal_those_in_memory() {
        let folder = TempDir::new().unwrap();
        let cache = TokenCache::in_folder(folder.path().join("made/when/needed"));
        let built = build(&cache, b"a");
        assert!(built.is_new && built.note.is_none());
        let found = cache.get_or_build(key(b"a"), VOCABULARY, never).unwrap();
        assert!(!found.is_new);
        let memory = TokenStore::from_examples(&examples());
        for store in [&built.store, &found.store] {
            assert_holds_examples(store);
            assert_eq!(store.metadata(), b"a");
            assert!((0..200).all(|index| store.entry(index).hash == memory.entry(index).hash));
        }
    }

    #[test]
    fn changed_input_never_meets_a_stale_cache() {
        let folder = TempDir::new().unwrap();
        let cache = TokenCache::in_folder(folder.path());
        build(&cache, b"a");
        assert!(cache.open(key(b"b"), VOCABULARY).unwrap().is_none());
        assert!(cache.open(key(b"a"), VOCABULARY - 1).unwrap().is_none(), "another vocabulary");
        assert!(build(&cache, b"b").is_new);
        // A file under the wrong name is not accepted either.
        let of_b = cache.path_of(key(b"b").with_vocabulary(VOCABULARY));
        fs::copy(cache.path_of(key(b"a").with_vocabulary(VOCABULARY)), &of_b).unwrap();
        let error = cache.open(key(b"b"), VOCABULARY).unwrap_err().to_string();
        assert!(error.contains("key"), "{error}");
    }

    #[test]
    fn every_damage_is_detected_and_repaired() {
        let folder = TempDir::new().unwrap();
        let cache = TokenCache::in_folder(folder.path());
        build(&cache, b"a");
        let path = cache.path_of(key(b"a").with_vocabulary(VOCABULARY));
        let whole = fs::read(&path).unwrap();
        let lengths = [0, 1, 127, 128, 4000, whole.len() - 1].map(|len| whole[..len].to_vec());
        let longer = [whole.as_slice(), b"x"].concat();
        let flipped = (0..whole.len()).step_by(97).filter(|&at| !(104..128).contains(&at)).map(|at| {
            let mut changed = whole.clone();
            changed[at] ^= 4;
            changed
        });
        let zeros = vec![0; whole.len()];
        for bytes in lengths.into_iter().chain([longer, zeros]).chain(flipped) {
            fs::write(&path, &bytes).unwrap();
            assert!(matches!(cache.open(key(b"a"), VOCABULARY), Err(CacheError::Damaged { .. })));
        }
        let rebuilt = build(&cache, b"a");
        assert!(rebuilt.is_new && rebuilt.note.unwrap().contains("tokenized again"));
        assert_holds_examples(&rebuilt.store);
        assert_eq!(fs::read(&path).unwrap(), whole, "equal inputs make equal files");
    }

    #[test]
    fn failed_build_leaves_nothing() {
        let folder = TempDir::new().unwrap();
        let cache = TokenCache::in_folder(folder.path());
        let fail = |writer: &mut StoreWriter| -> Result<Vec<u8>, CacheError> {
            writer.push(&examples()[9], ORIGIN)?;
            writer.push(&Example { tokens: vec![VOCABULARY as u32], loss_mask: vec![false] }, ORIGIN)?;
            Ok(Vec::new())
        };
        let error = cache.get_or_build(key(b"a"), VOCABULARY, fail).unwrap_err();
        assert!(matches!(error, CacheError::TokenOutOfRange { document: 2, .. }), "{error}");
        assert!(files(&folder).is_empty());
    }

    #[test]
    fn concurrent_builders_all_succeed_and_none_reads_a_half_file() {
        let folder = TempDir::new().unwrap();
        let cache = TokenCache::in_folder(folder.path());
        let barrier = Barrier::new(4);
        scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for round in 0..40_u8 {
                        barrier.wait();
                        let built = build(&cache, &[round]);
                        assert_holds_examples(&built.store);
                        // Slower threads may be replacing files that faster ones have mapped.
                        assert_holds_examples(&cache.open(key(&[round]), VOCABULARY).unwrap().unwrap());
                    }
                });
            }
        });
        assert_eq!(files(&folder).len(), 40);
    }

    #[test]
    fn a_killed_build_is_unusable_and_swept() {
        let folder = TempDir::new().unwrap();
        let cache = TokenCache::in_folder(folder.path());
        let of_file = key(b"a").with_vocabulary(VOCABULARY);
        let mut running = StoreWriter::in_folder(folder.path(), of_file, VOCABULARY).unwrap();
        running.push(&examples()[199], ORIGIN).unwrap();
        cache.sweep(Duration::ZERO);
        assert_eq!(files(&folder).len(), 1, "a running build is not swept");
        running.kill();

        assert!(cache.open(key(b"a"), VOCABULARY).unwrap().is_none());
        assert_holds_examples(&build(&cache, b"a").store);
        assert_eq!(files(&folder).len(), 2, "too recent to be swept by the build");
        cache.sweep(Duration::ZERO);
        assert_eq!(files(&folder), [cache.path_of(of_file)]);
    }
}
