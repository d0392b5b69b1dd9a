//! The run loop: evaluate, step, log, evaluate, save, until the plan's last step or a signal.
//!
//! The numbers of a step come back through an event and are read once the next step has been queued, so that the device never waits for the host: it
//! runs step N + 1 while the host logs step N and builds the batches of step N + 2. The checkpoint contains everything that a resumed run needs.
//! Several ranks run this loop in step: rank 0 writes, and all end after the same step. `numbers.rs` handles the numbers, `saving.rs` what is saved,
//! `replay.rs` a step that ends the run.
//! Trade-off: a step that is not finite is found one step late, but always before anything of it is saved.

mod background;
mod drift;
mod first_loss;
pub(super) mod launch;
mod numbers;
mod reference;
pub(super) mod replay;
mod resumed;
mod rounds;
mod saving;
mod start;
pub mod trace;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use firebrick_data::Loader;
use firebrick_hwprofile::usage::UsageMonitor;
use firebrick_kernels::Kernels;
use firebrick_parallel::{Limits, Ranks, Watchdog};

use self::background::Background;
use self::numbers::{Pending, Unreported, open_sinks, watch_usage};
use self::rounds::Learner;
use self::start::{Start, StartPoint, load};
use self::trace::{AGREE, DATA, HostSpans, QUEUE, TraceSteps};
use crate::console::{Console, Outcome, Progress};
use crate::error::RunError;
use crate::metrics::{Evaluation, MemoryMeter, MetricSinks, PolicyMetrics, RankMeter};
use crate::run::device::{dtype_of, self_test, tested};
use crate::run::interrupt::Interrupt;
use crate::run::prepare::{Prepared, Texts};
use crate::run::step::preference::StepCounts;
use crate::run::step::search::StepContent;
use crate::run::step::{StepOutcome, Trainer, assemble};
use crate::state::best::Best;
use crate::state::checkpoint::{RunState, SavedWeights};
use crate::state::reference_identity::ReferenceIdentity;
use crate::state::run_folder::RunFolder;
use crate::storage::{bytes_in_words, free_space};

/// Writes a report of the run in a folder, once it has ended or was stopped, and returns a line to print. The text is the summary of a run that has
/// ended; it will be the last file in the folder. A failed report does not fail the run.
pub type ReportWriter = fn(&Path, Option<&str>) -> String;

/// The time between two looks at the disk.
const BETWEEN_LOOKS: Duration = Duration::from_secs(60);

struct Run<B: Kernels> {
    prepared: Prepared,
    texts: Texts,
    folder: RunFolder,
    console: Console,
    trainer: Trainer<B>,
    weights: SavedWeights,
    sinks: MetricSinks,
    state: RunState,
    /// The file with the log-probabilities of the reference, if they were found.
    reference_file: Option<PathBuf>,
    interrupt: Interrupt,
    /// Only of a run that learns from rewards.
    learner: Option<Learner>,
    loader: Loader,
    meter: MemoryMeter,
    /// Only on rank 0, which writes the metrics.
    usage: Option<UsageMonitor>,
    started: Instant,
    wall_before: f64,
    pending: Option<Pending>,
    /// A step whose numbers have arrived, until those of the other ranks have too.
    unreported: Option<Unreported>,
    rank_meter: RankMeter,
    watchdog: Watchdog,
    trace: Option<TraceSteps>,
    spans: Option<HostSpans>,
    /// Whether the ranks agreed to end after this step.
    ends_together: bool,
    /// The last evaluation of this process and its step.
    evaluated: Option<(u64, Evaluation)>,
    /// The step of the best evaluation that a complete checkpoint is of.
    best_saved: Option<u64>,
    /// Whether a checkpoint is being written; it is finished even if another rank is lost.
    is_saving: Arc<AtomicBool>,
    background: Option<Background>,
    disk_seen: Instant,
    /// How long steps waited for checkpoints, without the last one.
    waited_for_saves: Duration,
    report: Option<ReportWriter>,
}

