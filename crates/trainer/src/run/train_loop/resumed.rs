//! Compares a run that is continued with its checkpoint: whether it is the same run, what has changed, and whether anything is left to do.
//!
//! Trade-off: settings that may change are listed, not asked about.

use std::fs;

use crate::console::Summary;
use crate::error::RunError;
use crate::plan::Plan;
use crate::run::prepare::Prepared;
use crate::state::best::Best;
use crate::state::checkpoint::{ADAPTER, MODEL};
use crate::state::identity::{RunIdentity, RunSettings};
use crate::state::resume_point::ResumePoint;

/// Errors if the checkpoint belongs to another run; otherwise returns a sentence for each changed setting.
pub(super) fn compare(point: &ResumePoint, prepared: &Prepared) -> Result<Vec<String>, RunError> {
    point.state.identity.check(&RunIdentity::new(
        &prepared.plan,
        prepared.train.fingerprint(),
        prepared.train.report().documents,
    ))?;
    let changes = point.state.settings.changes(&RunSettings::new(&prepared.plan));
    let rate = point.state.settings.rate_change(&prepared.plan.learning_rate_schedule(), point.state.step);
    Ok(point.notes.iter().cloned().chain(changes).chain(rate).collect())
}

/// Returns the results of a run that has taken all steps of the plan and written them, with a sentence on how to train further; `None` if any of that
/// is missing.
pub(super) fn already_finished(point: &ResumePoint, plan: &Plan) -> Option<(Summary, String)> {
    let step = point.state.step;
    let (result, key) = match plan.lora.value {
        Some(_) => (point.folder.path().join(ADAPTER), "lora.init_from"),
        None => (point.folder.path().join(MODEL), "model"),
    };
    let summary: Summary = serde_json::from_slice(&fs::read(point.folder.summary_json()).ok()?).ok()?;
    let ends_early = Best::ends(point.state.best.as_ref(), plan.best.as_ref().map(|best| &best.value));
    let is_finished = (step >= plan.steps.value || ends_early) && summary.steps == step && result.is_dir();
    let (why, larger) = match ends_early {
        true => (format!("ended early after step {step}"), "best.patience"),
        false => {
            (format!("has taken all of its {step} steps"), "train.steps (the schedule is then that of the longer run)")
        }
    };
    let note = format!(
        "the run {why}, so nothing is done and nothing was changed. To train further, write a larger {larger}, or start a \
         new run with {key} = \"{}\"",
        result.display()
    );
    is_finished.then_some((summary, note))
}
