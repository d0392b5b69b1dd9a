//! The gated short convolution of LFM2: `y = c * conv(b * x)`, depthwise and causal inside each document, without an activation.
//!
//! Trade-off: no backend has a kernel of its own yet; on CUDA the reference body runs while the section is paused.

#[cfg(feature = "flex")]
pub(crate) mod conformance;
pub mod reference;

use std::collections::BTreeMap;

use burn_tensor::{Tensor, backend::Backend};

use crate::attention::{CachedTokens, Documents};
use crate::session::Session;

/// The inputs of a gated short convolution, or their gradients, `[n, d]` each.
#[derive(Clone, Debug)]
pub struct ConvInputs<B: Backend> {
    /// Factor of what is convolved.
    pub b: Tensor<B, 2>,
    /// Factor of the result.
    pub c: Tensor<B, 2>,
    /// What is convolved.
    pub x: Tensor<B, 2>,
}

/// The last products `b * x` of each sequence that is being generated, `[k - 1, d]`, by the row of its first token in the caches; of a sequence that
/// has not begun, none.
pub type ConvState<B> = BTreeMap<usize, Tensor<B, 2>>;

/// Gated short convolutions, forward and backward. Filters are `[d, k]` in f32; the last column meets the token itself.
pub trait ConvOps: Session {
    /// Computes `c * conv(b * x)`, `[n, d]`.
    fn short_conv(
        inputs: &ConvInputs<Self>,
        filters_dk: Tensor<Self, 2>,
        documents: &Documents<Self>,
    ) -> Tensor<Self, 2> {
        Self::pause(&inputs.x.device(), || reference::forward(inputs, filters_dk, documents))
    }

    /// Backward of [`ConvOps::short_conv`]: the gradients of the inputs, and of the filters `[d, k]`, f32.
    fn short_conv_backward(
        inputs: ConvInputs<Self>,
        filters_dk: Tensor<Self, 2>,
        dy_nd: Tensor<Self, 2>,
        documents: &Documents<Self>,
    ) -> (ConvInputs<Self>, Tensor<Self, 2>) {
        Self::pause(&dy_nd.device(), || reference::backward(inputs, filters_dk, dy_nd, documents))
    }

    /// Computes [`ConvOps::short_conv`] of new tokens after those that the state holds, and adds the new ones to it.
    fn cached_short_conv(
        inputs: &ConvInputs<Self>,
        filters_dk: Tensor<Self, 2>,
        state: &mut ConvState<Self>,
        tokens: &CachedTokens<Self>,
    ) -> Tensor<Self, 2> {
        Self::pause(&inputs.x.device(), || reference::cached(inputs, filters_dk, state, tokens))
    }
}
