//! Attention as a mixer: norms and rotation of queries and keys, the operation forward and backward, sinks.

use burn_tensor::Tensor;
use firebrick_arch::AttentionSpec;
use firebrick_kernels::{
    AttentionOutput, Documents, Epilogue, GradientSink, HeadsEpilogue, Kernels, Parameter, QkNorms, Qkv, RotaryTables,
    Sinks,
};

use super::{Attend, Cache, Mixed};
use crate::norm::Norm;

/// Attention between the projections of queries, keys and values and that of the output.
#[derive(Clone, Debug)]
pub struct Attention<B: Kernels> {
    /// Its sizes and constants.
    pub spec: AttentionSpec,
    /// Norms of queries and keys.
    pub qk_norm: Option<[Norm<B>; 2]>,
    /// Sinks of the softmax.
    pub sinks: Option<AttentionSinks<B>>,
}

/// Logits `[heads]` of one more column in the softmax of each query's scores.
#[derive(Clone, Debug)]
pub struct AttentionSinks<B: Kernels> {
    /// The logits, f32.
    pub logits: Parameter<B>,
    /// Full fine-tuning trains them, LoRA does not.
    pub trains: bool,
}

impl<B: Kernels> Attention<B> {
    /// Returns what is done to the outputs of the first group.
    pub(super) fn epilogue(&self, rotary: &[RotaryTables<B>]) -> Epilogue<B> {
        let norms = |[q, k]: &[Norm<B>; 2]| QkNorms { q: q.operand(), k: k.operand() };
        Epilogue::Heads(HeadsEpilogue {
            head_dim: self.spec.head_dim,
            qk_norm: self.qk_norm.as_ref().map(norms),
            rotary: self.spec.rope.map(|index| rotary[index].clone()),
        })
    }

    pub(super) fn forward(&self, parts: &[Tensor<B, 2>], attend: Attend<'_, B>) -> (Tensor<B, 2>, Option<Mixed<B>>) {
        let (heads, sinks) = (heads(parts.to_vec()), self.sinks());
        match attend {
            Attend::Documents(documents) => {
                let AttentionOutput { o, statistics } =
                    B::packed_attention(&heads, sinks.as_ref(), &self.spec, documents);
                (o.clone(), Some(Mixed { values_nm: o, statistics: Some(statistics) }))
            }
            Attend::Cached { cache: Cache::State(_), .. } => unreachable!("attention has a cache of rows"),
            Attend::Cached { tokens, cache: Cache::Rows(cache), prompts } => {
                (B::cached_attention(&heads, sinks.as_ref(), cache, tokens, prompts, &self.spec), None)
            }
        }
    }

    pub(super) fn backward(
        &self,
        parts: Vec<Tensor<B, 2>>,
        mixed: Mixed<B>,
        d_mixed_nm: Tensor<B, 2>,
        documents: &Documents<B>,
        sink: &mut dyn GradientSink<B>,
    ) -> Vec<Tensor<B, 2>> {
        let statistics = mixed.statistics.expect("attention over documents returns what its backward reads");
        let (sinks, output) = (self.sinks(), AttentionOutput { o: mixed.values_nm, statistics });
        let (Qkv { q, k, v }, d_sinks) =
            B::packed_attention_backward(heads(parts), sinks.as_ref(), &self.spec, output, d_mixed_nm, documents);
        if let Some((sinks, gradient)) = self.sinks.as_ref().zip(d_sinks) {
            sink.add(&sinks.logits, gradient);
        }
        vec![q, k, v]
    }

    /// Returns the sinks as an operand: a handle, not a copy.
    fn sinks(&self) -> Option<Sinks<B>> {
        self.sinks.as_ref().map(|sinks| Sinks { logits_h: sinks.logits.value.clone(), trains: sinks.trains })
    }
}

fn heads<B: Kernels>(parts: Vec<Tensor<B, 2>>) -> Qkv<B> {
    let [q, k, v] = parts.try_into().expect("a group of queries, keys and values has three parts");
    Qkv { q, k, v }
}
