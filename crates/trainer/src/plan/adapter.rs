//! Decisions about weights: how the base stores them, which of them train, where they start, how adapters are computed, and the reference of a
//! preference loss.
//!
//! All frozen projections have one storage format; the embedding and the head stay dense. An adapter that starts at zero is its own reference in
//! every step, which costs a forward pass but no second copy of the base; precomputed log-probabilities cost that pass once per document instead of
//! once per epoch.

use std::collections::BTreeSet;
use std::path::PathBuf;

use firebrick_arch::{LoraConfig, ModelConfig, ModelSpec, Role};
use firebrick_hwprofile::memory::human_bytes;
use firebrick_kernels::{BackendKind, BaseStorage, GemmFormat, PairPasses, TrainingShape};
use firebrick_model::float_type_of;
use firebrick_precision::{FloatType, Format, QuantFormat};
use serde::Serialize;

use crate::config::{GrpoSection, PreferenceSection, RunConfig};
use crate::error::RunError;
use crate::plan::wish::Wish;
use crate::plan::{Chosen, Made};

/// The source of the reference's log-probabilities.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PlannedReference {
    /// Computed from the base without its adapter, in every pass.
    BaseWithoutAdapter,
    /// Computed once, before the first step.
    Precomputed,
}

/// Returns the storage that the recipe sets. Weights that it does not quantize have the format `compute`.
pub(super) fn storage(config: &RunConfig, compute: FloatType) -> BaseStorage {
    match (config.quantized_base(), &config.lora) {
        (Some(format), _) => BaseStorage::Frozen(Format::Quantized(format)),
        (None, Some(_)) => BaseStorage::Frozen(Format::Float(compute)),
        (None, None) => config.train.weights.storage(),
    }
}

/// Returns the storage with its reason.
///
/// # Errors
/// A projection has rows that the format does not take.
pub(super) fn base(
    config: &RunConfig,
    spec: &ModelSpec,
    storage: BaseStorage,
) -> Result<Chosen<BaseStorage>, RunError> {
    let why = match storage {
        BaseStorage::Trained => "mode = \"full\": every weight trains, in f32".to_owned(),
        BaseStorage::TrainedBf16 => "mode = \"full\": every weight trains, matrices in bf16".to_owned(),
        BaseStorage::Frozen(Format::Quantized(format)) => {
            check_widths(format, spec)?;
            let key = if config.base.is_some() { "base" } else { "[bnb_4bit]" };
            format!("{key}: {:.3} bits per weight, quantized while it is read", format.bits_per_value())
        }
        BaseStorage::Frozen(_) => "[lora] without [bnb_4bit] or base: frozen in the compute format".to_owned(),
    };
    Ok(Chosen::new(storage, why))
}

fn check_widths(format: QuantFormat, spec: &ModelSpec) -> Result<(), RunError> {
    spec.modules().try_for_each(|(module, inputs)| {
        let refused = |error| RunError::Refused(format!("base = \"{format}\": {}: {error}", module.path));
        format.check_columns(inputs).map_err(refused)
    })
}

/// Returns the adapter; without one every weight trains.
pub(super) fn lora(made: &Made<'_>) -> Chosen<Option<LoraConfig>> {
    let why = if made.wish.lora.is_some() { "[lora]" } else { "mode = \"full\"" };
    Chosen::new(made.training.lora.clone(), why)
}

/// Counts the parameters that train; the reason gives their share of the model.
pub(super) fn trained_parameters(made: &Made<'_>) -> Chosen<u64> {
    let Made { trained, .. } = made;
    let count: u64 = trained.iter().map(|tensor| tensor.elements() as u64).sum();
    let Some(lora) = &made.training.lora else {
        let why = match made.wish.model.spec.parameters_of(Role::PerLayerEmbedding) {
            0 => "all of them".to_owned(),
            table => format!("all but the table of the layers' inputs, {table} parameters, which stays as it is"),
        };
        return Chosen::new(count, why);
    };
    let (rank, total) = (lora.r, made.wish.model.spec.parameters());
    let share = 100.0 * count as f64 / total as f64;
    let kind = if lora.use_dora { "DoRA" } else { "LoRA" };
    let whole = trained.iter().filter(|tensor| !matches!(tensor.role, Role::LoraA | Role::LoraB | Role::LoraMagnitude));
    let whole: u64 = whole.filter(|tensor| tensor.role != Role::TokenRows).map(|tensor| tensor.elements() as u64).sum();
    let rows = trained.iter().filter(|tensor| tensor.role == Role::TokenRows);
    let rows: u64 = rows.map(|tensor| tensor.shape[0] as u64).sum();
    let rows = if rows > 0 { format!(", and {rows} rows of tokens") } else { String::new() };
    let whole = if whole > 0 { format!(", {whole} of them in modules_to_save") } else { String::new() };
    Chosen::new(count, format!("{kind} of rank {rank}: {share:.2} % of {total} parameters{whole}{rows}"))
}

/// Returns the modules that targets name and that some layers do not have, because they read the keys and values of others; the reason says which.
pub(super) fn skipped_modules(wish: &Wish<'_>) -> Option<Chosen<Vec<String>>> {
    let spec = &wish.model.spec;
    // What cannot be resolved is refused elsewhere.
    let skipped = wish.lora.as_ref()?.resolve(spec).ok()?.skipped_modules(spec);
    let layer = |path: &String| path.split('.').find_map(|part| part.parse::<usize>().ok());
    let layers: BTreeSet<usize> = skipped.iter().filter_map(layer).collect();
    let names: BTreeSet<&str> = skipped.iter().filter_map(|path| path.rsplit('.').next()).collect();
    let (first, last) = (layers.first()?, layers.last()?);
    let which = match last - first + 1 == layers.len() {
        true => format!("{first} to {last}"),
        false => layers.iter().map(usize::to_string).collect::<Vec<_>>().join(", "),
    };
    let why = format!("in layers {which}, which read the keys and values of earlier layers and have no such modules");
    Some(Chosen::new(names.into_iter().map(str::to_owned).collect(), why))
}

