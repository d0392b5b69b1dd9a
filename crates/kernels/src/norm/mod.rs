//! RMSNorm, forward and backward.
//!
//! Not supported: norms that subtract the mean.

#[cfg(feature = "flex")]
pub(crate) mod conformance;
pub mod reference;

use burn_tensor::{Tensor, backend::Backend};

use crate::dtype::plus;
use crate::session::Session;

/// The weight of an RMSNorm, as an operation takes it.
#[derive(Clone, Debug)]
pub struct NormWeight<B: Backend> {
    /// `[d]` f32.
    pub weight: Tensor<B, 1>,
    /// Added to the weight before the multiplication: 1 for norms that are stored as `weight - 1`, else 0.
    pub offset: f64,
    /// Added to the mean square.
    pub epsilon: f64,
    /// Whether the gradient of the weight is needed.
    pub trains: bool,
}

/// RMSNorm over the rows of a matrix (Zhang and Sennrich, Root mean square layer normalization, 2019).
pub trait NormOps: Session {
    /// Computes `x / sqrt(mean(x²) + epsilon) * (offset + weight)` `[n, d]` in f32, adds the residual `[n, d]` if given
    /// (its gradient is that of the result), and returns the dtype of `x`.
    fn rms_norm(
        x_nd: Tensor<Self, 2>,
        norm: &NormWeight<Self>,
        residual_nd: Option<Tensor<Self, 2>>,
    ) -> Tensor<Self, 2> {
        Self::pause(&x_nd.device(), || plus(reference::forward(x_nd, norm), residual_nd))
    }

    /// Backward of [`NormOps::rms_norm`] at input `x`: the gradient of `x` plus `d_residual` (the gradient that
    /// bypasses the norm on the residual path), and the gradient of the weight `[d]` f32 if it trains.
    fn rms_norm_backward(
        x_nd: Tensor<Self, 2>,
        norm: &NormWeight<Self>,
        dy_nd: Tensor<Self, 2>,
        d_residual_nd: Option<Tensor<Self, 2>>,
    ) -> (Tensor<Self, 2>, Option<Tensor<Self, 1>>) {
        Self::pause(&x_nd.device(), || reference::backward(x_nd, norm, dy_nd, d_residual_nd))
    }
}
