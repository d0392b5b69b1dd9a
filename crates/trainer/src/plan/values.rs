//! The values of a plan, and the accessors that turn them into the types of the crates below.
//!
//! Trade-off: the plan is one flat struct, so that `plan.toml` has one table per decision.

use std::path::PathBuf;

use firebrick_arch::{LoraConfig, ModelConfig};
use firebrick_data::PackedDataset;
use firebrick_hwprofile::memory::MemoryLine;
use firebrick_hwprofile::{AcceleratorSpec, HardwareProfile};
use firebrick_kernels::{BackendKind, BaseStorage, GemmAlgorithms, GemmFormat, Recompute, TrainingShape};
use firebrick_optim::{OptimizerConfig, OptimizerKind, Schedule, ScheduleKind};
use firebrick_precision::Format;
use serde::Serialize;

use crate::config::{Init, PreferenceSection, RunConfig, ZeroStage};
use crate::metrics::MlflowSection;
use crate::plan::chosen::Chosen;
use crate::plan::fit::SmallerRun;
use crate::plan::forecast::Forecast;
use crate::plan::preference::PlannedReference;

/// A whole plan.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Plan {
    /// Name of the run.
    pub name: Chosen<String>,
    /// Folder that holds the run folders.
    pub output_dir: Chosen<PathBuf>,
    /// Folder of the model.
    pub model_folder: Chosen<PathBuf>,
    /// Where the weights come from.
    pub init: Chosen<Init>,
    /// Seed of new weights and of sampling.
    pub seed: Chosen<u64>,
    /// Seed of the order of rows and of mixtures.
    pub data_seed: Chosen<u64>,
    /// Whether rows are shuffled in each epoch.
    pub shuffle: Chosen<bool>,
    /// Where tensors live.
    pub backend: Chosen<BackendKind>,
    /// Number of processes that train together.
    pub world_size: Chosen<usize>,
    /// What is divided over the processes.
    pub zero_stage: Chosen<ZeroStage>,
    /// Format of activations.
    pub compute: Chosen<Format>,
    /// What the GEMMs of the layers multiply.
    pub gemms: Chosen<GemmFormat>,
    /// Which share of a step's operations is in which format.
    pub arithmetic: Chosen<String>,
    /// Bytes of frozen weights that stay on the device in 8 bits; none where there are no such weights.
    pub kept_weights_bytes: Option<Chosen<u64>>,
    /// How algorithms of large GEMMs are chosen; `None` where the backend has no choice.
    pub gemm_algorithms: Option<Chosen<GemmAlgorithms>>,
    /// How the base weights are stored.
    pub base: Chosen<BaseStorage>,
    /// The adapter; without one every weight trains.
    pub lora: Chosen<Option<LoraConfig>>,
    /// The adapter folder whose matrices the run starts with.
    pub lora_init_from: Chosen<Option<PathBuf>>,
    /// Tokens that the tokenizer gets in addition to the model's; none where it gets none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub new_tokens: Option<Chosen<Vec<String>>>,
    /// Probability with which values that adapters read are dropped.
    pub adapter_dropout: Option<Chosen<f64>>,
    /// How many times the learning rate of A that of B is.
    pub loraplus_lr_ratio: Option<Chosen<f64>>,
    /// Which modules' adapters are part of the base's GEMMs, and which have GEMMs of their own.
    pub adapter_gemms: Option<Chosen<String>>,
    /// Number of parameters that train.
    pub trained_parameters: Chosen<u64>,
    /// What pairs of answers are trained for; none where documents are trained on one by one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preference: Option<Chosen<PreferenceSection>>,
    /// Where the reference of that loss comes from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reference: Option<Chosen<PlannedReference>>,
    /// What layers save for their backward.
    pub recompute: Chosen<Recompute>,
    /// Whether what layers save waits in host memory.
    pub offload: Chosen<bool>,
    /// Rule and state format of the optimizer.
    pub optimizer: Chosen<OptimizerKind>,
    /// Bytes of optimizer state that stay on the device.
    pub resident_state_bytes: Chosen<u64>,
    /// Bytes of optimizer state that wait in host memory.
    pub paged_state_bytes: Chosen<u64>,
    /// Decoupled weight decay.
    pub weight_decay: Chosen<f64>,
    /// Decay of the first moment.
    pub adam_beta1: Chosen<f64>,
    /// Decay of the second moment.
    pub adam_beta2: Chosen<f64>,
    /// Added to the root of the second moment.
    pub adam_epsilon: Chosen<f64>,
    /// Global norm that gradients are scaled down to; 0: no limit.
    pub max_grad_norm: Chosen<f64>,
    /// Maximum tokens of a document, and of a packed row.
    pub max_seq_len: Chosen<usize>,
    /// Whether rows hold several documents.
    pub pack: Chosen<bool>,
    /// Tokens per row, padding included.
    pub row_len: Chosen<usize>,
    /// Positions that the rotary tables cover.
    pub max_positions: Chosen<usize>,
    /// Which kernels compute attention, where that follows from the model alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attention: Option<Chosen<String>>,
    /// How experts are computed; none where the model has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub experts: Option<Chosen<String>>,
    /// Which factors of longrope are used; none where the model has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub long_rope: Option<Chosen<&'static str>>,
    /// Rows per forward and backward pass.
    pub micro_batch_size: Chosen<usize>,
    /// Micro-batches per step.
    pub gradient_accumulation: Chosen<usize>,
    /// Optimizer steps of the run.
    pub steps: Chosen<u64>,
    /// Highest learning rate.
    pub learning_rate: Chosen<f64>,
    /// Steps of increasing learning rate.
    pub warmup_steps: Chosen<u64>,
    /// Shape of the learning rate.
    pub schedule: Chosen<ScheduleKind>,
    /// Learning rate that the decay leads to.
    pub min_lr: Chosen<f64>,
    /// Rows of logits that exist at a time.
    pub loss_chunk_tokens: Chosen<usize>,
    /// Steps between two lines of metrics.
    pub log_every: Chosen<u64>,
    /// Steps between two evaluations; 0: only before and after training.
    pub eval_every_steps: Chosen<u64>,
    /// Whether there is held-out data, or a prompt to answer.
    #[serde(skip)]
    pub is_evaluated: bool,
    /// Whether to evaluate before the first step too.
    pub eval_on_start: Chosen<bool>,
    /// Rows per forward pass of the evaluation.
    pub eval_micro_batch_size: Chosen<usize>,
    /// Maximum number of micro-batches of the evaluation loss; 0: all.
    pub eval_max_batches: Chosen<usize>,
    /// Number of held-out prompts whose greedy answer is compared with the reference.
    pub exact_match_prompts: Chosen<usize>,
    /// Tokens of the prompts that are answered at a time, and of their answers.
    pub answer_tokens: Chosen<usize>,
    /// What of an answer is compared with the reference.
    pub extract: Chosen<String>,
    /// Maximum tokens of an answer.
    pub max_new_tokens: Chosen<usize>,
    /// Prompts whose answers are shown before and after training.
    pub sample_prompts: Chosen<Vec<String>>,
    /// Whether a sample prompt is a user's turn, rendered with the chat template.
    pub prompts_are_chats: Chosen<bool>,
    /// Steps between two checkpoints; 0: only at the end.
    pub checkpoint_every_steps: Chosen<u64>,
    /// Newest checkpoints to keep.
    pub checkpoints_kept: Chosen<usize>,
    /// Bytes of one checkpoint.
    pub checkpoint_bytes: Chosen<u64>,
    /// Bytes of the run folder at its largest.
    pub disk_bytes: Chosen<u64>,
    /// Threads that tokenize, before anything is on the device.
    pub tokenize_workers: Chosen<usize>,
    /// Threads that build batches while the device trains.
    pub loader_workers: Chosen<usize>,
    /// Bytes at the peak of a step, or of an evaluation where that needs more.
    pub memory_bytes: Chosen<u64>,
    /// Bytes of host memory that a run on a device needs in addition.
    pub host_memory_bytes: Chosen<u64>,
    /// The parts of `memory_bytes`.
    pub memory: Vec<MemoryLine>,
    /// A shortage of memory that the user chose to ignore, in a sentence.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub forced: Option<Chosen<bool>>,
    /// The tracking server that gets parameters and metrics too.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mlflow: Option<Chosen<MlflowSection>>,
    /// What the run will cost on a known accelerator.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub forecast: Option<Forecast>,
    /// What the recipe says and hardly anybody means, in sentences.
    #[serde(skip)]
    pub warnings: Vec<String>,
    /// How the model is trained, as far as memory and work depend on it.
    #[serde(skip)]
    pub training: TrainingShape,
    /// The next smaller run, for the case that the estimate is too low.
    #[serde(skip)]
    pub smaller: SmallerRun,
}

