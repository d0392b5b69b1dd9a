//! The sizes of a Llama-architecture model: parameters, and floating-point operations per token.

use serde::{Deserialize, Serialize};

use super::LinearLayer;

/// Sizes of a decoder, under the names of Hugging Face's `config.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelShape {
    /// Rows of the embedding table.
    pub vocab_size: usize,
    /// Model width.
    pub hidden_size: usize,
    /// Feed-forward width.
    pub intermediate_size: usize,
    /// Blocks.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key and value heads.
    pub num_key_value_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Whether the output head is the embedding table itself.
    pub tie_word_embeddings: bool,
}

impl ModelShape {
    /// Width of all query heads together.
    pub fn query_width(&self) -> usize {
        self.num_attention_heads * self.head_dim
    }

    /// Width of all key heads (and of all value heads) together.
    pub fn key_value_width(&self) -> usize {
        self.num_key_value_heads * self.head_dim
    }

    /// `[out, in]` of one of a block's linear layers.
    pub fn linear_shape(&self, layer: LinearLayer) -> [usize; 2] {
        let (d, f) = (self.hidden_size, self.intermediate_size);
        match layer {
            LinearLayer::QProj => [self.query_width(), d],
            LinearLayer::KProj | LinearLayer::VProj => [self.key_value_width(), d],
            LinearLayer::OProj => [d, self.query_width()],
            LinearLayer::GateProj | LinearLayer::UpProj => [f, d],
            LinearLayer::DownProj => [d, f],
        }
    }

    /// Parameters of each linear layer of one block.
    pub fn linear_parameters(&self) -> impl Iterator<Item = u64> + '_ {
        LinearLayer::ALL.into_iter().map(|layer| elements(self.linear_shape(layer)))
    }

    /// Parameters of all linear layers of one block.
    pub fn block_linear_parameters(&self) -> u64 {
        self.linear_parameters().sum()
    }

    /// Parameters of all norms: two a block and the last one.
    pub fn norm_parameters(&self) -> u64 {
        (2 * self.num_hidden_layers as u64 + 1) * self.hidden_size as u64
    }

    /// Parameters of the embedding table.
    pub fn embedding_parameters(&self) -> u64 {
        elements([self.vocab_size, self.hidden_size])
    }

    /// Parameters of the output head that are not the embedding table's.
    pub fn head_parameters(&self) -> u64 {
        if self.tie_word_embeddings { 0 } else { self.embedding_parameters() }
    }

    /// All parameters: 8.03e9 for Llama-3.1-8B.
    pub fn total_parameters(&self) -> u64 {
        let blocks = self.num_hidden_layers as u64 * self.block_linear_parameters();
        blocks + self.norm_parameters() + self.embedding_parameters() + self.head_parameters()
    }

    /// Parameters that multiply every token, `N` below: the blocks' linear layers and the head, tied or not. The embedding
    /// is a look-up and the norms are no matrix product.
    pub fn matmul_parameters(&self) -> u64 {
        self.num_hidden_layers as u64 * self.block_linear_parameters() + self.embedding_parameters()
    }

    /// Operations per token of one forward through attention's two products, all blocks: a query meets half of its document
    /// on average, so `2 products * 2 operations * document / 2 * query width` a block.
    pub fn attention_forward_flops_per_token(&self, document_tokens: f64) -> f64 {
        2.0 * document_tokens * (self.num_hidden_layers * self.query_width()) as f64
    }

    /// Operations per token that training this model takes, the numerator of MFU.
    ///
    /// A matrix of `N` parameters takes `2 N` operations a token forward, `2 N` for the gradient of its input, and `2 N` for
    /// the gradient of itself: `6 N` for full training, `4 N` for LoRA, whose frozen matrices need no gradient of themselves
    /// (the adapter's own products are under 1 % and not counted). Attention's products have no parameters: backward is
    /// twice the forward either way. Recomputation does not count: it is work, but no progress.
    pub fn model_flops_per_token(&self, lora: bool, document_tokens: f64) -> f64 {
        let passes = if lora { 4.0 } else { 6.0 };
        passes * self.matmul_parameters() as f64 + 3.0 * self.attention_forward_flops_per_token(document_tokens)
    }
}

pub(super) fn elements([rows, columns]: [usize; 2]) -> u64 {
    rows as u64 * columns as u64
}

#[cfg(test)]
pub(crate) fn llama_3_1_8b() -> ModelShape {
    ModelShape {
        vocab_size: 128_256,
        hidden_size: 4096,
        intermediate_size: 14_336,
        num_hidden_layers: 32,
        num_attention_heads: 32,
        num_key_value_heads: 8,
        head_dim: 128,
        tie_word_embeddings: false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn llama_3_1_8b_has_its_published_parameter_count() {
        let model = llama_3_1_8b();
        assert_eq!(model.total_parameters(), 8_030_261_248);
        assert_eq!(model.block_linear_parameters(), 218_103_808);
        assert_eq!(model.matmul_parameters(), 7_504_658_432);
    }

    #[test]
    fn llama_3_2_1b_shares_its_head_with_the_embedding() {
        let model = ModelShape {
            hidden_size: 2048,
            intermediate_size: 8192,
            num_hidden_layers: 16,
            head_dim: 64,
            tie_word_embeddings: true,
            ..llama_3_1_8b()
        };
        assert_eq!(model.total_parameters(), 1_235_814_400);
        assert_eq!(model.head_parameters(), 0);
    }

    #[test]
    fn lora_takes_two_thirds_of_the_matrix_work_of_full_training() {
        let model = llama_3_1_8b();
        let (lora, full) = (model.model_flops_per_token(true, 0.0), model.model_flops_per_token(false, 0.0));
        assert_eq!(lora * 6.0, full * 4.0);
        let attention = model.model_flops_per_token(true, 4096.0) - lora;
        assert_eq!(attention, 3.0 * 2.0 * 4096.0 * 32.0 * 4096.0);
    }
}
