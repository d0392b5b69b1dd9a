//! What was decided for a run: every field with its reason, printed before the first weight is read and saved as `plan.toml`.
//!
//! The plan follows from the recipe (what was typed), the hardware profile (what was found), the model's config and the size
//! of the data. It makes no Option: a run does what its plan says.

mod fit;
mod workers;

use std::fmt;

use firebrick_data::PackedDataset;
use firebrick_hwprofile::memory::{self, MemoryEstimate, MemoryLine, ModelShape, TrainingShape, human_bytes};
use firebrick_hwprofile::{HardwareProfile, memory::LoraShape};
use firebrick_model::LlamaConfig;
use serde::Serialize;

use crate::backend::BackendKind;
use crate::config::{ComputeDtype, OptimizerKind, Recompute, RunConfig, RunLength, ScheduleKind, Warmup};
use crate::error::RunError;

pub use fit::{SmallerRun, next_smaller};
pub use workers::tokenising;

/// A decision and why it was taken.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Chosen<T> {
    /// The decision.
    pub value: T,
    /// Why.
    pub reason: String,
}

impl<T> Chosen<T> {
    /// A decision and its reason.
    pub fn new(value: T, reason: impl Into<String>) -> Self {
        Self { value, reason: reason.into() }
    }
}

/// How the base is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum BasePlan {
    /// Every weight trains, in f32.
    Trained,
    /// Frozen, in the compute format.
    Frozen,
    /// Projections in 4 bits, f32 block scales.
    Nf4,
    /// Projections in 4 bits, 8-bit block scales.
    Nf4DoubleQuant,
}

/// How optimizer moments are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum MomentPlan {
    /// 8 bytes a trained parameter.
    Float32,
    /// About 2 bytes a trained parameter.
    EightBit,
}

/// A whole plan.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Plan {
    /// Where tensors live.
    pub backend: Chosen<BackendKind>,
    /// Format of activations and matrix products.
    pub compute_dtype: Chosen<ComputeDtype>,
    /// How the base is kept.
    pub base: Chosen<BasePlan>,
    /// Parameters that train.
    pub trained_parameters: Chosen<u64>,
    /// What blocks keep for their backward.
    pub recompute: Chosen<Recompute>,
    /// Whether what blocks keep waits in host memory.
    pub offload: Chosen<bool>,
    /// How optimizer moments are stored.
    pub optimizer: Chosen<MomentPlan>,
    /// Tokens of a row.
    pub row_len: Chosen<usize>,
    /// Rows of one forward and backward.
    pub micro_batch_size: Chosen<usize>,
    /// Micro-batches of a step.
    pub gradient_accumulation: Chosen<usize>,
    /// Optimizer steps of the run.
    pub steps: Chosen<u64>,
    /// Steps of rising learning rate.
    pub warmup_steps: Chosen<u64>,
    /// Shape of the learning rate.
    pub schedule: Chosen<ScheduleKind>,
    /// Rows of logits at a time.
    pub loss_chunk_tokens: Chosen<usize>,
    /// Threads that tokenise, before anything is on the device.
    pub tokenise_workers: Chosen<usize>,
    /// Threads that make batches while the device trains.
    pub loader_workers: Chosen<usize>,
    /// Bytes at the peak of a step.
    pub memory_bytes: Chosen<u64>,
    /// What they are made of.
    pub memory: Vec<MemoryLine>,
    /// Bytes of host memory that a run on a device needs beside them.
    pub host_memory_bytes: Chosen<u64>,
    /// What the blocks' memory and work were computed from.
    #[serde(skip)]
    pub training_shape: TrainingShape,
}

/// The rows that a run trains on, as far as a plan depends on them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataShape {
    /// Rows of an epoch.
    pub rows: usize,
    /// Tokens of a row, padding included.
    pub row_len: usize,
    /// How well documents fill them, in a sentence.
    pub report: String,
}

impl From<&PackedDataset> for DataShape {
    fn from(data: &PackedDataset) -> Self {
        Self { rows: data.rows(), row_len: data.row_len(), report: data.report().to_string() }
    }
}

