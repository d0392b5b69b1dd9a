//! The description of a decoder-only transformer: every size and constant that decides its arithmetic.
//!
//! A [`ModelSpec`] is data. A model family (`families/`) builds one from a `config.json`; the model crate builds layers from it, and
//! everything that counts or lists tensors asks it. Sizes carry the names of Hugging Face's `config.json`.
//! Not supported: encoders, cross attention, and anything that is not a stack of layers with a mixer and an MLP each.

use serde::{Deserialize, Serialize};

use crate::mixer::{AttentionSpec, Mixer};
use crate::modules::OutputOrder;
use crate::naming::Naming;
use crate::rope::Rope;
use crate::router::{RouterSpec, SharedExpertSpec};
use crate::tensor_spec::{Role, TensorSpec};
use crate::text_names::{is_expert, layer_of};

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
    /// Added to the weights of the RMSNorms before they multiply ([`Self::norm_offset_of`]): 1 where a checkpoint stores `weight - 1` (Gemma), else 0.
    pub norm_offset: f64,
    /// What the family calls tensors and modules.
    #[serde(default)]
    pub naming: Naming,
    /// Factor of the embedding's rows; `None`: 1.
    pub embedding_scale: Option<f64>,
    /// Whether that factor is rounded to the compute format first, as transformers does in Gemma.
    pub rounds_embedding_scale: bool,
    /// Divisor of the logits, before the soft cap: 1 in most families.
    pub logits_scaling: f64,
    /// `cap`, where logits become `cap * tanh(logits / cap)`.
    pub logit_soft_cap: Option<f64>,
    /// Whether the head shares the embedding's weight.
    pub tie_word_embeddings: bool,
    /// The longest context that the model was trained for, in tokens.
    pub max_position_embeddings: usize,
    /// Standard deviation of randomly initialized weights.
    pub initializer_range: f64,
    /// Inputs of each layer besides the residual stream (Gemma 4 E2B, E4B).
    pub per_layer_inputs: Option<PerLayerInputs>,
}

/// Inputs of each layer besides the residual stream: of each token a row of a table for all layers, and a projection of its scaled embedding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PerLayerInputs {
    /// Width of a layer's input, `hidden_size_per_layer_input`.
    pub width: usize,
    /// Rows of the table, `vocab_size_per_layer_input`.
    pub vocab_size: usize,
}

/// One decoder layer: mixer and MLP, each with its RMSNorms and added to the residual stream.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerSpec {
    /// What mixes tokens.
    pub mixer: Mixer,
    /// The MLP.
    pub mlp: MlpSpec,
    /// The places of the RMSNorms.
    pub norms: LayerNorms,
    /// Whether its output is multiplied by a stored number, `layer_scalar` `[1]`, which never trains (Gemma 4).
    pub has_scalar: bool,
}

/// The places where a layer normalizes: the inputs of mixer and MLP, their outputs before they are added to the residual stream, or both.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LayerNorms {
    /// The inputs: `x + mixer(norm(x))` (Llama).
    Pre,
    /// The outputs: `x + norm(mixer(x))` (OLMo 2).
    Post,
    /// Both: `x + norm(mixer(norm(x)))` (Gemma 2).
    PreAndPost,
    /// Both, with the names of GLM-4.
    PreAndPostGlm,
}

/// Hugging Face's names of the RMSNorms of a layer over the hidden size, `None` where a layer has none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NormNames {
    /// Norm of the mixer's input.
    pub before_mixer: Option<&'static str>,
    /// Norm of the mixer's output.
    pub after_mixer: Option<&'static str>,
    /// Norm of the MLP's input.
    pub before_mlp: Option<&'static str>,
    /// Norm of the MLP's output.
    pub after_mlp: Option<&'static str>,
}

