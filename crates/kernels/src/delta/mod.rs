//! The gated delta rule inside documents (Yang et al., Gated delta networks, 2024), the mixer of Qwen3.5 and Qwen3-Next: a matrix per head that
//! forgets, and that each token corrects where its key reads a value other than its own.
//!
//! Per token `t` and value head, with `q` and `k` of length one, `q` scaled by `k^-0.5`, `β = sigmoid(b)` (or twice that) and
//! `g = -exp(a_log) softplus(a + dt_bias)`: `S = e^g S`, `S = S + k ⊗ β (v - Sᵀ k)`, `o = Sᵀ q`; `S` is zero where a document starts.
//! Trade-off: CUDA alone has kernels of its own.

mod chunks;
#[cfg(feature = "flex")]
pub(crate) mod conformance;
mod pairs;
pub mod reference;
pub mod rule;
#[cfg(all(test, feature = "flex"))]
mod tests;

use std::collections::BTreeMap;

use burn_tensor::{Tensor, backend::Backend};
use firebrick_arch::DeltaNetSpec;

pub(crate) use chunks::chunk_room;
pub use chunks::{CHUNK, Chunks};

use crate::attention::{CachedTokens, Documents};
use crate::session::Session;

/// What the rule reads of each token, or the gradients of it, in the compute format.
#[derive(Clone, Debug)]
pub struct DeltaInputs<B: Backend> {
    /// Queries, keys and values side by side, after their convolution, `[n, 2 * key heads * k + value heads * v]`.
    pub qkv: Tensor<B, 2>,
    /// What the decay is computed of, `[n, value heads]`.
    pub a: Tensor<B, 2>,
    /// The logit of the share of its error that a token corrects, `[n, value heads]`.
    pub b: Tensor<B, 2>,
}

/// Parameters of the decay, or their gradients, `[value heads]` each, f32.
#[derive(Clone, Debug)]
pub struct DeltaParameters<B: Backend> {
    /// Log of the decay's rate.
    pub a_log: Tensor<B, 1>,
    /// Added to `a`.
    pub dt_bias: Tensor<B, 1>,
}

/// Result of [`DeltaOps::gated_delta`].
#[derive(Clone, Debug)]
pub struct DeltaOutput<B: Backend> {
    /// `[n, value heads * v]`.
    pub o: Tensor<B, 2>,
    /// The state at the start of each chunk, `[chunks, value heads, k, v]` in f32, or in a format and an order of the backend, whose backward reads it.
    pub states: Tensor<B, 4>,
    /// The state after the last document if it [goes on](Documents::goes_on), f32, `[value heads, k, v]`.
    pub end: Option<Tensor<B, 3>>,
}

/// Result of [`DeltaOps::gated_delta_backward`].
#[derive(Clone, Debug)]
pub struct DeltaGradients<B: Backend> {
    /// Of the inputs.
    pub inputs: DeltaInputs<B>,
    /// Of the parameters, if they train.
    pub parameters: Option<DeltaParameters<B>>,
    /// Of the state before the first document if it [began before](Documents::begins_before), f32, `[value heads, k, v]`.
    pub start: Option<Tensor<B, 3>>,
}

/// The state of each sequence that is being generated, `[value heads, k, v]`, f32, by the row of its first token in the caches; of a sequence that has
/// not begun, none.
pub type DeltaState<B> = BTreeMap<u32, Tensor<B, 3>>;

/// Returns whether the kernels for CUDA are for heads of these widths and this beta.
pub fn has_cuda_kernels(spec: &DeltaNetSpec) -> bool {
    let is_wide = |width: usize| width.is_multiple_of(16) && width <= 128;
    is_wide(spec.key_head_dim) && is_wide(spec.value_head_dim) && !spec.doubles_beta
}

/// The gated delta rule, forward and backward; in f32 whatever the compute format.
pub trait DeltaOps: Session {
    /// Computes what the tokens of each document read. `start` is the state that the tokens before have left, if the first
    /// document has any, f32, `[value heads, k, v]`.
    fn gated_delta(
        inputs: &DeltaInputs<Self>,
        parameters: &DeltaParameters<Self>,
        spec: &DeltaNetSpec,
        documents: &Documents<Self>,
        start: Option<Tensor<Self, 3>>,
    ) -> DeltaOutput<Self> {
        Self::pause(&inputs.qkv.device(), || reference::forward(inputs, parameters, spec, documents, start))
    }

    /// Backward of [`DeltaOps::gated_delta`], from its inputs and states, and the gradient of its `end`.
    fn gated_delta_backward(
        inputs: DeltaInputs<Self>,
        parameters: &DeltaParameters<Self>,
        spec: &DeltaNetSpec,
        states: Tensor<Self, 4>,
        d_o: Tensor<Self, 2>,
        d_end: Option<Tensor<Self, 3>>,
        documents: &Documents<Self>,
        parameters_train: bool,
    ) -> DeltaGradients<Self> {
        Self::pause(&d_o.device(), || {
            reference::backward(inputs, parameters, spec, states, d_o, d_end, documents, parameters_train)
        })
    }

    /// Computes the `o` of [`DeltaOps::gated_delta`] for new tokens after those that the states hold, and moves the states past them.
    fn cached_gated_delta(
        inputs: &DeltaInputs<Self>,
        parameters: &DeltaParameters<Self>,
        spec: &DeltaNetSpec,
        state: &mut DeltaState<Self>,
        tokens: &CachedTokens<Self>,
    ) -> Tensor<Self, 2> {
        Self::pause(&inputs.qkv.device(), || reference::cached(inputs, parameters, spec, state, tokens))
    }
}
