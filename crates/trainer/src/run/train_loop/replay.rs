//! Keeps what a step learned from that ends its run, says where its values stop being finite, and runs it again later: `train --replay`.
//!
//! Trade-off: the run searches with the weights that it has once the numbers have arrived, with which one more step may have been taken; a replay has
//! those of the last checkpoint before the step. It runs in one process, whatever the number of ranks was.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, absolute};

use firebrick_kernels::Kernels;
use firebrick_parallel::Ranks;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{Run, reference, start};
use crate::config::RunConfig;
use crate::console::{Console, FailureReport, program, shell_quoted};
use crate::error::RunError;
use crate::hub::Need;
use crate::plan::PlanRequest;
use crate::run::device::catch_failure;
use crate::run::prepare::{Prepared, now, prepare};
use crate::run::step::search::{StepContent, first_not_finite};
use crate::state::checkpoint::{RunState, SavedWeights, read_state};
use crate::state::checkpoint_folder::checkpoints;
use crate::state::manifest::Manifest;
use crate::state::reference_identity::ReferenceIdentity;
use crate::storage::write_atomically;
use crate::with_backend;

/// The file of the last step that ended a run, in its folder.
const FILE: &str = "replay.json";

/// A step that ended its run.
#[derive(Debug, Serialize, Deserialize)]
struct SavedStep<T> {
    step: u64,
    problem: String,
    /// What each rank learned from.
    ranks: Vec<T>,
}

impl<B: Kernels> Run<B> {
    /// Returns the error of a run that a step ends, after saving what the step learned from and searching it. All ranks call it together.
    pub(super) fn stop_at(&mut self, step: u64, problem: String, content: &StepContent) -> RunError {
        self.watchdog.step_ends();
        self.console.print(&format!("step {step}: {problem}; looking where that comes from"));
        let found = self.keep(step, &problem, content).and_then(|()| self.search(step, content));
        let folder = absolute(self.folder.path()).unwrap_or_default();
        let folder = shell_quoted(&folder.to_string_lossy());
        let replay = format!("{} train --replay {folder}", program());
        match found {
            Ok(found) => RunError::WrongNumbers(format!(
                "step {step}: {problem}: training has diverged and was stopped; {found}. The last checkpoint is \
                 untouched. Lower train.learning_rate, raise train.warmup_steps, or look at the rows of this step, \
                 which are saved; this runs them again: {replay}"
            )),
            Err(error) => error,
        }
    }

    /// Saves on rank 0 what all ranks learned from in a step.
    fn keep(&self, step: u64, problem: &str, content: &StepContent) -> Result<(), RunError> {
        let own = serde_json::to_vec(content).expect("content of plain fields is expressible as JSON");
        let all = self.trainer.ranks.all_gather("replay", own)?;
        if self.trainer.ranks.is_main() {
            let ranks = all.iter().map(|own| serde_json::from_slice(own).expect("a rank sends JSON")).collect();
            let saved = SavedStep::<Value> { step, problem: problem.to_owned(), ranks };
            if let Err(error) = write_atomically(&self.folder.path().join(FILE), json!(saved).to_string().as_bytes()) {
                tracing::warn!("the rows of step {step} could not be saved: {error}");
            }
        }
        Ok(())
    }

    /// Runs the step again on all ranks, and describes the first place that is not finite on any of them.
    fn search(&mut self, step: u64, content: &StepContent) -> Result<String, RunError> {
        let (rank, world_size) = (self.trainer.ranks.rank(), self.trainer.ranks.world_size());
        self.trainer.settings.again = Some((step, rank, world_size));
        let own = first_not_finite(&self.trainer.sizes(content)?);
        let own = serde_json::to_vec(&own).expect("a text is expressible as JSON");
        let all = self.trainer.ranks.all_gather("search", own)?;
        let all = all.iter().map(|own| serde_json::from_slice(own).expect("a rank sends JSON"));
        let all: Vec<(bool, String)> = all.collect();
        let rank = all.iter().position(|(is_found, _)| *is_found).unwrap_or(0);
        Ok(if world_size == 1 { all[0].1.clone() } else { format!("{}, rank {rank}", all[rank].1) })
    }
}