/// Says where the table of the layers' own inputs is.
pub(super) fn layer_inputs(model: &ModelConfig) -> Option<Chosen<&'static str>> {
    let [table, ..] = model.spec.per_layer_tensors()?;
    let bytes = human_bytes((table.elements() * float_type_of(model).bytes()) as u64);
    let why = format!(
        "embed_tokens_per_layer, {bytes}, never trains: each pass reads the rows of its tokens from the checkpoint, through the system's page cache"
    );
    Some(Chosen::new("host memory", why))
}

/// Returns the adapter folder that the matrices come from; the reason says how they start.
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

pub(super) fn new_tokens(wish: &Wish<'_>) -> Option<Chosen<Vec<String>>> {
    let Wish { recipe: config, model, .. } = wish;
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

pub(super) fn dropout(config: &RunConfig, backend: BackendKind) -> Option<Chosen<f64>> {
    let dropout = config.lora.as_ref()?.lora_dropout;
    let how = if backend == BackendKind::Cuda {
        "computed again in each pass, never stored; the adapters' part of the gradient of an input is a GEMM of its own"
    } else {
        "computed by one CPU thread and copied to the device in each pass"
    };
    (dropout > 0.0).then(|| Chosen::new(dropout, format!("one mask per group and row of the step, {how}")))
}

pub(super) fn loraplus_lr_ratio(config: &RunConfig) -> Option<Chosen<f64>> {
    let ratio = config.lora.as_ref()?.loraplus_lr_ratio?;
    let rate = ratio * config.learning_rate();
    Some(Chosen::new(
        ratio,
        format!("LoRA+: B and trained vectors learn at {rate:e}, everything else at the learning rate"),
    ))
}

/// Returns a text about which adapters join the base's GEMMs; `None` without an adapter.
pub(super) fn gemms(backend: BackendKind, spec: &ModelSpec, training: &TrainingShape) -> Option<Chosen<String>> {
    let why = if backend == BackendKind::Cuda {
        "few ranks join the base's GEMM, exact at any size; many, or those on a base that is not quantized, are cheaper on their own"
    } else {
        "two small GEMMs per module"
    };
    Some(Chosen::new(backend.adapter_gemms(spec, training)?, why))
}

pub(super) fn preference(config: &RunConfig) -> Option<Chosen<PreferenceSection>> {
    let section = config.preference.clone()?;
    let what = if section.has_reference() { "" } else { "no reference; " };
    let why = format!("{what}the head runs twice over each micro-batch: for log-probabilities, then for gradients");
    Some(Chosen::new(section, why))
}

/// Returns what completions are learned from, by layers that multiply in this format; `None` where documents are trained on.
pub(super) fn grpo(config: &RunConfig, gemms: GemmFormat) -> Option<Chosen<GrpoSection>> {
    let section = config.grpo.clone()?;
    let sampling = match gemms {
        GemmFormat::Fp8 => {
            "; sampling multiplies in 8-bit floats too, whatever its number of rows, with a scale per row: layers round alike in both, which \
             differ by the order of sums and attention over the cache"
        }
        GemmFormat::Compute | GemmFormat::F16 => "",
    };
    let why = "the model writes completions, rewards score them, and each step learns from those of its prompts";
    Some(Chosen::new(section, format!("{why}{sampling}")))
}

pub(super) fn reference(config: &RunConfig) -> Option<Chosen<PlannedReference>> {
    let section = config.preference.as_ref().filter(|section| section.has_reference())?;
    let pass = "one forward pass over all pairs before the first step";
    let (reference, why) = match (config.reference_is_precomputed_always(), &config.lora) {
        (true, None) => (PlannedReference::Precomputed, format!("every weight trains: {pass}")),
        (true, Some(_)) => (PlannedReference::Precomputed, format!("more than zeros is added to the base: {pass}")),
        (false, _) if section.precompute_ref_log_probs == Some(true) => {
            (PlannedReference::Precomputed, format!("the recipe: {pass}"))
        }
        (false, _) => {
            let why = "one more forward pass per micro-batch, with adapters off; no second copy of the base";
            (PlannedReference::BaseWithoutAdapter, why.to_owned())
        }
    };
    Some(Chosen::new(reference, why))
}

/// Returns the passes that pairs add to a step; `None` without pairs.
pub(super) fn passes(config: &RunConfig) -> Option<PairPasses> {
    config.preference.as_ref()?;
    let in_step = reference(config).is_some_and(|chosen| chosen.value == PlannedReference::BaseWithoutAdapter);
    Some(PairPasses { reference: in_step })
}

#[cfg(test)]
mod tests {
    use firebrick_arch::shapes::{llama_3_1_8b, llama_3_2_1b};

    use super::*;

    #[test]
    fn models_take_every_format_and_odd_widths_are_refused_by_name() {
        for format in QuantFormat::ALL {
            for spec in [llama_3_1_8b(), llama_3_2_1b()] {
                check_widths(format, &spec).unwrap();
            }
        }
        let odd = ModelSpec { hidden_size: 2048 + 16, ..llama_3_2_1b() };
        check_widths(QuantFormat::Nvfp4, &odd).unwrap();
        let message = check_widths(QuantFormat::Mxfp4, &odd).unwrap_err().to_string();
        assert!(message.contains("base = \"mxfp4\": model.layers.0.") && message.contains("2064"), "{message}");
    }
}
