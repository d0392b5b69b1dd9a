//! Gated DeltaNet (Yang et al., Gated delta networks, 2024), as in Qwen3.5, Qwen3-Next and OLMo Hybrid: sizes, linear modules, other tensors, FLOPs, saved values and
//! state.

use serde::{Deserialize, Serialize};

use super::{CacheSize, MixerGroups, MixerSizes};
use crate::modules::{GroupKind, group};
use crate::naming::LayerPath;
use crate::tensor_spec::{Role, TensorSpec};
use crate::values::{Value, ValueKind};

/// The modules of a checkpoint that compute what the convolution, the gates, beta and the decay read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeltaProjections {
    /// Queries, keys and values together, and one for each of the others (Qwen3.5).
    Joined,
    /// Two: `in_proj_qkvz`, with rows of a key head's query, key, values and gates, and `in_proj_ba` (Qwen3-Next).
    ByKeyHead,
    /// One for each (OLMo Hybrid).
    Separate,
}

/// A linear recurrence over the tokens of a document with a matrix per head as its state, after a causal convolution of queries, keys and values.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DeltaNetSpec {
    /// Heads of queries and keys.
    pub key_heads: usize,
    /// Heads of values, each with a state of its own; a multiple of `key_heads`. Consecutive ones share a key head.
    pub value_heads: usize,
    /// Width of a head of queries and keys.
    pub key_head_dim: usize,
    /// Width of a head of values.
    pub value_head_dim: usize,
    /// Tokens that a filter of the convolution covers, its own included.
    pub conv_width: usize,
    /// The modules of the first group.
    pub projections: DeltaProjections,
    /// Whether a token corrects up to twice its error instead of up to all of it, so that states may change their sign.
    pub doubles_beta: bool,
    /// Epsilon of the norm of each head's result; `None`: that of the model's other norms.
    pub norm_epsilon: Option<f64>,
}

impl DeltaNetSpec {
    /// Returns the width of all heads of queries together, and of keys.
    pub fn key_size(&self) -> usize {
        self.key_heads * self.key_head_dim
    }

    /// Returns the width of all heads of values together.
    pub fn value_size(&self) -> usize {
        self.value_heads * self.value_head_dim
    }

    /// Tokens of a chunk: its tokens are multiplied at once, and the state at its start may be kept.
    pub const CHUNK: usize = 64;

    /// Returns the values of all states of a sequence.
    pub fn state_size(&self) -> usize {
        self.value_heads * self.key_head_dim * self.value_head_dim
    }

    /// Lists the tensors that hold filters, with their channels: one, or one each for queries, keys and values.
    pub fn filters(&self) -> Vec<(&'static str, usize)> {
        let [keys, values] = [self.key_size(), self.value_size()];
        match self.projections {
            DeltaProjections::Separate => vec![("q_conv1d", keys), ("k_conv1d", keys), ("v_conv1d", values)],
            DeltaProjections::Joined | DeltaProjections::ByKeyHead => vec![("conv1d", self.channels())],
        }
    }

    fn name(&self, qwen: &'static str, olmo: &'static str) -> &'static str {
        if self.projections == DeltaProjections::Separate { olmo } else { qwen }
    }

    /// Returns the channels of the convolution: queries, keys and values side by side.
    pub fn channels(&self) -> usize {
        2 * self.key_size() + self.value_size()
    }
}

impl MixerSizes for DeltaNetSpec {
    /// Returns queries, keys and values of the convolution, gates of the result, and what beta and the decay are computed from.
    fn groups(&self, at: LayerPath, hidden: usize) -> MixerGroups {
        let [keys, qkv, z, heads] = [self.key_size(), self.channels(), self.value_size(), self.value_heads];
        let modules: &[(&str, usize)] = match self.projections {
            DeltaProjections::Joined => {
                &[("in_proj_qkv", qkv), ("in_proj_z", z), ("in_proj_b", heads), ("in_proj_a", heads)]
            }
            DeltaProjections::ByKeyHead => &[("in_proj_qkvz", qkv + z), ("in_proj_ba", 2 * heads)],
            DeltaProjections::Separate => {
                let [q, k, v] = [("q_proj", keys), ("k_proj", keys), ("v_proj", z)];
                &[q, k, v, ("g_proj", z), ("b_proj", heads), ("a_proj", heads)]
            }
        };
        let paths: Vec<_> = modules.iter().map(|(name, width)| (format!("linear_attn.{name}"), *width)).collect();
        let modules: Vec<_> = paths.iter().map(|(path, width)| (path.as_str(), *width)).collect();
        let mut input = group(at, GroupKind::MixerInput, hidden, &modules, None, false);
        if self.projections != DeltaProjections::ByKeyHead {
            input.parts = vec![qkv, z, heads, heads];
        }
        let output = [(self.name("linear_attn.out_proj", "linear_attn.o_proj"), hidden)];
        MixerGroups { input, output: group(at, GroupKind::MixerOutput, z, &output, None, false) }
    }

    /// Returns the filters, the two vectors of the decay, and the weight of the norm, which all heads share.
    fn vectors(&self, at: LayerPath) -> Vec<TensorSpec> {
        let filters = self.filters().into_iter().map(|(name, channels)| {
            let shape = vec![channels, 1, self.conv_width];
            TensorSpec { shape, ..at.vector(&format!("linear_attn.{name}.weight"), 0, Role::Filters) }
        });
        let [bias, log] = ["linear_attn.dt_bias", "linear_attn.A_log"];
        let others = [
            at.vector(bias, self.value_heads, Role::DecayBias),
            at.vector(log, self.value_heads, Role::DecayLog),
            at.vector(
                self.name("linear_attn.norm.weight", "linear_attn.o_norm.weight"),
                self.value_head_dim,
                Role::GatedNorm,
            ),
        ];
        filters.chain(others).collect()
    }

    /// Counts the products inside chunks and with the states, and the inverse of a chunk's matrix.
    fn forward_flops_per_token(&self, _document_tokens: f64) -> f64 {
        let [chunk, keys, values] = [Self::CHUNK, self.key_head_dim, self.value_head_dim].map(|size| size as f64);
        let products = 2.0 * (3.0 * chunk * keys + 2.0 * chunk * values + 3.0 * keys * values);
        let of_heads = self.value_heads as f64 * (products + chunk * (keys + values));
        of_heads + 2.0 * (self.conv_width * self.channels()) as f64
    }

    fn values(&self) -> Vec<Value> {
        let parts = Value::part(self.channels() + self.value_size() + 2 * self.value_heads);
        // The result of the convolution is computed again.
        let states = Value::states(self.state_size().div_ceil(Self::CHUNK));
        let gated = [ValueKind::BeforeGates, ValueKind::Gated].map(|kind| Value::gated(kind, self.value_size()));
        [vec![parts, Value::mixed(self.value_size()), states], gated.into()].concat()
    }

    /// Returns the size of the last convolved values and of the states, in f32, which takes as much as two values of 16 bits.
    fn cache(&self) -> CacheSize {
        let convolved = (self.conv_width - 1) * self.channels();
        CacheSize { per_token: 0, per_sequence: 2 * (convolved + self.state_size()) }
    }
}