/// The rows that a run trains on, as far as a plan depends on them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataShape {
    /// Rows per epoch.
    pub rows: usize,
    /// Tokens per row, padding included.
    pub row_len: usize,
    /// Tokens of the longest document.
    pub longest_document: usize,
    /// Maximum number of documents in a row, the padding at its end included.
    pub documents_per_row: usize,
    /// Maximum number of tokens in a row that count in the loss.
    pub loss_tokens_per_row: usize,
    /// Whether any of the data is rendered with the chat template.
    pub has_chats: bool,
    /// How well documents fill the rows, in a sentence.
    pub report: String,
}

impl DataShape {
    /// The shape of packed data. `has_chats`: whether any of it is rendered with the chat template.
    pub fn new(data: &PackedDataset, has_chats: bool) -> Self {
        let report = data.report();
        Self {
            rows: data.rows(),
            row_len: data.row_len(),
            longest_document: report.lengths.longest,
            documents_per_row: max_documents_per_row(data),
            loss_tokens_per_row: max_loss_tokens_per_row(data),
            has_chats,
            report: report.to_string(),
        }
    }
}

/// What a plan is made from.
#[derive(Clone, Copy, Debug)]
pub struct PlanInputs<'a> {
    /// What was typed.
    pub config: &'a RunConfig,
    /// What was found.
    pub profile: &'a HardwareProfile,
    /// The model's config.
    pub model: &'a ModelConfig,
    /// The rows to train on.
    pub data: &'a DataShape,
    /// Number of processes that train together.
    pub world_size: usize,
    /// What was requested on the command line.
    pub request: &'a PlanRequest,
}