/// Runs the last step that ended a run again, with the weights of the last checkpoint before it and without an update. Prints its sizes, and returns
/// a sentence for each rank that says what was found.
///
/// # Errors
/// No such step, or one that does not fit the recipe; any error of preparing the run.
pub fn replay(config: RunConfig, run: &Path, console: Console) -> Result<Vec<String>, RunError> {
    let refused = |problem: String| RunError::Refused(format!("{}: {problem}", run.join(FILE).display()));
    let bytes = fs::read(run.join(FILE));
    let bytes = bytes.map_err(|error| match error.kind() {
        ErrorKind::NotFound => refused("there is no step that ended the run, and so nothing to replay".to_owned()),
        _ => refused(format!("cannot be read: {error}")),
    })?;
    let saved = serde_json::from_slice(&bytes);
    let saved: SavedStep<StepContent> =
        saved.map_err(|error| refused(format!("is not a step that a run of this version saved: {error}")))?;
    let (step, problem) = (saved.step, &saved.problem);
    let before = checkpoints(run)?.into_iter().rev().find(|(at, path)| *at < step && Manifest::check(path).is_ok());
    let state = before.as_ref().map(|(_, path)| read_state(path)).transpose()?;
    let sources = [config.data.training_sources(), config.data.held_out_sources()].concat();
    config.fetch_model_on(&Ranks::single(), &sources, Need::Weights, console)?;
    let decided = state.as_ref().and_then(|state| state.decided);
    let request = PlanRequest { force: true, decided, ..PlanRequest::default() };
    let date = state.as_ref().map_or_else(now, |state| state.date);
    let length_group = state.as_ref().and_then(|state| state.length_group);
    let prepared = prepare(config, date, 1, &request, Need::Weights, length_group)?;
    let weights = before.as_ref().map_or(0, |(at, _)| *at);
    console.print(&format!("step {step} again, with the weights after step {weights}. It ended its run: {problem}"));
    let report = FailureReport::new(&prepared.plan, None);
    let point = before.as_ref().map(|(_, path)| path.as_path()).zip(state.as_ref());
    let found = with_backend!(prepared.plan.backend.value, B => {
        catch_failure(|| replay_on::<B>(prepared, point, &saved, console))
    });
    found.unwrap_or_else(|failure| Err(report.error(failure)))
}

fn replay_on<B: Kernels>(
    mut prepared: Prepared,
    point: Option<(&Path, &RunState)>,
    saved: &SavedStep<StepContent>,
    console: Console,
) -> Result<Vec<String>, RunError> {
    let (ranks, checkpoint) = (Ranks::single(), point.map(|(checkpoint, _)| checkpoint));
    let device = B::device_of(ranks.local_rank());
    let mut trainer = start::load::<B>(&prepared, checkpoint, ranks, console, &device)?;
    let identity = ReferenceIdentity::of(&prepared.plan)?;
    reference::prepare(&mut prepared, &mut trainer, identity.as_ref(), console)?;
    if let Some((checkpoint, state)) = point {
        let (adapter, companions) = (prepared.plan.lora.value.clone(), prepared.companions.clone());
        SavedWeights { adapter, companions }.restore(checkpoint, &mut trainer.model)?;
        if let Some(scale) = state.loss_scale.filter(|_| trainer.optimizer.loss_scale().is_some()) {
            trainer.optimizer.restore_loss_scale(scale);
        }
    } else if let Some(adapter) = &prepared.plan.lora_init_from.value {
        trainer.model.load_adapter(adapter)?;
    }
    let mut found = Vec::with_capacity(saved.ranks.len());
    for (rank, content) in saved.ranks.iter().enumerate() {
        let positions = trainer.model.max_positions();
        if content.batches().iter().any(|batch| batch.row_len > positions) {
            return Err(RunError::Refused(format!(
                "rows of the step have more than {positions} tokens: max_seq_len has changed"
            )));
        }
        trainer.settings.again = Some((saved.step, rank, saved.ranks.len()));
        let sizes = trainer.sizes(content)?;
        for (place, size) in &sizes {
            console.print(&format!("rank {rank}  {size:>10.3e}  {place}"));
        }
        let (_, what) = first_not_finite(&sizes);
        console.print(&what);
        found.push(what);
    }
    Ok(found)
}