/// What a plan is made from.
#[derive(Clone, Copy, Debug)]
pub struct PlanInputs<'a> {
    /// What was typed.
    pub config: &'a RunConfig,
    /// What was found.
    pub profile: &'a HardwareProfile,
    /// The model's description.
    pub model: &'a LlamaConfig,
    /// The rows to train on.
    pub data: &'a DataShape,
}

impl Plan {
    /// Decides everything.
    ///
    /// # Errors
    /// A backend that cannot be used, or a run that does not fit into memory (with the nearest change that does).
    pub fn resolve(inputs: PlanInputs<'_>) -> Result<Self, RunError> {
        let backend = crate::backend::choose(inputs.config.backend, inputs.profile)?;
        let estimate = fit::check(&inputs, backend.value)?;
        let config = inputs.config;
        let training_shape = fit::training_shape(config, backend.value, inputs.data.row_len);
        let steps = steps(config, inputs.data);
        Ok(Self {
            compute_dtype: compute_dtype(config, backend.value),
            base: base(config),
            trained_parameters: trained_parameters(&inputs),
            recompute: recompute(
                config.recompute(),
                training_shape.selective_bytes_per_token(&model_shape(inputs.model)),
            ),
            offload: offload(config, backend.value),
            optimizer: optimizer(config, backend.value),
            row_len: row_len(config, inputs.data),
            micro_batch_size: Chosen::new(config.train.micro_batch_size, "the recipe"),
            gradient_accumulation: Chosen::new(
                config.train.gradient_accumulation,
                format!("{} rows a step, one loss denominator over all of them", config.rows_per_step()),
            ),
            warmup_steps: warmup(config, steps.value),
            schedule: schedule(config),
            loss_chunk_tokens: Chosen::new(
                config.train.loss_chunk_tokens,
                format!("logits of {} tokens never exist for more positions at once", inputs.model.vocab_size),
            ),
            tokenise_workers: workers::to_tokenise(config, inputs.profile),
            loader_workers: workers::to_load(config, inputs.profile, backend.value),
            memory_bytes: memory_budget(&inputs, backend.value, &estimate),
            host_memory_bytes: host_memory(&inputs, &estimate),
            memory: estimate.lines,
            training_shape,
            backend,
            steps,
        })
    }
}

fn compute_dtype(config: &RunConfig, backend: BackendKind) -> Chosen<ComputeDtype> {
    match (backend, config.compute_dtype()) {
        (BackendKind::Cuda, asked) => Chosen::new(asked, "the recipe; norms, softmax and loss in f32"),
        (_, ComputeDtype::Float32) => Chosen::new(ComputeDtype::Float32, "the recipe"),
        (backend, _) => Chosen::new(ComputeDtype::Float32, format!("{backend} computes in f32")),
    }
}

fn base(config: &RunConfig) -> Chosen<BasePlan> {
    match (&config.bnb_4bit, &config.lora) {
        (Some(bnb), _) if bnb.double_quant => {
            Chosen::new(BasePlan::Nf4DoubleQuant, "[bnb_4bit]: 4.127 bits a weight, packed while it is read")
        }
        (Some(_), _) => Chosen::new(BasePlan::Nf4, "[bnb_4bit] without double_quant: 4.5 bits a weight"),
        (None, Some(_)) => Chosen::new(BasePlan::Frozen, "[lora] without [bnb_4bit]: frozen in the compute format"),
        (None, None) => Chosen::new(BasePlan::Trained, "no [lora]: every weight trains, in f32"),
    }
}

fn trained_parameters(inputs: &PlanInputs<'_>) -> Chosen<u64> {
    let shape = model_shape(inputs.model);
    match lora_shape(inputs.config) {
        Some(lora) => {
            let (trained, total) = (lora.parameters(&shape), shape.total_parameters());
            let share = 100.0 * trained as f64 / total as f64;
            Chosen::new(trained, format!("LoRA of rank {}: {share:.2} % of {total} parameters", lora.r))
        }
        None => Chosen::new(shape.total_parameters(), "all of them"),
    }
}

