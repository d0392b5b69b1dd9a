//! Keys and values of earlier tokens, for generation: allocated once for all sequences, filled row by row.
//!
//! The rows of a sequence follow each other, so a layer needs one matrix of keys and one of values whatever the lengths, and attention
//! reads them without an index per token. Who owns which rows is up to the caller; all layers share it.
//! Trade-off: the rows of a sequence are reserved for the longest that it may become.

use std::ops::Range;

use burn_tensor::{DType, Int, Tensor, backend::Backend};

/// Keys (already rotated) and values of one layer, `[rows, g * k]` each.
#[derive(Debug)]
pub struct KvCache<B: Backend> {
    /// `None` only while an operation replaces them.
    stored: Option<[Tensor<B, 2>; 2]>,
}

impl<B: Backend> KvCache<B> {
    /// Room for `rows` tokens of `width` values each; at least one. Outside of sections.
    pub fn new([rows, width]: [usize; 2], dtype: DType, device: &B::Device) -> Self {
        // CubeCL lays out the rows of a matrix apart where their bytes are no round number, and launches nothing over no elements.
        let rows = rows.max(1);
        let zeros = || Tensor::<B, 1>::zeros([rows * width], (device, dtype)).reshape([rows, width]);
        Self { stored: Some([zeros(), zeros()]) }
    }

    /// Keys and values; handles, not copies.
    ///
    /// # Panics
    /// Inside [`KvCache::replace`].
    pub fn tensors(&self) -> [Tensor<B, 2>; 2] {
        self.stored.clone().expect("keys and values are there between operations")
    }

    /// Replaces both by what `work` makes of them. They come with their only handles, so they may be written in place.
    ///
    /// # Panics
    /// Inside itself.
    pub fn replace(&mut self, work: impl FnOnce([Tensor<B, 2>; 2]) -> [Tensor<B, 2>; 2]) {
        let stored = self.stored.take().expect("keys and values are there between operations");
        self.stored = Some(work(stored));
    }
}

/// The new tokens of one sequence in a pass, and where they lie in the caches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewTokens {
    /// Row of the sequence's first token.
    pub first_row: usize,
    /// Tokens that the caches hold of it already.
    pub past: usize,
    /// New tokens.
    pub count: usize,
}

impl NewTokens {
    /// Rows of the new tokens.
    pub fn rows(&self) -> Range<usize> {
        let start = self.first_row + self.past;
        start..start + self.count
    }

    /// Rows of all tokens, the new ones included.
    pub fn all_rows(&self) -> Range<usize> {
        self.first_row..self.rows().end
    }
}

/// Where the tokens of a pass lie in the caches of all layers. Tokens of a sequence follow each other.
#[derive(Clone, Debug)]
pub struct CachedTokens<B: Backend> {
    sequences: Vec<NewTokens>,
    /// The row of each of the `n` tokens, and then the row of the first token of its sequence, `[2 * n]`.
    pub rows_2n: Tensor<B, 1, Int>,
}

impl<B: Backend> CachedTokens<B> {
    /// Outside of sections.
    pub fn new(sequences: Vec<NewTokens>, device: &B::Device) -> Self {
        let rows = sequences.iter().flat_map(NewTokens::rows);
        let firsts = sequences.iter().flat_map(|new| std::iter::repeat_n(new.first_row, new.count));
        let rows: Vec<i32> = rows.chain(firsts).map(|row| row as i32).collect();
        Self { sequences, rows_2n: Tensor::from_ints(rows.as_slice(), device) }
    }

    /// The sequences in the order of their tokens.
    pub fn sequences(&self) -> &[NewTokens] {
        &self.sequences
    }

    /// Number of tokens of the pass.
    pub fn count(&self) -> usize {
        self.sequences.iter().map(|new| new.count).sum()
    }

    /// Tokens of the sequence that has most of them, the new ones included.
    pub fn longest(&self) -> usize {
        self.sequences.iter().map(|new| new.all_rows().len()).max().unwrap_or(0)
    }

    /// Each sequence with the range of its tokens in the pass.
    pub fn in_pass(&self) -> impl Iterator<Item = (&NewTokens, Range<usize>)> {
        let mut start = 0;
        self.sequences.iter().map(move |new| {
            start += new.count;
            (new, start - new.count..start)
        })
    }
}
