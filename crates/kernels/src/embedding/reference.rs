//! Embedding lookup in ordinary Burn operations, and its gradient as a sum of rows by id.
//!
//! Trade-off: the gradient is a dense table, as large as the embedding, even where few ids occur.

use burn_tensor::{DType, IndexingUpdateOp, Int, Tensor, backend::Backend};

use crate::dtype::{to_dtype, to_f32};

/// Implements [`crate::EmbeddingOps::embed`].
pub fn forward<B: Backend>(table_vd: Tensor<B, 2>, ids_n: Tensor<B, 1, Int>, scale: f32, dtype: DType) -> Tensor<B, 2> {
    let rows_nd = table_vd.select(0, ids_n);
    to_dtype(if scale == 1.0 { rows_nd } else { to_f32(rows_nd).mul_scalar(scale) }, dtype)
}

/// Implements [`crate::EmbeddingOps::embed_backward`].
pub fn backward<B: Backend>(
    rows_n: Tensor<B, 1, Int>,
    dy_nd: Tensor<B, 2>,
    scale: f32,
    rows: usize,
    may_be_none: bool,
) -> Tensor<B, 2> {
    if may_be_none {
        // An additional row collects the tokens without a row.
        let is_none = rows_n.clone().lower_elem(0);
        let rows_n = rows_n.mask_fill(is_none, rows as i32);
        return backward(rows_n, dy_nd, scale, rows + 1, false).narrow(0, 0, rows);
    }
    let zeros = Tensor::zeros([rows, dy_nd.dims()[1]], (&dy_nd.device(), DType::F32));
    let dy_nd = if scale == 1.0 { to_f32(dy_nd) } else { to_f32(dy_nd).mul_scalar(scale) };
    zeros.select_assign(0, rows_n, dy_nd, IndexingUpdateOp::Add)
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::testing::{Plain, assert_close, backward as recorded_backward, leaf, random};

    #[test]
    fn embedding_backward_equals_autodiff_with_repeated_ids() {
        let device = Default::default();
        let ids = [3, 0, 3, 6, 3];
        let (table, dy) = (random::<Plain, 2>(1, [8, 5]), random::<Plain, 2>(2, [5, 5]));
        for scale in [1.0, 2.5] {
            let recorded = leaf(&table);
            let rows = forward(recorded.clone(), Tensor::from_ints(ids, &device), scale, DType::F32);
            let expected = recorded_backward(rows, &dy);
            let gradient = backward(Tensor::from_ints(ids, &device), dy.clone(), scale, 8, false);
            assert_close(gradient, recorded.grad(&expected).unwrap(), 1e-6);
        }
    }
}
