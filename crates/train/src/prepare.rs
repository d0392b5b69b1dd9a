//! Everything before the first weight is read: tokenizer, data, model description, plan.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use firebrick_data::{DocumentSet, Loader, LoaderConfig, PackOptions, PackedDataset, Question, Tokenizer};
use firebrick_hwprofile::HardwareProfile;
use firebrick_model::LlamaConfig;

use crate::config::RunConfig;
use crate::data_sets;
use crate::error::RunError;
use crate::evaluate::EvaluationSet;
use crate::plan::{self, DataShape, Plan, PlanInputs};

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
    /// When the run began, in seconds since 1970: the date that chat templates see.
    pub date: i64,
    /// Rows to train on.
    pub train: Arc<PackedDataset>,
    /// What to evaluate on.
    pub evaluation: EvaluationSet,
    /// Sentences about the data, to print.
    pub data_notes: Vec<String>,
}

/// Reads the data, and decides, for a run that begins now.
///
/// # Errors
/// As [`prepare_on`].
pub fn prepare(config: RunConfig) -> Result<Prepared, RunError> {
    prepare_on(config, now())
}

/// As [`prepare`], for a run that began at `date` (seconds since 1970), which is what chat templates see.
///
/// # Errors
/// Anything wrong with the recipe, the tokenizer, the data, the model's description or the machine.
pub fn prepare_on(config: RunConfig, date: i64) -> Result<Prepared, RunError> {
    let folder = config.model_folder()?;
    let model = LlamaConfig::read(&folder)?;
    let tokenizer = data_sets::tokenizer(&config, &folder, date)?;
    if tokenizer.vocab_size() > model.vocab_size {
        return Err(RunError::VocabularyTooSmall { tokenizer: tokenizer.vocab_size(), model: model.vocab_size });
    }
    let profile = HardwareProfile::detect();
    let data = data_sets::read(&config, &tokenizer, plan::tokenising(&config, &profile))?;
    let data_notes = data.notes();
    let options = pack_options(&config, &tokenizer);
    let packed = Arc::new(PackedDataset::new(data.train.documents, options.clone()));
    let evaluation = match data.held_out {
        Some(documents) => evaluation_set(&config, documents, options, &tokenizer)?,
        None => EvaluationSet::default(),
    };
    let data = DataShape::from(&*packed);
    let plan = Plan::resolve(PlanInputs { config: &config, profile: &profile, model: &model, data: &data })?;
    Ok(Prepared { config, profile, plan, model, tokenizer, date, train: packed, evaluation, data_notes })
}

/// Seconds since 1970.
pub(crate) fn now() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs() as i64)
}

/// How the recipe has documents put into rows.
pub fn pack_options(config: &RunConfig, tokenizer: &Tokenizer) -> PackOptions {
    let defaults = PackOptions::new(config.max_seq_len);
    // Groups of several micro-batches, so that which rows meet in one still depends on chance.
    let length_group = defaults.length_group.map(|rows| rows.max(4 * config.train.micro_batch_size));
    PackOptions {
        pack: config.pack,
        pad_token_id: tokenizer.pad_token_id(),
        pad_to_multiple_of: config.data.pad_to_multiple_of,
        length_group,
        ..defaults
    }
}

fn evaluation_set(
    config: &RunConfig,
    documents: DocumentSet,
    options: PackOptions,
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
        workers: 1,
    };
    let questions = Question::of_documents(&documents, tokenizer, config.eval.exact_match_prompts)?;
    let mut loader = Loader::new(Arc::new(PackedDataset::new(documents, options)), loader, Default::default());
    let limit = if config.eval.max_batches == 0 { usize::MAX } else { config.eval.max_batches };
    let batches = std::iter::from_fn(|| loader.next_batch().map(|(batch, _)| batch)).take(limit).collect();
    Ok(EvaluationSet {
        batches,
        questions,
        max_new_tokens: config.eval.max_new_tokens,
        loss_chunk_tokens: config.train.loss_chunk_tokens,
    })
}
