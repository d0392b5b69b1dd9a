//! The layout of a token file on disk. All numbers are little-endian.
//!
//! ```text
//! header    128 bytes, written last: a file without it is not finished
//! data      words of 4 bytes, document after document: its tokens (4 bytes each, or 2 where the vocabulary has at
//!           most 65,536 tokens; an odd number leaves 2 bytes), then one bit per token: whether it counts in the loss
//! index     44 bytes per document: first word, tokens, loss tokens, content hash, and where it came from: source, the
//!           record's hash, file, line
//! metadata  bytes of the caller: what building counted
//! ```
//!
//! Trade-off: no compression. Entropy coding would halve the file and make the loader slower.

use std::ops::Range;

use super::key::{CacheKey, FORMAT_VERSION};
use xxhash_rust::xxh3::xxh3_64;

/// Bytes before the data.
pub(super) const HEADER_BYTES: usize = 128;
pub(super) const ENTRY_WORDS: usize = 11;
const MAGIC: &[u8; 8] = b"FBTOKENS";
const CHECKED_BYTES: usize = 96;

/// Bytes per token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TokenWidth {
    Two,
    Four,
}

impl TokenWidth {
    pub(super) fn of_vocabulary(vocab_size: usize) -> Self {
        if vocab_size <= 1 << 16 { Self::Two } else { Self::Four }
    }

    pub(super) fn token_words(self, tokens: usize) -> usize {
        match self {
            Self::Two => tokens.div_ceil(2),
            Self::Four => tokens,
        }
    }

    /// Returns the number of words of a document: tokens and mask.
    pub(super) fn document_words(self, tokens: usize) -> usize {
        self.token_words(tokens) + tokens.div_ceil(32)
    }
}

/// The origin of a document, in numbers instead of names, so that a token file does not depend on the location of the data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Origin {
    /// Index of its source in the mixture.
    pub source: u32,
    /// Hash of its record ([`Encoded::record`](crate::Encoded::record)); the pieces of a split record have the same.
    pub record: u64,
    /// Index of the record's file in the source.
    pub file: u32,
    /// Line where the record begins (Parquet and Arrow: its row), counted from 1. Numbers above 32 bits are stored as the largest.
    pub line: u32,
}

/// The index entry of a document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DocumentEntry {
    /// First word in the data.
    pub(super) offset: u64,
    /// Number of tokens, at least 1.
    pub tokens: u32,
    /// Tokens that count in the loss.
    pub loss_tokens: u32,
    /// Hash of the tokens and the mask, the same on every machine.
    pub hash: u64,
    /// The record that the document came from.
    pub origin: Origin,
}

impl DocumentEntry {
    pub(super) fn to_words(self) -> [u32; ENTRY_WORDS] {
        let Self { offset, tokens, loss_tokens, hash, origin } = self;
        let Origin { source, record, file, line } = origin;
        let halves = |number: u64| (number as u32, (number >> 32) as u32);
        let ((offset, high), (hash, of_hash), (record, of_record)) = (halves(offset), halves(hash), halves(record));
        [offset, high, tokens, loss_tokens, hash, of_hash, source, record, of_record, file, line]
    }

    /// Parses an entry. Panics if there are fewer words than an entry has.
    pub(super) fn from_words(words: &[u32]) -> Self {
        let wide = |low: usize| u64::from(words[low]) | u64::from(words[low + 1]) << 32;
        let origin = Origin { source: words[6], record: wide(7), file: words[9], line: words[10] };
        Self { offset: wide(0), tokens: words[2], loss_tokens: words[3], hash: wide(4), origin }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) key: CacheKey,
    pub(super) width: TokenWidth,
    pub(super) documents: u64,
    pub(super) data_words: u64,
    pub(super) tokens: u64,
    pub(super) trained: u64,
    pub(super) metadata_bytes: u64,
    /// XXH3 of the data.
    pub(super) data_hash: u64,
    /// XXH3 of index and metadata.
    pub(super) tail_hash: u64,
}

impl Header {
    pub(super) fn empty(key: CacheKey, width: TokenWidth) -> Self {
        let (documents, data_words, tokens, trained, metadata_bytes, data_hash, tail_hash) = Default::default();
        Self { key, width, documents, data_words, tokens, trained, metadata_bytes, data_hash, tail_hash }
    }

