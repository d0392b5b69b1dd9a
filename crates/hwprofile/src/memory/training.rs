//! How a model is trained, as far as memory depends on it: storage of the base, adapter, rows, and what blocks keep.

use serde::{Deserialize, Serialize};

use super::shape::elements;
use super::{LoraShape, ModelShape};

/// How the frozen base is stored on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BaseStorage {
    /// The blocks' linear layers in 4-bit NormalFloat (Dettmers et al., QLoRA, 2023); embedding, head and norms as activations.
    Nf4 {
        /// Whether block scales are quantised too.
        double_quant: bool,
    },
    /// 2 bytes a parameter.
    Bf16,
    /// 4 bytes a parameter.
    F32,
}

/// What a block keeps between forward and backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Recompute {
    /// Its input only; its forward runs again in the backward.
    Full,
    /// What matrix products and attention made.
    Selective,
    /// Everything that its backward reads.
    None,
}

/// How the model is trained, as far as memory depends on it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrainingShape {
    /// Storage of the base. Without LoRA there is no frozen base and this says nothing.
    pub base: BaseStorage,
    /// The adapter; `None`: every parameter of the model trains.
    pub lora: Option<LoraShape>,
    /// Optimizer state: 8 for AdamW in f32, 2.03 for 8-bit AdamW, 0 for none.
    pub optimizer_bytes_per_parameter: f64,
    /// Rows of a micro-batch.
    pub micro_batch_size: usize,
    /// Tokens of a row.
    pub row_len: usize,
    /// What blocks keep.
    pub recompute: Recompute,
    /// Whether, under [`Recompute::Full`], block inputs wait in host memory.
    pub offload: bool,
    /// Whose accounting applies: `true` for the CUDA engine in a half format (groups of projections converted into scratch
    /// memory with their adapters merged in, gradients in place of activations, no attention scores), `false` for the
    /// portable bodies.
    pub fused: bool,
    /// Bytes of an activation: 4 for f32, 2 for bf16.
    pub activation_bytes: usize,
    /// Bytes of a trained parameter, and of its accumulated gradient: 4, as both are f32.
    pub trainable_bytes: usize,
    /// Rows of logits that exist at a time.
    pub loss_chunk_tokens: usize,
    /// Tokens of the longest document where attention holds its scores (the portable body); 0 where it does not (cuDNN and
    /// flash kernels). Without effect where `fused`.
    pub score_tokens: usize,
}

/// Values in a block of NF4, and blocks under one scale of scales: bitsandbytes' sizes, which its files are made with.
const NF4_BLOCK: u64 = 64;
const NF4_NESTED_BLOCK: u64 = 256;

/// Offloaded block inputs that are on the device at the same time: the one in use, and two on their way out or back.
const INPUTS_ON_DEVICE: u64 = 3;

impl BaseStorage {
    /// Bytes of one weight matrix of `parameters` values: 4.127 bits a value for NF4 with double quantisation, 4.5 without.
    pub fn matrix_bytes(self, parameters: u64) -> u64 {
        let blocks = parameters.div_ceil(NF4_BLOCK);
        match self {
            Self::F32 => 4 * parameters,
            Self::Bf16 => 2 * parameters,
            Self::Nf4 { double_quant: false } => parameters.div_ceil(2) + 4 * blocks,
            // One byte a block, one f32 a nested block, and the mean.
            Self::Nf4 { double_quant: true } => {
                parameters.div_ceil(2) + blocks + 4 * blocks.div_ceil(NF4_NESTED_BLOCK) + 4
            }
        }
    }

    /// Bytes of a parameter outside the blocks' linear layers.
    fn other_bytes(self, activation_bytes: usize) -> u64 {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
            Self::Nf4 { .. } => activation_bytes as u64,
        }
    }

    /// Whether a weight must be converted before it can be multiplied with activations of this many bytes.
    pub(super) fn needs_conversion(self, activation_bytes: usize) -> bool {
        match self {
            Self::F32 => activation_bytes != 4,
            Self::Bf16 => activation_bytes != 2,
            Self::Nf4 { .. } => true,
        }
    }
}

