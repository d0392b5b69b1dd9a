//! DoRA (Liu et al., 2024): an adapted module with a trained magnitude per output, `y = m / |W + s B A| (W x + s B A x) + bias`.
//!
//! The norms of the rows of `W + s B A` are constants in the forward and in the backward, as in PEFT. They depend on the parameters
//! alone, so they are computed once after each update and not in each micro-batch. With dropout on the adapter's input, PEFT's formula
//! is `y = W x + (c - 1) W x̃ + c s B A x̃ + bias` with `c = m / norm`: it multiplies by the weight twice.
//! Trade-off: the gradient of the magnitudes needs the outputs before scaling; the reference body recomputes them.

use burn_tensor::{DType, Tensor, backend::Backend};

use super::{Adapter, LinearOps};
use crate::dtype::{to_dtype, to_f32};
use crate::weights::Weight;
use crate::weights::reference::dense;

/// The magnitudes of an adapted module.
#[derive(Clone, Debug)]
pub struct Magnitude<B: Backend> {
    /// The magnitudes, `[o]` f32. Their gradient is always computed.
    pub value: Tensor<B, 1>,
    /// Norms of the rows of `W + s B A`, `[o]` f32, from [`LinearOps::adapted_norms`]; a constant in the backward.
    pub norm: Tensor<B, 1>,
}

impl<B: Backend> Magnitude<B> {
    /// Returns `m / norm`, `[1, o]` f32.
    pub(super) fn factors(&self) -> Tensor<B, 2> {
        self.value.clone().div(self.norm.clone()).unsqueeze()
    }

    /// Multiplies each column by its factor; rounds once.
    pub(super) fn scaled(&self, x_no: Tensor<B, 2>) -> Tensor<B, 2> {
        let dtype = x_no.dtype();
        to_dtype(to_f32(x_no).mul(self.factors()), dtype)
    }

    /// Computes the gradient of the magnitudes `[o]` from the gradient of the output and the output before scaling.
    pub(super) fn gradient(&self, dy_no: Tensor<B, 2>, unscaled_no: Tensor<B, 2>) -> Tensor<B, 1> {
        let sums: Tensor<B, 1> = to_f32(dy_no).mul(to_f32(unscaled_no)).sum_dim(0).squeeze_dim(0);
        sums.div(self.norm.clone())
    }
}

/// Implements [`LinearOps::row_squares`].
pub fn row_squares<B: LinearOps>(weight: &Weight<B>) -> Tensor<B, 1> {
    dense(weight, DType::F32).square().sum_dim(1).squeeze_dim(1)
}

/// Implements [`LinearOps::adapted_norms`]: one pass over the whole weight with its adapter merged.
pub fn adapted_norms<B: LinearOps>(weight: &Weight<B>, adapter: &Adapter<B>) -> Tensor<B, 1> {
    let update_oi = adapter.b.clone().matmul(adapter.a.clone()).mul_scalar(adapter.scale);
    dense(weight, DType::F32).add(update_oi).square().sum_dim(1).squeeze_dim::<1>(1).sqrt()
}
