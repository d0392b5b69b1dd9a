//! A tensor of a model: its name on disk, its shape, and its role.

use serde::{Deserialize, Serialize};

/// The purpose of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// The table of token embeddings `[vocab, hidden]`.
    Embedding,
    /// Weight of an RMSNorm.
    Norm,
    /// Weight `[out, in]` of a linear module of a layer.
    Projection,
    /// Router `[experts, hidden]` of a mixture of experts, or the gate `[1, hidden]` of a shared expert: small, and never quantized.
    Router,
    /// Correction `[experts]` of the scores by which a router chooses: f32, and it never trains.
    RouterCorrection,
    /// Factors of a router's input, `[hidden]`, or of the weights of experts, `[experts]`: f32, and they never train.
    RouterScale,
    /// Bias `[out]` of a linear module.
    Bias,
    /// Filters `[channels, 1, width]` of a depthwise convolution: f32, and never quantized.
    Filters,
    /// Logarithm of the largest decay of a state, `[heads]`: f32, and never quantized.
    DecayLog,
    /// What is added to the inputs of the decay, `[heads]`: f32, and never quantized.
    DecayBias,
    /// Weight of an RMSNorm before a gate, which multiplies as it is whatever the form of the others.
    GatedNorm,
    /// Logits `[heads]` of attention's sinks: never quantized.
    Sinks,
    /// The number `[1]` that a layer's output is multiplied by: it never trains, and is never quantized.
    LayerScalar,
    /// The table of layers' own inputs, `[vocab_size_per_layer_input, layers * width]`: it never trains, and stays in host memory.
    PerLayerEmbedding,
    /// The output head `[vocab, hidden]`.
    Head,
    /// LoRA's A `[r, in]`.
    LoraA,
    /// LoRA's B `[out, r]`.
    LoraB,
    /// DoRA's magnitudes `[out]`.
    LoraMagnitude,
    /// Single rows of embedding or head that train, `[tokens, hidden]`.
    TokenRows,
}

/// A tensor of a model or of an adapter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// Name on disk.
    pub name: String,
    /// Shape on disk.
    pub shape: Vec<usize>,
    /// Its purpose.
    pub role: Role,
    /// The layer it belongs to; `None` for embedding, final norm, head, and what computes the layers' own inputs.
    pub layer: Option<usize>,
}

impl TensorSpec {
    /// Returns the number of values; `usize::MAX` for more, which a hostile config.json can describe.
    pub fn elements(&self) -> usize {
        self.shape.iter().fold(1, |elements, &size| elements.saturating_mul(size))
    }

    /// Returns whether the tensor trains in full fine-tuning.
    pub fn may_train(&self) -> bool {
        let never = [Role::RouterCorrection, Role::RouterScale, Role::LayerScalar, Role::PerLayerEmbedding];
        !never.contains(&self.role)
    }
}
