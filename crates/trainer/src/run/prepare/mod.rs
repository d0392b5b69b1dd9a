//! Everything before the first weight is read: tokenizer, data, model config, headers of the weight files, and the plan.
//!
//! Trade-off: the data is read before the plan is made, because the plan depends on its size.

pub mod data_sets;
pub mod plan_for;
pub mod prompts;
pub mod together;
mod weight_notes;

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use firebrick_arch::{ModelConfig, counted};
use firebrick_data::{DocumentSet, FindingKind, PackOptions, PackedDataset, PairRows, SpecialToken, Tokenizer};
use firebrick_hwprofile::HardwareProfile;
use firebrick_model::peft::check_adapter;
use firebrick_model::{Companions, HfFolder, ModelError};

use self::data_sets::{DataSets, ReadSet};
use self::prompts::PromptColumns;
use self::weight_notes::{base_note, start_note};
use crate::config::{Init, RunConfig};
use crate::console::Console;
use crate::error::RunError;
use crate::hub::Need;
use crate::plan::{self, DataShape, Plan, PlanInputs, PlanRequest, size};
use crate::run::step::evaluate::EvaluationSet;
use crate::run::text::generate::check_vocabulary;
use crate::run::text::sampling::{ChosenSampling, TypedSampling};
use crate::run::text::{chat_settings, end_of_turn};
use crate::storage::{StorageError, free_space, may_write};

/// A run that is ready to load its model.
pub struct Prepared {
    /// The recipe as typed. The run only saves it; everything else reads the plan.
    pub recipe: RunConfig,
    /// The plan.
    pub plan: Plan,
    /// The model's config; its end-of-text tokens include the recipe's, and those that end a turn in the data.
    pub model_config: ModelConfig,
    /// Files that are saved next to the trained weights.
    pub companions: Companions,
    /// The model's tokenizer.
    pub tokenizer: Tokenizer,
    /// When the run began, in seconds since 1970: the date that chat templates see.
    pub date: i64,
    /// The folder that caches tokens; `None` if none does.
    pub cache: Option<PathBuf>,
    /// Rows to train on.
    pub train: Arc<PackedDataset>,
    /// The prompts of those rows and the held-out ones, if the model learns from rewards.
    pub prompts: Option<Prompts>,
    /// The data to evaluate on.
    pub evaluation: EvaluationSet,
    /// How the answers to sample prompts are chosen.
    pub sampling: ChosenSampling,
    /// Sentences to print about the data, and about a machine that is not this one.
    pub data_notes: Vec<String>,
    /// Why a run would not start although it can be planned: weights that are not there.
    pub missing: Option<RunError>,
}

/// Prompts that the model completes.
#[derive(Clone, Debug)]
pub struct Prompts {
    /// Columns of the documents to train on.
    pub train: Vec<PromptColumns>,
    /// Held-out documents and their columns.
    pub held_out: Option<(DocumentSet, Vec<PromptColumns>)>,
}

