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
    /// Norms of queries and of keys of its own, if it has any.
    pub qk_norm: Vec<Norm<B>>,
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
    pub(super) fn epilogue(&self, rotary: &[RotaryTables<B>]) -> Epilogue<B> {
        let rotary = self.spec.rope.map(|index| rotary[index].clone());
        let mut heads = HeadsEpilogue::of_qkv(self.spec.head_dim, None, rotary);
        heads.parts.iter_mut().zip(&self.qk_norm).for_each(|(part, norm)| part.norm = Some(norm.operand()));
        heads.parts[2].norm = self.value_norm.clone();
        heads.parts.truncate(self.own_parts());
        if self.has_shared_part() {
            heads.parts[1] = HeadPart { role: HeadRole::Value, norm: None };
        }
        if self.spec.gate != OutputGate::None {
            heads.parts.push(HeadPart { role: HeadRole::Gate, norm: None });
            heads.gates_in_queries = self.spec.gate == OutputGate::PerValue;
        }
        Epilogue::Heads(heads)
    }

    pub(super) fn gated(&self, parts: &[Tensor<B, 2>], x: Tensor<B, 2>) -> Prologue<B> {
        let gate = parts.last().filter(|_| self.spec.gate != OutputGate::None).cloned();
        let Some(mut gate) = gate else { return Prologue::None { x } };
        if self.spec.gate == OutputGate::PerHead {
            let ([tokens, heads], width) = (gate.dims(), self.spec.head_dim);
            // The gate of each head is that of all its values.
            let widen = || gate.clone().unsqueeze_dim::<3>(2).repeat_dim(2, width).reshape([tokens, heads * width]);
            gate = B::pause(&gate.device(), widen);
        }
        Prologue::Gated { gate, up: x, activation: Activation::Sigmoid }
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
        rotary: &[RotaryTables<B>],
        attend: Attend<'_, B>,
        published: &mut Published<B>,
    ) -> (Tensor<B, 2>, Option<Mixed<B>>) {
        let (heads, sinks) = (self.heads(parts.to_vec(), rotary, published), self.sinks());
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
        rotary: &[RotaryTables<B>],
        published: &mut Published<B>,
        sink: &mut dyn GradientSink<B>,
    ) -> Vec<Tensor<B, 2>> {
        let (d_mixed_nm, d_gate) = match d_input {
            InputGradient::Plain(d_mixed_nm) => (d_mixed_nm, None),
            InputGradient::Gated { d_gate, d_up } => (d_up, Some(self.gate_backward(d_gate))),
        };
        let Some(Kept::Statistics(statistics)) = mixed.kept else { unreachable!("attention keeps its statistics") };
        let (sinks, output) = (self.sinks(), AttentionOutput { o: mixed.values_nm, statistics });
        let shared = self.has_shared_part().then(|| parts[1].clone());
        let (Qkv { q, k, v }, d_sinks) = B::packed_attention_backward(
            self.heads(parts, rotary, published),
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
        if let Some(shared_nk) = shared {
            let [q, k, v] = into_parts(d_parts);
            d_parts = vec![q, self.shared_part_backward(shared_nk, [k, v], rotary, sink)];
        }
        d_parts.extend(d_gate);
        d_parts
    }

    /// Counts the parts of the first group that queries, keys and values are made of.
    fn own_parts(&self) -> usize {
        match self.spec.keys_and_values {
            KeysAndValues::OfLayer(_) => 1,
            KeysAndValues::Own | KeysAndValues::Published(_) => 3 - usize::from(self.spec.values_are_keys),
        }
    }

    /// Returns whether keys and values are made of one part.
    fn has_shared_part(&self) -> bool {
        self.own_parts() == 2
    }

    /// Returns queries, keys and values: outputs of the first group, what is made of them, or those of another layer.
    fn heads(&self, mut parts: Vec<Tensor<B, 2>>, rotary: &[RotaryTables<B>], published: &Published<B>) -> Qkv<B> {
        parts.truncate(self.own_parts());
        match self.spec.keys_and_values {
            KeysAndValues::OfLayer(layer) => {
                let [k, v] = published.values[&layer].clone();
                Qkv { q: into_single(parts), k, v }
            }
            _ if self.has_shared_part() => {
                let [q, shared_nk] = into_parts(parts);
                let k = normed(shared_nk.clone(), self.qk_norm.get(1).map(Norm::operand).as_ref());
                Qkv { q, k: self.turned(k, rotary, false), v: normed(shared_nk, self.value_norm.as_ref()) }
            }
            KeysAndValues::Own | KeysAndValues::Published(_) => {
                let [q, k, v] = into_parts(parts);
                Qkv { q, k, v }
            }
        }
    }

    /// Computes the gradient of the part that keys and values are made of from theirs.
    fn shared_part_backward(
        &self,
        shared_nk: Tensor<B, 2>,
        [dk, dv]: [Tensor<B, 2>; 2],
        rotary: &[RotaryTables<B>],
        sink: &mut dyn GradientSink<B>,
    ) -> Tensor<B, 2> {
        let (mut sum, k_norm) = (self.turned(dk, rotary, true), self.qk_norm.get(1));
        if let Some(norm) = k_norm {
            let (gradient, d_weight) = normed_backward(shared_nk.clone(), &norm.operand(), sum, None);
            norm.add_gradient(d_weight, sink);
            sum = gradient;
        }
        match &self.value_norm {
            Some(norm) => normed_backward(shared_nk, norm, dv, Some(sum)).0,
            None => B::pause(&dv.device(), || sum.add(dv)),
        }
    }

    /// Rotates keys, or turns their gradient back.
    fn turned(&self, k: Tensor<B, 2>, rotary: &[RotaryTables<B>], backward: bool) -> Tensor<B, 2> {
        match self.spec.rope {
            Some(index) => B::rotary(k, &rotary[index], self.spec.head_dim, backward),
            None => k,
        }
    }

    /// Returns the sinks as an operand: a handle, not a copy.
    fn sinks(&self) -> Option<Sinks<B>> {
        self.sinks.as_ref().map(|sinks| Sinks { logits_h: sinks.logits.value.clone(), trains: sinks.trains })
    }
}

