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

use burn_tensor::{Tensor, backend::Backend};
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

    /// Attention of new tokens of sequences that have a cache: stores their keys and values in the rows that are
    /// theirs, in place where the backend can, and lets their queries attend to all tokens of their sequences up to
    /// themselves, `[n, h * k]`. `prompts` are the documents of new tokens that begin their sequences, so that nothing
    /// of the cache is read.
    fn cached_attention(
        qkv: &Qkv<Self>,
        cache: &mut KvCache<Self>,
        tokens: &CachedTokens<Self>,
        prompts: Option<&Documents<Self>>,
        spec: &AttentionSpec,
    ) -> Tensor<Self, 2> {
        reference::store(cache, qkv.k.clone(), qkv.v.clone(), tokens);
        match prompts {
            Some(documents) => Self::packed_attention(qkv, spec, documents).o,
            None => reference::cached(qkv.q.clone(), cache, tokens, spec),
        }
    }
}
