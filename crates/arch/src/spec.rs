//! The description of a decoder-only transformer: every size and constant that decides its arithmetic.
//!
//! A [`ModelSpec`] is data. A model family (`families/`) builds one from a `config.json`; the model crate builds layers from it, and
//! everything that counts or lists tensors asks it. Sizes carry the names of Hugging Face's `config.json`.
//! Not supported: encoders, cross attention, and anything that is not a stack of attention and MLP layers.

use serde::{Deserialize, Serialize};

use crate::rope::Rope;

/// A decoder: embedding, layers, final norm, head.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelSpec {
    /// Number of tokens: rows of the embedding and of the head.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// The layers, in the order of the forward pass.
    pub layers: Vec<LayerSpec>,
    /// The rotary embeddings that layers refer to by index.
    pub ropes: Vec<Rope>,
    /// Added to the mean square inside every RMSNorm.
    pub rms_norm_eps: f64,
    /// Whether the head shares the embedding's weight.
    pub tie_word_embeddings: bool,
    /// The longest context that the model was trained for, in tokens.
    pub max_position_embeddings: usize,
    /// Standard deviation of randomly initialized weights.
    pub initializer_range: f64,
}

/// One decoder layer: attention and MLP, each after an RMSNorm and added to the residual stream.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerSpec {
    /// Self attention.
    pub attention: AttentionSpec,
    /// The MLP.
    pub mlp: MlpSpec,
}

/// Causal self attention with grouped key/value heads.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AttentionSpec {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// Index into [`ModelSpec::ropes`]; `None`: queries and keys are not rotated.
    pub rope: Option<usize>,
    /// Whether queries and keys are normalized before the rotation, and over what.
    pub qk_norm: QkNorm,
    /// Whether the query, key and value projections have a bias.
    pub qkv_bias: bool,
    /// Whether the output projection has a bias.
    pub output_bias: bool,
    /// Keys that a query sees, itself included; `None`: all earlier ones. Query `t` sees keys `t - window + 1 ..= t`.
    pub window: Option<usize>,
    /// Factor of the scores, usually `1 / sqrt(head_dim)`.
    pub scale: f64,
}

/// RMSNorm of queries and keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum QkNorm {
    /// None.
    None,
    /// Over each head, with one weight `[head_dim]` for all query heads and one for all key heads (Qwen3).
    PerHead,
}

/// The MLP of a layer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MlpSpec {
    /// `down(activation(gate(x)) * up(x))` (Shazeer, GLU variants improve transformer, 2020).
    Gated {
        /// Hidden width of the MLP.
        intermediate_size: usize,
        /// Activation of the gate.
        activation: Activation,
        /// Whether the three projections have a bias.
        bias: bool,
    },
}

/// Activation function of a gated MLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// `x * sigmoid(x)`.
    Silu,
}

impl Activation {
    /// All of them.
    pub const ALL: [Self; 1] = [Self::Silu];

    /// The name in `hidden_act` of a `config.json`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Silu => "silu",
        }
    }
}

impl AttentionSpec {
    /// The usual factor of the scores, `1 / sqrt(head_dim)`.
    pub fn default_scale(head_dim: usize) -> f64 {
        1.0 / (head_dim as f64).sqrt()
    }

    /// Width of all query heads together.
    pub fn query_size(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Width of all key heads (or of all value heads) together.
    pub fn kv_size(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// The window, if it hides anything in a document of `longest` tokens.
    pub fn window_within(&self, longest: usize) -> Option<usize> {
        self.window.filter(|&window| window < longest)
    }
}

impl MlpSpec {
    /// Hidden width.
    pub fn intermediate_size(&self) -> usize {
        let Self::Gated { intermediate_size, .. } = self;
        *intermediate_size
    }

    /// Activation of the gate.
    pub fn activation(&self) -> Activation {
        let Self::Gated { activation, .. } = self;
        *activation
    }

    /// Whether the projections have a bias.
    pub fn bias(&self) -> bool {
        let Self::Gated { bias, .. } = self;
        *bias
    }
}