/// Names and contents of the files that are saved with a run and each of its checkpoints.
pub type Texts = [(&'static str, String); 2];

impl Prepared {
    /// Returns the recipe, with the name of the run's folder, and the plan as files.
    pub fn texts(&self, name: &str) -> Texts {
        let recipe = RunConfig { name: name.to_owned(), ..self.recipe.clone() };
        [("config.toml", recipe.to_toml()), ("plan.toml", self.plan.to_toml())]
    }
}

/// Prepares the plan of a new run that would begin now, as [`prepare`] does. The weights of a model on the Hub are not downloaded; an adapter to
/// start from is, because its shapes are checked.
pub fn prepare_for(recipe: RunConfig, world_size: usize, request: &PlanRequest) -> Result<Prepared, RunError> {
    check_start(&recipe)?;
    check_output(Path::new(&recipe.output_dir))?;
    prepare(recipe, now(), world_size, request, Need::Description, None)
}

/// Refuses a folder of runs that is a file, or below one, or where nothing may be written.
fn check_output(output_dir: &Path) -> Result<(), RunError> {
    let here = |path: &Path| if path.as_os_str().is_empty() { PathBuf::from(".") } else { path.to_owned() };
    let found = output_dir.ancestors().map(here).find(|path| path.exists());
    let kind = match found {
        Some(found) if !found.is_dir() => ErrorKind::NotADirectory,
        Some(found) if !may_write(&found) => ErrorKind::PermissionDenied,
        _ => return Ok(()),
    };
    Err(StorageError::NotWritable { path: output_dir.to_owned(), source: kind.into() }.into())
}

/// Checks that a new run can start from the adapter that its recipe names. A resumed run starts from its checkpoint.
///
/// # Errors
/// An adapter that cannot be read, or was made with other settings or for another model.
pub fn check_start(recipe: &RunConfig) -> Result<(), RunError> {
    let Some(from) = recipe.fetch_adapter(Need::Weights, Console::QUIET)? else { return Ok(()) };
    let folder = recipe.model_folder()?;
    let mut model = recipe.read_model(&folder)?;
    if recipe.data.adds_tokens() {
        let tokenizer = data_sets::tokenizer(recipe, &folder, now())?;
        // Its rows belong to its ids, so a tokenizer next to it must give the new tokens the same ones.
        if !tokenizer.new_tokens().is_empty() && from.join("tokenizer.json").is_file() {
            let theirs = Tokenizer::from_folder(&from)?;
            for token in tokenizer.new_tokens() {
                let id = theirs.token_to_id(&token.content);
                if id != Some(token.id) {
                    let (token, here) = (&token.content, token.id);
                    let there = id.map_or("no token".to_owned(), |id| format!("token {id}"));
                    return Err(RunError::Refused(format!(
                        "the adapter in {} has {there} as {token:?}, which gets id {here} here: write data.new_tokens in the order in \
                         which it was trained",
                        from.display()
                    )));
                }
            }
        }
        add_tokens(&tokenizer, &mut model)?;
    }
    match recipe.adapter_of(&model)? {
        Some(lora) => Ok(check_adapter(&from, &model.spec, &lora)?),
        None => Ok(()),
    }
}

/// Reads the data and makes the plan of a run of `world_size` processes that began at `date` (seconds since 1970; chat templates see it), on the
/// machine and with the exceptions of `request`. `length_group` is that of a run that is continued.
pub fn prepare(
    recipe: RunConfig,
    date: i64,
    world_size: usize,
    request: &PlanRequest,
    need: Need,
    length_group: Option<usize>,
) -> Result<Prepared, RunError> {
    let profile = request.profile();
    let mut data = Data::read(&recipe, date, &profile, need, (world_size, length_group))?;
    let (model, shape) = (&data.model, &data.shape);
    let inputs = PlanInputs { config: &recipe, profile: &profile, model, data: shape, world_size, request };
    let mut plan = Plan::resolve(inputs)?.with_folders(data.folder.clone(), data.adapter);
    check_groups(&plan)?;
    // The disk of another machine is unknown.
    let free = free_space(&plan.output_dir.value).filter(|_| profile.named.is_none());
    let of_disk = free.map(|free| plan.check_free(free.bytes)).transpose()?;
    plan.warnings.extend(of_disk.flatten());
    data.notes.extend(data.weights.and_then(|weights| base_note(&weights, &data.model, &plan)));
    let evaluation = match data.held_out {
        Some((documents, names)) if data.prompts.is_none() => {
            EvaluationSet::new(&plan, &documents, &names, data.train.options(), &data.tokenizer)?
        }
        _ => EvaluationSet::default(),
    };
    data.notes.extend(evaluation.note());
    let sampling = ChosenSampling::resolve(&data.folder, None, TypedSampling::default())?;
    if !plan.sample_prompts.value.is_empty() {
        data.notes.extend(sampling.note());
    }
    let companions = Companions {
        from: data.folder,
        chat_template: data.template,
        chat_settings: chat_settings::to_json(
            data.tokenizer.template_defaults(),
            plan.long_rope.as_ref().map(|_| plan.max_seq_len.value),
        ),
        tokenizer: data.tokenizer.changed_files()?,
    };
    Ok(Prepared {
        recipe,
        plan,
        model_config: data.model,
        companions,
        tokenizer: data.tokenizer,
        date,
        cache: data.cache,
        train: data.train,
        prompts: data.prompts,
        evaluation,
        sampling,
        data_notes: data.notes,
        missing: data.missing,
    })
}

/// Refuses steps whose completions are no whole groups on each rank.
fn check_groups(plan: &Plan) -> Result<(), RunError> {
    let Some(grpo) = &plan.grpo else { return Ok(()) };
    let (generations, ranks, rows) = (grpo.value.num_generations, plan.world_size.value, plan.rows_per_step());
    if rows.is_multiple_of(generations * ranks) {
        return Ok(());
    }
    Err(RunError::Refused(format!(
        "train.rows_per_step: a step has {} on {}, and each rank needs whole groups of grpo.num_generations = \
         {generations}: write a multiple of {}",
        counted(rows, "completion"),
        counted(ranks, "rank"),
        generations * ranks
    )))
}

/// What a wish is made from besides its recipe, and what else was read with it.
struct Data {
    /// The model's config, with the tokens that the recipe adds and those that end a turn in the data.
    model: ModelConfig,
    folder: PathBuf,
    /// The folder of the adapter that the run starts from.
    adapter: Option<PathBuf>,
    weights: Option<HfFolder>,
    tokenizer: Tokenizer,
    /// The text of the chat template if the recipe chose it.
    template: Option<String>,
    cache: Option<PathBuf>,
    /// Documents to evaluate on, and the names of their sources' sets.
    held_out: Option<(DocumentSet, Vec<Option<String>>)>,
    train: Arc<PackedDataset>,
    shape: DataShape,
    prompts: Option<Prompts>,
    notes: Vec<String>,
    /// Weights that are not there.
    missing: Option<RunError>,
}

impl Data {
    /// Reads the model's description, the tokenizer and the data, for this many ranks and with the length group of a run that is continued.
    fn read(
        recipe: &RunConfig,
        date: i64,
        profile: &HardwareProfile,
        need: Need,
        (world_size, length_group): (usize, Option<usize>),
    ) -> Result<Self, RunError> {
        let found = recipe.fetch_model(need, Console::QUIET)?;
        let folder = found.folder;
        let mut model = recipe.read_model(&folder)?;
        let (weights, missing) = match check_model(recipe, &folder, &model, found.missing_bytes == 0) {
            // A plan needs no weights; errors in weights that are present are reported now.
            Err(RunError::Model(error @ ModelError::NotThere { .. })) if need == Need::Description => {
                (None, Some(RunError::from(error)))
            }
            weights => (weights?, None),
        };
        let tokenizer = data_sets::tokenizer(recipe, &folder, date)?;
        add_tokens(&tokenizer, &mut model)?;
        recipe.adapter_of(&model)?;
        // A new run with a missing adapter was refused earlier. A resumed run needs the adapter only as the reference of a preference loss, and looks
        // for it then.
        let adapter = recipe.fetch_adapter(need, Console::QUIET).ok().flatten();
        let data = data_sets::read(recipe, &tokenizer, plan::tokenizing(recipe, profile))?;
        let mut notes = data.notes();
        notes.extend(adapter.as_deref().and_then(|from| start_note(from, recipe, &folder)));
        if recipe.init == Init::Pretrained && found.missing_bytes > 0 {
            let gigabytes = found.missing_bytes as f64 / 1e9;
            let name = &recipe.model;
            notes.push(format!("the weights of {name} ({gigabytes:.2} GB) are on the Hub; a run downloads them"));
        }
        if profile.named.is_some() {
            notes.extend(profile.notes.iter().cloned());
        }
        let has_chats = data.has_chats(&tokenizer);
        let (mut ends, mut found) = (trained_ends(recipe, &data.train, &tokenizer), "which ends what is trained");
        if ends.is_empty() && has_chats && recipe.data.train_end_of_turn {
            ends.extend(end_of_turn::in_template(&tokenizer)?);
            found = "which ends an answer in the chat template";
        }
        notes.extend(end_of_turn::note(&ends, found, &tokenizer)?);
        model.add_eos_token_ids(tokenizer.chosen_token_id(SpecialToken::Eos));
        tokenizer.chosen_token_id(SpecialToken::Pad).into_iter().for_each(|id| model.set_pad_token_id(id));
        model.add_eos_token_ids(ends);
        let of_set = |set: &ReadSet| prompts::columns(&set.documents, &set.inputs);
        let mut prompts = None;
        if let Some(grpo) = &recipe.grpo {
            let held_out = data.held_out.as_ref().map(|set| Ok::<_, RunError>((set.documents.clone(), of_set(set)?)));
            let train = of_set(&data.train)?;
            prompts::check_answers(&grpo.rewards, &train, &data.train.sources[0].name)?;
            prompts = Some(Prompts { train, held_out: held_out.transpose()? });
        }
        let mut packing = pack_options(recipe, &tokenizer, &data, world_size);
        packing.length_group = length_group.or(packing.length_group);
        let train = Arc::new(PackedDataset::new(data.train.documents, packing));
        let shape = DataShape::new(&train, has_chats);
        let shape = match &recipe.grpo {
            Some(grpo) => shape.of_completions(grpo, recipe),
            None => shape,
        };
        let names = || recipe.data.held_out_sources().into_iter().map(|source| source.name).collect();
        let held_out = data.held_out.map(|set| (set.documents, names()));
        let template = recipe.data.chat_template.as_ref().map(|_| tokenizer.chat_template()).transpose()?;
        let template = template.map(|template| template.source().to_owned());
        let cache = data.train.cache;
        Ok(Self {
            model,
            folder,
            adapter,
            weights,
            tokenizer,
            template,
            cache,
            held_out,
            train,
            shape,
            prompts,
            notes,
            missing,
        })
    }
}

/// Returns the tokens that end what is trained; none where the model writes the answers itself.
fn trained_ends(recipe: &RunConfig, set: &ReadSet, tokenizer: &Tokenizer) -> Vec<u32> {
    if recipe.grpo.is_some() {
        return Vec::new();
    }
    let has = |kind| set.sources.iter().any(|source| source.diagnosis.count(kind) > 0);
    let is_any_cut = has(FindingKind::Truncated) || has(FindingKind::Split);
    // Both answers of a pair share the limit.
    let tokens = |document: usize| set.documents.entry(document).tokens as usize;
    let of_other = |document: usize| recipe.preference.as_ref().map_or(0, |_| tokens(document ^ 1));
    let is_cut = |document| is_any_cut && tokens(document) + of_other(document) >= recipe.max_seq_len();
    end_of_turn::trained(&set.documents, tokenizer, is_cut)
}

/// Refuses adapter settings and weight files that do not fit the model, before the data is read, which may take long. Returns the weights that the
/// run starts from, if they are here.
fn check_model(
    recipe: &RunConfig,
    folder: &Path,
    model_config: &ModelConfig,
    has_weights: bool,
) -> Result<Option<HfFolder>, RunError> {
    if let Some(lora) = recipe.adapter(folder) {
        lora.resolve(&model_config.spec)?.check_unordered(&model_config.spec)?;
    }
    if recipe.init != Init::Pretrained || !has_weights {
        return Ok(None);
    }
    let weights = HfFolder::open(folder)?;
    weights.check_complete(model_config)?;
    let divides = recipe.lora.as_ref().is_some_and(|lora| !lora.init_lora_weights.is_uniform());
    let quantized = weights.names().find(|name| divides && weights.stored_format(name).is_some()).map(str::to_owned);
    match quantized {
        Some(name) => Err(ModelError::PrincipalPartOfCodes { name }.into()),
        None => Ok(Some(weights)),
    }
}

/// Adds rows to the model for the tokens that were added to the tokenizer.
///
/// # Errors
/// The tokenizer already had more tokens than the model has rows.
fn add_tokens(tokenizer: &Tokenizer, model: &mut ModelConfig) -> Result<(), RunError> {
    let ids: Vec<usize> = tokenizer.new_tokens().iter().map(|token| token.id as usize).collect();
    let tokens = ids.first().copied().unwrap_or(tokenizer.vocab_size());
    check_vocabulary(tokenizer, tokens, model.spec.vocab_size)?;
    model.add_tokens(&ids);
    Ok(())
}

/// Returns the seconds since 1970.
pub fn now() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs() as i64)
}