fn recompute(recompute: Recompute, selective_bytes: u64) -> Chosen<Recompute> {
    let why = match recompute {
        Recompute::Full => {
            "blocks keep their input and run forward twice, but for their last product: least memory".to_owned()
        }
        Recompute::Selective => format!(
            "blocks keep what products and attention made, {selective_bytes} bytes a token and block; norms and activation \
             functions are computed again, which costs little"
        ),
        Recompute::None => "blocks keep all that their backward reads: most memory, least work".to_owned(),
    };
    Chosen::new(recompute, why)
}

/// Whether block inputs wait in host memory.
pub(crate) fn offload(config: &RunConfig, backend: BackendKind) -> Chosen<bool> {
    match (backend, config.recompute(), config.train.offload) {
        (BackendKind::Cuda, Recompute::Full, None | Some(true)) => {
            Chosen::new(true, "block inputs wait in pinned host memory, copied beside the work")
        }
        (BackendKind::Cuda, Recompute::Full, Some(false)) => Chosen::new(false, "the recipe"),
        (BackendKind::Cuda, ..) => Chosen::new(false, "only block inputs are offloaded: recompute = \"full\""),
        (backend, _, Some(true)) => {
            Chosen::new(false, format!("{backend} leaves block inputs where they are, whatever the recipe says"))
        }
        (backend, ..) => Chosen::new(false, format!("{backend} leaves block inputs where they are")),
    }
}

fn optimizer(config: &RunConfig, backend: BackendKind) -> Chosen<MomentPlan> {
    let small = "parameters below 4,096 elements keep f32";
    match config.train.optimizer {
        OptimizerKind::Adamw => Chosen::new(MomentPlan::Float32, "AdamW, moments in f32"),
        OptimizerKind::Adamw8bit => Chosen::new(MomentPlan::EightBit, format!("AdamW, moments in 8 bits; {small}")),
        OptimizerKind::PagedAdamw8bit => {
            let place = if backend.is_cpu() { "in host memory as all else" } else { "on the device" };
            Chosen::new(
                MomentPlan::EightBit,
                format!("the same as adamw_8bit: moments in 8 bits stay {place}, nothing is paged; {small}"),
            )
        }
    }
}

fn row_len(config: &RunConfig, data: &DataShape) -> Chosen<usize> {
    let how = if config.pack { "packed" } else { "one document a row" };
    Chosen::new(data.row_len, format!("max_seq_len; {how}: {}", data.report))
}

fn steps(config: &RunConfig, data: &DataShape) -> Chosen<u64> {
    let (rows, per_step) = (data.rows, config.rows_per_step());
    match config.length() {
        RunLength::Steps(steps) => {
            let epochs = (steps * per_step as u64) as f64 / rows as f64;
            Chosen::new(steps, format!("the recipe: {epochs:.2} epochs of {rows} rows"))
        }
        RunLength::Epochs(epochs) => {
            let steps = (epochs * rows as f64 / per_step as f64).ceil().max(1.0) as u64;
            Chosen::new(steps, format!("{epochs} epochs of {rows} rows, {per_step} rows a step, rounded up"))
        }
    }
}

fn warmup(config: &RunConfig, steps: u64) -> Chosen<u64> {
    match config.warmup() {
        Warmup::Steps(warmup) => Chosen::new(warmup, "the recipe"),
        Warmup::Ratio(ratio) => {
            Chosen::new((ratio * steps as f64).round() as u64, format!("{:.1} % of the steps", 100.0 * ratio))
        }
    }
}

fn schedule(config: &RunConfig) -> Chosen<ScheduleKind> {
    Chosen::new(config.train.schedule, format!("the recipe; peak learning rate {:e}", config.train.learning_rate))
}

