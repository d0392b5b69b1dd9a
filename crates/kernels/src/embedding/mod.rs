//! Embedding lookup, and its gradient as a sum of rows by token id.

#[cfg(feature = "flex")]
pub(crate) mod conformance;
pub mod reference;

use burn_tensor::{DType, Int, Tensor};

use crate::dtype::added;
use crate::session::Session;

/// Token embeddings.
pub trait EmbeddingOps: Session {
    /// Looks up the rows `ids` of the table `[v, d]`, times `scale`, as `[n, d]` in the given dtype; multiplies in f32
    /// and rounds once. A scale of 1 changes no bit.
    fn embed(table_vd: Tensor<Self, 2>, ids_n: Tensor<Self, 1, Int>, scale: f32, dtype: DType) -> Tensor<Self, 2> {
        Self::pause(&table_vd.device(), || reference::forward(table_vd, ids_n, scale, dtype))
    }

    /// Computes the gradient of the table, or of some of its rows, `[rows, d]` f32: the rows of `dy` times `scale`,
    /// summed by the row index of each token. A negative index means no row, and is allowed only with `may_be_none`.
    fn embed_backward(
        rows_n: Tensor<Self, 1, Int>,
        dy_nd: Tensor<Self, 2>,
        scale: f32,
        rows: usize,
        may_be_none: bool,
    ) -> Tensor<Self, 2> {
        Self::pause(&dy_nd.device(), || reference::backward(rows_n, dy_nd, scale, rows, may_be_none))
    }

    /// Adds the gradient of the table to a sum `[v, d]` of earlier contributions, f32 or bf16: only rows of the ids change, in place where the backend
    /// can.
    fn add_embed_backward(
        sum_vd: Tensor<Self, 2>,
        ids_n: Tensor<Self, 1, Int>,
        dy_nd: Tensor<Self, 2>,
        scale: f32,
    ) -> Tensor<Self, 2> {
        let (device, [rows, _]) = (sum_vd.device(), sum_vd.dims());
        let gradient_vd = Self::embed_backward(ids_n, dy_nd, scale, rows, false);
        Self::pause(&device, || added(sum_vd, gradient_vd))
    }
}
