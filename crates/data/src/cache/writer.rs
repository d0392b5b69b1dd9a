//! Documents written one after another, to memory or to a file that exists for others only when it is whole.
//!
//! A file is built under a name of its own, with an exclusive lock on it. Data, index and metadata are forced to disk
//! before the header, the header before the file gets its final name. A build that ends anywhere before leaves a file
//! that is never opened and that a later build sweeps away. Held in memory while building: the index, 28 bytes a
//! document.

use std::fmt::{Debug, Formatter, Result as FormatResult};
use std::fs::{self, File, OpenOptions};
use std::io::{BufWriter, Error as IoError, ErrorKind, Result as IoResult, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use xxhash_rust::xxh3::Xxh3;

use crate::dataset::Example;
use crate::stable_hash::StableHash;

use super::document::append_words;
use super::error::CacheError;
use super::key::CacheKey;
use super::layout::{Entry, HEADER_BYTES, Header, TokenWidth};
use super::store::TokenStore;

/// Ending of files that are being built.
pub(super) const PARTIAL: &str = "partial";
const BUFFER_BYTES: usize = 1 << 20;
/// Packing numbers documents with 32 bits.
const MAX_DOCUMENTS: usize = u32::MAX as usize;

/// Takes documents in their final order.
#[derive(Debug)]
pub struct StoreWriter {
    output: Output,
    width: TokenWidth,
    vocab_size: usize,
    index: Vec<u32>,
    documents: usize,
    data_words: u64,
    tokens: u64,
    trained: u64,
}

#[derive(Debug)]
enum Output {
    Memory(Vec<u32>),
    File(Box<PartialFile>),
}

impl StoreWriter {
    /// A writer into memory; tokens are below `vocab_size`, `usize::MAX` for any.
    pub fn in_memory(vocab_size: usize) -> Self {
        Self::with(Output::Memory(Vec::new()), vocab_size)
    }

    /// A writer into a new file in `folder`.
    pub(super) fn in_folder(folder: &Path, key: CacheKey, vocab_size: usize) -> Result<Self, CacheError> {
        let file = PartialFile::create(folder, key)?;
        Ok(Self::with(Output::File(Box::new(file)), vocab_size))
    }

    fn with(output: Output, vocab_size: usize) -> Self {
        Self {
            output,
            width: TokenWidth::of_vocabulary(vocab_size),
            vocab_size,
            index: Vec::new(),
            documents: 0,
            data_words: 0,
            tokens: 0,
            trained: 0,
        }
    }

    /// Adds a document that came from `source` of a mixture (0 where there is one).
    ///
    /// # Errors
    /// A token outside the vocabulary; more than 2^32 - 1 documents; the disk refuses.
    ///
    /// # Panics
    /// If the example is empty or its mask is of another length.
    pub fn push(&mut self, example: &Example, source: u32) -> Result<(), CacheError> {
        let Example { tokens, trained } = example;
        assert!(!tokens.is_empty(), "a document without tokens");
        assert_eq!(tokens.len(), trained.len(), "one flag for each token");
        let number = self.documents + 1;
        if number > MAX_DOCUMENTS {
            return Err(CacheError::TooManyDocuments { limit: MAX_DOCUMENTS });
        }
        if let Some(&token) = tokens.iter().find(|&&token| token as usize >= self.vocab_size) {
            let vocab_size = self.vocab_size;
            return Err(CacheError::TokenOutOfRange { token, document: number, vocab_size });
        }
        let mut hash = StableHash::new();
        hash.add_document(tokens, trained);
        let entry = Entry {
            offset: self.data_words,
            tokens: u32::try_from(tokens.len()).expect("a document fits a row"),
            trained: trained[1..].iter().filter(|&&trained| trained).count() as u32,
            hash: hash.finish(),
            source,
        };
        match &mut self.output {
            Output::Memory(data) => append_words(example, self.width, data),
            Output::File(file) => file.push(example, self.width)?,
        }
        self.index.extend(entry.to_words());
        self.documents = number;
        self.data_words += self.width.document_words(tokens.len()) as u64;
        self.tokens += u64::from(entry.tokens);
        self.trained += u64::from(entry.trained);
        Ok(())
    }

    /// Documents so far.
    pub fn documents(&self) -> usize {
        self.documents
    }

    /// Tokens so far.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Ends a store in memory. `metadata` is kept beside the documents.
    ///
    /// # Panics
    /// If the writer writes to a file.
    pub fn into_store(self, metadata: Vec<u8>) -> TokenStore {
        let header = self.header(CacheKey(0), metadata.len());
        let Output::Memory(data) = self.output else { panic!("this writer writes to a file") };
        TokenStore::in_memory(&header, data, self.index, metadata)
    }

    /// Ends a file and gives it its name. Where it cannot be renamed because another process has just made the same
    /// file and holds it open (Windows), that one is as good: it was made from the same key.
    pub(super) fn publish(self, key: CacheKey, path: &Path, metadata: &[u8]) -> Result<(), CacheError> {
        let mut header = self.header(key, metadata.len());
        let Output::File(mut file) = self.output else { panic!("this writer writes to memory") };
        header.data_hash = file.hash.digest();
        header.tail_hash = file.push_tail(&self.index, metadata)?;
        file.finish(&header)?;
        match fs::rename(&file.path, path) {
            Ok(()) => {
                file.is_published = true;
                sync_folder(path);
                Ok(())
            }
            Err(_) if matches!(TokenStore::open(path, key), Ok(Some(_))) => Ok(()),
            Err(reason) => Err(CacheError::Io { doing: "rename a finished file to", path: path.to_owned(), reason }),
        }
    }

    /// A header without the hashes, which only files have.
    fn header(&self, key: CacheKey, metadata_bytes: usize) -> Header {
        Header {
            key,
            width: self.width,
            documents: self.documents as u64,
            data_words: self.data_words,
            tokens: self.tokens,
            trained: self.trained,
            metadata_bytes: metadata_bytes as u64,
            data_hash: 0,
            tail_hash: 0,
        }
    }
}

/// A file that nobody else reads yet; removed when dropped before it was published.
struct PartialFile {
    path: PathBuf,
    file: BufWriter<File>,
    hash: Xxh3,
    words: Vec<u32>,
    bytes: Vec<u8>,
    is_published: bool,
}

impl PartialFile {
    /// A name that no other process and no other build of this one has, and the lock that says it is being built.
    fn create(folder: &Path, key: CacheKey) -> Result<Self, CacheError> {
        static BUILDS: AtomicU64 = AtomicU64::new(0);
        loop {
            let build = BUILDS.fetch_add(1, Ordering::Relaxed);
            let path = folder.join(format!("{key}.{}-{build}.{PARTIAL}", std::process::id()));
            let io = |reason| CacheError::Io { doing: "write", path: path.clone(), reason };
            let file = match OpenOptions::new().write(true).create_new(true).open(&path) {
                // Left by a killed process that had the same number.
                Err(reason) if reason.kind() == ErrorKind::AlreadyExists => continue,
                opened => opened.map_err(io)?,
            };
            // Some network file systems have no locks; sweeping then goes by age alone.
            let _ = file.lock();
            let mut file = BufWriter::with_capacity(BUFFER_BYTES, file);
            file.write_all(&[0; HEADER_BYTES]).map_err(io)?;
            let (words, bytes) = (Vec::new(), Vec::new());
            return Ok(Self { path, file, hash: Xxh3::new(), words, bytes, is_published: false });
        }
    }

    fn push(&mut self, example: &Example, width: TokenWidth) -> Result<(), CacheError> {
        self.words.clear();
        append_words(example, width, &mut self.words);
        self.bytes.clear();
        self.bytes.extend(self.words.iter().flat_map(|word| word.to_le_bytes()));
        self.hash.update(&self.bytes);
        self.file.write_all(&self.bytes).map_err(|reason| self.refused(reason))
    }

    /// Writes index and metadata; gives their hash.
    fn push_tail(&mut self, index: &[u32], metadata: &[u8]) -> Result<u64, CacheError> {
        let mut hash = Xxh3::new();
        for words in index.chunks(BUFFER_BYTES) {
            self.bytes.clear();
            self.bytes.extend(words.iter().flat_map(|word| word.to_le_bytes()));
            hash.update(&self.bytes);
            self.file.write_all(&self.bytes).map_err(|reason| self.refused(reason))?;
        }
        hash.update(metadata);
        self.file.write_all(metadata).map_err(|reason| self.refused(reason))?;
        Ok(hash.digest())
    }

    /// All else reaches the disk before the header does.
    fn finish(&mut self, header: &Header) -> Result<(), CacheError> {
        let file = &mut self.file;
        let mut write = || -> IoResult<()> {
            file.flush()?;
            file.get_ref().sync_data()?;
            file.seek(SeekFrom::Start(0))?;
            file.write_all(&header.to_bytes())?;
            file.flush()?;
            file.get_ref().sync_all()
        };
        write().map_err(|reason| self.refused(reason))
    }

    fn refused(&self, reason: IoError) -> CacheError {
        CacheError::Io { doing: "write", path: self.path.clone(), reason }
    }
}

impl Debug for PartialFile {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> FormatResult {
        formatter.debug_struct("PartialFile").field("path", &self.path).finish_non_exhaustive()
    }
}

impl Drop for PartialFile {
    fn drop(&mut self) {
        if !self.is_published {
            // What cannot be removed now is swept later.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Makes a new name last through a power cut, where folders can be synced; without it the file is built once more.
fn sync_folder(file: &Path) {
    if let Some(folder) = file.parent()
        && let Ok(folder) = File::open(folder)
    {
        let _ = folder.sync_all();
    }
}
