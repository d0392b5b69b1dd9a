//! Attention over the earlier tokens of a document: sizes, linear modules, other tensors, FLOPs, saved values and cache.

use serde::{Deserialize, Serialize};

use super::{CacheSize, MixerGroups, MixerSizes};
use crate::modules::{GroupKind, group};
use crate::naming::LayerPath;
use crate::tensor_spec::{Role, TensorSpec};
use crate::values::{Value, ValueKind};

/// Causal self attention with grouped key/value heads.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AttentionSpec {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Where keys and values come from.
    pub keys_and_values: KeysAndValues,
    /// Width of one head.
    pub head_dim: usize,
    /// Index into [`ModelSpec::ropes`](crate::ModelSpec::ropes); `None`: queries and keys are not rotated.
    pub rope: Option<usize>,
    /// Whether queries and keys are normalized before the rotation, and over what.
    pub qk_norm: QkNorm,
    /// Whether each head's values are divided by their root mean square: an RMSNorm without a weight (Gemma 4).
    pub value_norm: bool,
    /// Whether values are what `k_proj` computes, before norm and rotation: there is no `v_proj` (Gemma 4's `attention_k_eq_v`).
    pub values_are_keys: bool,
    /// Whether a checkpoint stores the query, key and value projections as one module, `qkv_proj` (Phi-3). LoRA then has one pair for it.
    pub fused_qkv: bool,
    /// Whether the query, key and value projections have a bias.
    pub qkv_bias: bool,
    /// Whether the output projection has a bias.
    pub output_bias: bool,
    /// Keys that a query sees, itself included; `None`: all earlier ones. Query `t` sees keys `t - window + 1 ..= t`.
    pub window: Option<usize>,
    /// Factor of the scores, usually `1 / sqrt(head_dim)`.
    pub scale: f64,
    /// `cap`, where scaled scores become `cap * tanh(scores / cap)` before the softmax (Gemma 2).
    pub soft_cap: Option<f64>,
    /// Whether the softmax of a query's scores has one more column: a trained logit per head, `self_attn.sinks` `[heads]`, without a value
    /// (gpt-oss). Neither scaled nor capped.
    pub sinks: bool,
    /// What the sigmoid of which multiplies the result before the output projection.
    pub gate: OutputGate,
}

/// The gates of attention's result, which are more outputs of its first group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OutputGate {
    /// None.
    #[default]
    None,
    /// One for each query head, of a module `g_proj` (LFM3).
    PerHead,
    /// One for each value of a query head, in the rows of `q_proj` after those of that head's query (Qwen3-Next).
    PerValue,
}

/// The keys and values that a layer attends to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KeysAndValues {
    /// Its own.
    #[default]
    Own,
    /// Its own, which later layers read, too: those of the layer with this number, which is this one's.
    Published(usize),
    /// Those of the earlier layer with this number, which publishes them; this layer has a projection of queries alone.
    OfLayer(usize),
}

/// RMSNorm of queries and keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum QkNorm {
    /// None.
    None,
    /// Over each head, with one weight `[head_dim]` for all query heads and one for all key heads (Qwen3).
    PerHead,
    /// Over all query heads together and over all key heads together, with weights `[heads * head_dim]` and `[kv_heads * head_dim]`
    /// (OLMo 2).
    WholeProjection,
}

impl QkNorm {
    /// Returns the widths of the query and key norm weights; `None` without norms.
    pub fn widths(self, attention: &AttentionSpec) -> Option<[usize; 2]> {
        match self {
            Self::None => None,
            Self::PerHead => Some([attention.head_dim; 2]),
            Self::WholeProjection => Some([attention.query_size(), attention.kv_size()]),
        }
    }
}

impl AttentionSpec {
    /// Describes attention as in most families: over all earlier tokens, rotated by the model's first rope, without norms and biases.
    pub fn new(heads: usize, kv_heads: usize, head_dim: usize) -> Self {
        Self {
            heads,
            kv_heads,
            keys_and_values: KeysAndValues::Own,
            head_dim,
            rope: Some(0),
            qk_norm: QkNorm::None,
            value_norm: false,
            values_are_keys: false,
            fused_qkv: false,
            qkv_bias: false,
            output_bias: false,
            window: None,
            scale: 1.0 / (head_dim as f64).sqrt(),
            soft_cap: None,
            sinks: false,
            gate: OutputGate::None,
        }
    }

