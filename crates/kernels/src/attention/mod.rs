//! Causal grouped-query attention inside each document of a packed micro-batch, and over a key/value cache.
//!
//! Heads of a token lie side by side: queries `[n, h * k]`, keys and values `[n, g * k]`. The output carries the statistics of its
//! softmax and their layout, so that the backward never has to guess which kernel computed them.
//! Not supported: masks other than causal with a window, and attention across documents.

mod cache;
#[cfg(feature = "flex")]
pub(crate) mod conformance;
mod documents;
pub mod reference;

use burn_tensor::{DType, Tensor, backend::Backend};
use firebrick_arch::AttentionSpec;

pub use cache::{CachedTokens, KvCache, NewTokens};
pub use documents::Documents;

/// Queries, keys and values of a layer, or their gradients.
#[derive(Clone, Debug)]
pub struct Qkv<B: Backend> {
    /// `[n, h * k]`.
    pub q: Tensor<B, 2>,
    /// `[n, g * k]`.
    pub k: Tensor<B, 2>,
    /// `[n, g * k]`.
    pub v: Tensor<B, 2>,
}

/// Result of [`AttentionOps::packed_attention`].
#[derive(Clone, Debug)]
pub struct AttentionOutput<B: Backend> {
    /// `[n, h * k]`.
    pub o: Tensor<B, 2>,
    /// What the backward reads of the softmax.
    pub statistics: SoftmaxStatistics<B>,
}

/// Log of the sum of exponentials of each query's scaled scores, f32.
#[derive(Clone, Debug)]
pub struct SoftmaxStatistics<B: Backend> {
    /// `h * n` values, in the order that `layout` names.
    pub log_sum_exp: Tensor<B, 2>,
    /// Who computed them, and so their order.
    pub layout: StatisticsLayout,
}

/// Order of the values of [`SoftmaxStatistics`]: the backward must use a kernel that reads the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StatisticsLayout {
    /// `[h, n]`: reference bodies and hand-written kernels.
    HeadsTokens,
    /// `[n, h]`: a vendor library over packed documents.
    TokensHeads,
    /// `[documents, h, length]`: a vendor library over documents of one length.
    DocumentsHeadsTokens,
}

/// Attention, forward and backward.
pub trait AttentionOps: Backend {
    /// Starts to prepare what takes long and both passes over documents will need in this compute format, while other work runs. It is
    /// optional: a pass prepares what is missing.
    fn begin_attention(_spec: &AttentionSpec, _dtype: DType, _documents: &Documents<Self>) {}

    /// Attention of each document's tokens to the earlier ones of the same document, as `spec` describes it (heads, window, scale,
    /// soft cap).
    fn packed_attention(qkv: &Qkv<Self>, spec: &AttentionSpec, documents: &Documents<Self>) -> AttentionOutput<Self> {
        reference::forward(qkv, spec, documents)
    }

    /// Backward of [`AttentionOps::packed_attention`]: gradients of queries, keys and values.
    fn packed_attention_backward(
        qkv: Qkv<Self>,
        spec: &AttentionSpec,
        output: AttentionOutput<Self>,
        d_o: Tensor<Self, 2>,
        documents: &Documents<Self>,
    ) -> Qkv<Self> {
        reference::backward(qkv, spec, output, d_o, documents)
    }

    /// Stores keys and values `[n, g * k]` of new tokens in the rows that are theirs. A backend may write them in place.
    fn store_in_cache(cache: &mut KvCache<Self>, k: Tensor<Self, 2>, v: Tensor<Self, 2>, tokens: &CachedTokens<Self>) {
        reference::store(cache, k, v, tokens);
    }

    /// Attention of new tokens, whose keys and values are stored already, to all tokens of their sequences up to themselves: queries
    /// and result `[n, h * k]`.
    fn cached_attention(
        q: Tensor<Self, 2>,
        cache: &KvCache<Self>,
        tokens: &CachedTokens<Self>,
        spec: &AttentionSpec,
    ) -> Tensor<Self, 2> {
        reference::cached(q, cache, tokens, spec)
    }
}
