//! The key of a cache of tokenized data: a number that covers everything that the data depends on.
//!
//! The number is a 128-bit XXH3 hash. Trade-off: it is not safe against inputs that are crafted to collide, and inputs
//! that differ but tokenize to the same tokens are built twice.

use std::fmt::{Display, Formatter, Result as FormatResult};

use xxhash_rust::xxh3::Xxh3;

/// Version of the layout of token files, incremented when the layout changes.
pub(super) const FORMAT_VERSION: u32 = 3;

/// A key that is equal exactly when all parts are equal (up to hash collisions), in builds with the same file layout. The owners of the parts define
/// their meaning: an encoder's fingerprint contains the version of its code, a source's content key that of its readers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CacheKey(pub(super) u128);

impl CacheKey {
    /// Creates the key of named parts: the data's content key, the tokenizer's bytes, the template, the options. Names and order matter; lengths are
    /// hashed too, so parts cannot be confused with each other.
    pub fn from_parts<'a>(parts: impl IntoIterator<Item = (&'a str, &'a [u8])>) -> Self {
        Self::in_version(FORMAT_VERSION, parts)
    }

    /// Adds the vocabulary, which determines how tokens are stored and which are refused.
    pub(super) fn with_vocabulary(self, vocab_size: usize) -> Self {
        let parts = [("key", &self.0.to_le_bytes()[..]), ("vocab_size", &(vocab_size as u64).to_le_bytes()[..])];
        Self::from_parts(parts)
    }

    fn in_version<'a>(format_version: u32, parts: impl IntoIterator<Item = (&'a str, &'a [u8])>) -> Self {
        let mut hash = Xxh3::new();
        hash.update(&format_version.to_le_bytes());
        for (name, bytes) in parts {
            for part in [name.as_bytes(), bytes] {
                hash.update(&(part.len() as u64).to_le_bytes());
                hash.update(part);
            }
        }
        Self(hash.digest128())
    }
}

impl Display for CacheKey {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> FormatResult {
        write!(formatter, "{:032x}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_key_changes_with_parts_names_and_layout_alone() {
        let parts: [(&str, &[u8]); 2] = [("data", b"ab"), ("tokenizer", b"c")];
        let key = CacheKey::from_parts(parts);
        assert_eq!(key, CacheKey::from_parts(parts));
        let others: [CacheKey; 5] = [
            CacheKey::from_parts([("data", &b"ax"[..]), ("tokenizer", b"c")]),
            CacheKey::from_parts([("data", &b"a"[..]), ("tokenizer", b"bc")]),
            CacheKey::from_parts([("tokenizer", &b"ab"[..]), ("data", b"c")]),
            CacheKey::from_parts([("data", &b"ab"[..])]),
            CacheKey::in_version(FORMAT_VERSION + 1, parts),
        ];
        assert!(others.iter().all(|other| *other != key));
        // XXH3-128 of the bytes as described, computed by the reference implementation (the Python package xxhash).
        assert_eq!(CacheKey::from_parts([("data", &b"ab"[..])]).to_string(), "7a301904735b1efc81b88209d80b6b2c");
    }
}
