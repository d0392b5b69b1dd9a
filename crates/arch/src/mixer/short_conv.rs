//! The gated short convolution of LFM2: sizes, linear modules, filters, FLOPs, saved values and state.

use serde::{Deserialize, Serialize};

use super::{CacheSize, MixerGroups, MixerSizes};
use crate::modules::{GroupKind, group};
use crate::naming::LayerPath;
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
    /// The largest width.
    pub const MAX_WIDTH: usize = 8;
}

impl MixerSizes for ShortConvSpec {
    fn groups(&self, at: LayerPath, hidden: usize) -> MixerGroups {
        let [b, c, x] = ["b", "c", "x"].map(|part| (part, self.channels));
        let (input, output) = ([b, c, x], [("conv.out_proj", hidden)]);
        MixerGroups {
            input: group(at, GroupKind::MixerInput, hidden, &input, Some("conv.in_proj"), false),
            output: group(at, GroupKind::MixerOutput, self.channels, &output, None, false),
        }
    }

    fn vectors(&self, at: LayerPath) -> Vec<TensorSpec> {
        let filters = at.vector("conv.conv.weight", 0, Role::Filters);
        vec![TensorSpec { shape: vec![self.channels, 1, self.width], ..filters }]
    }

    fn forward_flops_per_token(&self, _document_tokens: f64) -> f64 {
        2.0 * (self.width * self.channels) as f64
    }

    fn values(&self) -> Vec<Value> {
        vec![Value::part(3 * self.channels), Value::mixed(self.channels)]
    }

    /// Returns the size of the last products of the gate and its input, in f32, which take as much as two values of 16 bits.
    fn cache(&self) -> CacheSize {
        CacheSize { per_token: 0, per_sequence: 2 * (self.width - 1) * self.channels }
    }
}