impl<B: Kernels> Run<B> {
    /// Loads the model and, for a resumed run, the checkpoint.
    fn start(
        mut prepared: Prepared,
        place: StartPoint,
        ranks: Ranks,
        console: Console,
        interrupt: Interrupt,
        started: Instant,
    ) -> Result<Self, RunError> {
        let texts = prepared.texts(place.folder.name());
        let plan = &prepared.plan;
        let reference = ReferenceIdentity::of(plan)?;
        if let Some((_, state)) = &place.resumed {
            ReferenceIdentity::check(state.reference.as_ref(), reference.as_ref())?;
        }
        let (device, backend) = (B::device_of(ranks.local_rank()), plan.backend.value);
        if let Some(where_threads_are) = backend.stay_near(ranks.local_rank()) {
            console.print(&where_threads_are);
        }
        let test = tested(&prepared.model_config.spec, dtype_of(plan.compute.value), plan.gemms.value);
        if let Some(seconds) = self_test(backend, ranks.local_rank(), test)? {
            console.print(&format!("self-test: every operation agrees with its reference ({seconds:.2} s)"));
        }
        if let Some(carrier) = ranks.connect(backend)? {
            let (all, here) = (ranks.world_size(), ranks.local_world_size());
            console.print(&format!("{all} ranks, {here} of them here; gradients: {carrier}"));
        }
        let checkpoint = place.resumed.as_ref().map(|(checkpoint, _)| checkpoint.as_path());
        let mut trainer = load::<B>(&prepared, checkpoint, ranks, console, &device)?;
        let weights = SavedWeights { adapter: plan.lora.value.clone(), companions: prepared.companions.clone() };
        let reference_file = reference::prepare(&mut prepared, &mut trainer, reference.as_ref(), console)?;
        let Start { folder, state, resumed } =
            Start::new(place, &prepared, &texts, &mut trainer, &weights, reference, console)?;
        let learner = Learner::open(&prepared, &trainer.model, folder.path().to_owned())?;
        if learner.is_some() {
            trainer.model.note_choices();
        }
        let mut sinks = if trainer.ranks.is_main() {
            open_sinks(&folder, resumed, &state, &prepared.plan)?
        } else {
            MetricSinks::default()
        };
        if console.verbose {
            sinks.push(Progress::start(prepared.plan.steps.value, state.step));
        }
        let watch = |limits| Watchdog::start(&trainer.ranks, limits);
        let watchdog = Limits::from_environment().map_or_else(Watchdog::off, watch);
        Ok(Self {
            loader: assemble::loader(&prepared.plan, prepared.train.clone(), &trainer.ranks, state.cursor),
            meter: MemoryMeter::new(prepared.plan.backend.value, trainer.ranks.local_rank()),
            usage: trainer.ranks.is_main().then(|| watch_usage(&prepared, trainer.ranks.local_rank(), console)),
            wall_before: state.wall_s,
            best_saved: state.best.as_ref().map(|best| best.step),
            prepared,
            texts,
            folder,
            console,
            interrupt,
            learner,
            trainer,
            weights,
            sinks,
            state,
            reference_file,
            started,
            pending: None,
            unreported: None,
            rank_meter: RankMeter::default(),
            watchdog,
            trace: None,
            spans: None,
            ends_together: false,
            evaluated: None,
            is_saving: Arc::default(),
            background: None,
            disk_seen: started,
            waited_for_saves: Duration::ZERO,
            report: None,
        })
    }

    /// Trains to the plan's last step or to a signal.
    fn train(mut self) -> Result<Outcome, RunError> {
        self.interrupt.training_begins();
        match self.take_steps() {
            Ok(true) => self.finish(),
            Ok(false) => Ok(self.interrupted()),
            Err(error) => {
                if let Err(error) = self.settle() {
                    self.console.print(&format!("the last checkpoint could not be written: {error}"));
                }
                // All ranks end for such numbers, so the first to end is not a loss to the others.
                if !matches!(error, RunError::WrongNumbers(_)) {
                    self.save_after_loss();
                }
                self.report_alone();
                Err(error)
            }
        }
    }

    /// Takes all steps, or ends early, and saves. Returns whether no signal ended the run before.
    fn take_steps(&mut self) -> Result<bool, RunError> {
        let total = self.prepared.plan.steps.value;
        self.evaluate_first()?;
        if self.state.evaluation_is_due && self.state.step < total {
            if self.evaluate()? {
                self.save()?;
            }
            if self.state.evaluation_is_due {
                // The run was stopped again, so it still continues from the checkpoint that it started from.
                return Ok(false);
            }
        }
        while !self.is_over() {
            let next = self.state.step + 1;
            let is_stopped = match self.trace.take_if(|trace| trace.first == next) {
                Some(steps) => self.advance_traced(steps)?,
                None => self.advance()?,
            };
            if is_stopped {
                return Ok(false);
            }
        }
        if let Some(steps) = self.trace {
            self.console.print(&format!("there is no trace: this process did not take step {}", steps.first));
        }
        if self.prepared.plan.best.is_some() && self.evaluated_now().is_none() {
            // The last evaluation may be the best, and the checkpoint remembers it.
            self.evaluate()?;
            if self.state.evaluation_is_due {
                self.save()?;
                return Ok(false);
            }
        }
        self.save()?;
        Ok(true)
    }

    fn is_over(&self) -> bool {
        let plan = &self.prepared.plan;
        self.state.step >= plan.steps.value
            || Best::ends(self.state.best.as_ref(), plan.best.as_ref().map(|best| &best.value))
    }

    fn ends(&self) -> bool {
        if self.trainer.ranks.world_size() == 1 { self.interrupt.is_requested() } else { self.ends_together }
    }