/// Normalizes rows of heads as wide as the norm's weight.
fn normed<B: Kernels>(x: Tensor<B, 2>, norm: Option<&NormWeight<B>>) -> Tensor<B, 2> {
    let Some(norm) = norm else { return x };
    let shape = x.dims();
    B::rms_norm(by_head(x, norm), norm, None).reshape(shape)
}

/// Backward of [`normed`]: the gradient of `x` plus another one of it, and that of the weight if it trains.
fn normed_backward<B: Kernels>(
    x: Tensor<B, 2>,
    norm: &NormWeight<B>,
    dy: Tensor<B, 2>,
    more: Option<Tensor<B, 2>>,
) -> (Tensor<B, 2>, Option<Tensor<B, 1>>) {
    let shape = x.dims();
    let more = more.map(|more| by_head(more, norm));
    let (dx, d_weight) = B::rms_norm_backward(by_head(x, norm), norm, by_head(dy, norm), more);
    (dx.reshape(shape), d_weight)
}

/// Returns a row for each head. Parts and gradients of attention have no gaps, so nothing moves.
fn by_head<B: Kernels>(x: Tensor<B, 2>, norm: &NormWeight<B>) -> Tensor<B, 2> {
    let ([tokens, all], [width]) = (x.dims(), norm.weight.dims());
    x.reshape([tokens * all / width, width])
}

/// Adds gradients of keys and values; a section is paused for it.
fn added<B: Kernels>([k, v]: [Tensor<B, 2>; 2], [more_k, more_v]: [Tensor<B, 2>; 2]) -> [Tensor<B, 2>; 2] {
    B::pause(&k.device(), || [k.add(more_k), v.add(more_v)])
}
