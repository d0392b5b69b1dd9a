//! Everything before the first weight is read: tokenizer, data, model description, plan.

use std::path::Path;
use std::sync::Arc;

use firebrick_data::{
    Dataset, DatasetFormat, Holdout, Loader, LoaderConfig, PackedDataset, ReadOptions, Tokenizer, TrainOn,
};
use firebrick_hwprofile::HardwareProfile;
use firebrick_model::LlamaConfig;

use crate::config::{self, RunConfig};
use crate::error::RunError;
use crate::evaluate::EvaluationSet;
use crate::plan::{Plan, PlanInputs};

/// A run that is ready to load its model.
pub struct Prepared {
    /// What was typed.
    pub config: RunConfig,
    /// What was found.
    pub profile: HardwareProfile,
    /// What was decided.
    pub plan: Plan,
    /// The model's description.
    pub model: LlamaConfig,
    /// The model's tokenizer.
    pub tokenizer: Tokenizer,
    /// Rows to train on.
    pub train: Arc<PackedDataset>,
    /// What to evaluate on.
    pub evaluation: EvaluationSet,
    /// Sentences about the data, to print.
    pub data_notes: Vec<String>,
}

/// Reads the data, and decides.
///
/// # Errors
/// Anything wrong with the recipe, the tokenizer, the data, the model's description or the machine.
pub fn prepare(config: RunConfig) -> Result<Prepared, RunError> {
    let folder = config.model_folder()?;
    let model = LlamaConfig::read(&folder)?;
    let tokenizer = Tokenizer::from_folder(&folder)?;
    if tokenizer.vocab_size() > model.vocab_size {
        return Err(RunError::VocabularyTooSmall { tokenizer: tokenizer.vocab_size(), model: model.vocab_size });
    }
    let (train, held_out) = read_data(&config, &tokenizer)?;
    let data_notes = notes(&train, held_out.as_ref());
    let pack = |set: &Dataset| PackedDataset::pack(set, config.max_seq_len, config.pack, tokenizer.pad_token_id());
    let packed = Arc::new(pack(&train));
    let evaluation = match held_out {
        Some(set) => evaluation_set(&config, &set, pack(&set), &tokenizer)?,
        None => EvaluationSet::default(),
    };
    let profile = HardwareProfile::detect();
    let plan = Plan::resolve(PlanInputs { config: &config, profile: &profile, model: &model, data: &packed })?;
    Ok(Prepared { config, profile, plan, model, tokenizer, train: packed, evaluation, data_notes })
}

fn read_data(config: &RunConfig, tokenizer: &Tokenizer) -> Result<(Dataset, Option<Dataset>), RunError> {
    let mut options = ReadOptions::new(config.max_seq_len);
    options.format = match config.data.format {
        config::DataFormat::Auto => DatasetFormat::Auto,
        config::DataFormat::Chat => DatasetFormat::Chat,
        config::DataFormat::Text => DatasetFormat::Text,
    };
    options.train_on = match config.train_on() {
        config::TrainOn::Assistant => TrainOn::Assistant,
        config::TrainOn::All => TrainOn::All,
    };
    let train = Dataset::read_jsonl(Path::new(&config.data.path), tokenizer, &options)?;
    if let Some(path) = &config.data.eval_path {
        let held_out = Dataset::read_jsonl(Path::new(path), tokenizer, &options)?;
        return Ok((train, Some(held_out)));
    }
    match config.data.eval_fraction {
        Some(fraction) => {
            let (train, held_out) = train.split(Holdout::Fraction(fraction))?;
            Ok((train, Some(held_out)))
        }
        None => Ok((train, None)),
    }
}

fn notes(train: &Dataset, held_out: Option<&Dataset>) -> Vec<String> {
    let mut notes = vec![format!("training data: {}", train.report)];
    notes.extend(held_out.map(|set| format!("held-out data: {}", set.report)));
    notes
}

fn evaluation_set(
    config: &RunConfig,
    set: &Dataset,
    packed: PackedDataset,
    tokenizer: &Tokenizer,
) -> Result<EvaluationSet, RunError> {
    let loader = LoaderConfig {
        rows_per_batch: config.eval_micro_batch_size(),
        seed: 0,
        shuffle: false,
        epochs: Some(1),
        rank: 0,
        world_size: 1,
        prefetch: 1,
    };
    let mut loader = Loader::new(Arc::new(packed), loader, Default::default());
    let limit = if config.eval.max_batches == 0 { usize::MAX } else { config.eval.max_batches };
    let batches = std::iter::from_fn(|| loader.next_batch().map(|(batch, _)| batch)).take(limit).collect();
    Ok(EvaluationSet {
        batches,
        questions: set.questions(tokenizer, config.eval.exact_match_prompts)?,
        max_new_tokens: config.eval.max_new_tokens,
        loss_chunk_tokens: config.train.loss_chunk_tokens,
    })
}
