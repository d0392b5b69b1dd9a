//! Every key of the recipe with its default. The doc comments here are the descriptions in docs/config.schema.json.
//!
//! Values have the types of the crates that use them, so a number format, an optimizer or a schedule has one type in the whole
//! workspace. Trade-off: a library's settings carry the recipe's names of their keys.

use firebrick_arch::LoraConfig;
use firebrick_kernels::Recompute;
use firebrick_optim::{OptimizerKind, ScheduleKind};
use firebrick_precision::{Format, QuantFormat};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::config::backend_choice::BackendChoice;
use crate::config::compute::{self, Compute};
use crate::config::data_section::DataConfig;
use crate::config::device_budget::DeviceBudget;
use crate::config::preference_section::PreferenceSection;
use crate::config::zero_stage::ZeroStage;
use crate::metrics::MlflowSection;

/// A whole recipe. Every key has a default except `model` and `data`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RunConfig {
    /// Name of the run and of its folder. Default "": the recipe's file name without `.toml`.
    #[serde(default)]
    pub name: String,
    /// Where tensors live and operations run: "auto", "cuda", "wgpu", "candle" or "flex". Default "auto": CUDA if there is an
    /// NVIDIA card, otherwise the fastest of the others.
    #[serde(default)]
    pub backend: BackendChoice,
    /// Folder of the model (config.json, safetensors, tokenizer.json), relative to the working directory, or an id of the Hub:
    /// "owner/name" or "owner/name@revision". A folder wins over an id.
    pub model: String,
    /// Where the weights come from: "pretrained" reads them from the model folder, "random" needs only config.json and
    /// tokenizer.json there. Default "pretrained".
    #[serde(default)]
    pub init: Init,
    /// Which weights train: "full" (all of them), "lora" (adapters on a base that stays as stored) or "qlora" (adapters on a
    /// quantized base). Default: what the recipe says otherwise. `base` or `[bnb_4bit]` is "qlora", `[lora]` alone is "lora"; a
    /// recipe with none of them and pretrained weights has to say `mode = "full"`.
    pub mode: Option<Mode>,
    /// Number format of activations and matrix multiplications: "float32", "bfloat16" or "float16" (also "f32", "fp32", "bf16",
    /// "f16", "fp16"), or "fp8": the matrix multiplications of the layers in 8-bit floats with a scale per row, everything else in
    /// bfloat16; from compute capability 8.9 on (L4, H100, B200, RTX 40). CPU backends compute in float32 whatever this says, wgpu in float16
    /// where its device can if this says so, else in float32. float16 trains with dynamic loss scaling. Default "bfloat16".
    pub compute: Option<Compute>,
    /// Fill each row with several documents, which do not see each other. Default true.
    #[serde(default = "yes")]
    pub pack: bool,
    /// Tokens per row; `data.overflow` says what happens to longer documents. Default 2048.
    #[serde(default = "default_max_seq_len")]
    pub max_seq_len: usize,
    /// Folder that holds the run folders. Default "runs".
    #[serde(default = "default_output_dir")]
    pub output_dir: String,
    /// Seed of shuffling (see also `data.data_seed`), of adapter and random weights, and of sampling. Default 0.
    #[serde(default)]
    pub seed: u64,
    /// Quantize the frozen base while it is read and train adapters on it (QLoRA), those of `[lora]` or else its defaults: "nvfp4"
    /// (E2M1, 16 values per E4M3 scale), "mxfp4" (E2M1, 32 values per power of two), "fp8" (E4M3, a scale per row), or "nf4" and
    /// "nf4_double_quant", which are what `[bnb_4bit]` says. Weights are dequantized where they are multiplied, on every backend; with
    /// `compute = "fp8"` they become its 8-bit floats. Default: absent, what `[bnb_4bit]` says, or else the base stays as stored.
    pub base: Option<QuantFormat>,
    /// Keep the frozen base in 4 bits as bitsandbytes does, like `base`, and train adapters on it. Default: absent.
    pub bnb_4bit: Option<Bnb4bitSection>,
    /// Train low-rank adapters on a frozen base. Default: absent; see `mode`.
    pub lora: Option<LoraConfig>,
    /// Train on pairs of a chosen and a rejected answer (DPO, ORPO). Default: absent, every document is trained on by itself.
    pub preference: Option<PreferenceSection>,
    /// What to train and evaluate on.
    pub data: DataConfig,
    /// The training step and the number of steps.
    #[serde(default)]
    pub train: TrainConfig,
    /// Evaluation before, during and after training.
    #[serde(default)]
    pub eval: EvalConfig,
    /// When to save, and how many checkpoints to keep.
    #[serde(default)]
    pub checkpoint: CheckpointConfig,
    /// An MLflow tracking server that gets parameters and metrics too. Default: absent, nothing leaves the machine.
    pub mlflow: Option<MlflowSection>,
}

