//! Causal depthwise convolutions inside documents: `y = c * conv(b * x)` between two gates (LFM2), or `y = silu(conv(x))` (Gated DeltaNet).
//!
//! Trade-off: CUDA alone has kernels of its own.

#[cfg(feature = "flex")]
pub(crate) mod conformance;
pub mod reference;

use std::collections::BTreeMap;

use burn_tensor::{Tensor, backend::Backend};

use crate::attention::{CachedTokens, Documents};
use crate::session::Session;

/// The inputs of a convolution, or their gradients, `[n, d]` each.
#[derive(Clone, Debug)]
pub struct ConvInputs<B: Backend> {
    /// Factors of what is convolved, and of the result; `None`: the result goes through SiLU instead.
    pub gates: Option<[Tensor<B, 2>; 2]>,
    /// What is convolved.
    pub x: Tensor<B, 2>,
}

/// The last convolved values of each sequence that is being generated, `[k - 1, d]`, by the row of its first token in the caches; of a sequence that
/// has not begun, none.
pub type ConvState<B> = BTreeMap<u32, Tensor<B, 2>>;

/// Causal convolutions, forward and backward. Filters are `[d, k]` in f32; the last column meets the token itself.
pub trait ConvOps: Session {
    /// Computes a convolution of the tokens of each document, `[n, d]`.
    fn causal_conv(
        inputs: &ConvInputs<Self>,
        filters_dk: Tensor<Self, 2>,
        documents: &Documents<Self>,
    ) -> Tensor<Self, 2> {
        Self::pause(&inputs.x.device(), || reference::forward(inputs, filters_dk, documents))
    }

    /// Backward of [`ConvOps::causal_conv`]: the gradients of the inputs, and if they train of the filters `[d, k]`, f32.
    fn causal_conv_backward(
        inputs: ConvInputs<Self>,
        filters_dk: Tensor<Self, 2>,
        dy_nd: Tensor<Self, 2>,
        documents: &Documents<Self>,
        filters_train: bool,
    ) -> (ConvInputs<Self>, Option<Tensor<Self, 2>>) {
        Self::pause(&dy_nd.device(), || reference::backward(inputs, filters_dk, dy_nd, documents, filters_train))
    }

    /// Computes [`ConvOps::causal_conv`] of new tokens after those that the state holds, and adds the new ones to it.
    fn cached_causal_conv(
        inputs: &ConvInputs<Self>,
        filters_dk: Tensor<Self, 2>,
        state: &mut ConvState<Self>,
        tokens: &CachedTokens<Self>,
    ) -> Tensor<Self, 2> {
        Self::pause(&inputs.x.device(), || reference::cached(inputs, filters_dk, state, tokens))
    }
}
