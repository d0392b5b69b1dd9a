//! The format in which a run has each tensor of its base: asked by the loader, by the plan, and for the route of a group.
//!
//! Trade-off: the plan counts whole tensors; tables in which codes are looked up are shared, and are not counted.

use std::collections::BTreeSet;

use firebrick_arch::{EMBEDDING, HEAD, LoraConfig, ModelSpec, Role, TensorSpec};
use firebrick_precision::{FloatType, Format, QuantFormat};
use serde::{Deserialize, Serialize};

use super::{MatrixScales, matrix_scales, part_sizes};

/// Storage of the base weights on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BaseStorage {
    /// Every weight trains, in f32.
    Trained,
    /// Every weight trains: matrices in bf16, everything else in f32.
    TrainedBf16,
    /// Frozen in this format; if it is a quantized one, only projections are quantized, and everything else has the compute format.
    Frozen(Format),
}

impl BaseStorage {
    /// Returns whether every weight trains.
    pub const fn trains(self) -> bool {
        matches!(self, Self::Trained | Self::TrainedBf16)
    }

    /// Returns the format of a tensor with this role that trains. Routers are small and decide, so they stay in f32.
    pub const fn trained_format(self, role: Role) -> FloatType {
        match (self, role) {
            (Self::TrainedBf16, Role::Embedding | Role::Projection | Role::Head) => FloatType::Bf16,
            _ => FloatType::F32,
        }
    }
}

/// The settings of a run that determine how it stores its base.
#[derive(Clone, Copy, Debug)]
pub struct Storage<'a> {
    /// Storage of frozen projections.
    pub base: BaseStorage,
    /// The adapter, with the modules that train whole next to it.
    pub lora: Option<&'a LoraConfig>,
    /// Format of frozen weights that are not quantized.
    pub compute: FloatType,
    /// Projections that stay unquantized, as they are in the folder.
    pub dense: &'a BTreeSet<String>,
}

impl Storage<'_> {
    /// Returns whether a tensor of the base trains.
    pub fn trains(&self, name: &str) -> bool {
        self.base.trains() || self.lora.is_some_and(|lora| lora.saves_tensor(name))
    }

    /// Returns the format of a tensor of the model, given its name in the folder or in the run, where the experts of a module are one tensor.
    pub fn storage_of(&self, model: &ModelSpec, name: &str, role: Role) -> Format {
        match (role, self.base) {
            (
                Role::Norm
                | Role::GatedNorm
                | Role::Bias
                | Role::RouterCorrection
                | Role::RouterScale
                | Role::LayerScalar
                | Role::Sinks
                | Role::Filters
                | Role::DecayLog
                | Role::DecayBias,
                _,
            ) => Format::Float(FloatType::F32),
            _ if self.trains(name) => Format::Float(self.base.trained_format(role)),
            (Role::Projection, _) if self.dense.contains(name) => Format::Float(self.compute),
            (Role::Projection, _) if model.is_mxfp4(name) => Format::Quantized(QuantFormat::Mxfp4),
            (Role::Projection, BaseStorage::Frozen(format @ Format::Quantized(_))) => format,
            _ => Format::Float(self.compute),
        }
    }

    /// Returns the bytes on the device of all tensors that do not train.
    pub fn frozen_bytes(&self, model: &ModelSpec) -> u64 {
        let tensors = model.stacked_tensors();
        let frozen = tensors.iter().filter(|tensor| !self.trains(&tensor.name));
        let frozen: u64 = frozen.map(|tensor| self.bytes(model, tensor)).sum();
        // With tied tables, the head keeps its initial weight if only the embedding trains.
        let keeps_head = model.tie_word_embeddings && self.trains(EMBEDDING) && !self.trains(HEAD);
        frozen
            + if keeps_head { self.compute.bytes() as u64 * (model.vocab_size * model.hidden_size) as u64 } else { 0 }
    }

    /// Returns the bytes on the device of a tensor of the run: none of those that stay on the host.
    pub fn bytes(&self, model: &ModelSpec, tensor: &TensorSpec) -> u64 {
        if matches!(tensor.role, Role::PerLayerEmbedding | Role::LayerScalar) {
            return 0;
        }
        match self.storage_of(model, &tensor.name, tensor.role) {
            Format::Float(float) => (tensor.elements() * float.bytes()) as u64,
            Format::Quantized(format) => {
                quantized_bytes(format, [tensor.shape[0], tensor.shape[1]], model.experts_of(&tensor.name)) as u64
            }
        }
    }
}

/// Returns the bytes of a quantized matrix `[out, in]` on a device with bytes, or of a stack of `experts` of them: codes in whole blocks, and scales.
fn quantized_bytes(format: QuantFormat, [rows, columns]: [usize; 2], experts: Option<usize>) -> usize {
    let has_float_scales =
        experts.is_some_and(|experts| matrix_scales(format, [rows / experts, columns]) == MatrixScales::Float);
    part_sizes(format, [rows, columns], has_float_scales).iter().map(|[count, bytes]| count * bytes).sum()
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::testing::{Plain, random};
    use crate::{QuantizedWeight, WeightOps};

    #[test]
    fn planned_bytes_are_those_of_the_weight() {
        for (format, shape) in QuantFormat::ALL.into_iter().flat_map(|format| [(format, [7, 320]), (format, [300, 64])])
        {
            let weight: QuantizedWeight<Plain> = Plain::quantize_weight(random::<Plain, 2>(3, shape), format);
            assert_eq!(quantized_bytes(format, shape, None), weight.bytes(), "{format} {shape:?}");
        }
    }
}