/// `init`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Init {
    /// Weights are read from the model folder.
    #[default]
    Pretrained,
    /// Weights are drawn from the seed: pretraining from scratch.
    Random,
}

/// `mode`: which weights train.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// Every weight.
    Full,
    /// Adapters on a base that stays as stored.
    Lora,
    /// Adapters on a quantized base.
    Qlora,
}

/// `[bnb_4bit]`: the frozen base in 4 bits, byte for byte as bitsandbytes quantizes it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Bnb4bitSection {
    /// Number format. Default "nf4".
    pub quant_type: QuantType,
    /// Quantize the block scales too. Default true.
    pub double_quant: bool,
    /// The older name of `compute`; it may be written as long as the two agree. Default: absent.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "compute::deserialize_format")]
    #[schemars(schema_with = "compute::format_schema")]
    pub compute_dtype: Option<Format>,
}

impl Default for Bnb4bitSection {
    fn default() -> Self {
        Bnb4bitSection { quant_type: QuantType::Nf4, double_quant: true, compute_dtype: None }
    }
}

impl Bnb4bitSection {
    /// The format that the section describes.
    #[must_use]
    pub fn format(&self) -> QuantFormat {
        match self.quant_type {
            QuantType::Nf4 => QuantFormat::Nf4 { double_quant: self.double_quant },
        }
    }
}

/// `bnb_4bit.quant_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum QuantType {
    /// 4-bit NormalFloat.
    Nf4,
}

/// `[train]`: the training step and the number of steps.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct TrainConfig {
    /// An older way to write `compute`: true is "bfloat16", false is "float32". It may be written as long as the two agree.
    /// Default: absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bf16: Option<bool>,
    /// Save only each layer's input for the backward pass and compute the rest again: less memory for one more forward pass.
    /// Default true.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grad_checkpointing: Option<bool>,
    /// A finer form of `grad_checkpointing`: "full" (true), "projections" (also true): save attention's output and the inputs of attention
    /// and of the MLP, so that attention and its output projection do not run twice, for three times the memory; "none" (false), or
    /// "selective" (also false): save the outputs of matrix multiplications and attention, compute norms and activation functions again.
    /// Default: what `grad_checkpointing` says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recompute: Option<Recompute>,
    /// With `recompute = "full"` or `"projections"`: keep what layers save in pinned host memory, copied there and back while other work
    /// runs: tokens x hidden size x 2 bytes for each layer, and under "projections" as much for the sum after attention, and tokens x
    /// width of the queries x 2 bytes for attention's output. Default true on CUDA; the other backends leave it where it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub offload: Option<bool>,
    /// "adamw" (32-bit state), "adamw_8bit" (block-wise 8-bit state, which takes no less memory on wgpu) or "paged_adamw_8bit" (the same,
    /// but on CUDA state beyond `optimizer_device_gib` waits in host memory). Default "adamw".
    pub optimizer: OptimizerKind,
    /// With "paged_adamw_8bit" on CUDA: GiB of optimizer state that stay on the device; the rest waits in pinned host memory and
    /// is copied there and back in each step. "auto": as much as fits. Other backends page nothing. Default "auto".
    pub optimizer_device_gib: DeviceBudget,
    /// On CUDA with a quantized base: GiB of weights that stay on the device as GEMMs read them (in the compute format, or in 8 bits with
    /// compute = "fp8") instead of being written again in every pass; all of them take two bytes per parameter of the layers'
    /// projections. A number, or "auto": what fits. Default "auto".
    #[serde(default, alias = "fp8_weights_gib")]
    pub kept_weights_gib: DeviceBudget,
    /// On CUDA: whether the algorithm of each large GEMM is chosen by measuring it, in the first step, which then takes 5 to 15 s longer.
    /// Choices are kept on disk for this card and library, and used whenever this is not false. Default: true where the run is
    /// planned to take ten minutes or more.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tune_gemms: Option<bool>,
    /// On several ranks, what is divided over them instead of being on each (ZeRO): 0 nothing, 1 the optimizer's state, 2 gradients too,
    /// 3 the weights of the layers too, frozen or trained, which then travel in every pass. Each rank updates its share of the parameters
    /// and gives it to the others. Default 0.
    pub zero_stage: ZeroStage,
    /// Rows per forward and backward pass. Default 1.
    pub micro_batch_size: usize,
    /// Micro-batches per step. Default 1.
    pub gradient_accumulation: usize,
    /// Highest learning rate of the schedule. Default 2e-4 for adapters and for weights drawn from the seed, 2e-5 where every
    /// weight of a pretrained model trains.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub learning_rate: Option<f64>,
    /// Learning rate after the warm-up: "constant", or decreasing to `min_lr` as "linear" or "cosine". Default "cosine".
    pub schedule: ScheduleKind,
    /// The learning rate that "linear" and "cosine" decrease to (a rate, not a fraction of `learning_rate`). Default 0.
    pub min_lr: f64,
    /// Steps in which the learning rate increases from 0. Default: absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warmup_steps: Option<u64>,
    /// The same as a fraction of the run, 0 or more and below 1, rounded up to whole steps. Default, if `warmup_steps` is absent:
    /// 0.03, and 0 for the schedule "constant".
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
    /// Passes over the data; may be a fraction. Default 1 if `steps` is absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub epochs: Option<f64>,
    /// Optimizer steps, instead of `epochs`. Default: absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub steps: Option<u64>,
    /// Write metrics every this many steps. Default 1 if `log_every_epochs` is absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub log_every: Option<u64>,
    /// The same in epochs, or as a fraction of one, rounded to whole steps. Default: absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub log_every_epochs: Option<f64>,
    /// Tokens whose logits exist at the same time in the loss; fewer is slower and takes less memory. Default 1024.
    pub loss_chunk_tokens: usize,
}

