//! What a cache of tokenised data depends on, as one number.
//!
//! The number is a 128-bit XXH3 hash: it tells inputs apart, it does not withstand someone who crafts two inputs with
//! the same hash. Gives up recognising inputs that differ but tokenise alike: they are built twice.

use std::fmt::{Display, Formatter, Result as FormatResult};

use xxhash_rust::xxh3::Xxh3;

/// The layout of token files. Raised when it changes.
pub(super) const FORMAT_VERSION: u32 = 1;

/// Equal exactly when all parts are (up to chance), in builds with one layout of files. What the parts mean is for their
/// owners to say: an encoder's fingerprint holds the version of its code, a source's content key that of its readers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CacheKey(pub(super) u128);

impl CacheKey {
    /// The key of parts by name: the data's content key, the tokenizer's bytes, the template, the options. Names and
    /// order count; lengths are hashed too, so no part can pass for the beginning of the next.
    pub fn of<'a>(parts: impl IntoIterator<Item = (&'a str, &'a [u8])>) -> Self {
        Self::in_version(FORMAT_VERSION, parts)
    }

    /// Vocabularies decide how tokens lie in a file and which are refused.
    pub(super) fn with_vocabulary(self, vocab_size: usize) -> Self {
        let parts = [("key", &self.0.to_le_bytes()[..]), ("vocab_size", &(vocab_size as u64).to_le_bytes()[..])];
        Self::of(parts)
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
    fn every_change_of_a_part_its_name_or_the_layout_changes_the_key() {
        let parts: [(&str, &[u8]); 2] = [("data", b"ab"), ("tokenizer", b"c")];
        let key = CacheKey::of(parts);
        assert_eq!(key, CacheKey::of(parts));
        let others: [CacheKey; 5] = [
            CacheKey::of([("data", &b"ax"[..]), ("tokenizer", b"c")]),
            CacheKey::of([("data", &b"a"[..]), ("tokenizer", b"bc")]),
            CacheKey::of([("tokenizer", &b"ab"[..]), ("data", b"c")]),
            CacheKey::of([("data", &b"ab"[..])]),
            CacheKey::in_version(FORMAT_VERSION + 1, parts),
        ];
        assert!(others.iter().all(|other| *other != key));
    }

    #[test]
    fn key_never_changes_within_a_version() {
        // XXH3-128 of the bytes as described, computed by the reference implementation (the Python package xxhash).
        assert_eq!(CacheKey::of([("data", &b"ab"[..])]).to_string(), FROZEN);
    }

    const FROZEN: &str = "d3d51fc8abadff4fb1f63187454fddc8";
}