impl LayerNorms {
    /// Returns the names of the norms in a checkpoint. `post_attention_layernorm` is the MLP's input norm in one family and the mixer's output norm
    /// in another.
    pub const fn names(self) -> NormNames {
        const INPUT: &str = "input_layernorm";
        const POST: &str = "post_attention_layernorm";
        const OUTPUT: &str = "post_feedforward_layernorm";
        let [before_mixer, after_mixer, before_mlp, after_mlp] = match self {
            Self::Pre => [Some(INPUT), None, Some(POST), None],
            Self::Post => [None, Some(POST), None, Some(OUTPUT)],
            Self::PreAndPost => [Some(INPUT), Some(POST), Some("pre_feedforward_layernorm"), Some(OUTPUT)],
            Self::PreAndPostGlm => {
                [Some(INPUT), Some("post_self_attn_layernorm"), Some(POST), Some("post_mlp_layernorm")]
            }
        };
        NormNames { before_mixer, after_mixer, before_mlp, after_mlp }
    }
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
        /// Whether a checkpoint stores the gate and up projections as one module, `gate_up_proj` (Phi-3).
        fused: bool,
        /// Whether the three projections have a bias.
        bias: bool,
    },
    /// A mixture of experts: a router gives each token to `top_k` of `count` gated MLPs, whose outputs are added up with its weights
    /// (Shazeer et al., 2017; Jiang et al., Mixtral of experts, 2024).
    Experts {
        /// Number of experts.
        count: usize,
        /// Experts per token.
        top_k: usize,
        /// Hidden width of one expert.
        intermediate_size: usize,
        /// Activation of the gates.
        activation: Activation,
        /// How a token's experts are chosen and weighted.
        router: RouterSpec,
        /// The MLP that every token goes through next to its experts; `None` where there is none.
        shared: Option<SharedExpertSpec>,
        /// Names of the router and the experts in a checkpoint.
        names: ExpertNames,
        /// Whether gate and up of all experts are one module, `experts.gate_up_proj`, whose rows are gate's and then up's of each expert. LoRA then
        /// has one pair for it.
        fused: bool,
        /// Whether the projections of the experts have a bias.
        bias: bool,
        /// Whether a checkpoint stores the experts' weights in MXFP4. While they are frozen they stay so, whatever the format of the others.
        mxfp4: bool,
    },
}

/// Hugging Face's names inside a mixture of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExpertNames {
    /// `block_sparse_moe.gate`, `block_sparse_moe.experts.0.{w1,w3,w2}`.
    Mixtral,
    /// `mlp.gate`, `mlp.experts.0.{gate_proj,up_proj,down_proj}`, `mlp.shared_expert`, `mlp.shared_expert_gate`.
    Qwen,
    /// As [`Self::Qwen`], but `mlp.shared_experts`; also `mlp.gate.e_score_correction_bias`.
    DeepSeek,
    /// `feed_forward.gate`, `feed_forward.experts.0.{w1,w3,w2}`, `feed_forward.expert_bias`.
    Lfm2,
    /// `mlp.router`; experts as in [`Self::Qwen`] in the model, and on disk in one tensor each for gate and up and for down.
    GptOss,
    /// `router.proj`, `experts` and the dense `mlp`, all in the layer itself; experts on disk as in [`Self::GptOss`], in rows.
    Gemma4,
}