    /// Returns the width of all query heads together.
    pub fn query_size(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Returns the width of all key heads (or of all value heads) together.
    pub fn kv_size(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Returns the number of gates of a token.
    pub fn gate_size(&self) -> usize {
        match self.gate {
            OutputGate::None => 0,
            OutputGate::PerHead => self.heads,
            OutputGate::PerValue => self.query_size(),
        }
    }

    /// Returns the window, if it hides anything in a document of `longest` tokens.
    pub fn window_within(&self, longest: usize) -> Option<usize> {
        self.window.filter(|&window| window < longest)
    }

    /// Returns whether keys and values are those of an earlier layer.
    pub fn reads_another(&self) -> bool {
        matches!(self.keys_and_values, KeysAndValues::OfLayer(_))
    }
}

impl MixerSizes for AttentionSpec {
    fn groups(&self, at: LayerPath, hidden: usize) -> MixerGroups {
        let (query, kv) = (self.query_size(), self.kv_size());
        let of_queries = if self.gate == OutputGate::PerValue { 2 * query } else { query };
        let mut qkv = vec![("self_attn.q_proj", of_queries)];
        if !self.reads_another() {
            qkv.push(("self_attn.k_proj", kv));
            qkv.extend((!self.values_are_keys).then_some(("self_attn.v_proj", kv)));
        }
        qkv.extend((self.gate == OutputGate::PerHead).then_some(("self_attn.g_proj", self.heads)));
        let fused = self.fused_qkv.then_some("self_attn.qkv_proj");
        let output = [("self_attn.o_proj", hidden)];
        MixerGroups {
            input: group(at, GroupKind::MixerInput, hidden, &qkv, fused, self.qkv_bias),
            output: group(at, GroupKind::MixerOutput, query, &output, None, self.output_bias),
        }
    }

    /// Returns the norms of queries and of keys of its own, and the sinks.
    fn vectors(&self, at: LayerPath) -> Vec<TensorSpec> {
        let norms =
            self.qk_norm.widths(self).map(|[q, k]| [("self_attn.q_norm.weight", q), ("self_attn.k_norm.weight", k)]);
        let norm = |(path, width)| at.vector(path, width, Role::Norm);
        let sinks = self.sinks.then(|| at.vector("self_attn.sinks", self.heads, Role::Sinks));
        let own = if self.reads_another() { 1 } else { 2 };
        norms.into_iter().flatten().take(own).map(norm).chain(sinks).collect()
    }

    /// Counts the two GEMMs, which take `2 * keys * query_size` FLOPs per query. A causal query sees half of its document on average, and no more
    /// than its window.
    fn forward_flops_per_token(&self, document_tokens: f64) -> f64 {
        let mean_keys = match self.window.map(|window| window as f64).filter(|&window| window < document_tokens) {
            // The first `window` queries see a triangle, the others a full window.
            Some(window) => (window * window / 2.0 + (document_tokens - window) * window) / document_tokens,
            None => document_tokens / 2.0,
        };
        4.0 * mean_keys * self.query_size() as f64
    }

    fn values(&self) -> Vec<Value> {
        let (query, kv) = (self.query_size(), if self.reads_another() { 0 } else { self.kv_size() });
        let mut values = vec![Value::part(query), Value::mixed(query), Value::statistics(self.heads)];
        if !self.reads_another() {
            let key_value = match self.keys_and_values {
                KeysAndValues::Published(_) => Value::part(kv).published(),
                // The backward computes both again from what they are made of.
                _ if self.values_are_keys => Value { saved_from: None, ..Value::part(kv) },
                _ => Value::part(kv),
            };
            values.extend([key_value; 2]);
            values.extend(self.values_are_keys.then_some(Value::part(kv)));
        }
        // Heads are normalized where they are, in one buffer, unless keys and values are made of one part.
        let [keys, normed] = [!self.values_are_keys, !self.values_are_keys && self.value_norm];
        let [keys, normed] = [keys, normed].map(|is_there| if is_there { kv } else { 0 });
        let before_norm = match self.qk_norm {
            QkNorm::None => vec![normed],
            QkNorm::PerHead => vec![query + keys + normed],
            QkNorm::WholeProjection => vec![query, keys, normed],
        };
        let gated = |kind| Value::gated(kind, query);
        match self.gate {
            OutputGate::None => {}
            // Repeated for each value of a head.
            OutputGate::PerHead => {
                let widened = gated(ValueKind::BeforeGates);
                values.extend([Value::part(self.heads), widened, gated(ValueKind::Gated)]);
            }
            // Their gradient is next to that of what they multiply.
            OutputGate::PerValue => {
                values.extend([Value { passing: &[], ..Value::part(query) }, gated(ValueKind::Gated)]);
            }
        }
        values.extend(before_norm.into_iter().filter(|width| *width > 0).map(Value::part_before_norm));
        values
    }

    fn cache(&self) -> CacheSize {
        CacheSize { per_token: if self.reads_another() { 0 } else { 2 * self.kv_size() }, per_sequence: 0 }
    }

    fn cache_of(&self, layer: usize) -> usize {
        if let KeysAndValues::OfLayer(other) = self.keys_and_values { other } else { layer }
    }
}
