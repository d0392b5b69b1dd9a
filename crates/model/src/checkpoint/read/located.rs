//! A located tensor of the model: one tensor of a file, a part of one, or several if it is quantized.

use std::path::Path;

use safetensors::tensor::TensorInfo;

use crate::checkpoint::experts::fused::ExpertSlice;
use crate::checkpoint::quantized::QuantizedWeight;
use crate::checkpoint::read::shard::Shard;

/// A tensor of the model, found.
pub(crate) enum Located<'a> {
    /// Unquantized.
    Plain(&'a Shard, &'a TensorInfo),
    /// In a tensor of all experts in one of these shards.
    OfExpert(&'a ExpertSlice, &'a [Shard]),
    /// In several tensors of these shards.
    Quantized(&'a QuantizedWeight, &'a [Shard]),
}

impl Located<'_> {
    pub(crate) fn shape(&self) -> &[usize] {
        match self {
            Self::Plain(_, info) => &info.shape,
            Self::OfExpert(slice, _) => &slice.shape,
            Self::Quantized(weight, _) => &weight.shape,
        }
    }

    pub(crate) fn path(&self) -> &Path {
        match self {
            Self::Plain(shard, _) => shard.path(),
            Self::OfExpert(slice, shards) => slice.path(shards),
            Self::Quantized(weight, shards) => weight.path(shards),
        }
    }
}
