//! Runs a recipe on its backend: prepares it, finds the folder or the checkpoint to resume, and trains.
//!
//! All ranks of a job run this in the same order; an error on one of them is passed to the others.
//! Trade-off: a resumed run reads its data before its recipe is compared with the checkpoint, because the data is part of the
//! comparison.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use firebrick_arch::counted;
use firebrick_data::records_encoded;
use firebrick_kernels::CommError;
use firebrick_parallel::{ParallelError, Ranks};

use crate::config::RunConfig;
use crate::console::{Console, FailureReport, Outcome, Summary, error_message};
use crate::error::RunError;
use crate::hub::Need;
use crate::metrics::Mlflow;
use crate::plan::PlanRequest;
use crate::run::device::catch_failure;
use crate::run::interrupt::Interrupt;
use crate::run::prepare::{Prepared, check_start, prepare, together};
use crate::run::train_loop::resumed::{already_finished, compare};
use crate::run::train_loop::start::StartPoint;
use crate::run::train_loop::trace::TraceSteps;
use crate::run::train_loop::{ReportWriter, Run};
use crate::state::resume_point::ResumeFrom;
use crate::with_backend;

/// A recipe, and how to run it.
#[derive(Clone, Debug)]
pub struct RunOptions {
    /// The recipe.
    pub config: RunConfig,
    /// The run or the checkpoint to continue; `None` starts a new run.
    pub resume: Option<ResumeFrom>,
    /// Where to print.
    pub console: Console,
    /// Requests the end of the run.
    pub interrupt: Interrupt,
    /// Steps to trace.
    pub trace: Option<TraceSteps>,
    /// Train even if the plan says that memory is short.
    pub force: bool,
    /// The processes that train together.
    pub ranks: Ranks,
    /// Called on rank 0 at the end; `None` writes no report.
    pub report: Option<ReportWriter>,
}

/// Runs a recipe, from its start or from a checkpoint, to its end or to a signal.
///
/// # Errors
/// Any error that stops the run; what was saved stays.
pub fn run(options: RunOptions) -> Result<Outcome, RunError> {
    let started = Instant::now();
    let RunOptions { console, trace, report: writer, ref interrupt, ref ranks, .. } = options;
    let is_saving = Arc::<AtomicBool>::default();
    together::end_when_lost(ranks, is_saving.clone());
    let tell = |error: RunError| {
        ranks.fail(&error_message(&error));
        error
    };
    let (prepared, place) = match ready(&options).map_err(tell)? {
        Ready::Train(ready) => *ready,
        Ready::Ended(summary) => {
            ranks.leave().map_err(RunError::from).map_err(tell)?;
            return Ok(Outcome::Finished(summary));
        }
    };
    console.brief(&prepared.plan, place.folder.path());
    let report = FailureReport::new(&prepared.plan, Some(place.folder.path().to_path_buf()));
    let result = with_backend!(prepared.plan.backend.value, B => {
        catch_failure(|| together::catch_loss(|| {
            let mut run = Run::<B>::start(prepared, place, ranks.clone(), console, interrupt.clone(), started)?;
            (run.trace, run.is_saving, run.report) = (trace, is_saving, writer);
            run.train()
        }))
    });
    let outcome = match (result, ranks.check("training")) {
        // Errors of a device or an exchange after another rank is lost are consequences of the loss.
        (Err(_), Err(lost)) => Err(report.lost(&lost, ranks.is_main())),
        (Ok(Err(RunError::Parallel(ParallelError::Comm(CommError::Lost { .. })))), Err(lost)) => {
            Err(report.lost(&lost, ranks.is_main()))
        }
        (Ok(result), _) => result,
        (Err(failure), Ok(())) => Err(report.error(failure)),
    };
    let outcome = outcome.map_err(tell)?;
    ranks.leave().map_err(RunError::from).map_err(tell)?;
    Ok(outcome)
}

/// A run whose data and plan all ranks agree on.
enum Ready {
    /// It trains, from this place.
    Train(Box<(Prepared, StartPoint)>),
    /// It had taken all of its steps.
    Ended(Box<Summary>),
}

/// Prepares a run on all ranks, and finds its folder or the checkpoint that it continues from.
fn ready(options: &RunOptions) -> Result<Ready, RunError> {
    let RunOptions { config, resume, console, force, ranks, .. } = options;
    together::agree_on_recipe(ranks, config)?;
    let (date, resumed) = together::start_of(ranks, config, resume.as_ref())?;
    if let Some(server) = config.mlflow.as_ref().filter(|_| ranks.is_main()) {
        Mlflow::reach(server)?;
    }
    let sources = [config.data.training_sources(), config.data.held_out_sources()].concat();
    config.fetch_model_on(ranks, &sources, Need::Weights, *console)?;
    if resumed.is_none() {
        check_start(config)?;
    }
    let state = resumed.as_ref().map(|point| &point.state);
    let (decided, local_ranks) = (state.and_then(|state| state.decided), ranks.local_world_size());
    let request = PlanRequest { force: *force, local_ranks, decided, ..PlanRequest::default() };
    let length_group = state.and_then(|state| state.length_group);
    let prepared = {
        let _shown = console.activity(reading_data);
        let (config, world_size) = (config.clone(), ranks.world_size());
        together::prepare_in_turn(ranks, || prepare(config, date, world_size, &request, Need::Weights, length_group))?
    };
    together::agree_on_data(ranks, &prepared)?;
    together::agree_on_folder(ranks, &prepared.plan, resumed.as_ref())?;
    let changes = resumed.as_ref().map(|point| compare(point, &prepared)).transpose()?;
    for note in prepared.data_notes.iter().chain(changes.iter().flatten()) {
        console.print(note);
    }
    let Some(point) = resumed else {
        let folder = together::new_folder(ranks, &prepared.plan)?;
        if let Some(notice) = folder.notice() {
            console.print(notice);
        }
        return Ok(Ready::Train(Box::new((prepared, StartPoint { folder, resumed: None }))));
    };
    let found = already_finished(&point, &prepared.plan);
    // The run ends here only if all ranks find them: one rank may see the folder differently.
    let missing = ranks.all_reduce_count(u64::from(found.is_none()))?;
    if let (Some((summary, note)), 0) = (found, missing) {
        console.print(&note);
        return Ok(Ready::Ended(Box::new(summary)));
    }
    let place = StartPoint { folder: point.folder, resumed: Some((point.checkpoint, point.state)) };
    Ok(Ready::Train(Box::new((prepared, place))))
}

/// Returns the text to show while data is read and tokenized.
pub fn reading_data() -> String {
    format!("reading data: {} tokenized", counted(records_encoded(), "record"))
}