    /// Takes one step, with the evaluation and the checkpoint that are due after it. Returns whether a signal ends the run, which is then saved.
    fn advance(&mut self) -> Result<bool, RunError> {
        self.watchdog.step_begins(self.state.step + 1);
        if self.learner.is_some() {
            return self.advance_in_round();
        }
        let started = Instant::now();
        let (mut micro_batches, mut cursor) = (Vec::new(), self.state.cursor);
        for _ in 0..self.prepared.plan.gradient_accumulation.value {
            let (batch, after) = self.loader.next_batch().expect("the loader repeats its epochs without end");
            micro_batches.push(batch);
            cursor = after;
        }
        self.note(DATA, self.state.step + 1, started);
        let queued = Instant::now();
        let exchanged = self.trainer.ranks.exchanged();
        let here = micro_batches.iter().map(|batch| batch.tokens() as u64).sum();
        let (counts, tokens) = self.agree_on_step(StepCounts::of(&micro_batches), here)?;
        if self.trainer.ranks.world_size() > 1 {
            self.note(AGREE, self.state.step + 1, queued);
        }
        let queued = Instant::now();
        self.limit_norm();
        let outcome = self.trainer.step_of(&micro_batches, counts)?;
        self.note(QUEUE, outcome.step, queued);
        self.state.cursor = cursor;
        let content = StepContent::Rows(micro_batches, counts);
        self.queued((outcome, content), tokens, None, (started, exchanged))?;
        if self.state.step == 1 {
            // Nothing runs next to the first step, so that its loss is shown when it ends.
            self.flush()?;
        }
        self.after_step()
    }

    /// Takes one step of a run that learns from rewards, as [`Run::advance`] does.
    fn advance_in_round(&mut self) -> Result<bool, RunError> {
        let started = Instant::now();
        let exchanged = self.trainer.ranks.exchanged();
        self.limit_norm();
        let (queued, here, policy) = self.step_of_round()?;
        let (_, tokens) = self.agree_on_step(StepCounts::default(), here)?;
        self.queued(queued, tokens, Some(policy), (started, exchanged))?;
        // A round begins with the weights that the step before has left, so nothing is gained by waiting.
        self.flush()?;
        self.after_step()
    }

    /// Tells the optimizer the norm above which the next step is a spike.
    fn limit_norm(&mut self) {
        let factor = self.prepared.plan.train.spike_factor.value;
        self.trainer.optimizer.set_norm_limit(self.state.guard.limit(factor, self.pending.is_none()));
    }

    /// Counts a step that is queued, and logs the one before. `since`: when it began, and how long ranks had exchanged by then.
    fn queued(
        &mut self,
        (outcome, content): (StepOutcome, StepContent),
        tokens: u64,
        policy: Option<PolicyMetrics>,
        since: (Instant, Duration),
    ) -> Result<(), RunError> {
        let (started, before) = since;
        let exchanged = self.trainer.ranks.exchanged() - before;
        self.state.step = outcome.step;
        self.state.loss_tokens += outcome.loss_tokens;
        // Waits for the end of the previous step while the device runs this one: at most two steps are in flight.
        if let Some(previous) = self.pending.take() {
            self.log(previous)?;
        }
        let seconds = started.elapsed().as_secs_f64();
        self.state.step_s += seconds;
        self.state.step_tokens += tokens;
        let loss_tokens = self.state.loss_tokens;
        self.pending = Some(Pending { outcome, content, loss_tokens, tokens, seconds, exchanged, policy });
        self.watchdog.step_ends();
        Ok(())
    }

    /// Does what is due after a step. Returns whether a signal ends the run.
    fn after_step(&mut self) -> Result<bool, RunError> {
        if self.background.as_ref().is_some_and(Background::is_done) {
            self.settle()?;
        }
        let (step, total) = (self.state.step, self.prepared.plan.steps.value);
        let is_due = |every: u64| every > 0 && step.is_multiple_of(every) && step < total;
        let is_best = is_due(self.prepared.plan.eval_every_steps.value) && self.evaluate()?;
        if self.is_over() {
            return Ok(false);
        }
        // Each rank looks at its own clock, and the first one ends all.
        if let Some(hours) = self.prepared.plan.max_time_hours.as_ref().map(|hours| hours.value)
            && self.started.elapsed().as_secs_f64() >= 3600.0 * hours
            && !self.interrupt.is_requested()
        {
            self.console.print(&format!("train.max_time_hours = {hours} are over: saving everything"));
            self.interrupt.time_is_up();
        }
        self.watch_the_disk();
        if self.ends() {
            self.save()?;
            return Ok(true);
        }
        if is_best {
            // Unlike others it must not fail: the run would end with weights that are not there.
            self.save_on_the_way(false)?;
        } else if is_due(self.prepared.plan.checkpoint_every_steps.value) {
            self.save_on_the_way(true)?;
        }
        Ok(false)
    }

    /// Warns on rank 0, once a minute, while the disk has no room for the next checkpoint.
    fn watch_the_disk(&mut self) {
        if !self.trainer.ranks.is_main() || self.background.is_some() || self.disk_seen.elapsed() < BETWEEN_LOOKS {
            return;
        }
        self.disk_seen = Instant::now();
        let (folder, needed) = (self.folder.path(), self.prepared.plan.checkpoint_bytes.value);
        if let Some(free) = free_space(folder).filter(|free| free.bytes < needed || !free.has_inodes) {
            let (free, needed) = (bytes_in_words(free.bytes), bytes_in_words(needed));
            tracing::warn!(
                "the disk that holds {} has {free} free, and the next checkpoint needs {needed}: free some space before it is due",
                folder.display()
            );
        }
    }
}
