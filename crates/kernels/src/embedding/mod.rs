//! Embedding lookup, and its gradient as a sum of rows by token id.
//!
//! Trade-off: the gradient is a dense table.

#[cfg(feature = "flex")]
pub(crate) mod conformance;
pub mod reference;

use burn_tensor::{DType, Int, Tensor, backend::Backend};

/// Token embeddings.
pub trait EmbeddingOps: Backend {
    /// Rows `ids` of the table `[v, d]` times `scale`, in the given dtype, `[n, d]`: multiplied in f32 and rounded once. A scale of 1
    /// changes no bit.
    fn embed(table_vd: Tensor<Self, 2>, ids_n: Tensor<Self, 1, Int>, scale: f32, dtype: DType) -> Tensor<Self, 2> {
        reference::forward(table_vd, ids_n, scale, dtype)
    }

    /// Gradient of the table `[v, d]` f32: rows of `dy` times `scale`, summed by id.
    fn embed_backward(
        ids_n: Tensor<Self, 1, Int>,
        dy_nd: Tensor<Self, 2>,
        scale: f32,
        vocab_size: usize,
    ) -> Tensor<Self, 2> {
        reference::backward(ids_n, dy_nd, scale, vocab_size)
    }

    /// Gradient of some rows of the table, `[rows, d]` f32: rows of `dy` times `scale`, summed by the row that `slots_n` names for each
    /// token; -1 names none.
    fn embed_rows_backward(
        slots_n: Tensor<Self, 1, Int>,
        dy_nd: Tensor<Self, 2>,
        scale: f32,
        rows: usize,
    ) -> Tensor<Self, 2> {
        reference::rows_backward(slots_n, dy_nd, scale, rows)
    }
}
