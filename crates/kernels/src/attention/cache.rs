//! Keys and values of earlier tokens, for generation: allocated once for all sequences, filled row by row.
//!
//! The rows of a sequence are contiguous, so a layer needs one matrix of keys and one of values whatever the lengths, and attention
//! reads them without an index per token. The caller assigns rows to sequences, and all layers share that assignment.
//! Trade-off: each sequence reserves rows for its maximum length.

use std::ops::Range;

use burn_tensor::{DType, Int, Tensor, backend::Backend};

/// Keys (already rotated) and values of one layer, `[rows, g * k]` each.
#[derive(Debug)]
pub struct KvCache<B: Backend> {
    /// `None` only while an operation replaces them.
    stored: Option<[Tensor<B, 2>; 2]>,
}

impl<B: Backend> KvCache<B> {
    /// Allocates `rows` tokens (at least one) of `width` values each. Must be called outside sections.
    pub fn new([rows, width]: [usize; 2], dtype: DType, device: &B::Device) -> Self {
        // CubeCL pads the rows of a matrix if their size in bytes is not round, and launches nothing over zero elements.
        let rows = rows.max(1);
        let zeros = || Tensor::<B, 1>::zeros([rows * width], (device, dtype)).reshape([rows, width]);
        Self { stored: Some([zeros(), zeros()]) }
    }

    /// Returns keys and values, as handles without a copy.
    ///
    /// # Panics
    /// Inside [`KvCache::replace`].
    pub fn tensors(&self) -> [Tensor<B, 2>; 2] {
        self.stored.clone().expect("keys and values are there between operations")
    }

    /// Replaces both by the result of `work`, which receives their only handles and so may write in place.
    ///
    /// # Panics
    /// If called within itself.
    pub fn replace(&mut self, work: impl FnOnce([Tensor<B, 2>; 2]) -> [Tensor<B, 2>; 2]) {
        let stored = self.stored.take().expect("keys and values are there between operations");
        self.stored = Some(work(stored));
    }
}

/// The new tokens of one sequence in a pass, and their place in the caches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewTokens {
    /// Row of the sequence's first token.
    pub first_row: usize,
    /// Tokens of the sequence that are already in the caches.
    pub past: usize,
    /// Number of new tokens.
    pub count: usize,
}

impl NewTokens {
    /// Returns the rows of the new tokens.
    pub fn rows(&self) -> Range<usize> {
        let start = self.first_row + self.past;
        start..start + self.count
    }

    /// Returns the rows of all tokens, including the new ones.
    pub fn all_rows(&self) -> Range<usize> {
        self.first_row..self.rows().end
    }
}

/// Rows of a pass's tokens in the caches of all layers. Tokens of a sequence are contiguous.
#[derive(Clone, Debug)]
pub struct CachedTokens<B: Backend> {
    sequences: Vec<NewTokens>,
    /// The row of each of the `n` tokens, followed by the row of the first token of each one's sequence, `[2 * n]`.
    pub rows_2n: Tensor<B, 1, Int>,
}

impl<B: Backend> CachedTokens<B> {
    /// Uploads the rows. Must be called outside sections.
    pub fn new(sequences: Vec<NewTokens>, device: &B::Device) -> Self {
        let rows = sequences.iter().flat_map(NewTokens::rows);
        let firsts = sequences.iter().flat_map(|new| std::iter::repeat_n(new.first_row, new.count));
        let rows: Vec<i32> = rows.chain(firsts).map(|row| row as i32).collect();
        Self { sequences, rows_2n: Tensor::from_ints(rows.as_slice(), device) }
    }

    /// Returns the sequences in the order of their tokens.
    pub fn sequences(&self) -> &[NewTokens] {
        &self.sequences
    }

    /// Returns the number of tokens in the pass.
    pub fn count(&self) -> usize {
        self.sequences.iter().map(|new| new.count).sum()
    }

    /// Returns the number of tokens in the longest sequence, including the new ones.
    pub fn longest(&self) -> usize {
        self.sequences.iter().map(|new| new.all_rows().len()).max().unwrap_or(0)
    }

    /// Iterates over the sequences, each with the range of its tokens in the pass.
    pub fn in_pass(&self) -> impl Iterator<Item = (&NewTokens, Range<usize>)> {
        let mut start = 0;
        self.sequences.iter().map(move |new| {
            start += new.count;
            (new, start - new.count..start)
        })
    }
}
