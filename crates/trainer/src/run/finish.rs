//! What a run produces besides its steps: sample answers, and the trained weights in the format that other programs read.
//!
//! Trade-off: the trained weights are written once more next to the last checkpoint, which contains them too.

use std::fs;
use std::path::{Path, PathBuf};

use firebrick_kernels::Kernels;
use firebrick_model::{BatchLimits, CollectedWeights, Decoder, SavedDtype};

use crate::console::Summary;
use crate::error::RunError;
use crate::plan::Plan;
use crate::run::generate::{continue_prompts, encode_prompt};
use crate::run::prepare::Prepared;
use crate::state::checkpoint::{ADAPTER, MODEL, SavedWeights};
use crate::state::resume_point::ResumePoint;
use crate::storage::StorageError;

/// Answers to the plan's sample prompts, chosen as the model's folder says.
///
/// # Errors
/// A prompt that the chat template refuses, or logits that are not finite.
pub(super) fn sample<B: Kernels>(prepared: &Prepared, model: &Decoder<B>) -> Result<Vec<String>, RunError> {
    let Prepared { plan, tokenizer, .. } = prepared;
    let chat = plan.prompts_are_chats.value;
    let prompts = plan.sample_prompts.value.iter();
    let encoded: Vec<Vec<u32>> = prompts.map(|text| encode_prompt(tokenizer, text, chat)).collect::<Result<_, _>>()?;
    let (new, sampler) = (plan.max_new_tokens.value, prepared.sampling.sampler());
    let answers = continue_prompts(model, tokenizer, (&encoded, chat), new, sampler, BatchLimits::NONE);
    // The steps that may follow cannot use memory of these sizes.
    B::release_memory(model.device());
    answers
}

/// Writes the trained weights into the run folder, `collected` among them. A whole model keeps the number format of the one it came from. Returns the path.
///
/// # Errors
/// The folder cannot be written.
pub(super) fn write_weights<B: Kernels>(
    run_folder: &Path,
    weights: &SavedWeights,
    model: &Decoder<B>,
    collected: CollectedWeights,
) -> Result<PathBuf, RunError> {
    let dtype = SavedDtype::of_config(model.config.dtype.as_deref());
    // The last checkpoint has the same weights, so an earlier copy of a resumed run may be removed.
    let earlier = run_folder.join(MODEL);
    if earlier.exists() {
        fs::remove_dir_all(&earlier).map_err(|error| StorageError::io("replace", &earlier, error))?;
    }
    weights.write(model, collected, run_folder, dtype)
}

/// The results of a run that has taken all steps of the plan and written them, and a sentence on how to train further;
/// `None` where any of that is missing.
pub(super) fn already_finished(point: &ResumePoint, plan: &Plan) -> Option<(Summary, String)> {
    let step = point.state.step;
    let (result, key) = match plan.lora.value {
        Some(_) => (point.folder.path().join(ADAPTER), "lora.init_from"),
        None => (point.folder.path().join(MODEL), "model"),
    };
    let summary: Summary = serde_json::from_slice(&fs::read(point.folder.summary_json()).ok()?).ok()?;
    let is_finished = step >= plan.steps.value && summary.steps == step && result.is_dir();
    let note = format!(
        "the run has taken all of its {step} steps, so nothing is done and nothing was changed. To train further, \
         write a larger train.steps (the schedule is then that of the longer run), or start a new run with {key} = \
         \"{}\"",
        result.display()
    );
    is_finished.then_some((summary, note))
}
