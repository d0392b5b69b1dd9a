//! Every key of the recipe with its default. The doc comments here are the descriptions in docs/config.schema.json.

use std::fmt;

use clap::ValueEnum;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{Error as DeError, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::config::data_keys::DataConfig;

/// A whole recipe. Every key has a default but `model` and `data`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RunConfig {
    /// Name of the run and of its folder. Default "": the recipe's file name without `.toml`.
    #[serde(default)]
    pub name: String,
    /// Where tensors live and ops run. Default "auto": CUDA where there is an NVIDIA card, else the fastest of the others.
    #[serde(default)]
    pub backend: BackendChoice,
    /// Folder of the model (config.json, safetensors, tokenizer.json), relative to the folder you run from.
    /// A Hub id is told from a folder and answered with the command that downloads it.
    pub model: String,
    /// Where the weights come from: "pretrained" reads them from the model folder, "random" needs only config.json and
    /// tokenizer.json there. Default "pretrained".
    #[serde(default)]
    pub init: Init,
    /// Fill each row with several documents, which do not see each other. Default true.
    #[serde(default = "yes")]
    pub pack: bool,
    /// Tokens in a row; longer documents are cut. Default 2048.
    #[serde(default = "default_max_seq_len")]
    pub max_seq_len: usize,
    /// Folder that holds the run folders. Default "runs".
    #[serde(default = "default_output_dir")]
    pub output_dir: String,
    /// Seed of shuffling, of adapter and random weights, and of sampling. Default 0.
    #[serde(default)]
    pub seed: u64,
    /// Keep the frozen base in 4 bits (QLoRA). Default: absent, the base stays as stored. Needs `[lora]`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bnb_4bit: Option<BnbConfig>,
    /// Train low-rank adapters on a frozen base. Default: absent, all weights are trained.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lora: Option<LoraConfig>,
    /// What to train and evaluate on.
    pub data: DataConfig,
    /// The training step and how many of them.
    #[serde(default)]
    pub train: TrainConfig,
    /// Evaluation before, during and after training.
    #[serde(default)]
    pub eval: EvalConfig,
    /// When to save, and how many saves to keep.
    #[serde(default)]
    pub checkpoint: CheckpointConfig,
}

/// `backend`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum BackendChoice {
    /// Chosen by the plan.
    #[default]
    Auto,
    /// NVIDIA cards.
    Cuda,
    /// Vulkan, Metal, DirectX or WebGPU.
    Wgpu,
    /// CPU, candle's kernels.
    Candle,
    /// CPU, Burn's own kernels.
    Flex,
}

/// `init`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Init {
    /// Weights are read from the model folder.
    #[default]
    Pretrained,
    /// Weights are drawn from the seed: pretraining from nothing.
    Random,
}

/// `[bnb_4bit]`: the frozen base in 4 bits, bytes as bitsandbytes makes them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct BnbConfig {
    /// Number format. Default "nf4".
    pub quant_type: QuantType,
    /// Quantise the block scales too. Default true.
    pub double_quant: bool,
    /// Number format that matrices are multiplied in, where the backend has it. Default: "bfloat16", or "float32" with
    /// `train.bf16 = false`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compute_dtype: Option<ComputeDtype>,
}

impl Default for BnbConfig {
    fn default() -> Self {
        BnbConfig { quant_type: QuantType::Nf4, double_quant: true, compute_dtype: None }
    }
}

/// `bnb_4bit.quant_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum QuantType {
    /// 4-bit NormalFloat.
    Nf4,
}

/// `bnb_4bit.compute_dtype`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ComputeDtype {
    /// 8 bits of exponent, 7 of fraction.
    Bfloat16,
    /// 5 bits of exponent, 10 of fraction.
    Float16,
    /// Single precision.
    Float32,
}

/// `[lora]`: low-rank adapters, scaled by `alpha / r`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct LoraConfig {
    /// Rank. Default 16.
    pub r: usize,
    /// Numerator of the scale. Default 32.
    pub alpha: f64,
    /// Modules that get an adapter. Default "all-linear": every linear layer of the blocks.
    pub target: LoraTarget,
    /// Scale by `alpha / sqrt(r)` (rsLoRA). Default false.
    pub use_rslora: bool,
}

