//! Attention as a mixer: norms and rotation of queries and keys, the operation forward and backward, sinks.

use burn_tensor::Tensor;
use firebrick_arch::{Activation, AttentionSpec, KeysAndValues, OutputGate};
use firebrick_kernels::linear::{into_parts, into_single};
use firebrick_kernels::{
    AttentionOutput, Documents, Epilogue, GradientSink, HeadPart, HeadRole, HeadsEpilogue, InputGradient, Kernels,
    NormWeight, Parameter, Prologue, Qkv, RotaryTables, Sinks,
};

use super::{Attend, Cache, Kept, Mixed, Published};
use crate::norm::Norm;

/// Attention between the projections of queries, keys and values and that of the output.
#[derive(Clone, Debug)]
pub struct Attention<B: Kernels> {
    /// Its sizes and constants.
    pub spec: AttentionSpec,
    /// Norms of queries and keys.
    pub qk_norm: Option<[Norm<B>; 2]>,
    /// Norm of values, which has no weight.
    pub value_norm: Option<NormWeight<B>>,
    /// Sinks of the softmax.
    pub sinks: Option<AttentionSinks<B>>,
}

/// Logits `[heads]` of one more column in the softmax of each query's scores.
#[derive(Clone, Debug)]
pub struct AttentionSinks<B: Kernels> {
    /// `[heads]`, f32.
    pub logits: Parameter<B>,
    /// Full fine-tuning trains them, LoRA does not.
    pub trains: bool,
}

impl<B: Kernels> Attention<B> {
    /// Returns what is done to the outputs of the first group.
    pub(super) fn epilogue(&self, rotary: &[RotaryTables<B>]) -> Epilogue<B> {
        let norms = self.qk_norm.as_ref().map(|norms| norms.each_ref().map(Norm::operand));
        let rotary = self.spec.rope.map(|index| rotary[index].clone());
        let mut heads = HeadsEpilogue::of_qkv(self.spec.head_dim, norms, rotary);
        heads.parts[2].norm = self.value_norm.clone();
        if self.spec.reads_another() {
            heads.parts.truncate(1);
        }
        if self.spec.gate != OutputGate::None {
            heads.parts.push(HeadPart { role: HeadRole::Gate, norm: None });
            heads.gates_in_queries = self.spec.gate == OutputGate::PerValue;
        }
        Epilogue::Heads(heads)
    }

    /// Builds the input of the output projection.
    pub(super) fn gated(&self, parts: &[Tensor<B, 2>], x: Tensor<B, 2>) -> Prologue<B> {
        let gate = parts.last().filter(|_| self.spec.gate != OutputGate::None).cloned();
        let Some(gate) = gate else { return Prologue::None { x } };
        let gate = if self.spec.gate == OutputGate::PerHead { self.widened(gate) } else { gate };
        Prologue::Gated { gate, up: x, activation: Activation::Sigmoid }
    }

    /// Repeats the gate of each head for its values.
    fn widened(&self, gate_nh: Tensor<B, 2>) -> Tensor<B, 2> {
        let ([tokens, heads], width) = (gate_nh.dims(), self.spec.head_dim);
        let widen = || gate_nh.clone().unsqueeze_dim::<3>(2).repeat_dim(2, width).reshape([tokens, heads * width]);
        B::pause(&gate_nh.device(), widen)
    }

    /// Backward of [`Self::gated`] as far as the gates are an output of the first group.
    fn gate_backward(&self, d_gate: Tensor<B, 2>) -> Tensor<B, 2> {
        if self.spec.gate == OutputGate::PerValue {
            return d_gate;
        }
        let [tokens, width] = d_gate.dims();
        let heads = self.spec.heads;
        let sum = || d_gate.clone().reshape([tokens, heads, width / heads]).sum_dim(2).reshape([tokens, heads]);
        B::pause(&d_gate.device(), sum)
    }

