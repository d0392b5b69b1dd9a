//! DoRA (Liu et al., 2024): an adapted module whose outputs have magnitudes of their own, `y = m / |W + s B A| (W x + s B A x) + bias`.
//!
//! The norms of the rows of `W + s B A` are constants of a step, in the forward and in the backward, as in PEFT: they follow from the
//! parameters alone, so they are computed once after each update and not in each micro-batch.
//! Under dropout of what the adapter reads, PEFT's formula is `y = W x + (c - 1) W x̃ + c s B A x̃ + bias` with `c = m / norm`: the weight
//! is multiplied twice.
//! Trade-off: the gradient of the magnitudes needs the outputs before they are scaled; the reference body computes them again.

use burn_tensor::{DType, Tensor, backend::Backend};

use super::{Adapter, LinearOps};
use crate::dtype::{to_dtype, to_f32};
use crate::weights::Weight;
use crate::weights::reference::dense;

/// The magnitudes of an adapted module.
#[derive(Clone, Debug)]
pub struct Magnitude<B: Backend> {
    /// `[o]` f32. Its gradient is always needed.
    pub value: Tensor<B, 1>,
    /// Norms of the rows of `W + s B A`, `[o]` f32: [`LinearOps::adapted_norms`]. A constant in the backward.
    pub norm: Tensor<B, 1>,
}

impl<B: Backend> Magnitude<B> {
    /// `m / norm`, `[1, o]` f32.
    pub(super) fn factors(&self) -> Tensor<B, 2> {
        self.value.clone().div(self.norm.clone()).unsqueeze()
    }

    /// Each column times its factor, rounded once.
    pub(super) fn scaled(&self, x_no: Tensor<B, 2>) -> Tensor<B, 2> {
        let dtype = x_no.dtype();
        to_dtype(to_f32(x_no).mul(self.factors()), dtype)
    }

    /// The gradient of the magnitudes `[o]` from that of the output and the output before it was scaled.
    pub(super) fn gradient(&self, dy_no: Tensor<B, 2>, unscaled_no: Tensor<B, 2>) -> Tensor<B, 1> {
        let sums: Tensor<B, 1> = to_f32(dy_no).mul(to_f32(unscaled_no)).sum_dim(0).squeeze_dim(0);
        sums.div(self.norm.clone())
    }
}

/// See [`LinearOps::row_squares`].
pub fn row_squares<B: LinearOps>(weight: &Weight<B>) -> Tensor<B, 1> {
    dense(weight, DType::F32).square().sum_dim(1).squeeze_dim(1)
}

/// See [`LinearOps::adapted_norms`]: a pass over the whole weight with its adapter in it.
pub fn adapted_norms<B: LinearOps>(weight: &Weight<B>, adapter: &Adapter<B>) -> Tensor<B, 1> {
    let update_oi = adapter.b.clone().matmul(adapter.a.clone()).mul_scalar(adapter.scale);
    dense(weight, DType::F32).add(update_oi).square().sum_dim(1).squeeze_dim::<1>(1).sqrt()
}
