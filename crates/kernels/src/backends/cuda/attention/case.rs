//! Parameters of an attention call, whichever kernel runs it: sizes, dense inputs, and gradients to write.

use firebrick_arch::AttentionSpec;

use crate::backends::cuda::engine::{Cuda, MatrixView, SoftCap, tensor};
use crate::{Documents, Qkv};

#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    pub tokens: usize,
    pub query_heads: usize,
    pub key_value_heads: usize,
    pub head_dim: usize,
    /// Scale of the scores.
    pub scale: f32,
    /// The window, if it hides any key from a query.
    pub window: Option<usize>,
    /// Soft cap of the scaled scores.
    pub soft_cap: Option<SoftCap>,
}

impl Sizes {
    pub(crate) fn new(spec: &AttentionSpec, documents: &Documents<Cuda>) -> Self {
        Self {
            tokens: documents.tokens(),
            query_heads: spec.heads,
            key_value_heads: spec.kv_heads,
            head_dim: spec.head_dim,
            scale: spec.scale as f32,
            window: spec.window_within(documents.longest()),
            soft_cap: spec.soft_cap.map(SoftCap::new),
        }
    }

    /// Returns the operations of the forward's two GEMMs over the visible pairs.
    pub(super) fn forward_flops(&self, documents: &Documents<Cuda>) -> f64 {
        let pairs = |length: usize| {
            let seen = self.window.unwrap_or(length).min(length) as f64;
            seen * (length as f64 - seen / 2.0)
        };
        let pairs: f64 = documents.ranges().map(|range| pairs(range.len())).sum();
        4.0 * pairs * (self.query_heads * self.head_dim) as f64
    }
}

/// Queries, keys and values, dense.
pub(crate) type Inputs<'a> = [&'a MatrixView; 3];

/// Their gradients, dense.
pub(crate) type Gradients = [MatrixView; 3];

/// Returns queries, keys and values, or their gradients, as tensors.
pub(super) fn into_qkv(dense: [MatrixView; 3]) -> Qkv<Cuda> {
    let [q, k, v] = dense.map(|matrix| tensor(matrix.tensor));
    Qkv { q, k, v }
}

/// Additional inputs of the backward, dense.
#[derive(Clone, Copy)]
pub(crate) struct BackwardInputs<'a> {
    pub forward: Inputs<'a>,
    pub o: &'a MatrixView,
    pub d_o: &'a MatrixView,
    /// Statistics in the order that the called backward reads.
    pub log_sum_exp: &'a MatrixView,
}