/// Returns how the recipe packs data into rows, those to train on and those to evaluate on.
pub fn pack_options(config: &RunConfig, tokenizer: &Tokenizer, data: &DataSets, world_size: usize) -> PackOptions {
    let (documents, pack) = (data.train.documents.len(), config.pack && config.grpo.is_none());
    let defaults = PackOptions::new(match config.max_seq_len {
        // Rows that suit the size of the data and hold every document, also those that are evaluated.
        None if pack && config.follows_size() => {
            let tokens_of = |set: &ReadSet| -> (usize, usize) {
                let lengths = (0..set.documents.len()).map(|document| set.documents.entry(document).tokens as usize);
                lengths.fold((0, 0), |(sum, longest), tokens| (sum + tokens, longest.max(tokens)))
            };
            let (tokens, longest) = tokens_of(&data.train);
            let also = data.held_out.as_ref().map_or(0, |set| tokens_of(set).1);
            size::row_len(documents, tokens, longest.max(also), config.max_seq_len())
        }
        _ => config.max_seq_len(),
    });
    // A group has several steps, so that chance still decides which rows share one, and the data has several groups, of a whole step at least. How a
    // step is divided into micro-batches and over ranks does not matter: a run that ran out of memory goes on with smaller ones.
    let of_step = match config.leaves_rows_open() {
        true => size::rows_per_step(documents, world_size),
        false => config.rows_per_step(world_size),
    };
    let length_group = defaults
        .length_group
        .filter(|_| config.grpo.is_none())
        .map(|rows| rows.max((4 * of_step).min(of_step.max(documents / 16))));
    PackOptions {
        pack,
        pad_token_id: tokenizer.pad_token_id(),
        pad_to_multiple_of: config.data.pad_to_multiple_of,
        pairs: config.preference.as_ref().map(|section| PairRows { prompt_loss: section.counts_prompt() }),
        length_group,
        ..defaults
    }
}