fn memory_budget(inputs: &PlanInputs<'_>, backend: BackendKind, estimate: &MemoryEstimate) -> Chosen<u64> {
    let (free, place) = fit::available(inputs.profile, backend);
    Chosen::new(estimate.total_bytes(), format!("of {} free {place}, at the peak of a step", human_bytes(free)))
}

fn host_memory(inputs: &PlanInputs<'_>, estimate: &MemoryEstimate) -> Chosen<u64> {
    let why = match estimate.host_lines.first() {
        Some(line) => {
            let free = human_bytes(inputs.profile.memory.available_bytes);
            format!("{}: {}; of {free} free", line.what, line.why)
        }
        None => "nothing waits there for the device".to_owned(),
    };
    Chosen::new(estimate.host_bytes(), why)
}

/// The sizes that memory and work hang on.
pub fn model_shape(config: &LlamaConfig) -> ModelShape {
    ModelShape {
        vocab_size: config.vocab_size,
        hidden_size: config.hidden_size,
        intermediate_size: config.intermediate_size,
        num_hidden_layers: config.num_hidden_layers,
        num_attention_heads: config.num_attention_heads,
        num_key_value_heads: config.num_key_value_heads,
        head_dim: config.head_dim,
        tie_word_embeddings: config.tie_word_embeddings,
    }
}

/// The adapter's size, if there is one. A target that is no projection counts for nothing here: the model refuses it.
pub fn lora_shape(config: &RunConfig) -> Option<LoraShape> {
    use crate::config::LoraTarget;
    let lora = config.lora.as_ref()?;
    Some(match &lora.target {
        LoraTarget::AllLinear => LoraShape::all_linear(lora.r),
        LoraTarget::Modules(names) => {
            memory::LoraShape::named(lora.r, names).unwrap_or(LoraShape { r: lora.r, targets: Vec::new() })
        }
    })
}

/// The snake-case name that serde gives a unit variant.
pub(crate) fn word(value: &impl Serialize) -> String {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(word)) => word,
        Ok(other) => other.to_string(),
        Err(_) => String::new(),
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let line = |name: &str, value: String, reason: &str| format!("  {name:<22} {value:<16} {reason}");
        let lines = [
            line("backend", word(&self.backend.value), &self.backend.reason),
            line("compute", word(&self.compute_dtype.value), &self.compute_dtype.reason),
            line("base", word(&self.base.value), &self.base.reason),
            line("trained parameters", self.trained_parameters.value.to_string(), &self.trained_parameters.reason),
            line("recompute", word(&self.recompute.value), &self.recompute.reason),
            line("offload", self.offload.value.to_string(), &self.offload.reason),
            line("optimizer state", word(&self.optimizer.value), &self.optimizer.reason),
            line("row length", self.row_len.value.to_string(), &self.row_len.reason),
            line("micro batch", self.micro_batch_size.value.to_string(), &self.micro_batch_size.reason),
            line("accumulation", self.gradient_accumulation.value.to_string(), &self.gradient_accumulation.reason),
            line("steps", self.steps.value.to_string(), &self.steps.reason),
            line("warm-up steps", self.warmup_steps.value.to_string(), &self.warmup_steps.reason),
            line("schedule", word(&self.schedule.value), &self.schedule.reason),
            line("loss chunk", self.loss_chunk_tokens.value.to_string(), &self.loss_chunk_tokens.reason),
            line("tokenising threads", self.tokenise_workers.value.to_string(), &self.tokenise_workers.reason),
            line("loader threads", self.loader_workers.value.to_string(), &self.loader_workers.reason),
            line("memory", human_bytes(self.memory_bytes.value), &self.memory_bytes.reason),
        ];
        writeln!(formatter, "{}", lines.join("\n"))?;
        for part in &self.memory {
            writeln!(formatter, "    {:<34} {:>10}  {}", part.what, human_bytes(part.bytes), part.why)?;
        }
        if self.host_memory_bytes.value > 0 {
            let bytes = human_bytes(self.host_memory_bytes.value);
            writeln!(formatter, "{}", line("host memory", bytes, &self.host_memory_bytes.reason))?;
        }
        Ok(())
    }
}