    pub(super) fn to_bytes(&self) -> [u8; HEADER_BYTES] {
        let width: u32 = match self.width {
            TokenWidth::Two => 2,
            TokenWidth::Four => 4,
        };
        let mut bytes = Vec::with_capacity(HEADER_BYTES);
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&FORMAT_VERSION.to_le_bytes());
        bytes.extend_from_slice(&width.to_le_bytes());
        bytes.extend_from_slice(&self.key.0.to_le_bytes());
        let Self { documents, data_words, tokens, trained, metadata_bytes, data_hash, tail_hash, .. } = self;
        for number in [documents, data_words, tokens, trained, metadata_bytes, data_hash, tail_hash] {
            bytes.extend_from_slice(&number.to_le_bytes());
        }
        bytes.resize(CHECKED_BYTES, 0);
        bytes.extend_from_slice(&xxh3_64(&bytes).to_le_bytes());
        bytes.resize(HEADER_BYTES, 0);
        bytes.try_into().expect("exactly the bytes of a header")
    }

    /// Parses the beginning of a file. Error: the problem with it, as the end of a sentence.
    pub(super) fn from_bytes(file: &[u8]) -> Result<Self, String> {
        let Some(bytes) = file.get(..HEADER_BYTES) else {
            return Err(format!("a header has {HEADER_BYTES} bytes, the whole file {}", file.len()));
        };
        if bytes[..CHECKED_BYTES].iter().all(|&byte| byte == 0) {
            return Err("it was never finished".to_owned());
        }
        let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        if &bytes[..8] != MAGIC || xxh3_64(&bytes[..CHECKED_BYTES]) != number(CHECKED_BYTES) {
            return Err("its header is not what was written".to_owned());
        }
        let [version, width] = [number(8) as u32, (number(8) >> 32) as u32];
        let width = match (version, width) {
            (FORMAT_VERSION, 2) => TokenWidth::Two,
            (FORMAT_VERSION, 4) => TokenWidth::Four,
            _ => return Err(format!("it has format {version}, this build reads {FORMAT_VERSION}")),
        };
        let key = CacheKey(u128::from_le_bytes(bytes[16..32].try_into().expect("sixteen bytes")));
        let [documents, data_words, tokens, trained, metadata_bytes, data_hash, tail_hash] =
            [32, 40, 48, 56, 64, 72, 80].map(number);
        Ok(Self { key, width, documents, data_words, tokens, trained, metadata_bytes, data_hash, tail_hash })
    }

    /// Returns the range of words with the documents.
    pub(super) fn data(&self) -> Range<usize> {
        HEADER_BYTES / 4..HEADER_BYTES / 4 + self.data_words as usize
    }

    /// Returns the range of words with the index.
    pub(super) fn index(&self) -> Range<usize> {
        let begin = self.data().end;
        begin..begin + self.documents as usize * ENTRY_WORDS
    }

    /// Returns the range of bytes with the metadata.
    pub(super) fn metadata(&self) -> Range<usize> {
        let begin = 4 * self.index().end;
        begin..begin + self.metadata_bytes as usize
    }

    /// Returns the size of a complete file in bytes; `None` if no file can be that long.
    pub(super) fn file_bytes(&self) -> Option<u64> {
        let data = self.data_words.checked_mul(4)?;
        let index = self.documents.checked_mul(4 * ENTRY_WORDS as u64)?;
        data.checked_add(index)?.checked_add(self.metadata_bytes)?.checked_add(HEADER_BYTES as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> Header {
        let [documents, data_words, tokens, trained, metadata_bytes, data_hash, tail_hash] = [1, 2, 3, 4, 5, 6, 7];
        let (key, width) = (CacheKey(u128::MAX - 5), TokenWidth::Two);
        Header { key, width, documents, data_words, tokens, trained, metadata_bytes, data_hash, tail_hash }
    }

    #[test]
    fn header_reads_back_and_any_changed_bit_is_seen() {
        let bytes = header().to_bytes();
        assert_eq!(Header::from_bytes(&bytes), Ok(header()));
        for bit in 0..8 * (CHECKED_BYTES + 8) {
            let mut changed = bytes;
            changed[bit / 8] ^= 1 << (bit % 8);
            assert!(Header::from_bytes(&changed).is_err(), "bit {bit}");
        }
        assert!(Header::from_bytes(&bytes[..HEADER_BYTES - 1]).is_err());
        assert_eq!(Header::from_bytes(&[0; HEADER_BYTES]), Err("it was never finished".to_owned()));
    }

    #[test]
    fn entry_reads_back() {
        let origin = Origin { source: 8, record: u64::MAX - 10, file: 9, line: 10 };
        let entry = DocumentEntry { offset: 1 << 40 | 3, tokens: 5, loss_tokens: 4, hash: u64::MAX - 9, origin };
        assert_eq!(DocumentEntry::from_words(&entry.to_words()), entry);
    }
}