impl ExpertNames {
    /// Returns the path of the block inside its layer; empty if it is the layer itself.
    pub const fn block(self) -> &'static str {
        match self {
            Self::Mixtral => "block_sparse_moe",
            Self::Lfm2 => "feed_forward",
            Self::Qwen | Self::DeepSeek | Self::GptOss => "mlp",
            Self::Gemma4 => "",
        }
    }

    /// Returns the path inside the layer of a part of the block, such as `experts`.
    pub fn path(self, part: &str) -> String {
        path_in(self.block(), part)
    }

    /// Returns the name of the router inside the block.
    pub const fn router(self) -> &'static str {
        match self {
            Self::Mixtral | Self::Qwen | Self::DeepSeek | Self::Lfm2 => "gate",
            Self::GptOss => "router",
            Self::Gemma4 => "router.proj",
        }
    }

    /// Returns whether every checkpoint and every program has all experts of a projection in one tensor.
    pub const fn are_in_one_tensor(self) -> bool {
        matches!(self, Self::GptOss | Self::Gemma4)
    }

    /// The names of the correction of the router's scores inside the block.
    pub(crate) const CORRECTIONS: [&str; 2] = [".gate.e_score_correction_bias", ".expert_bias"];

    /// Returns that of this family.
    pub(crate) const fn correction(self) -> &'static str {
        if matches!(self, Self::Lfm2) { Self::CORRECTIONS[1] } else { Self::CORRECTIONS[0] }
    }

    /// Returns the path of the block in transformers 5, which has the experts of all families fused.
    pub const fn fused_block(self) -> &'static str {
        if matches!(self, Self::Lfm2 | Self::Gemma4) { self.block() } else { "mlp" }
    }

    /// Returns the path inside the layer of a part of that block.
    pub(crate) fn fused_path(self, part: &str) -> String {
        path_in(self.fused_block(), part)
    }

    /// Returns the name of the shared expert inside the block.
    pub const fn shared(self) -> &'static str {
        match self {
            Self::Mixtral | Self::DeepSeek | Self::GptOss | Self::Lfm2 => "shared_experts",
            Self::Qwen => "shared_expert",
            Self::Gemma4 => "mlp",
        }
    }

    /// Returns the order of gate and up in transformers' parameter of all experts.
    pub const fn gate_up_order(self) -> OutputOrder {
        match self {
            Self::GptOss => OutputOrder::InTurn,
            Self::Mixtral | Self::Qwen | Self::DeepSeek | Self::Lfm2 | Self::Gemma4 => OutputOrder::AsInRun,
        }
    }

    /// Returns the names of an expert's gate, up and down projections.
    pub const fn projections(self) -> [&'static str; 3] {
        match self {
            Self::Mixtral | Self::Lfm2 => ["w1", "w3", "w2"],
            Self::Qwen | Self::DeepSeek | Self::GptOss | Self::Gemma4 => ["gate_proj", "up_proj", "down_proj"],
        }
    }
}

/// Joins a path that may be empty with what is under it.
fn path_in(block: &str, part: &str) -> String {
    if block.is_empty() { part.to_owned() } else { format!("{block}.{part}") }
}

/// Activation function of a gated MLP: what is done to the gate, `a`, and to what it multiplies; plain `up` but for the last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// `x * sigmoid(x)`.
    Silu,
    /// `x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x³)))` (Hendrycks and Gimpel, Gaussian error linear units, 2016).
    GeluTanh,
    /// `sigmoid(x)`: output gates of attention.
    Sigmoid,
    /// `g * sigmoid(alpha g)` with `g = min(x, limit)`, times `1 + clamp(up, -limit, limit)` (gpt-oss).
    ClampedSwiglu(SwigluConstants),
}

/// The constants of [`Activation::ClampedSwiglu`], as bits: kernels are compiled for them, and found by them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct SwigluConstants {
    alpha: u32,
    limit: u32,
}

impl SwigluConstants {
    /// Those of the published gpt-oss models.
    pub const PUBLISHED: Self = Self::new(1.702, 7.0);

    /// Takes the factor inside the sigmoid, and the largest gate and magnitude of up.
    pub const fn new(alpha: f32, limit: f32) -> Self {
        Self { alpha: alpha.to_bits(), limit: limit.to_bits() }
    }

    /// Returns the factor inside the sigmoid.
    pub const fn alpha(self) -> f32 {
        f32::from_bits(self.alpha)
    }

    /// Returns the largest gate, and the largest magnitude of up.
    pub const fn limit(self) -> f32 {
        f32::from_bits(self.limit)
    }
}

impl Activation {
    /// All of them.
    pub const ALL: [Self; 4] =
        [Self::Silu, Self::GeluTanh, Self::Sigmoid, Self::ClampedSwiglu(SwigluConstants::PUBLISHED)];
    /// Those that `hidden_act` of a `config.json` can name.
    pub const NAMED: [Self; 2] = [Self::Silu, Self::GeluTanh];

