//! The gated short convolution of LFM2: sizes, linear modules, filters, FLOPs, saved values and state.

use serde::{Deserialize, Serialize};

use super::{CacheSize, MixerGroups, MixerSizes};
use crate::modules::{GroupKind, group};
use crate::tensor_spec::{Role, TensorSpec};
use crate::values::Value;

/// A causal depthwise convolution between two gates: `out_proj(c * conv(b * x))`, where one projection computes `b`, `c` and `x`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShortConvSpec {
    /// Channels: the hidden size of the model.
    pub channels: usize,
    /// Tokens that a filter covers, its own included.
    pub width: usize,
}

impl ShortConvSpec {
    /// Returns the filters.
    pub fn filters(&self, layer: usize) -> TensorSpec {
        let name = format!("model.layers.{layer}.conv.conv.weight");
        TensorSpec { name, shape: vec![self.channels, 1, self.width], role: Role::Filters, layer: Some(layer) }
    }
}

impl MixerSizes for ShortConvSpec {
    fn groups(&self, layer: usize, hidden: usize) -> MixerGroups {
        let [b, c, x] = ["b", "c", "x"].map(|part| (part, self.channels));
        let (input, output) = ([b, c, x], [("conv.out_proj", hidden)]);
        MixerGroups {
            input: group(layer, GroupKind::MixerInput, hidden, &input, Some("conv.in_proj"), false),
            output: group(layer, GroupKind::MixerOutput, self.channels, &output, None, false),
        }
    }

    fn vectors(&self, layer: usize) -> Vec<TensorSpec> {
        vec![self.filters(layer)]
    }

    fn forward_flops_per_token(&self, _document_tokens: f64) -> f64 {
        2.0 * (self.width * self.channels) as f64
    }

    fn values(&self) -> Vec<Value> {
        let part = Value::part(self.channels);
        vec![part, part, part, Value::mixed(self.channels)]
    }

    /// Returns the size of the last products of the gate and its input, in f32, which take as much as two values of 16 bits.
    fn cache(&self) -> CacheSize {
        CacheSize { per_token: 0, per_sequence: 2 * (self.width - 1) * self.channels }
    }
}
