//! A located tensor of the model: one tensor of a file, or several if it is quantized.
//!
//! Trade-off: a tensor is stored in one of these two ways, so a format with another needs a third variant.

use std::path::Path;

use safetensors::tensor::TensorInfo;

use super::quantized::QuantizedWeight;
use super::shard::Shard;

/// A tensor of the model, found.
pub(super) enum Located<'a> {
    /// Unquantized.
    Plain(&'a Shard, &'a TensorInfo),
    /// In several tensors of these shards.
    Quantized(&'a QuantizedWeight, &'a [Shard]),
}

impl Located<'_> {
    pub(super) fn shape(&self) -> &[usize] {
        match self {
            Self::Plain(_, info) => &info.shape,
            Self::Quantized(weight, _) => &weight.shape,
        }
    }

    pub(super) fn path(&self) -> &Path {
        match self {
            Self::Plain(shard, _) => shard.path(),
            Self::Quantized(weight, shards) => weight.path(shards),
        }
    }
}
