//! Whether a run fits into memory, and the nearest change that does where it does not.

use firebrick_hwprofile::HardwareProfile;
use firebrick_hwprofile::memory::{self, BaseStorage, MemoryEstimate, TrainingShape, human_bytes};

use crate::backend::BackendKind;
use crate::config::{ComputeDtype, OptimizerKind, Recompute, RunConfig};
use crate::error::RunError;
use crate::plan::{PlanInputs, lora_shape, model_shape};

/// The part of the free memory that a plan may use: the estimate leaves out contexts, libraries and rounding.
const USABLE: f64 = 0.9;

/// The estimate of a run that fits.
///
/// # Errors
/// [`RunError::DoesNotFit`] with the table and the nearest change that fits.
pub(super) fn check(inputs: &PlanInputs<'_>, backend: BackendKind) -> Result<MemoryEstimate, RunError> {
    let (free, place) = available(inputs.profile, backend);
    let estimate = estimate(inputs, inputs.config, backend);
    let fits = |estimate: &MemoryEstimate| (estimate.total_bytes() as f64) <= free as f64 * USABLE;
    if fits(&estimate) {
        return Ok(estimate);
    }
    let change = smaller(inputs.config).into_iter().find(|(_, config)| fits(&self::estimate(inputs, config, backend)));
    let advice = match change {
        Some((settings, config)) => {
            let needed = human_bytes(self::estimate(inputs, &config, backend).total_bytes());
            format!("The nearest change that fits needs {needed}: {settings}")
        }
        None => {
            "No smaller micro-batch fits either: shorten max_seq_len, or take a smaller model or a larger device".into()
        }
    };
    let lines = estimate
        .lines
        .iter()
        .map(|line| format!("\n  {:<34} {:>10}  {}", line.what, human_bytes(line.bytes), line.why));
    Err(RunError::DoesNotFit {
        needed: human_bytes(estimate.total_bytes()),
        available: format!("{} {place}", human_bytes(free)),
        breakdown: lines.collect(),
        advice,
    })
}

/// Free bytes where the backend's tensors live, and that place's name.
pub(super) fn available(profile: &HardwareProfile, backend: BackendKind) -> (u64, &'static str) {
    match (backend, profile.gpus.first()) {
        (BackendKind::Cuda, Some(card)) => (card.memory_free_bytes, "on the card"),
        // WebGPU does not say how much memory its device has; unified and software devices share the host's.
        _ => (profile.memory.available_bytes, "in host memory"),
    }
}

fn estimate(inputs: &PlanInputs<'_>, config: &RunConfig, backend: BackendKind) -> MemoryEstimate {
    memory::estimate(&model_shape(inputs.model), &training_shape(config, backend, inputs.data.row_len()))
}

fn training_shape(config: &RunConfig, backend: BackendKind, row_len: usize) -> TrainingShape {
    let wide = backend != BackendKind::Cuda || config.compute_dtype() == ComputeDtype::Float32;
    let base = match &config.bnb_4bit {
        Some(bnb) => BaseStorage::Nf4 { double_quant: bnb.double_quant },
        None if wide => BaseStorage::F32,
        None => BaseStorage::Bf16,
    };
    TrainingShape {
        base,
        lora: lora_shape(config),
        optimizer_bytes_per_parameter: moment_bytes(config.train.optimizer, backend),
        micro_batch_size: config.train.micro_batch_size,
        row_len,
        recompute: match config.recompute() {
            Recompute::Full => memory::Recompute::Full,
            Recompute::Selective => memory::Recompute::Selective,
            Recompute::None => memory::Recompute::None,
        },
        offload: super::offload(config, backend).value,
        activation_bytes: if wide { 4 } else { 2 },
        trainable_bytes: 4,
        loss_chunk_tokens: config.train.loss_chunk_tokens,
        // The portable attention holds the scores of one document at a time, at most a row.
        score_tokens: row_len,
    }
}

/// Bytes of both moments of a parameter.
fn moment_bytes(optimizer: OptimizerKind, backend: BackendKind) -> f64 {
    /// One f32 scale in 256 values, for each moment.
    const SCALES: f64 = 2.0 * 4.0 / 256.0;
    match (optimizer, backend) {
        (OptimizerKind::Adamw, _) => 8.0,
        // WebGPU stores no bytes, so each code takes a word there.
        (_, BackendKind::Wgpu) => 8.0 + SCALES,
        _ => 2.0 + SCALES,
    }
}

/// Smaller runs with the same effective batch, nearest first.
fn smaller(config: &RunConfig) -> Vec<(String, RunConfig)> {
    let mut runs = Vec::new();
    let mut next = config.clone();
    if next.recompute() != Recompute::Full {
        next.train.recompute = Some(Recompute::Full);
        next.train.grad_checkpointing = None;
        runs.push(("--set train.recompute=full".to_owned(), next.clone()));
    }
    let full = if runs.is_empty() { "" } else { "--set train.recompute=full " };
    while next.train.micro_batch_size > 1 && next.train.micro_batch_size.is_multiple_of(2) {
        next.train.micro_batch_size /= 2;
        next.train.gradient_accumulation *= 2;
        let settings = format!(
            "{full}--set train.micro_batch_size={} --set train.gradient_accumulation={} (the same effective batch)",
            next.train.micro_batch_size, next.train.gradient_accumulation
        );
        runs.push((settings, next.clone()));
    }
    runs
}
