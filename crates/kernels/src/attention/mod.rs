//! Causal grouped-query attention inside each document of a packed micro-batch, and over a key/value cache.
//!
//! Heads of a token lie side by side: queries `[n, h * k]`, keys and values `[n, g * k]`. The output carries the
//! softmax statistics and their layout, so that the backward never has to guess which kernel computed them.
//! Not supported: masks other than causal with a window, and attention across documents.

mod cache;
#[cfg(feature = "flex")]
pub(crate) mod conformance;
pub(crate) mod documents;
pub mod reference;

use burn_tensor::{Tensor, backend::Backend};
use firebrick_arch::AttentionSpec;

use crate::session::Session;

pub use cache::{CachedTokens, KvCache, NewTokens, PAGE_ROWS};
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

/// Sinks of a layer's attention: one more column in the softmax of each query's scores, without a value.
#[derive(Clone, Debug)]
pub struct Sinks<B: Backend> {
    /// The logit of each query head's column `[h]`, f32; neither scaled nor capped.
    pub logits_h: Tensor<B, 1>,
    /// Whether the backward computes its gradient.
    pub trains: bool,
}

/// Result of [`AttentionOps::packed_attention`].
#[derive(Clone, Debug)]
pub struct AttentionOutput<B: Backend> {
    /// `[n, h * k]`.
    pub o: Tensor<B, 2>,
    /// Softmax statistics, which the backward reads.
    pub statistics: SoftmaxStatistics<B>,
}

/// Log of the sum of exponentials of each query's scaled scores and of its sink, f32.
#[derive(Clone, Debug)]
pub struct SoftmaxStatistics<B: Backend> {
    /// `h * n` values, in the order that `layout` names.
    pub log_sum_exp: Tensor<B, 2>,
    /// The order of the values, which depends on the kernel that computed them.
    pub layout: StatisticsLayout,
}

/// Order of the values of [`SoftmaxStatistics`]; the backward must use a kernel that reads the same order.
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
pub trait AttentionOps: Session {
    /// Computes causal attention inside each document, as `spec` describes it (heads, window, scale, soft cap), with sinks if it has them.
    fn packed_attention(
        qkv: &Qkv<Self>,
        sinks: Option<&Sinks<Self>>,
        spec: &AttentionSpec,
        documents: &Documents<Self>,
    ) -> AttentionOutput<Self> {
        Self::pause(&qkv.q.device(), || reference::forward(qkv, sinks, spec, documents))
    }

    /// Backward of [`AttentionOps::packed_attention`]: gradients of queries, keys and values, and of sinks that train `[h]`, f32.
    fn packed_attention_backward(
        qkv: Qkv<Self>,
        sinks: Option<&Sinks<Self>>,
        spec: &AttentionSpec,
        output: AttentionOutput<Self>,
        d_o: Tensor<Self, 2>,
        documents: &Documents<Self>,
    ) -> (Qkv<Self>, Option<Tensor<Self, 1>>) {
        Self::pause(&d_o.device(), || reference::backward(qkv, sinks, spec, output, d_o, documents))
    }

    /// Computes attention of new tokens over a cache, `[n, h * k]`: stores their keys and values in their rows, in
    /// place where the backend can, and lets each query attend to all tokens of its sequence up to itself. `prompts`
    /// are the documents of new tokens if all of them begin their sequences, so that attention need not read the cache.
    fn cached_attention(
        qkv: &Qkv<Self>,
        sinks: Option<&Sinks<Self>>,
        cache: &mut KvCache<Self>,
        tokens: &CachedTokens<Self>,
        prompts: Option<&Documents<Self>>,
        spec: &AttentionSpec,
    ) -> Tensor<Self, 2> {
        Self::pause(&qkv.q.device(), || {
            reference::store(cache, qkv.k.clone(), qkv.v.clone(), tokens);
            match prompts {
                Some(documents) => Self::packed_attention(qkv, sinks, spec, documents).o,
                None => reference::cached(Tensor::matmul, qkv.q.clone(), sinks, cache, tokens, spec),
            }
        })
    }
}