/// What a command requests of a plan in addition to the recipe.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PlanRequest {
    /// The machine to plan for; `None`: this one.
    pub machine: Option<&'static AcceleratorSpec>,
    /// Plan a run that does not fit into memory all the same.
    pub force: bool,
    /// Price of the machine per hour, in any currency.
    pub price_per_hour: Option<f64>,
    /// Processes of the run that share this machine; 0 counts as one.
    pub local_ranks: usize,
}

impl PlanRequest {
    /// The machine: the named one, or this one as it is found.
    pub fn profile(&self) -> HardwareProfile {
        let mut profile = match self.machine {
            Some(spec) => HardwareProfile::of_machine(spec),
            // Metal's GPUs are known to wgpu alone.
            None if cfg!(target_os = "macos") => HardwareProfile::detect_with_adapters(),
            None => HardwareProfile::detect(),
        };
        // Ranks share the cores and the memory of their machine.
        let ranks = self.local_ranks.max(1);
        profile.cpu.logical_cores = (profile.cpu.logical_cores / ranks).max(1);
        profile.memory.available_bytes /= ranks as u64;
        profile
    }
}

impl Plan {
    /// The optimizer's settings.
    pub fn optimizer_config(&self) -> OptimizerConfig {
        OptimizerConfig {
            kind: self.optimizer.value,
            beta1: self.adam_beta1.value,
            beta2: self.adam_beta2.value,
            epsilon: self.adam_epsilon.value,
            weight_decay: self.weight_decay.value,
            max_grad_norm: (self.max_grad_norm.value > 0.0).then_some(self.max_grad_norm.value),
        }
    }

    /// The learning rate by step.
    pub fn learning_rate_schedule(&self) -> Schedule {
        Schedule {
            kind: self.schedule.value,
            peak: self.learning_rate.value,
            lowest: self.min_lr.value,
            warmup_steps: self.warmup_steps.value,
            total_steps: self.steps.value,
        }
    }

    /// Rows per step over all ranks.
    pub fn rows_per_step(&self) -> usize {
        self.micro_batch_size.value * self.gradient_accumulation.value * self.world_size.value
    }

    /// Every decision as words, for a tracking server: its name, and its value as plan.toml has it.
    pub fn parameters(&self) -> Vec<(String, String)> {
        // Invariant: as in `to_toml`.
        let table = toml::Table::try_from(self).expect("a plan of plain fields is expressible as TOML");
        let value = |(name, decision): (String, toml::Value)| {
            let value = decision.get("value")?;
            Some((name, value.as_str().map_or_else(|| value.to_string(), str::to_owned)))
        };
        table.into_iter().filter_map(value).collect()
    }

    /// The text of `plan.toml`.
    pub fn to_toml(&self) -> String {
        // Invariant: a plan is plain strings, numbers, lists and tables, and TOML can hold all of them.
        toml::to_string(self).expect("a plan of plain fields is expressible as TOML")
    }
}

/// The maximum number of documents in a row, the padding at its end included.
fn max_documents_per_row(data: &PackedDataset) -> usize {
    let documents = |row: usize| {
        let padding = usize::from(data.row_tokens(row) < data.row_len());
        data.row_documents(row).count() + padding
    };
    (0..data.rows()).map(documents).max().unwrap_or(1)
}

/// The maximum number of tokens in a row that count in the loss. Of pairs those of their prompts may count too.
fn max_loss_tokens_per_row(data: &PackedDataset) -> usize {
    if data.pairs() > 0 {
        return data.row_len();
    }
    let counted = |document: usize| data.documents().entry(document).loss_tokens as usize;
    let of_row = |row: usize| data.row_documents(row).map(counted).sum::<usize>();
    (0..data.rows()).map(of_row).max().unwrap_or(0)
}
