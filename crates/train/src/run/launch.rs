//! From a recipe to a run on its backend: prepare, find the folder or the checkpoint to resume, train.
//!
//! Trade-off: a resumed run reads its data before its recipe is compared with the checkpoint, because the data is part of the
//! comparison.

use std::time::Instant;

use firebrick_data::records_encoded;
use firebrick_parallel::Ranks;

use crate::config::RunConfig;
use crate::console::{Console, FailureReport, Outcome};
use crate::error::RunError;
use crate::plan::PlanRequest;
use crate::run::device::catch_failure;
use crate::run::interrupt::Interrupt;
use crate::run::prepare::{Prepared, check_start, now, prepare_as};
use crate::run::start::Place;
use crate::run::trace::TraceSteps;
use crate::run::train_loop::Run;
use crate::state::identity::{RunIdentity, RunSettings};
use crate::state::resume_point::{ResumeFrom, ResumePoint};
use crate::state::run_folder::RunFolder;
use crate::with_backend;

/// How to run a recipe.
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
    /// Steps to write a trace of.
    pub trace: Option<TraceSteps>,
    /// Train although the plan says that memory is short.
    pub force: bool,
}

/// Runs a recipe, from its start or from a checkpoint, to its end or to a signal.
///
/// # Errors
/// Whatever stops it; everything that was saved stays.
pub fn run(options: RunOptions) -> Result<Outcome, RunError> {
    let started = Instant::now();
    let RunOptions { config, resume, console, interrupt, trace, force } = options;
    let resumed = resume.map(|from| ResumePoint::open(&from, config.output_dir.as_ref(), &config.name)).transpose()?;
    if resumed.is_none() {
        check_start(&config)?;
    }
    let date = resumed.as_ref().map_or_else(now, |point| point.state.date);
    let ranks = Ranks::single();
    let request = PlanRequest { force, ..PlanRequest::default() };
    let prepared = {
        let _shown = console.activity(reading_data);
        prepare_as(config, date, ranks.world_size(), &request)?
    };
    let mut notes = prepared.data_notes.clone();
    if let Some(point) = &resumed {
        notes.extend(compare(point, &prepared)?);
    }
    for note in &notes {
        console.print(note);
    }
    console.plan(&prepared.plan);
    let place = match resumed {
        Some(point) => Place::Resumed(Box::new(point)),
        None => {
            let folder = RunFolder::create(&prepared.plan.output_dir.value, &prepared.plan.name.value)?;
            if let Some(notice) = folder.notice() {
                console.print(notice);
            }
            Place::New(folder)
        }
    };
    let report = FailureReport::new(&prepared.plan, Some(place.folder().path().to_path_buf()));
    with_backend!(prepared.plan.backend.value, B => {
        catch_failure(|| Run::<B>::start(prepared, place, ranks, console, interrupt, started)?.tracing(trace).train())
    })
    .unwrap_or_else(|failure| Err(report.error(failure)))
}

/// What is shown while data is read and tokenized.
pub fn reading_data() -> String {
    format!("reading data: {} records tokenized", records_encoded())
}

/// Refuses another run than the saved one. Returns sentences about what changed.
fn compare(point: &ResumePoint, prepared: &Prepared) -> Result<Vec<String>, RunError> {
    let identity = RunIdentity::new(&prepared.plan, prepared.train.fingerprint());
    point.state.identity.check(&identity)?;
    let changes = point.state.settings.changes(&RunSettings::new(&prepared.plan));
    Ok(point.notes.iter().cloned().chain(changes).collect())
}