impl Default for LoraConfig {
    fn default() -> Self {
        LoraConfig { r: 16, alpha: 32.0, target: LoraTarget::AllLinear, use_rslora: false }
    }
}

/// `lora.target`: "all-linear" or a list of Hugging Face module names such as `["q_proj", "v_proj"]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LoraTarget {
    /// Every linear layer of the blocks, not the head.
    AllLinear,
    /// The named ones.
    Modules(Vec<String>),
}

/// The word for [`LoraTarget::AllLinear`].
const ALL_LINEAR: &str = "all-linear";

impl Serialize for LoraTarget {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            LoraTarget::AllLinear => serializer.serialize_str(ALL_LINEAR),
            LoraTarget::Modules(names) => names.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for LoraTarget {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TargetVisitor;
        impl<'de> Visitor<'de> for TargetVisitor {
            type Value = LoraTarget;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "\"{ALL_LINEAR}\" or a list of module names such as [\"q_proj\", \"v_proj\"]")
            }

            fn visit_str<E: DeError>(self, word: &str) -> Result<LoraTarget, E> {
                match word {
                    ALL_LINEAR => Ok(LoraTarget::AllLinear),
                    other => Err(E::invalid_value(serde::de::Unexpected::Str(other), &self)),
                }
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<LoraTarget, A::Error> {
                let mut names = Vec::new();
                while let Some(name) = list.next_element()? {
                    names.push(name);
                }
                Ok(LoraTarget::Modules(names))
            }
        }
        deserializer.deserialize_any(TargetVisitor)
    }
}

impl JsonSchema for LoraTarget {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "LoraTarget".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "description": "\"all-linear\" or a list of Hugging Face module names.",
            "oneOf": [{ "const": ALL_LINEAR }, { "type": "array", "items": { "type": "string" }, "minItems": 1 }]
        })
    }
}

/// `[train]`: the training step and how many of them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct TrainConfig {
    /// Compute in bfloat16 where the backend has it; CPU backends compute in float32. Default true, or what
    /// `bnb_4bit.compute_dtype` says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bf16: Option<bool>,
    /// Keep only each block's input for the backward pass and compute the rest again: less memory for one forward
    /// pass more.
    /// Default true.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grad_checkpointing: Option<bool>,
    /// `grad_checkpointing` said finely: "full" (true), "none" (false), or "selective" (false too): keep what matrix
    /// products and attention made, compute norms and activation functions again. Default: what `grad_checkpointing`
    /// says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recompute: Option<Recompute>,
    /// With `recompute = "full"`: keep block inputs in host memory (pinned: tokens x width x 2 bytes for each block),
    /// copied there and back beside the work. Default true on CUDA; the other backends leave them where they are.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub offload: Option<bool>,
    /// "adamw" (32-bit state), "adamw_8bit" (block-wise 8-bit state) or "paged_adamw_8bit" (the same as "adamw_8bit":
    /// its state stays on the device, nothing is paged to the host). Default "adamw".
    pub optimizer: OptimizerKind,
    /// Rows of one forward and backward pass. Default 1.
    pub micro_batch_size: usize,
    /// Micro-batches of one step. Default 1.
    pub gradient_accumulation: usize,
    /// Highest learning rate of the schedule. Default 2e-4.
    pub learning_rate: f64,
    /// Learning rate after the warm-up: "constant", or falling to 0 as "linear" or "cosine". Default "cosine".
    pub schedule: ScheduleKind,
    /// Steps in which the learning rate rises from 0. Default: absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warmup_steps: Option<u64>,
    /// The same as a part of the run, 0 or more and below 1. Default 0.03 where `warmup_steps` is absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warmup_ratio: Option<f64>,
    /// Decoupled weight decay. Default 0.
    pub weight_decay: f64,
    /// Decay of the first moment. Default 0.9.
    pub adam_beta1: f64,
    /// Decay of the second moment. Default 0.999.
    pub adam_beta2: f64,
    /// Added to the root of the second moment. Default 1e-8.
    pub adam_epsilon: f64,
    /// Gradients are scaled down to this global norm; 0 turns it off. Default 1.
    pub max_grad_norm: f64,
    /// Passes over the data; may be a fraction. Default 1 where `steps` is absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub epochs: Option<f64>,
    /// Optimizer steps, instead of `epochs`. Default: absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub steps: Option<u64>,
    /// Write metrics every so many steps. Default 1.
    pub log_every: u64,
    /// Tokens whose logits are held at once in the loss; less is slower and takes less memory. Default 1024.
    pub loss_chunk_tokens: usize,
}

