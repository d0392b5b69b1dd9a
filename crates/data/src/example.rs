//! One tokenized document in memory, with its loss mask.
//!
//! Trade-off: five bytes per token. Many documents are kept in a [`TokenStore`](crate::TokenStore) instead.

use xxhash_rust::xxh3::xxh3_64;

/// One document: its tokens, and for each whether it counts in the loss as a target (the first never does).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Example {
    /// Token ids.
    pub tokens: Vec<u32>,
    /// One entry per token.
    pub loss_mask: Vec<bool>,
}

impl Example {
    /// Number of tokens that count in the loss.
    pub fn loss_tokens(&self) -> usize {
        self.loss_mask.iter().filter(|&&counts| counts).count()
    }

    /// Hash of the tokens and the mask, the same on every machine. Splits and fingerprints are stored by it.
    pub(crate) fn content_hash(&self) -> u64 {
        let mut bytes = Vec::with_capacity(5 * self.tokens.len());
        bytes.extend(self.tokens.iter().flat_map(|token| token.to_le_bytes()));
        bytes.extend(self.loss_mask.iter().map(|&counts| u8::from(counts)));
        xxh3_64(&bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_hash_never_changes() {
        let example = Example { tokens: vec![1, 2, 3], loss_mask: vec![false, true, true] };
        assert_eq!(example.content_hash(), FROZEN);
    }

    #[test]
    fn content_hash_distinguishes_tokens_masks_and_lengths() {
        let hash = |tokens: &[u32], loss_mask: &[bool]| {
            Example { tokens: tokens.to_vec(), loss_mask: loss_mask.to_vec() }.content_hash()
        };
        let first = hash(&[1, 2], &[false, true]);
        for other in
            [hash(&[1, 3], &[false, true]), hash(&[1, 2], &[false, false]), hash(&[1], &[false]), hash(&[], &[])]
        {
            assert_ne!(other, first);
        }
    }

    /// XXH3-64 of the bytes as described, computed by the reference implementation (the Python package xxhash).
    const FROZEN: u64 = 16_097_035_359_449_784_994;
}
