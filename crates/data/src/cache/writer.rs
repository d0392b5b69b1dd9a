//! Writes documents one after another, to memory or to a file that becomes visible to others only when it is complete.
//!
//! A file is built under a temporary name with an exclusive lock. Data, index and metadata are synced to disk before
//! the header, and the header before the file gets its final name. A build that ends earlier leaves a file that is
//! never opened and that a later build sweeps away. Trade-off: the index is kept in memory while building, 44 bytes per
//! document.

use std::io::{BufWriter, Error as IoError, Result as IoResult, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use firebrick_files::{sync_folder, temporary_in};
use tempfile::NamedTempFile;
use xxhash_rust::xxh3::Xxh3;

use super::CacheError;
use super::document::{Example, append_words};
use super::key::CacheKey;
use super::layout::{DocumentEntry, HEADER_BYTES, Header, Origin, TokenWidth};
use super::store::TokenStore;

/// Extension of files that are being built.
pub(super) const PARTIAL: &str = "partial";
const BUFFER_BYTES: usize = 1 << 20;
/// The limit comes from packing, which numbers documents with 32 bits.
const MAX_DOCUMENTS: usize = u32::MAX as usize;

/// Writes documents in their final order.
pub struct StoreWriter {
    output: Output,
    vocab_size: usize,
    index: Vec<u32>,
    /// Counts of the written documents. The hashes are those of files.
    header: Header,
}

enum Output {
    Memory(Vec<u32>),
    File(Box<PartialFile>),
}

impl StoreWriter {
    /// Creates a writer into memory. Tokens must be below `vocab_size`; `usize::MAX` accepts any.
    pub fn in_memory(vocab_size: usize) -> Self {
        Self::with(Output::Memory(vec![0; HEADER_BYTES / 4]), CacheKey(0), vocab_size)
    }

    pub(super) fn in_folder(folder: &Path, key: CacheKey, vocab_size: usize) -> Result<Self, CacheError> {
        let file = PartialFile::create(folder, key)?;
        Ok(Self::with(Output::File(Box::new(file)), key, vocab_size))
    }

    fn with(output: Output, key: CacheKey, vocab_size: usize) -> Self {
        let width = TokenWidth::of_vocabulary(vocab_size);
        Self { output, vocab_size, index: Vec::new(), header: Header::empty(key, width) }
    }

    /// Adds a document. Errors: a token outside the vocabulary; more than 2^32 - 1 documents; a disk error. Panics if the example is empty or its
    /// mask has another length.
    pub fn push(&mut self, example: &Example, origin: Origin) -> Result<(), CacheError> {
        let Example { tokens, loss_mask } = example;
        assert!(!tokens.is_empty(), "a document needs at least one token");
        assert_eq!(tokens.len(), loss_mask.len(), "one mask entry per token");
        let header = &mut self.header;
        let number = header.documents as usize + 1;
        if number > MAX_DOCUMENTS {
            return Err(CacheError::TooManyDocuments(MAX_DOCUMENTS));
        }
        if let Some(&token) = tokens.iter().find(|&&token| token as usize >= self.vocab_size) {
            let vocab_size = self.vocab_size;
            return Err(CacheError::TokenOutOfRange { token, document: number, vocab_size });
        }
        let entry = DocumentEntry {
            offset: header.data_words,
            tokens: u32::try_from(tokens.len()).expect("a document fits a row"),
            loss_tokens: loss_mask[1..].iter().filter(|&&counts| counts).count() as u32,
            hash: example.content_hash(),
            origin,
        };
        match &mut self.output {
            Output::Memory(data) => append_words(example, header.width, data),
            Output::File(file) => file.push(example, header.width)?,
        }
        self.index.extend(entry.to_words());
        header.documents += 1;
        header.data_words += header.width.document_words(tokens.len()) as u64;
        header.tokens += u64::from(entry.tokens);
        header.trained += u64::from(entry.loss_tokens);
        Ok(())
    }

    /// Finishes a store in memory. `metadata` is stored with the documents. Panics if the writer writes to a file.
    pub fn into_store(mut self, metadata: &[u8]) -> TokenStore {
        let Output::Memory(mut words) = self.output else { panic!("this writer writes to a file") };
        self.header.metadata_bytes = metadata.len() as u64;
        words.append(&mut self.index);
        let word = |bytes: &[u8]| bytes.iter().rev().fold(0, |word, &byte| word << 8 | u32::from(byte));
        words.extend(metadata.chunks(4).map(word));
        TokenStore::in_memory(self.header, words)
    }

    /// Finishes a file and gives it its final name. If renaming fails because another process has just created the same
    /// file and holds it open (Windows), that file is used: it was built from the same key.
    pub(super) fn publish(self, path: &Path, metadata: &[u8]) -> Result<(), CacheError> {
        let Output::File(mut file) = self.output else { panic!("this writer writes to memory") };
        let (data_hash, tail_hash) = (file.hash.digest(), file.push_tail(&self.index, metadata)?);
        let header = Header { metadata_bytes: metadata.len() as u64, data_hash, tail_hash, ..self.header };
        file.finish(&header)?;
        match file
            .file
            .into_inner()
            .map_err(|error| error.into_error())
            .and_then(|temporary| temporary.persist(path).map_err(|error| error.error))
        {
            Ok(_) => {
                // If a power failure undoes the renaming, the file is built again.
                let _ = path.parent().map(sync_folder);
                Ok(())
            }
            Err(_) if matches!(TokenStore::open(path, header.key), Ok(Some(_))) => Ok(()),
            Err(reason) => Err(CacheError::Io { doing: "rename a finished file to", path: path.to_owned(), reason }),
        }
    }
}

#[cfg(test)]
impl StoreWriter {
    /// Ends like a killed process: the unfinished file stays, without its lock.
    pub(super) fn kill(self) {
        let Output::File(file) = self.output else { panic!("this writer writes to memory") };
        file.file.into_inner().unwrap().keep().unwrap();
    }
}

impl TokenStore {
    /// Copies examples into a store in memory: four bytes per token and one bit for the mask. Panics if an example is
    /// empty, its mask has another length, or there are more than 2^32 - 1.
    pub fn from_examples(examples: &[Example]) -> Self {
        let mut writer = StoreWriter::in_memory(usize::MAX);
        for example in examples {
            // No token is outside the largest vocabulary, and memory has no write errors.
            let origin = Origin { record: example.content_hash(), ..Origin::default() };
            writer.push(example, origin).expect("memory accepts all tokens");
        }
        writer.into_store(&[])
    }
}

/// A file under a temporary name, removed if it is dropped before it is published.
struct PartialFile {
    path: PathBuf,
    file: BufWriter<NamedTempFile>,
    hash: Xxh3,
    words: Vec<u32>,
    bytes: Vec<u8>,
}

impl PartialFile {
    /// Creates a file with a unique name and locks it, which marks it as being built.
    fn create(folder: &Path, key: CacheKey) -> Result<Self, CacheError> {
        let io = |reason| CacheError::Io { doing: "write a file in", path: folder.to_owned(), reason };
        let file = temporary_in(folder, &format!("{key}."), &format!(".{PARTIAL}")).map_err(io)?;
        // Some network file systems have no locks; sweeping then relies on age alone.
        let _ = file.as_file().lock();
        let path = file.path().to_owned();
        let mut file = BufWriter::with_capacity(BUFFER_BYTES, file);
        file.write_all(&[0; HEADER_BYTES]).map_err(io)?;
        Ok(Self { path, file, hash: Xxh3::new(), words: Vec::new(), bytes: Vec::new() })
    }

    fn push(&mut self, example: &Example, width: TokenWidth) -> Result<(), CacheError> {
        self.words.clear();
        append_words(example, width, &mut self.words);
        self.bytes.clear();
        self.bytes.extend(self.words.iter().flat_map(|word| word.to_le_bytes()));
        self.hash.update(&self.bytes);
        self.file.write_all(&self.bytes).map_err(|reason| self.refused(reason))
    }

    /// Writes index and metadata; returns their hash.
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

    /// Syncs everything else to disk before the header.
    fn finish(&mut self, header: &Header) -> Result<(), CacheError> {
        let file = &mut self.file;
        let mut write = || -> IoResult<()> {
            file.flush()?;
            file.get_ref().as_file().sync_data()?;
            file.seek(SeekFrom::Start(0))?;
            file.write_all(&header.to_bytes())?;
            file.flush()?;
            file.get_ref().as_file().sync_all()
        };
        write().map_err(|reason| self.refused(reason))
    }

    fn refused(&self, reason: IoError) -> CacheError {
        CacheError::Io { doing: "write", path: self.path.clone(), reason }
    }
}
