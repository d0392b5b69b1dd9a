//! Keys and values of earlier tokens, for generation: allocated once for all sequences, filled row by row.
//!
//! The rows of a sequence are in pages, so that sequences with the same beginning share those of it, and none reserves what it does not write. The
//! caller assigns pages to sequences, and all layers share that assignment.
//! Trade-off: attention looks up a page for each key, and the last page of a sequence is partly empty.

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

/// Rows of a page.
pub const PAGE_ROWS: usize = 64;

/// The new tokens of one sequence in a pass, and their place in the caches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewTokens {
    /// Pages of the sequence's tokens, in their order, with room for the new ones.
    pub pages: Vec<u32>,
    /// Tokens of the sequence that are already in the caches.
    pub past: usize,
    /// Number of new tokens.
    pub count: usize,
}

impl NewTokens {
    /// Returns a number that identifies the sequence among those that share no page with it.
    pub fn sequence(&self) -> u32 {
        self.pages[0]
    }

    /// Returns the number of tokens, including the new ones.
    pub fn all(&self) -> usize {
        self.past + self.count
    }

    /// Returns the row of a token.
    pub fn row(&self, token: usize) -> usize {
        self.pages[token / PAGE_ROWS] as usize * PAGE_ROWS + token % PAGE_ROWS
    }

    /// Returns the rows of some tokens, in their order, as ranges.
    pub fn rows(&self, tokens: Range<usize>) -> Vec<Range<usize>> {
        let mut ranges: Vec<Range<usize>> = Vec::new();
        let mut token = tokens.start;
        while token < tokens.end {
            let (row, after) = (self.row(token), tokens.end.min((token / PAGE_ROWS + 1) * PAGE_ROWS));
            match ranges.last_mut().filter(|last| last.end == row) {
                Some(last) => last.end += after - token,
                None => ranges.push(row..row + after - token),
            }
            token = after;
        }
        ranges
    }

    /// Returns the rows of the new tokens, as ranges.
    pub fn new_rows(&self) -> Vec<Range<usize>> {
        self.rows(self.past..self.all())
    }
}

/// Rows of a pass's tokens in the caches of all layers. Tokens of a sequence are contiguous.
#[derive(Clone, Debug)]
pub struct CachedTokens<B: Backend> {
    /// In the order of their tokens.
    pub sequences: Vec<NewTokens>,
    /// For each of the `n` tokens its row, then its number in its sequence, then where in this tensor the sequence's pages begin; then these pages.
    pub places: Tensor<B, 1, Int>,
}

impl<B: Backend> CachedTokens<B> {
    /// Uploads the places. Must be called outside sections.
    pub fn new(sequences: Vec<NewTokens>, device: &B::Device) -> Self {
        let tokens = || sequences.iter().flat_map(|new| (new.past..new.all()).map(move |token| (new, token)));
        let count = tokens().count();
        let mut at = 3 * count;
        let starts = sequences.iter().flat_map(|new| {
            at += new.pages.len();
            std::iter::repeat_n(at - new.pages.len(), new.count)
        });
        let starts: Vec<usize> = starts.collect();
        let of_tokens =
            tokens().map(|(new, token)| new.row(token)).chain(tokens().map(|(_, token)| token)).chain(starts);
        let pages = sequences.iter().flat_map(|new| new.pages.iter().map(|&page| page as i32));
        let places: Vec<i32> = of_tokens.map(|place| place as i32).chain(pages).collect();
        Self { places: Tensor::from_ints(places.as_slice(), device), sequences }
    }

    /// Returns the number of tokens in the pass.
    pub fn count(&self) -> usize {
        self.sequences.iter().map(|new| new.count).sum()
    }

    /// Returns the number of tokens in the longest sequence, including the new ones.
    pub fn longest(&self) -> usize {
        self.sequences.iter().map(NewTokens::all).max().unwrap_or(0)
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
