//! Parameters of an attention call, whichever kernel runs it: sizes, dense inputs, and gradients to write.

use firebrick_arch::AttentionSpec;

use crate::backends::cuda::device::Device;
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
#[derive(Clone, Copy)]
pub(crate) struct Inputs<'a> {
    pub q: &'a MatrixView,
    pub k: &'a MatrixView,
    pub v: &'a MatrixView,
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

/// Gradients of queries, keys and values, dense.
pub(crate) struct Gradients {
    pub dq: MatrixView,
    pub dk: MatrixView,
    pub dv: MatrixView,
}

impl Gradients {
    pub(crate) fn new(device: &Device, inputs: &Inputs<'_>) -> Self {
        let like = |input: &MatrixView| device.empty_matrix(input.rows, input.width, input.dtype);
        Self { dq: like(inputs.q), dk: like(inputs.k), dv: like(inputs.v) }
    }

    pub(super) fn into_qkv(self) -> Qkv<Cuda> {
        Qkv { q: tensor(self.dq.tensor), k: tensor(self.dk.tensor), v: tensor(self.dv.tensor) }
    }
}