impl Default for TrainConfig {
    fn default() -> Self {
        TrainConfig {
            bf16: None,
            grad_checkpointing: None,
            recompute: None,
            offload: None,
            optimizer: OptimizerKind::AdamW,
            optimizer_device_gib: DeviceBudget::Auto,
            kept_weights_gib: DeviceBudget::Auto,
            tune_gemms: None,
            zero_stage: ZeroStage::NONE,
            micro_batch_size: 1,
            gradient_accumulation: 1,
            learning_rate: None,
            schedule: ScheduleKind::Cosine,
            min_lr: 0.0,
            warmup_steps: None,
            warmup_ratio: None,
            weight_decay: 0.0,
            adam_beta1: 0.9,
            adam_beta2: 0.999,
            adam_epsilon: 1e-8,
            max_grad_norm: 1.0,
            epochs: None,
            steps: None,
            log_every: None,
            log_every_epochs: None,
            loss_chunk_tokens: 1024,
        }
    }
}

/// `[eval]`: evaluation before, during and after training; needs `data.eval_path` or `data.eval_fraction`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct EvalConfig {
    /// Evaluate every this many steps; 0 only before and after training. Default 0 if `every_epochs` is absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub every_steps: Option<u64>,
    /// The same in epochs, or as a fraction of one, rounded to whole steps. Default: absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub every_epochs: Option<f64>,
    /// Evaluate and answer `prompts` before the first step too, to see what training changes. Default true.
    pub on_start: bool,
    /// Rows per forward pass of the evaluation. Default: `train.micro_batch_size`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub micro_batch_size: Option<usize>,
    /// Maximum number of micro-batches for the evaluation loss; 0 takes all. Default 0.
    pub max_batches: usize,
    /// Number of held-out prompts that are answered greedily in each evaluation and compared with the reference answer, the last
    /// one of the record; 0 for none. Records without a complete last answer are skipped and counted. Default 0.
    pub exact_match_prompts: usize,
    /// What of the two answers is compared: "whole" (without white space around it), "last_number" (the last number, without
    /// separators of thousands: math), "choice" (the last letter from A to J that stands alone: multiple choice), or a regular
    /// expression with one group, whose last match is taken. An answer in which nothing is found is wrong. Default "whole".
    pub extract: String,
    /// Maximum tokens of an answer. Default 64.
    pub max_new_tokens: usize,
    /// Prompts whose answers are shown before and after training. Default: none.
    pub prompts: Vec<String>,
}

impl Default for EvalConfig {
    fn default() -> Self {
        EvalConfig {
            every_steps: None,
            every_epochs: None,
            on_start: true,
            micro_batch_size: None,
            max_batches: 0,
            exact_match_prompts: 0,
            extract: "whole".to_owned(),
            max_new_tokens: 64,
            prompts: Vec::new(),
        }
    }
}

/// `[checkpoint]`: when to save, and how many checkpoints to keep. The end of a run is always saved.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct CheckpointConfig {
    /// Save every this many steps; 0 only at the end. Default 500 if `every_epochs` is absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub every_steps: Option<u64>,
    /// The same in epochs, or as a fraction of one, rounded to whole steps. Default: absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub every_epochs: Option<f64>,
    /// Number of newest checkpoints to keep. Default 3.
    pub keep: usize,
}

impl Default for CheckpointConfig {
    fn default() -> Self {
        CheckpointConfig { every_steps: None, every_epochs: None, keep: 3 }
    }
}

pub(super) fn yes() -> bool {
    true
}

pub(super) fn default_max_seq_len() -> usize {
    2048
}

pub(super) fn default_output_dir() -> String {
    "runs".to_string()
}