impl TrainingShape {
    /// Tokens of a micro-batch.
    pub fn tokens(&self) -> u64 {
        elements([self.micro_batch_size, self.row_len])
    }

    /// Parameters that get a gradient and optimizer state.
    pub fn trained_parameters(&self, model: &ModelShape) -> u64 {
        self.lora.as_ref().map_or_else(|| model.total_parameters(), |lora| lora.parameters(model))
    }

    /// Bytes of the frozen base, or of the copy in compute precision that full training multiplies with (none where the
    /// trained weights already have that precision, or are converted as they are needed).
    pub fn base_bytes(&self, model: &ModelShape) -> u64 {
        if self.lora.is_none() {
            let copied = self.activation_bytes < self.trainable_bytes && !self.fused;
            return if copied { model.total_parameters() * self.activation_bytes as u64 } else { 0 };
        }
        let block: u64 = model.linear_parameters().map(|parameters| self.base.matrix_bytes(parameters)).sum();
        let others = model.norm_parameters() + model.embedding_parameters() + model.head_parameters();
        block * model.num_hidden_layers as u64 + others * self.base.other_bytes(self.activation_bytes)
    }

    /// Bytes per token of everything that the backward of one block reads: what [`Recompute::Selective`] keeps, both normed
    /// inputs, and the product of gate and up.
    pub fn block_bytes_per_token(&self, model: &ModelShape) -> u64 {
        let elementwise = 2 * model.hidden_size + model.intermediate_size;
        self.selective_bytes_per_token(model) + (elementwise * self.activation_bytes) as u64
    }

    /// Bytes per token of what matrix products and attention made in one block: input, queries, keys, values, attention
    /// output with one f32 log-sum-exp a head, the sum after attention, gate and up.
    pub fn selective_bytes_per_token(&self, model: &ModelShape) -> u64 {
        let products =
            2 * model.hidden_size + 2 * model.query_width() + 2 * model.key_value_width() + 2 * model.intermediate_size;
        (products * self.activation_bytes + 4 * model.num_attention_heads) as u64
    }

    /// Blocks whose stored activations are on the device at the same time.
    pub fn stored_blocks(&self, model: &ModelShape) -> u64 {
        let blocks = model.num_hidden_layers as u64;
        if self.is_offloaded() { blocks.min(INPUTS_ON_DEVICE) } else { blocks }
    }

    /// Bytes of block inputs that wait in host memory: all but the last block's, which is needed at once.
    pub fn offloaded_bytes(&self, model: &ModelShape) -> u64 {
        let blocks = (model.num_hidden_layers as u64).saturating_sub(1);
        if self.is_offloaded() { blocks * self.tokens() * self.stored_bytes_per_token(model) } else { 0 }
    }

    fn is_offloaded(&self) -> bool {
        self.offload && self.recompute == Recompute::Full
    }

    /// Bytes per token that the forward stores for one block until its backward, on the device or in host memory.
    pub fn stored_bytes_per_token(&self, model: &ModelShape) -> u64 {
        match self.recompute {
            Recompute::Full => (model.hidden_size * self.activation_bytes) as u64,
            Recompute::Selective => self.selective_bytes_per_token(model),
            Recompute::None => self.block_bytes_per_token(model),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nf4_takes_4_127_bits_a_weight_with_double_quantisation_and_4_5_without() {
        let parameters = 4096 * 14_336;
        let bits =
            |double_quant| 8.0 * BaseStorage::Nf4 { double_quant }.matrix_bytes(parameters) as f64 / parameters as f64;
        assert!((bits(true) - 4.127).abs() < 1e-3, "{}", bits(true));
        assert_eq!(bits(false), 4.5);
    }

    #[test]
    fn a_matrix_smaller_than_a_block_still_has_its_scales() {
        assert_eq!(BaseStorage::Nf4 { double_quant: true }.matrix_bytes(3), 2 + 1 + 4 + 4);
        assert_eq!(BaseStorage::Nf4 { double_quant: false }.matrix_bytes(65), 33 + 8);
    }
}
