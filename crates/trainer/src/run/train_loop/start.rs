//! Creates the state that a run starts with: evaluated before its first step, or restored from a checkpoint.
//!
//! Trade-off: a new run is evaluated before it trains, which costs an evaluation and shows what training changed.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use firebrick_kernels::{Hint, Kernels};
use firebrick_model::Decoder;
use firebrick_parallel::Ranks;

use crate::console::Console;
use crate::error::RunError;
use crate::metrics::Evaluation;
use crate::run::prepare::together;
use crate::run::prepare::{Prepared, Texts};
use crate::run::step::Trainer;
use crate::run::step::assemble;
use crate::run::step::evaluate::Stage;
use crate::run::text::generate::{continue_prompts, encode_prompt};
use crate::state::checkpoint::{ADAPTER, RunState, SavedWeights, restore};
use crate::state::checkpoint_folder::{checkpoint_of, set_aside_after};
use crate::state::identity::{RunIdentity, RunSettings, check_model};
use crate::state::manifest::Manifest;
use crate::state::reference_identity::ReferenceIdentity;
use crate::state::run_folder::RunFolder;

/// The place where a run begins.
pub(super) struct StartPoint {
    pub(super) folder: RunFolder,
    /// The checkpoint that a resumed run continues from, and its state.
    pub(super) resumed: Option<(PathBuf, RunState)>,
}

pub(super) struct Start {
    /// The run folder, with recipe and plan in it.
    pub(super) folder: RunFolder,
    /// The state before the next step.
    pub(super) state: RunState,
    /// The step that a resumed run continues after.
    pub(super) resumed: Option<u64>,
}

impl Start {
    /// Evaluates a new run, or restores the trainer from a checkpoint. `reference` is that of the run's preference loss.
    ///
    /// # Errors
    /// A checkpoint that does not belong to this run, or a folder that cannot be written.
    pub(super) fn new<B: Kernels>(
        place: StartPoint,
        prepared: &Prepared,
        texts: &Texts,
        trainer: &mut Trainer<B>,
        weights: &SavedWeights,
        reference: Option<ReferenceIdentity>,
        console: Console,
    ) -> Result<Self, RunError> {
        let StartPoint { folder, resumed } = place;
        let Some((checkpoint, state)) = resumed else {
            save_texts(&folder, texts, &trainer.ranks)?;
            if let Some(adapter) = &prepared.plan.lora_init_from.value {
                trainer.model.load_adapter(adapter)?;
            }
            together::agree_on_weights(&trainer.ranks, &prepared.plan, &mut trainer.model)?;
            let state = RunState { reference, ..first_state(prepared, trainer, console)? };
            return Ok(Self { folder, state, resumed: None });
        };
        let state = continue_from((&folder, &checkpoint, state), prepared, trainer, weights, console)?;
        let state = RunState { reference, decided: Some(prepared.plan.decided()), ..state };
        together::agree_on_weights(&trainer.ranks, &prepared.plan, &mut trainer.model)?;
        save_texts(&folder, texts, &trainer.ranks)?;
        Ok(Self { resumed: Some(state.step), folder, state })
    }
}

/// Builds the trainer, and shows the progress of reading its weights.
pub(super) fn load<B: Kernels>(
    prepared: &Prepared,
    checkpoint: Option<&Path>,
    ranks: Ranks,
    console: Console,
    device: &B::Device,
) -> Result<Trainer<B>, RunError> {
    let (mut plan, model) = (prepared.plan.clone(), &prepared.model_config);
    if let (Some(lora), Some(checkpoint)) = (&mut plan.lora.value, checkpoint) {
        // If the base lost a part to the adapter, the checkpoint determines that part.
        lora.init_from = Some(checkpoint.join(ADAPTER).to_string_lossy().into_owned());
    }
    let (read, all) = (Arc::new(AtomicUsize::new(0)), model.spec.tensors().len());
    let shown = Arc::clone(&read);
    let _shown =
        console.activity(move || format!("loading the model: {} of {all} tensors", shown.load(Ordering::Relaxed)));
    assemble::trainer::<B>(&plan, model, plan.init.value.into(), ranks, device, &mut |_| {
        read.fetch_add(1, Ordering::Relaxed);
    })
}

fn save_texts(folder: &RunFolder, texts: &Texts, ranks: &Ranks) -> Result<(), RunError> {
    let mut texts = texts.iter().filter(|_| ranks.is_main());
    Ok(texts.try_for_each(|(name, text)| folder.write(name, text))?)
}