    pub(super) fn forward(
        &self,
        parts: &[Tensor<B, 2>],
        attend: Attend<'_, B>,
        published: &mut Published<B>,
    ) -> (Tensor<B, 2>, Option<Mixed<B>>) {
        let (heads, sinks) = (self.heads(parts.to_vec(), published), self.sinks());
        if let KeysAndValues::Published(layer) = self.spec.keys_and_values {
            published.values.insert(layer, [heads.k.clone(), heads.v.clone()]);
        }
        match attend {
            Attend::Documents(documents) => {
                let AttentionOutput { o, statistics } =
                    B::packed_attention(&heads, sinks.as_ref(), &self.spec, documents);
                (o.clone(), Some(Mixed { values_nm: o, kept: Some(Kept::Statistics(statistics)) }))
            }
            Attend::Cached { cache: Cache::State(_) | Cache::States(..), .. } => {
                unreachable!("attention has a cache of rows")
            }
            Attend::Cached { tokens, cache: Cache::Rows(cache), prompts } => {
                (B::cached_attention(&heads, sinks.as_ref(), cache, tokens, prompts, &self.spec), None)
            }
        }
    }

    pub(super) fn backward(
        &self,
        parts: Vec<Tensor<B, 2>>,
        mixed: Mixed<B>,
        d_input: InputGradient<B>,
        documents: &Documents<B>,
        published: &mut Published<B>,
        sink: &mut dyn GradientSink<B>,
    ) -> Vec<Tensor<B, 2>> {
        let (d_mixed_nm, d_gate) = match d_input {
            InputGradient::Plain(d_mixed_nm) => (d_mixed_nm, None),
            InputGradient::Gated { d_gate, d_up } => (d_up, Some(self.gate_backward(d_gate))),
        };
        let Some(Kept::Statistics(statistics)) = mixed.kept else { unreachable!("attention keeps its statistics") };
        let (sinks, output) = (self.sinks(), AttentionOutput { o: mixed.values_nm, statistics });
        let (Qkv { q, k, v }, d_sinks) = B::packed_attention_backward(
            self.heads(parts, published),
            sinks.as_ref(),
            &self.spec,
            output,
            d_mixed_nm,
            documents,
        );
        if let Some((sinks, gradient)) = self.sinks.as_ref().zip(d_sinks) {
            sink.add(&sinks.logits, gradient);
        }
        let mut d_parts = match self.spec.keys_and_values {
            KeysAndValues::Own => vec![q, k, v],
            KeysAndValues::OfLayer(layer) => {
                let sum = match published.gradients.remove(&layer) {
                    Some(sum) => added(sum, [k, v]),
                    None => [k, v],
                };
                published.gradients.insert(layer, sum);
                vec![q]
            }
            KeysAndValues::Published(layer) => match published.gradients.remove(&layer) {
                Some(sum) => {
                    let [k, v] = added(sum, [k, v]);
                    vec![q, k, v]
                }
                None => vec![q, k, v],
            },
        };
        d_parts.extend(d_gate);
        d_parts
    }

    /// Returns queries, keys and values: outputs of the first group, or of another layer's.
    fn heads(&self, mut parts: Vec<Tensor<B, 2>>, published: &Published<B>) -> Qkv<B> {
        parts.truncate(if self.spec.reads_another() { 1 } else { 3 });
        match self.spec.keys_and_values {
            KeysAndValues::OfLayer(layer) => {
                let [k, v] = published.values[&layer].clone();
                Qkv { q: into_single(parts), k, v }
            }
            KeysAndValues::Own | KeysAndValues::Published(_) => {
                let [q, k, v] = into_parts(parts);
                Qkv { q, k, v }
            }
        }
    }

    /// Returns the sinks as an operand: a handle, not a copy.
    fn sinks(&self) -> Option<Sinks<B>> {
        self.sinks.as_ref().map(|sinks| Sinks { logits_h: sinks.logits.value.clone(), trains: sinks.trains })
    }
}

/// Adds gradients of keys and values; a section is paused for it.
fn added<B: Kernels>([k, v]: [Tensor<B, 2>; 2], [more_k, more_v]: [Tensor<B, 2>; 2]) -> [Tensor<B, 2>; 2] {
    B::pause(&k.device(), || [k.add(more_k), v.add(more_v)])
}
