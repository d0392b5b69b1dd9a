//! Tokenized documents: in memory for small sets, otherwise in a mapped file. Read-only, shared by threads.
//!
//! The cost of opening a file grows with the number of documents, not of tokens: header, length and index are checked.
//! Trade-off: the tokens are checked at opening only in files of up to 256 MiB; [`TokenStore::verify`] checks any file.

use std::fs::File;
use std::io::ErrorKind;
use std::ops::Range;
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::xxh3_64;

use super::CacheError;
use super::document::Document;
use super::key::CacheKey;
use super::layout::{DocumentEntry, ENTRY_WORDS, HEADER_BYTES, Header};
use super::map::Words;

/// Maximum size of data that is verified at opening, which takes some hundredths of a second.
const VERIFIED_AT_OPENING: usize = 256 << 20;

/// Documents with their tokens, masks and an index.
#[derive(Debug)]
pub struct TokenStore {
    /// `None` in memory.
    path: Option<PathBuf>,
    words: Words,
    header: Header,
}

impl TokenStore {
    /// Creates a store in memory from the words of a file; the header's words need not be filled.
    pub(super) fn in_memory(header: Header, words: Vec<u32>) -> Self {
        Self { path: None, words: Words::Memory(words), header }
    }

    /// Opens a finished file. `None` if there is no such file; an error if it cannot be read or is damaged.
    pub(super) fn open(path: &Path, key: CacheKey) -> Result<Option<Self>, CacheError> {
        let io = |reason| CacheError::Io { doing: "read", path: path.to_owned(), reason };
        let damaged = |what| CacheError::Damaged { path: path.to_owned(), what };
        let file = match File::open(path) {
            Err(reason) if reason.kind() == ErrorKind::NotFound => return Ok(None),
            opened => opened.map_err(io)?,
        };
        if file.metadata().map_err(io)?.len() < HEADER_BYTES as u64 {
            return Err(damaged("it is shorter than its header".to_owned()));
        }
        let words = Words::of_file(&file).map_err(io)?;
        let header = Header::from_bytes(words.bytes()).map_err(damaged)?;
        let found = words.bytes().len();
        if header.file_bytes() != Some(found as u64) {
            let expected = header.file_bytes().map_or("more than any file has".to_owned(), |bytes| bytes.to_string());
            return Err(damaged(format!("its header gives {expected} bytes, but it has {found}")));
        }
        if header.key != key {
            return Err(damaged(format!("it has the data of key {}, expected {key}", header.key)));
        }
        let store = Self { path: Some(path.to_owned()), words, header };
        store.check_tail().map_err(damaged)?;
        if 4 * store.header.data().len() <= VERIFIED_AT_OPENING {
            store.verify()?;
        }
        Ok(Some(store))
    }

    /// Reads all tokens and compares their checksum: some tenths of a second per gigabyte from memory, otherwise limited by the disk. A store in
    /// memory is not checked. Errors: the file changed after it was written, or the disk lost data.
    pub fn verify(&self) -> Result<(), CacheError> {
        let Some(path) = &self.path else { return Ok(()) };
        let Range { start, end } = self.header.data();
        if xxh3_64(&self.words.bytes()[4 * start..4 * end]) == self.header.data_hash {
            return Ok(());
        }
        let what = "the checksum of its tokens does not match".to_owned();
        Err(CacheError::Damaged { path: path.clone(), what })
    }

    /// Returns the file; `None` in memory.
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// Returns the number of documents.
    pub fn documents(&self) -> usize {
        self.header.documents as usize
    }

    /// Returns the number of tokens in all documents.
    pub fn tokens(&self) -> u64 {
        self.header.tokens
    }

    /// Returns the number of tokens that count in the loss.
    pub fn loss_tokens(&self) -> u64 {
        self.header.trained
    }

    /// Returns the metadata that the builder stored with the documents.
    pub fn metadata(&self) -> &[u8] {
        &self.words.bytes()[self.header.metadata()]
    }

    /// Returns the tokens and the mask of a document. Panics if there is no such document.
    pub fn document(&self, index: usize) -> Document<'_> {
        let entry = self.entry(index);
        let (start, tokens) = (self.header.data().start + entry.offset as usize, entry.tokens as usize);
        let width = self.header.width;
        Document::new(&self.words.words()[start..start + width.document_words(tokens)], tokens, width)
    }

    /// Returns the index entry of a document; its tokens are not read. Panics if there is no such document.
    pub fn entry(&self, index: usize) -> DocumentEntry {
        let index_begin = self.header.index().start;
        DocumentEntry::from_words(&self.words.words()[index_begin + ENTRY_WORDS * index..][..ENTRY_WORDS])
    }

    /// Checks that index and metadata are unchanged and that every document lies within the data.
    fn check_tail(&self) -> Result<(), String> {
        if xxh3_64(&self.words.bytes()[4 * self.header.index().start..]) != self.header.tail_hash {
            return Err("the checksum of its index does not match".to_owned());
        }
        let (mut tokens, mut trained) = (0_u64, 0_u64);
        for (number, words) in self.words.words()[self.header.index()].chunks_exact(ENTRY_WORDS).enumerate() {
            let entry = DocumentEntry::from_words(words);
            let end = entry.offset.checked_add(self.header.width.document_words(entry.tokens as usize) as u64);
            if entry.tokens == 0 || end.is_none_or(|end| end > self.header.data_words) {
                return Err(format!("document {} lies outside the data", number + 1));
            }
            tokens += u64::from(entry.tokens);
            trained += u64::from(entry.loss_tokens);
        }
        if (tokens, trained) != (self.header.tokens, self.header.trained) {
            let Header { tokens: expected, trained: expected_trained, .. } = self.header;
            return Err(format!(
                "its header counts {expected} tokens, {expected_trained} of them in the loss, its index {tokens} and {trained}"
            ));
        }
        Ok(())
    }
}
