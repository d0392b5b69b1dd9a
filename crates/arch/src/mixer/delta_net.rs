//! Gated DeltaNet (Yang et al., Gated delta networks, 2024), as in Qwen3.5 and Qwen3-Next: sizes, linear modules, other tensors, FLOPs, saved values and
//! state.

use serde::{Deserialize, Serialize};

/// A linear recurrence over the tokens of a document with a matrix per head as its state, after a causal convolution of queries, keys and values.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
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

    /// Returns the channels of the convolution: queries, keys and values side by side.
    pub fn channels(&self) -> usize {
        2 * self.key_size() + self.value_size()
    }
}