/// Returns the state before the first step: evaluated and sampled, unless the plan leaves that out.
fn first_state<B: Kernels>(prepared: &Prepared, trainer: &Trainer<B>, console: Console) -> Result<RunState, RunError> {
    let (mut before, mut samples_before) = (Evaluation::default(), Vec::new());
    if prepared.plan.eval_on_start.value {
        before = evaluated(prepared, trainer, console)?;
        console.evaluation("before training", &before);
        // A pass over divided weights involves all ranks.
        if trainer.ranks.is_main() || trainer.model.is_divided() {
            samples_before = sample(prepared, &trainer.model)?;
        }
        console.samples("before", &prepared.plan.sample_prompts.value, &samples_before);
    }
    Ok(RunState {
        date: prepared.date,
        before,
        samples_before,
        sample_prompts: prepared.plan.sample_prompts.value.clone(),
        base_hash: trainer.model.base_hash(),
        decided: Some(prepared.plan.decided()),
        length_group: prepared.train.length_group(),
        identity: RunIdentity::new(&prepared.plan, prepared.train.fingerprint(), prepared.train.report().documents),
        settings: RunSettings::new(&prepared.plan),
        ..RunState::default()
    })
}

fn evaluated<B: Kernels>(prepared: &Prepared, trainer: &Trainer<B>, console: Console) -> Result<Evaluation, RunError> {
    let stage = Arc::new(Mutex::new(None));
    let shown = Arc::clone(&stage);
    let describe = move || {
        let stage: Option<Stage> = *shown.lock().unwrap_or_else(PoisonError::into_inner);
        stage.map_or_else(String::new, |stage| stage.to_string())
    };
    let _shown = console.activity(describe);
    let watch = &mut |now| {
        *stage.lock().unwrap_or_else(PoisonError::into_inner) = Some(now);
        ControlFlow::Continue(())
    };
    let evaluation =
        prepared.evaluation.evaluate_watched(&trainer.model, &prepared.tokenizer, &trainer.ranks, watch)?;
    Ok(evaluation.expect("an evaluation that nothing stops has a result"))
}

/// Restores the trainer from a checkpoint, after comparing the base model with the saved one by content.
fn continue_from<B: Kernels>(
    (folder, checkpoint, mut state): (&RunFolder, &Path, RunState),
    prepared: &Prepared,
    trainer: &mut Trainer<B>,
    weights: &SavedWeights,
    console: Console,
) -> Result<RunState, RunError> {
    state.check_cursor(checkpoint, prepared.train.rows())?;
    check_model(state.base_hash, trainer.model.base_hash())?;
    restore(checkpoint, weights, &mut trainer.model, &mut trainer.optimizer, &state)?;
    (state.settings, state.length_group) = (RunSettings::new(&prepared.plan), prepared.train.length_group());
    if trainer.ranks.is_main() && state.step < prepared.plan.steps.value {
        folder.set_summary_aside()?;
    }
    let set_aside = if trainer.ranks.is_main() { set_aside_after(folder.path(), state.step)? } else { Vec::new() };
    let keep = prepared.plan.checkpoints_kept.value;
    for path in set_aside {
        console.print(&format!(
            "{} is a checkpoint that is set aside, because the run was continued from an earlier one: it counts among \
             the {keep} of checkpoint.keep and is the first to be deleted: copy it now if you need it",
            path.display()
        ));
    }
    // The checkpoint that the run continues from is whole.
    let others = state.best.as_ref().filter(|best| trainer.ranks.is_main() && best.step != state.step);
    let damage = others.and_then(|best| Manifest::check(&checkpoint_of(folder.path(), best.step)).err());
    if trainer.ranks.all_reduce_count(u64::from(damage.is_some()))? > 0 {
        let step = state.best.take().map_or(0, |best| best.step);
        let problem = damage.map_or_else(String::new, |damage| format!(" ({})", damage.problem()));
        console.print(&format!(
            "the best checkpoint so far, of step {step}, is gone or damaged{problem}: the best is searched from here on"
        ));
    }
    console.print(&format!("resumed after step {} from {}", state.step, checkpoint.display()));
    Ok(state)
}

/// Answers the plan's sample prompts, sampling as the model's folder says.
///
/// # Errors
/// A prompt that the chat template refuses, or logits that are not finite.
pub(super) fn sample<B: Kernels>(prepared: &Prepared, model: &Decoder<B>) -> Result<Vec<String>, RunError> {
    let Prepared { plan, tokenizer, .. } = prepared;
    let chat = plan.prompts_are_chats.value;
    let prompts = plan.sample_prompts.value.iter();
    let encoded: Vec<Vec<u32>> = prompts.map(|text| encode_prompt(tokenizer, text, chat)).collect::<Result<_, _>>()?;
    let (new, sampler) = (plan.max_new_tokens.value, prepared.sampling.sampler());
    let answers = continue_prompts(model, tokenizer, (&encoded, chat), new, sampler);
    // The steps that follow cannot reuse buffers of these sizes.
    B::hint(model.device(), Hint::NewSizes);
    answers
}
