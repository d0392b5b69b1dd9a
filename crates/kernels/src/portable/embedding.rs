//! Embedding look-up, and its gradient as a sum of rows by id.

use burn_tensor::{IndexingUpdateOp, Int, Tensor, backend::Backend};

use super::to_f32;

/// See [`crate::Kernels::embed`].
pub fn forward<B: Backend>(table_vd: Tensor<B, 2>, ids_n: Tensor<B, 1, Int>) -> Tensor<B, 2> {
    table_vd.select(0, ids_n)
}

/// See [`crate::Kernels::embed_backward`].
pub fn backward<B: Backend>(ids_n: Tensor<B, 1, Int>, dy_nd: Tensor<B, 2>, vocab_size: usize) -> Tensor<B, 2> {
    let zeros = Tensor::zeros([vocab_size, dy_nd.dims()[1]], &dy_nd.device());
    zeros.select_assign(0, ids_n, to_f32(dy_nd), IndexingUpdateOp::Add)
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Plain, assert_close, backward as recorded_backward, leaf, random};
    use super::*;

    #[test]
    fn embedding_backward_equals_autodiff_with_repeated_ids() {
        let device = Default::default();
        let ids = [3, 0, 3, 6, 3];
        let (table, dy) = (random::<Plain, 2>(1, [8, 5]), random::<Plain, 2>(2, [5, 5]));
        let recorded = leaf(&table);
        let expected = recorded_backward(forward(recorded.clone(), Tensor::from_ints(ids, &device)), &dy);
        assert_close(backward(Tensor::from_ints(ids, &device), dy, 8), recorded.grad(&expected).unwrap(), 1e-6);
    }
}