    /// Returns the name in `hidden_act` of a `config.json`, which has none for the last two.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Silu => "silu",
            Self::GeluTanh => "gelu_pytorch_tanh",
            Self::Sigmoid => "sigmoid",
            Self::ClampedSwiglu(_) => "clamped_swiglu",
        }
    }
}

impl MlpSpec {
    /// Describes a mixture of this many experts, experts per token, and values of an expert's hidden width. Its projections have no biases, and a
    /// checkpoint stores them apart and unquantized.
    pub const fn experts(
        names: ExpertNames,
        [count, top_k, intermediate_size]: [usize; 3],
        activation: Activation,
        router: RouterSpec,
        shared: Option<SharedExpertSpec>,
    ) -> Self {
        let (fused, bias, mxfp4) = (false, false, false);
        Self::Experts { count, top_k, intermediate_size, activation, router, shared, names, fused, bias, mxfp4 }
    }

    /// Returns the hidden width of the MLP, or of one expert.
    pub fn intermediate_size(&self) -> usize {
        match self {
            Self::Gated { intermediate_size, .. } | Self::Experts { intermediate_size, .. } => *intermediate_size,
        }
    }

    /// Returns the activation of the gate.
    pub fn activation(&self) -> Activation {
        match self {
            Self::Gated { activation, .. } | Self::Experts { activation, .. } => *activation,
        }
    }

    /// Counts the MLPs of this width that a token goes through.
    pub fn rows_per_token(&self) -> usize {
        match self {
            Self::Gated { .. } => 1,
            Self::Experts { top_k, .. } => *top_k,
        }
    }

    /// Returns the router of a mixture of experts.
    pub fn router(&self) -> Option<&RouterSpec> {
        match self {
            Self::Gated { .. } => None,
            Self::Experts { router, .. } => Some(router),
        }
    }

    /// Returns the shared expert of a mixture.
    pub fn shared(&self) -> Option<SharedExpertSpec> {
        match self {
            Self::Gated { .. } => None,
            Self::Experts { shared, .. } => *shared,
        }
    }

    /// Returns whether the MLP is a mixture of experts.
    pub fn is_mixture(&self) -> bool {
        matches!(self, Self::Experts { .. })
    }
}

impl ModelSpec {
    /// Iterates over the attention of all layers that have one.
    pub fn attentions(&self) -> impl DoubleEndedIterator<Item = &AttentionSpec> {
        self.layers.iter().filter_map(|layer| layer.mixer.attention())
    }

    /// Iterates over them to change them.
    pub fn attentions_mut(&mut self) -> impl Iterator<Item = &mut AttentionSpec> {
        self.layers.iter_mut().filter_map(|layer| layer.mixer.attention_mut())
    }

    /// Returns what is added to the values of a tensor before they multiply.
    pub fn norm_offset_of(&self, tensor: &TensorSpec) -> f64 {
        if tensor.role == Role::Norm { self.norm_offset } else { 0.0 }
    }

    /// Returns whether the tensor of this name is a weight of experts that the checkpoint stores in MXFP4: as long as it is frozen it stays so.
    pub fn is_mxfp4(&self, name: &str) -> bool {
        matches!(self.mixture_of(name), Some(MlpSpec::Experts { mxfp4: true, .. }))
    }

    /// Returns the number of matrices in the tensor of this name, if it is a weight of experts as a run has it.
    pub fn experts_of(&self, name: &str) -> Option<usize> {
        match self.mixture_of(name)? {
            MlpSpec::Gated { .. } => None,
            MlpSpec::Experts { count, .. } => Some(*count),
        }
    }

    /// Returns the MLP that a weight of experts belongs to.
    fn mixture_of(&self, name: &str) -> Option<&MlpSpec> {
        let layer = layer_of(name).filter(|_| is_expert(name) && name.ends_with(".weight"))?;
        self.layers.get(layer).map(|layer| &layer.mlp)
    }

    /// Returns whether any layer is a mixture of experts.
    pub fn is_mixture(&self) -> bool {
        self.layers.iter().any(|layer| layer.mlp.is_mixture())
    }
}
