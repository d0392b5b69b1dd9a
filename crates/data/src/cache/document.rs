//! One document, in memory and in its stored form: tokens of two or four bytes and a bit mask, read without a copy.
//!
//! Trade-off: in memory five bytes per token; stored, two-byte tokens are unpacked on every read.

use xxhash_rust::xxh3::xxh3_64;

use super::layout::TokenWidth;

/// One document: its tokens, and for each whether it counts in the loss as a target (the first never does).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Example {
    /// Token ids.
    pub tokens: Vec<u32>,
    /// One entry per token.
    pub loss_mask: Vec<bool>,
}

impl Example {
    /// Returns the number of tokens that count in the loss.
    pub fn loss_tokens(&self) -> usize {
        self.loss_mask.iter().filter(|&&counts| counts).count()
    }

    /// Returns a hash of the tokens and the mask, the same on every machine. Splits and fingerprints depend on it.
    pub(crate) fn content_hash(&self) -> u64 {
        let mut bytes = Vec::with_capacity(5 * self.tokens.len());
        bytes.extend(self.tokens.iter().flat_map(|token| token.to_le_bytes()));
        bytes.extend(self.loss_mask.iter().map(|&counts| u8::from(counts)));
        xxh3_64(&bytes)
    }
}

/// Tokens and mask of a document, borrowed from a [`TokenStore`](super::TokenStore).
#[derive(Debug, Clone, Copy)]
pub struct Document<'a> {
    tokens: &'a [u32],
    /// The loss mask, 32 tokens per word, the first token in the lowest bit; unused bits are 0.
    pub(crate) mask: &'a [u32],
    len: usize,
    width: TokenWidth,
}

impl<'a> Document<'a> {
    /// Borrows a document. Panics if there are fewer `words` than a document of `len` tokens takes.
    pub(super) fn new(words: &'a [u32], len: usize, width: TokenWidth) -> Self {
        let (tokens, mask) = words.split_at(width.token_words(len));
        Self { tokens, mask: &mask[..len.div_ceil(32)], len, width }
    }

    /// Returns the number of tokens, at least 1.
    #[expect(clippy::len_without_is_empty, reason = "no document is empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Appends the tokens to `to`.
    pub fn append_tokens(&self, to: &mut Vec<u32>) {
        match self.width {
            TokenWidth::Four => to.extend_from_slice(self.tokens),
            TokenWidth::Two => {
                let (pairs, odd) = self.tokens.split_at(self.len / 2);
                to.extend(pairs.iter().flat_map(|pair| [pair & 0xffff, pair >> 16]));
                to.extend(odd.iter().map(|last| last & 0xffff));
            }
        }
    }

    /// Copies the document.
    pub fn to_example(&self) -> Example {
        let mut tokens = Vec::with_capacity(self.len);
        self.append_tokens(&mut tokens);
        let loss_mask = (0..self.len).map(|index| self.mask[index / 32] >> (index % 32) & 1 == 1).collect();
        Example { tokens, loss_mask }
    }
}

/// Appends a document to `to`, in the form that [`Document::new`] reads. Panics if a token does not fit the width.
pub(super) fn append_words(example: &Example, width: TokenWidth, to: &mut Vec<u32>) {
    let half = |token: u32| {
        assert!(token <= 0xffff, "token {token} does not fit two bytes");
        token
    };
    match width {
        TokenWidth::Four => to.extend_from_slice(&example.tokens),
        TokenWidth::Two => {
            let (pairs, odd) = example.tokens.as_chunks::<2>();
            to.extend(pairs.iter().map(|&[first, second]| half(first) | half(second) << 16));
            to.extend(odd.iter().copied().map(half));
        }
    }
    let bits = |flags: &[bool]| flags.iter().rev().fold(0, |word, &flag| word << 1 | u32::from(flag));
    to.extend(example.loss_mask.chunks(32).map(bits));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn document_reads_back_at_every_length_and_width() {
        for width in [TokenWidth::Two, TokenWidth::Four] {
            for len in 1..100 {
                let tokens: Vec<u32> = (0..len).map(|index| 65_535 - 31 * index).collect();
                let loss_mask = (0..len).map(|index| index * index % 3 == 1).collect();
                let example = Example { tokens, loss_mask };
                let mut words = Vec::new();
                append_words(&example, width, &mut words);
                assert_eq!(words.len(), width.document_words(len as usize));
                assert_eq!(Document::new(&words, len as usize, width).to_example(), example);
            }
        }
    }

    #[test]
    fn a_content_hash_is_fixed_and_sees_every_difference() {
        let hash = |tokens: &[u32], loss_mask: &[bool]| {
            Example { tokens: tokens.to_vec(), loss_mask: loss_mask.to_vec() }.content_hash()
        };
        // XXH3-64 of the bytes as described, computed by the reference implementation (the Python package xxhash).
        assert_eq!(hash(&[1, 2, 3], &[false, true, true]), 16_097_035_359_449_784_994);
        let first = hash(&[1, 2], &[false, true]);
        for other in
            [hash(&[1, 3], &[false, true]), hash(&[1, 2], &[false, false]), hash(&[1], &[false]), hash(&[], &[])]
        {
            assert_ne!(other, first);
        }
    }
}
