//! One document in its stored form: tokens of two or four bytes and a bit mask, read without copying first.
//!
//! Trade-off: two-byte tokens are unpacked on every read.

use crate::example::Example;

use super::layout::TokenWidth;

/// Tokens and mask of a document, borrowed from a [`TokenStore`](super::TokenStore).
#[derive(Debug, Clone, Copy)]
pub struct Document<'a> {
    tokens: &'a [u32],
    mask: &'a [u32],
    len: usize,
    width: TokenWidth,
}

impl<'a> Document<'a> {
    /// # Panics
    /// If there are fewer `words` than a document of `len` tokens takes.
    pub(super) fn new(words: &'a [u32], len: usize, width: TokenWidth) -> Self {
        let (tokens, mask) = words.split_at(width.token_words(len));
        Self { tokens, mask: &mask[..len.div_ceil(32)], len, width }
    }

    /// Number of tokens, at least 1.
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

    /// The loss mask, 32 tokens per word, the first token in the lowest bit; unused bits are 0.
    pub(crate) fn mask(&self) -> &'a [u32] {
        self.mask
    }

    /// A copy.
    pub fn to_example(&self) -> Example {
        let mut tokens = Vec::with_capacity(self.len);
        self.append_tokens(&mut tokens);
        let loss_mask = (0..self.len).map(|index| self.mask[index / 32] >> (index % 32) & 1 == 1).collect();
        Example { tokens, loss_mask }
    }
}

/// Appends a document to `to`, in the form that [`Document::new`] reads.
///
/// # Panics
/// If a token does not fit the width.
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
}
