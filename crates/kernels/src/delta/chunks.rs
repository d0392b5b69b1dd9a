//! Documents cut into chunks of equal size, so that the work inside all chunks is one batch and only their states follow one another.

use std::cmp::Reverse;
use std::ops::Range;

use burn_tensor::{Int, Tensor, backend::Backend};
use firebrick_arch::DeltaNetSpec;

/// The most tokens of a chunk.
pub const CHUNK: usize = DeltaNetSpec::CHUNK;

/// Returns the number of chunks to allocate for a pass over so many tokens in so many chunks: one of few, because documents differ from pass to pass, and
/// memory that a pass leaves serves the next one if it has the same size.
pub(crate) fn chunk_room(tokens: usize, chunks: usize) -> usize {
    chunks.next_multiple_of(tokens.div_ceil(4 * CHUNK).max(1))
}

/// The chunks of documents. The last one of a document is filled up with rows of zeros.
///
/// Chunks are ordered by their number in their document, and of one number by the lengths of the documents, longest first: step `i` of a scan takes
/// a range of chunks, and the documents that go on after it are the first in it.
#[derive(Clone, Debug)]
pub struct Chunks<B: Backend> {
    /// Rows of a chunk: the smallest power of two that holds the longest document, at most [`CHUNK`].
    size: usize,
    /// The documents, longest first: the order of states before the first step and after the last.
    pub order: Vec<usize>,
    /// The chunks of each step of a scan.
    pub(super) steps: Vec<Range<usize>>,
    /// The token of each row; one past the last for a row of zeros.
    tokens_r: Tensor<B, 1, Int>,
    /// The row of each token.
    rows_n: Tensor<B, 1, Int>,
}

impl<B: Backend> Chunks<B> {
    /// Cuts documents that follow one another from token 0 on. Must be called outside sections.
    ///
    /// # Panics
    /// If a document is empty.
    pub fn new(documents: &[Range<usize>], device: &B::Device) -> Self {
        assert!(documents.iter().all(|document| !document.is_empty()), "a document without tokens in {documents:?}");
        let longest = documents.iter().map(Range::len).max().unwrap_or(0);
        let size = longest.next_power_of_two().min(CHUNK);
        let mut order: Vec<usize> = (0..documents.len()).collect();
        order.sort_by_key(|&document| Reverse(documents[document].len()));
        let tokens: usize = documents.iter().map(Range::len).sum();
        let (mut tokens_r, mut rows_n, mut steps) = (Vec::new(), vec![0; tokens], Vec::new());
        for start in (0..longest).step_by(size) {
            let first = tokens_r.len() / size;
            for document in order.iter().map(|&document| &documents[document]) {
                let rest = (document.start + start).min(document.end)..document.end;
                for token in rest.clone().take(size) {
                    rows_n[token] = tokens_r.len() as i32;
                    tokens_r.push(token as i32);
                }
                tokens_r.resize(tokens_r.len().next_multiple_of(size), tokens as i32);
            }
            steps.push(first..tokens_r.len() / size);
        }
        let ints = |values: Vec<i32>| Tensor::from_ints(values.as_slice(), device);
        Self { size, order, steps, tokens_r: ints(tokens_r), rows_n: ints(rows_n) }
    }

    pub(super) fn all(&self) -> Range<usize> {
        0..self.steps.last().map_or(0, |last| last.end)
    }

    /// Moves values of tokens `[n, h, d]` to the rows of chunks, `[chunks, h, rows, d]`.
    pub(super) fn of_tokens(&self, x_nhd: Tensor<B, 3>) -> Tensor<B, 4> {
        let [_, heads, width] = x_nhd.dims();
        let zeros = Tensor::zeros([1, heads, width], (&x_nhd.device(), x_nhd.dtype()));
        let rows = Tensor::cat(vec![x_nhd, zeros], 0).select(0, self.tokens_r.clone());
        rows.reshape([self.all().len(), self.size, heads, width]).swap_dims(1, 2)
    }

    /// Moves values of the rows of chunks back to their tokens.
    pub(super) fn to_tokens(&self, x_mhcd: Tensor<B, 4>) -> Tensor<B, 3> {
        let [chunks, heads, rows, width] = x_mhcd.dims();
        x_mhcd.swap_dims(1, 2).reshape([chunks * rows, heads, width]).select(0, self.rows_n.clone())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn few_sizes_serve_passes_of_any_documents() {
        for tokens in [1_usize, 64, 2048, 12_288] {
            let whole = tokens.div_ceil(CHUNK);
            let rooms: BTreeSet<usize> = (whole..=2 * whole).map(|chunks| chunk_room(tokens, chunks)).collect();
            assert!(rooms.len() <= 5, "{tokens}: {rooms:?}");
            let spare = |chunks| chunk_room(tokens, chunks) - chunks;
            assert!((whole..=2 * whole).all(|chunks| 4 * spare(chunks) <= whole + 3), "{tokens}: {rooms:?}");
        }
        assert_eq!(chunk_room(12_288, 192), 192, "documents of whole chunks");
    }
}
