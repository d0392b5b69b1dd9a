//! Decisions about adapters: what of a model trains, where it starts, and how it is computed.
//!
//! Trade-off: without an adapter these are asked all the same, and answer with nothing or with the whole model.

use std::path::PathBuf;

use firebrick_arch::{ModelConfig, ModelSpec, Role, TensorSpec};
use firebrick_kernels::{BackendKind, TrainingShape};

use crate::config::RunConfig;
use crate::plan::chosen::Chosen;
use crate::plan::values::PlanInputs;

/// How many parameters train, and of how many.
pub(super) fn trained_parameters(inputs: &PlanInputs<'_>, trained: &[TensorSpec], has_lora: bool) -> Chosen<u64> {
    let count: u64 = trained.iter().map(|tensor| tensor.elements() as u64).sum();
    if !has_lora {
        return Chosen::new(count, "all of them");
    }
    let total = inputs.model.spec.parameters();
    let rank = inputs.config.lora.as_ref().map_or(0, |lora| lora.r);
    let share = 100.0 * count as f64 / total as f64;
    let kind = if inputs.config.lora.as_ref().is_some_and(|lora| lora.use_dora) { "DoRA" } else { "LoRA" };
    let whole = trained.iter().filter(|tensor| !matches!(tensor.role, Role::LoraA | Role::LoraB | Role::LoraMagnitude));
    let whole: u64 = whole.filter(|tensor| tensor.role != Role::TokenRows).map(|tensor| tensor.elements() as u64).sum();
    let rows = trained.iter().filter(|tensor| tensor.role == Role::TokenRows);
    let rows: u64 = rows.map(|tensor| tensor.shape[0] as u64).sum();
    let rows = if rows > 0 { format!(", and {rows} rows of tokens") } else { String::new() };
    let whole = if whole > 0 { format!(", {whole} of them in modules_to_save") } else { String::new() };
    Chosen::new(count, format!("{kind} of rank {rank}: {share:.2} % of {total} parameters{whole}{rows}"))
}

/// The adapter folder that the matrices come from; the reason says how they start.
pub(super) fn init_from(config: &RunConfig) -> Chosen<Option<PathBuf>> {
    let folder = config.lora.as_ref().and_then(|lora| lora.init_from.as_ref()).map(PathBuf::from);
    if let Some(lora) = config.lora.as_ref().filter(|lora| !lora.init_lora_weights.is_uniform()) {
        let why = format!(
            "{}: the principal part of each weight, which the base loses before it is stored; saved with rank {} for the original base",
            lora.init_lora_weights,
            2 * lora.r
        );
        return Chosen::new(folder, why);
    }
    let why = match (folder.is_some(), config.lora.as_ref().is_some_and(|lora| lora.use_dora)) {
        (true, _) => "its matrices; the optimizer starts from zero",
        (false, false) => "A is random, B is zero",
        (false, true) => "A is random, B is zero, magnitudes are the norms of the rows",
    };
    Chosen::new(folder, why)
}

/// Tokens that the recipe adds; `None` where it adds none.
pub(super) fn new_tokens(config: &RunConfig, model: &ModelConfig) -> Option<Chosen<Vec<String>>> {
    let (first, last) = (model.new_tokens.first()?, model.new_tokens.last()?);
    let (stored, rows) = (model.stored_vocab_size, model.spec.vocab_size);
    let tables = match rows == stored {
        true => format!("rows that the {stored} of the model's tables have to spare"),
        false => format!("its tables grow from {stored} to {rows} rows"),
    };
    let trains = if config.lora.is_some() { "of the tables only these train" } else { "all rows train" };
    let tokens = config.data.new_tokens.iter().chain(&config.data.new_special_tokens).cloned().collect();
    Some(Chosen::new(
        tokens,
        format!("ids {first} to {last}: {tables}; they start at the mean of the others; {trains}"),
    ))
}

/// Dropout of what adapters read; `None` where nothing is dropped.
pub(super) fn dropout(config: &RunConfig, backend: BackendKind) -> Option<Chosen<f64>> {
    let dropout = config.lora.as_ref()?.lora_dropout;
    let how = if backend == BackendKind::Cuda {
        "computed again in each pass, never stored; the adapters' part of the gradient of an input is a GEMM of its own"
    } else {
        "computed by one CPU thread and copied to the device in each pass"
    };
    (dropout > 0.0).then(|| Chosen::new(dropout, format!("one mask per group and micro-batch, {how}")))
}

/// The ratio of LoRA+; `None` without it.
pub(super) fn loraplus_lr_ratio(config: &RunConfig) -> Option<Chosen<f64>> {
    let ratio = config.lora.as_ref()?.loraplus_lr_ratio?;
    let rate = ratio * config.learning_rate();
    Some(Chosen::new(
        ratio,
        format!("LoRA+: B and trained vectors learn at {rate:e}, everything else at the learning rate"),
    ))
}

/// Which adapters join the base's GEMMs; `None` without an adapter.
pub(super) fn gemms(backend: BackendKind, spec: &ModelSpec, training: &TrainingShape) -> Option<Chosen<String>> {
    let why = if backend == BackendKind::Cuda {
        "few ranks join the base's GEMM, exact at any size; many, or those on a base that is not quantized, are cheaper on their own"
    } else {
        "two small GEMMs per module"
    };
    Some(Chosen::new(backend.adapter_gemms(spec, training)?, why))
}
