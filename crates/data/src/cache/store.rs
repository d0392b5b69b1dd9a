//! Tokenized documents: in memory for small sets, otherwise in a mapped file. Read-only, shared by threads.
//!
//! The cost of opening a file grows with the number of documents, not of tokens: header, length and index are checked.
//! Trade-off: the tokens are checked at opening only in files of up to 256 MiB; [`TokenStore::verify`] checks any file.

use std::fmt::{Debug, Formatter, Result as FormatResult};
use std::fs::File;
use std::io::ErrorKind;
use std::ops::Range;
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::xxh3_64;

use super::document::Document;
use super::error::CacheError;
use super::key::CacheKey;
use super::layout::{ENTRY_WORDS, Entry, HEADER_BYTES, Header, TokenWidth};
use super::map::Map;
use super::origin::Origin;

/// Maximum size of data that is verified at opening, which takes some hundredths of a second.
const VERIFIED_AT_OPENING: usize = 256 << 20;

/// Documents with their tokens, masks and an index.
pub struct TokenStore {
    backing: Backing,
    width: TokenWidth,
    documents: usize,
    tokens: u64,
    loss_tokens: u64,
}

enum Backing {
    Memory { data: Vec<u32>, index: Vec<u32>, metadata: Vec<u8> },
    Mapped(Box<MappedFile>),
}

struct MappedFile {
    path: PathBuf,
    map: Map,
    header: Header,
    data: Range<usize>,
    index: Range<usize>,
}

impl TokenStore {
    /// A store in memory, as a writer built it.
    pub(super) fn in_memory(header: &Header, data: Vec<u32>, index: Vec<u32>, metadata: Vec<u8>) -> Self {
        Self::with(header, Backing::Memory { data, index, metadata })
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
        let map = Map::of(&file).map_err(io)?;
        let header = Header::from_bytes(map.bytes()).map_err(damaged)?;
        let found = map.bytes().len();
        if header.file_bytes() != Some(found as u64) {
            let expected = header.file_bytes().map_or("more than any file has".to_owned(), |bytes| bytes.to_string());
            return Err(damaged(format!("its header gives {expected} bytes, but it has {found}")));
        }
        if header.key != key {
            return Err(damaged(format!("it has the data of key {}, expected {key}", header.key)));
        }
        let data = HEADER_BYTES / 4..HEADER_BYTES / 4 + header.data_words as usize;
        let index = data.end..data.end + header.documents as usize * ENTRY_WORDS;
        let mapped = MappedFile { path: path.to_owned(), map, data, index, header };
        mapped.check_tail().map_err(damaged)?;
        if 4 * mapped.data.len() <= VERIFIED_AT_OPENING {
            mapped.check_data().map_err(damaged)?;
        }
        let header = mapped.header.clone();
        Ok(Some(Self::with(&header, Backing::Mapped(Box::new(mapped)))))
    }

    fn with(header: &Header, backing: Backing) -> Self {
        Self {
            backing,
            width: header.width,
            documents: header.documents as usize,
            tokens: header.tokens,
            loss_tokens: header.trained,
        }
    }

    /// Reads all tokens and compares their checksum: some tenths of a second per gigabyte from memory, otherwise
    /// limited by the disk. A store in memory is not checked.
    ///
    /// # Errors
    /// The file changed after it was written, or the disk lost data.
    pub fn verify(&self) -> Result<(), CacheError> {
        match &self.backing {
            Backing::Memory { .. } => Ok(()),
            Backing::Mapped(file) => {
                file.check_data().map_err(|what| CacheError::Damaged { path: file.path.clone(), what })
            }
        }
    }

    /// Number of documents.
    pub fn documents(&self) -> usize {
        self.documents
    }

    /// Tokens of all documents.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Tokens that count in the loss.
    pub fn loss_tokens(&self) -> u64 {
        self.loss_tokens
    }

    /// The metadata that the builder stored with the documents.
    pub fn metadata(&self) -> &[u8] {
        match &self.backing {
            Backing::Memory { metadata, .. } => metadata,
            Backing::Mapped(file) => &file.map.bytes()[4 * file.index.end..],
        }
    }

    /// The tokens and the mask of a document.
    ///
    /// # Panics
    /// If there is no such document.
    pub fn document(&self, index: usize) -> Document<'_> {
        let entry = self.entry(index);
        let (start, tokens) = (entry.offset as usize, entry.tokens as usize);
        Document::new(&self.data()[start..start + self.width.document_words(tokens)], tokens, self.width)
    }

    /// Tokens of a document, from the index alone.
    pub fn document_tokens(&self, index: usize) -> usize {
        self.entry(index).tokens as usize
    }

    /// Loss tokens of a document, from the index alone.
    pub fn document_loss_tokens(&self, index: usize) -> usize {
        self.entry(index).trained as usize
    }

    /// Hash of the tokens and the mask of a document, the same on every machine.
    pub fn document_hash(&self, index: usize) -> u64 {
        self.entry(index).hash
    }

    /// Where a document came from.
    pub fn document_origin(&self, index: usize) -> Origin {
        self.entry(index).origin
    }

    fn entry(&self, index: usize) -> Entry {
        let words = match &self.backing {
            Backing::Memory { index, .. } => index,
            Backing::Mapped(file) => &file.map.words()[file.index.clone()],
        };
        Entry::from_words(&words[ENTRY_WORDS * index..][..ENTRY_WORDS])
    }

    fn data(&self) -> &[u32] {
        match &self.backing {
            Backing::Memory { data, .. } => data,
            Backing::Mapped(file) => &file.map.words()[file.data.clone()],
        }
    }
}

impl MappedFile {
    /// Checks that index and metadata are unchanged and that every document lies within the data.
    fn check_tail(&self) -> Result<(), String> {
        if xxh3_64(&self.map.bytes()[4 * self.index.start..]) != self.header.tail_hash {
            return Err("the checksum of its index does not match".to_owned());
        }
        let (mut tokens, mut trained) = (0_u64, 0_u64);
        for (number, words) in self.map.words()[self.index.clone()].chunks_exact(ENTRY_WORDS).enumerate() {
            let entry = Entry::from_words(words);
            let end = entry.offset.checked_add(self.header.width.document_words(entry.tokens as usize) as u64);
            if entry.tokens == 0 || end.is_none_or(|end| end > self.header.data_words) {
                return Err(format!("document {} lies outside the data", number + 1));
            }
            tokens += u64::from(entry.tokens);
            trained += u64::from(entry.trained);
        }
        if (tokens, trained) != (self.header.tokens, self.header.trained) {
            let Header { tokens: expected, trained: expected_trained, .. } = self.header;
            return Err(format!(
                "its header counts {expected} tokens, {expected_trained} of them in the loss, its index {tokens} and {trained}"
            ));
        }
        Ok(())
    }

    fn check_data(&self) -> Result<(), String> {
        let bytes = &self.map.bytes()[4 * self.data.start..4 * self.data.end];
        if xxh3_64(bytes) == self.header.data_hash {
            Ok(())
        } else {
            Err("the checksum of its tokens does not match".to_owned())
        }
    }
}

impl Debug for TokenStore {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> FormatResult {
        let place = match &self.backing {
            Backing::Memory { .. } => None,
            Backing::Mapped(file) => Some(&file.path),
        };
        let Self { documents, tokens, loss_tokens, .. } = self;
        formatter
            .debug_struct("TokenStore")
            .field("file", &place)
            .field("documents", documents)
            .field("tokens", tokens)
            .field("loss_tokens", loss_tokens)
            .finish_non_exhaustive()
    }
}
