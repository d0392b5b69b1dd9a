//! What mixes the tokens of a layer, and what depends on its kind: linear modules, other tensors, FLOPs, saved values and cache.
//!
//! A kind is one file here, one in the model crate's `mixer/`, and a folder of operations in the kernels crate; no other code asks which it is.

mod attention;
mod delta_net;
mod short_conv;

use std::ops::Deref;

use serde::{Deserialize, Serialize};

pub use attention::{AttentionSpec, KeysAndValues, OutputGate, QkNorm};
pub use delta_net::{DeltaNetSpec, DeltaProjections};
pub use short_conv::ShortConvSpec;

use crate::modules::GroupSpec;
use crate::naming::LayerPath;
use crate::tensor_spec::TensorSpec;
use crate::values::Value;

/// The mixer of a layer: it reads the residual stream through one group of linear modules, and writes to it through another.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mixer {
    /// Causal self attention.
    Attention(AttentionSpec),
    /// A gated short convolution.
    ShortConv(ShortConvSpec),
    /// Gated DeltaNet.
    DeltaNet(DeltaNetSpec),
}

/// The linear modules of a mixer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MixerGroups {
    /// From the layer's input to what the mixer reads, e.g. queries, keys and values.
    pub input: GroupSpec,
    /// From what it computes to the residual stream.
    pub output: GroupSpec,
}

/// Values that a mixer keeps of earlier tokens in generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheSize {
    /// Of every token.
    pub per_token: usize,
    /// Of a sequence, whatever its length.
    pub per_sequence: usize,
}

impl Mixer {
    /// Returns attention, if that is what mixes tokens.
    pub fn attention(&self) -> Option<&AttentionSpec> {
        if let Self::Attention(attention) = self { Some(attention) } else { None }
    }

    /// Returns it to be changed.
    pub fn attention_mut(&mut self) -> Option<&mut AttentionSpec> {
        if let Self::Attention(attention) = self { Some(attention) } else { None }
    }
}

/// What a mixer answers for its kind.
pub trait MixerSizes {
    /// Returns the linear modules of a layer.
    fn groups(&self, at: LayerPath, hidden: usize) -> MixerGroups;

    /// Returns the tensors of a layer besides those of linear modules; a folder is read in this order, after the first group.
    fn vectors(&self, at: LayerPath) -> Vec<TensorSpec>;

    /// Returns the forward FLOPs per token between the two groups, for documents of `document_tokens` tokens.
    fn forward_flops_per_token(&self, document_tokens: f64) -> f64;

    /// Lists the values of a layer that are the mixer's.
    fn values(&self) -> Vec<Value>;

    /// Returns the size of the cache.
    fn cache(&self) -> CacheSize;

    /// Returns the layer whose cache the mixer of layer `layer` reads: its own, unless keys and values are another's.
    fn cache_of(&self, layer: usize) -> usize {
        layer
    }
}

impl Deref for Mixer {
    type Target = dyn MixerSizes;

    fn deref(&self) -> &Self::Target {
        match self {
            Self::Attention(attention) => attention,
            Self::ShortConv(conv) => conv,
            Self::DeltaNet(delta) => delta,
        }
    }
}