impl Default for TrainConfig {
    fn default() -> Self {
        TrainConfig {
            bf16: None,
            grad_checkpointing: None,
            recompute: None,
            offload: None,
            optimizer: OptimizerKind::Adamw,
            micro_batch_size: 1,
            gradient_accumulation: 1,
            learning_rate: 2e-4,
            schedule: ScheduleKind::Cosine,
            warmup_steps: None,
            warmup_ratio: None,
            weight_decay: 0.0,
            adam_beta1: 0.9,
            adam_beta2: 0.999,
            adam_epsilon: 1e-8,
            max_grad_norm: 1.0,
            epochs: None,
            steps: None,
            log_every: 1,
            loss_chunk_tokens: 1024,
        }
    }
}

/// `train.recompute`: what of a block the backward pass computes again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Recompute {
    /// Everything but the last product: only the block's input is kept.
    Full,
    /// What an elementwise pass or a norm makes: outputs of matrix products and of attention are kept.
    Selective,
    /// Nothing: all that the backward pass needs is kept.
    None,
}

/// `train.optimizer`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema, ValueEnum)]
pub enum OptimizerKind {
    /// AdamW with 32-bit moments.
    #[serde(rename = "adamw")]
    #[value(name = "adamw")]
    Adamw,
    /// AdamW with block-wise 8-bit moments.
    #[serde(rename = "adamw_8bit")]
    #[value(name = "adamw_8bit")]
    Adamw8bit,
    /// The same, under the name that recipes for bitsandbytes give it; nothing is paged.
    #[serde(rename = "paged_adamw_8bit")]
    #[value(name = "paged_adamw_8bit")]
    PagedAdamw8bit,
}

/// `train.schedule`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ScheduleKind {
    /// Stays at the learning rate.
    Constant,
    /// Falls to 0 in a straight line.
    Linear,
    /// Falls to 0 along half a cosine.
    Cosine,
}

/// `[eval]`: evaluation before, during and after training; needs `data.eval_path` or `data.eval_fraction`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct EvalConfig {
    /// Evaluate every so many steps; 0 only before and after. Default 0.
    pub every_steps: u64,
    /// Rows of one evaluation forward pass. Default: `train.micro_batch_size`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub micro_batch_size: Option<usize>,
    /// At most so many micro-batches for the evaluation loss; 0 takes all. Default 0.
    pub max_batches: usize,
    /// Held-out prompts that are answered greedily, before and after, and compared with the right answer; 0 for none.
    /// Default 0.
    pub exact_match_prompts: usize,
    /// Longest answer to a prompt. Default 64.
    pub max_new_tokens: usize,
    /// Prompts whose answers are shown before and after training. Default: none.
    pub prompts: Vec<String>,
}

impl Default for EvalConfig {
    fn default() -> Self {
        EvalConfig {
            every_steps: 0,
            micro_batch_size: None,
            max_batches: 0,
            exact_match_prompts: 0,
            max_new_tokens: 64,
            prompts: Vec::new(),
        }
    }
}

/// `[checkpoint]`: when to save, and how many saves to keep. The end of a run is always saved.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct CheckpointConfig {
    /// Save every so many steps; 0 only at the end. Default 500.
    pub every_steps: u64,
    /// Newest checkpoints that are kept. Default 3.
    pub keep: usize,
}

impl Default for CheckpointConfig {
    fn default() -> Self {
        CheckpointConfig { every_steps: 500, keep: 3 }
    }
}

fn yes() -> bool {
    true
}

fn default_max_seq_len() -> usize {
    2048
}

fn default_output_dir() -> String {
    "runs".to_string()
}
