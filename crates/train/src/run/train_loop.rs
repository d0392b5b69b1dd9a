//! The run loop: evaluate, step, log, evaluate, save, until the plan's last step or a signal.
//!
//! The numbers of a step come back through an event and are read once the next step has been queued, so that the device never waits
//! for the host: it runs step N + 1 while the host logs step N and builds the batches of step N + 2. Everything that a resumed run needs
//! is in the checkpoint. Several ranks run this loop in step: rank 0 writes, and all end after the same step.
//! Trade-off: a step that is not finite is found one step late, but always before anything of it is saved.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use firebrick_data::{Batch, Cursor, Loader};
use firebrick_hwprofile::usage::UsageMonitor;
use firebrick_kernels::Kernels;
use firebrick_parallel::{Limits, Ranks, Watchdog};

use crate::console::{Console, Outcome, Progress, Summary};
use crate::error::RunError;
use crate::metrics::{
    EvalMetrics, Evaluation, EventWriter, JsonLines, MemoryMeter, MetricSinks, Mlflow, RankMeter, RankMetrics,
    RankTimes, RunEnd, StepMetrics, usage_target,
};
use crate::plan::Plan;
use crate::report;
use crate::run::assemble;
use crate::run::device::{dtype_of, head_dim, self_test};
use crate::run::evaluate::Stage;
use crate::run::finish;
use crate::run::interrupt::Interrupt;
use crate::run::preference::StepCounts;
use crate::run::prepare::Prepared;
use crate::run::reference;
use crate::run::start::{Place, Start};
use crate::run::step::{StepNumbers, StepOutcome, Trainer};
use crate::run::trace::{AGREE, DATA, HostSpans, NUMBERS, QUEUE, RunTrace, TraceSteps, of_all_ranks};
use crate::state::checkpoint::{ADAPTER, RunState, SavedWeights, Snapshot, save_part};
use crate::state::run_folder::RunFolder;

/// A run on a backend.
pub(super) struct Run<B: Kernels> {
    prepared: Prepared,
    folder: RunFolder,
    console: Console,
    trainer: Trainer<B>,
    weights: SavedWeights,
    sinks: MetricSinks,
    state: RunState,
    interrupt: Interrupt,
    loader: Loader,
    meter: MemoryMeter,
    /// Of rank 0, which writes the metrics.
    usage: Option<UsageMonitor>,
    started: Instant,
    wall_before: f64,
    /// Seconds spent in steps by this process, and the tokens they processed.
    step_s: f64,
    step_tokens: u64,
    pending: Option<Pending>,
    /// A step whose numbers have come, until those of the other ranks have.
    unreported: Option<Unreported>,
    rank_meter: RankMeter,
    watchdog: Watchdog,
    trace: Option<TraceSteps>,
    /// While steps are traced.
    spans: Option<HostSpans>,
    /// Whether the ranks agreed to end after this step.
    ends_together: bool,
    /// Whether a checkpoint is being written, which is finished even if another rank is lost.
    is_saving: Arc<AtomicBool>,
}

/// A loss scale below which float16 cannot be what makes the gradients overflow (fairseq's `min_loss_scale`).
const MIN_LOSS_SCALE: f32 = 1e-4;

/// A step whose numbers are still on their way.
struct Pending {
    outcome: StepOutcome,
    /// Loss tokens of the run up to this step.
    loss_tokens: u64,
    tokens: u64,
    seconds: f64,
    /// Of it in exchanges with other ranks through host memory.
    exchanged: Duration,
}

/// What this rank knows of a step.
struct Unreported {
    /// `None` where the step is not logged.
    metrics: Option<StepMetrics>,
    times: RankTimes,
}

impl<B: Kernels> Run<B> {
    /// Loads the model and, for a resumed run, the checkpoint.
    pub(super) fn start(
        mut prepared: Prepared,
        place: Place,
        ranks: Ranks,
        console: Console,
        interrupt: Interrupt,
        started: Instant,
    ) -> Result<Self, RunError> {
        prepared.recipe.name = place.folder().name().to_owned();
        let plan = &prepared.plan;
        let device = B::device_of(ranks.local_rank());
        if let Some(where_threads_are) = B::stay_near(&device) {
            console.print(&where_threads_are);
        }
        let head_dim = head_dim(&prepared.model_config.spec);
        if let Some(seconds) = self_test::<B>(plan.backend.value, &device, dtype_of(plan.compute.value), head_dim)? {
            console.print(&format!("self-test: every operation agrees with its reference ({seconds:.2} s)"));
        }
        if let Some(carrier) = ranks.connect::<B>(&device)? {
            let (all, here) = (ranks.world_size(), ranks.local_world_size());
            console.print(&format!("{all} ranks, {here} of them here; gradients: {carrier}"));
        }
        let mut trainer = load::<B>(&prepared, place.checkpoint(), ranks, console, &device)?;
        let weights = SavedWeights { adapter: plan.lora.value.clone(), companions: prepared.companions.clone() };
        reference::prepare(&mut prepared, &mut trainer, console)?;
        let Start { folder, state, resumed } = Start::new(place, &prepared, &mut trainer, &weights, console)?;
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
            prepared,
            folder,
            console,
            interrupt,
            trainer,
            weights,
            sinks,
            state,
            started,
            step_s: 0.0,
            step_tokens: 0,
            pending: None,
            unreported: None,
            rank_meter: RankMeter::default(),
            watchdog,
            trace: None,
            spans: None,
            ends_together: false,
            is_saving: Arc::default(),
        })
    }

    /// The same run, which writes a trace of these steps.
    pub(super) fn tracing(self, trace: Option<TraceSteps>) -> Self {
        Self { trace, ..self }
    }

    /// The same run, which notes here whether it is writing a checkpoint.
    pub(super) fn noting(self, is_saving: Arc<AtomicBool>) -> Self {
        Self { is_saving, ..self }
    }

    /// Trains to the plan's last step or to a signal.
    pub(super) fn train(mut self) -> Result<Outcome, RunError> {
        self.interrupt.training_begins();
        match self.take_steps() {
            Ok(true) => self.finish(),
            Ok(false) => Ok(self.interrupted()),
            Err(error) => {
                self.save_after_loss();
                self.report_alone();
                Err(error)
            }
        }
    }

    /// Takes all steps and saves. Whether all of them were taken.
    fn take_steps(&mut self) -> Result<bool, RunError> {
        let total = self.prepared.plan.steps.value;
        if self.state.evaluation_is_due && self.state.step < total {
            self.evaluate()?;
            if self.state.evaluation_is_due {
                // Stopped again: the checkpoint that this run started from is still what there is to continue.
                return Ok(false);
            }
        }
        while self.state.step < total {
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
        self.save()?;
        Ok(true)
    }

    /// Saves the last step if another rank was lost since, where that step cannot have been touched by the loss.
    fn save_after_loss(&mut self) {
        let ranks = &self.trainer.ranks;
        let is_whole = self.state.step > 0 && self.trainer.optimizer.steps() == self.state.step;
        let is_here = ranks.is_main() && !self.trainer.optimizer.is_partial();
        if ranks.check("saving").is_err() && is_here && ranks.is_exact_after_loss::<B>() && is_whole {
            match self.save() {
                Ok(()) => self.console.print(&format!("saved step {} before ending", self.state.step)),
                Err(error) => self.console.print(&format!("step {} could not be saved: {error}", self.state.step)),
            }
        }
    }

    /// Whether the run is to end after this step, on all ranks.
    fn ends(&self) -> bool {
        if self.trainer.ranks.world_size() == 1 { self.interrupt.is_requested() } else { self.ends_together }
    }

    /// One step, and the evaluation and the checkpoint that are due after it. Whether a signal ends the run, which is then saved.
    fn advance(&mut self) -> Result<bool, RunError> {
        self.step()?;
        let (step, total) = (self.state.step, self.prepared.plan.steps.value);
        let is_due = |every: u64| every > 0 && step.is_multiple_of(every) && step < total;
        if is_due(self.prepared.plan.eval_every_steps.value) {
            self.evaluate()?;
        }
        if self.ends() && step < total {
            self.save()?;
            return Ok(true);
        }
        if is_due(self.prepared.plan.checkpoint_every_steps.value) {
            self.save()?;
        }
        Ok(false)
    }

    /// Evaluates after a step, unless the run is to end: then the run that resumes it evaluates first.
    fn evaluate(&mut self) -> Result<(), RunError> {
        self.flush()?;
        self.state.evaluation_is_due = true;
        let evaluation = self.evaluation()?;
        self.state.evaluation_is_due = evaluation.is_none();
        if let Some(evaluation) = evaluation {
            report_evaluation(&mut self.sinks, self.state.step, &evaluation);
        }
        Ok(())
    }

    /// The evaluation of the model as it is; `None` if the run is to end.
    fn evaluation(&mut self) -> Result<Option<Evaluation>, RunError> {
        let (interrupt, sinks) = (&self.interrupt, &mut self.sinks);
        let watch = &mut |stage: Stage| {
            sinks.activity(&stage.to_string());
            if interrupt.is_requested() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        let (model, ranks) = (&self.trainer.model, &self.trainer.ranks);
        let evaluation = self.prepared.evaluation.evaluate_watched(model, &self.prepared.tokenizer, ranks, watch)?;
        if evaluation.is_none() {
            self.agree_on_step(StepCounts::default(), 0)?;
        }
        Ok(evaluation)
    }

    /// Sums what the next step divides by and its tokens over all ranks, and notes whether one of them is requested to end.
    fn agree_on_step(&mut self, counts: StepCounts, tokens: u64) -> Result<(StepCounts, u64), RunError> {
        let ranks = &self.trainer.ranks;
        if ranks.world_size() == 1 {
            return Ok((counts, tokens));
        }
        let times = self.unreported.as_ref().map(|step| step.times).unwrap_or_default();
        let [own, collectives, wait] = times.to_microseconds();
        let StepCounts { loss_tokens, pairs, chosen_targets } = counts;
        let code = self.interrupt.code();
        let numbers = [code, own, collectives, wait, loss_tokens, pairs, chosen_targets, tokens];
        let all = ranks.all_gather_numbers("step", numbers)?;
        if let Some([code, ..]) = all.iter().find(|[code, ..]| *code != 0) {
            self.interrupt.adopt(*code);
            self.ends_together = true;
        }
        let times = all.iter().map(|&[_, own, collectives, wait, ..]| [own, collectives, wait]);
        self.report(times.map(RankTimes::from_microseconds).collect());
        let sums = |(counts, sum): (StepCounts, u64), &[.., loss_tokens, pairs, chosen_targets, tokens]: &[u64; 8]| {
            (counts.plus(StepCounts { loss_tokens, pairs, chosen_targets }), sum + tokens)
        };
        Ok(all.iter().fold(Default::default(), sums))
    }

    /// Reports the step whose numbers were waiting for the times of the other ranks.
    fn report(&mut self, times: Vec<RankTimes>) {
        let Some(Unreported { metrics, .. }) = self.unreported.take() else { return };
        self.rank_meter.add(&times);
        if let Some(metrics) = metrics {
            self.sinks.step(&StepMetrics { ranks: Some(RankMetrics::new(&times)), ..metrics });
        }
    }

    /// Reports it without the other ranks, of which one is lost.
    fn report_alone(&mut self) {
        if let Some(metrics) = self.unreported.take().and_then(|step| step.metrics) {
            self.sinks.step(&metrics);
        }
    }

    /// Reports it now: all ranks do so after the same step.
    fn report_now(&mut self) -> Result<(), RunError> {
        let ranks = &self.trainer.ranks;
        let Some(step) = &self.unreported else { return Ok(()) };
        if ranks.check("times of a step").is_err() {
            self.report_alone();
            return Ok(());
        }
        let all = ranks.all_gather_numbers("times of a step", step.times.to_microseconds())?;
        self.report(all.into_iter().map(RankTimes::from_microseconds).collect());
        Ok(())
    }

    /// Traces steps, and writes the trace. The steps run as all others do; the device is waited for before the first and after the last.
    fn advance_traced(&mut self, steps: TraceSteps) -> Result<bool, RunError> {
        let device = self.trainer.model.device().clone();
        let last = steps.last.min(self.prepared.plan.steps.value);
        // So that the clocks of all ranks begin together.
        self.trainer.ranks.barrier()?;
        let (is_stopped, operations) = B::trace(&device, || {
            self.spans = Some(HostSpans::start());
            while self.state.step < last {
                if self.advance()? {
                    return Ok(true);
                }
            }
            Ok::<_, RunError>(false)
        });
        let is_stopped = is_stopped?;
        let host = self.spans.take().unwrap_or_else(HostSpans::start);
        let trace = RunTrace { steps: TraceSteps { last, ..steps }, host, device: operations };
        let file = self.folder.trace_json();
        let ranks = &self.trainer.ranks;
        let all = ranks.all_gather("trace", trace.events(ranks.rank()))?;
        if ranks.is_main() {
            self.folder.write(&file, &of_all_ranks(&all))?;
        }
        self.console.print(&format!("{trace}; {}", file.display()));
        Ok(is_stopped)
    }

    /// Adds what the host has done since `started` to the trace, if there is one.
    fn note(&mut self, name: &'static str, step: u64, started: Instant) {
        if let Some(spans) = &mut self.spans {
            spans.add(name, step, started);
        }
    }

    /// Ends a run that was stopped and saved.
    fn interrupted(mut self) -> Outcome {
        self.sinks.close(RunEnd::Interrupted);
        self.write_report_page();
        Outcome::Interrupted {
            step: self.state.step,
            signal: self.interrupt.signal(),
            name: self.folder.name().to_owned(),
            folder: self.folder.path().to_owned(),
        }
    }

    fn step(&mut self) -> Result<(), RunError> {
        self.watchdog.step_begins(self.state.step + 1);
        self.watched_step()?;
        self.watchdog.step_ends();
        Ok(())
    }

    fn watched_step(&mut self) -> Result<(), RunError> {
        let started = Instant::now();
        let (micro_batches, cursor) = self.next_micro_batches();
        self.note(DATA, self.state.step + 1, started);
        let queued = Instant::now();
        let exchanged = self.trainer.ranks.exchanged();
        let here = micro_batches.iter().map(|batch| batch.tokens() as u64).sum();
        let (counts, tokens) = self.agree_on_step(StepCounts::of(&micro_batches), here)?;
        if self.trainer.ranks.world_size() > 1 {
            self.note(AGREE, self.state.step + 1, queued);
        }
        let queued = Instant::now();
        let outcome = self.trainer.step_of(&micro_batches, counts)?;
        self.note(QUEUE, outcome.step, queued);
        let exchanged = self.trainer.ranks.exchanged() - exchanged;
        self.state.step = outcome.step;
        self.state.cursor = cursor;
        self.state.loss_tokens += outcome.loss_tokens;
        // Waits for the end of the previous step, while the device has this one to run: at most two steps are in flight.
        if let Some(previous) = self.pending.take() {
            self.log(previous)?;
        }
        let seconds = started.elapsed().as_secs_f64();
        self.step_s += seconds;
        self.step_tokens += tokens;
        self.pending = Some(Pending { outcome, loss_tokens: self.state.loss_tokens, tokens, seconds, exchanged });
        Ok(())
    }

    fn next_micro_batches(&mut self) -> (Vec<Batch>, Cursor) {
        let count = self.prepared.plan.gradient_accumulation.value;
        let mut cursor = self.state.cursor;
        let batches = (0..count)
            .map(|_| {
                let (batch, after) = self.loader.next_batch().expect("the loader repeats its epochs without end");
                cursor = after;
                batch
            })
            .collect();
        (batches, cursor)
    }

    /// Reads the numbers of the step in flight.
    fn flush(&mut self) -> Result<(), RunError> {
        self.report_now()?;
        if let Some(pending) = self.pending.take() {
            self.log(pending)?;
        }
        self.report_now()
    }

    fn log(&mut self, pending: Pending) -> Result<(), RunError> {
        let Pending { outcome, loss_tokens, tokens, seconds, exchanged } = pending;
        let StepOutcome { step, learning_rate, .. } = outcome;
        let started = Instant::now();
        let numbers = self.watchdog.waiting_for_device(|| outcome.read());
        if !self.trainer.ranks.is_exact_after_loss::<B>() {
            self.trainer.ranks.check("a step")?;
        }
        self.note(NUMBERS, step, started);
        self.check_finite(step, &numbers)?;
        self.remember_loss(f64::from(numbers.loss));
        let plan = &self.prepared.plan;
        let is_alone = self.trainer.ranks.world_size() == 1;
        let times = rank_times(1e3 * seconds, exchanged, &numbers);
        let mut metrics = None;
        if step.is_multiple_of(plan.log_every.value) {
            let usage = self.usage.as_ref().map(UsageMonitor::take).unwrap_or_default();
            self.usage
                .iter()
                .flat_map(UsageMonitor::notes)
                .for_each(|note| self.console.print(&format!("note: {note}")));
            let waits = plan.offload.value || plan.paged_state_bytes.value > 0;
            metrics = Some(StepMetrics {
                step,
                loss: f64::from(numbers.loss),
                learning_rate,
                grad_norm: f64::from(numbers.grad_norm),
                loss_tokens,
                tokens_per_s: tokens as f64 / seconds,
                ms: 1e3 * seconds,
                memory_bytes: self.meter.sample(),
                loss_scale: numbers.loss_scale.map(f64::from),
                pairs: numbers.pairs,
                restore_wait_ms: waits.then_some(f64::from(numbers.restore_wait_ms)),
                comm_wait_ms: (!is_alone).then_some(times.comm_wait),
                ranks: None,
                allocated_bytes: B::allocated_bytes(self.trainer.model.device()),
                usage,
            });
        }
        assert!(self.unreported.is_none(), "a step is reported before the next one is logged");
        self.unreported = Some(Unreported { metrics, times });
        if is_alone {
            self.report_alone();
        }
        Ok(())
    }

    /// Reports a skipped step. An overflow that no loss scale avoids ends the run, as does any without loss scaling.
    fn check_finite(&self, step: u64, numbers: &StepNumbers) -> Result<(), RunError> {
        let &StepNumbers { loss, grad_norm, loss_scale, .. } = numbers;
        match loss_scale {
            Some(scale) if numbers.was_skipped() && scale >= MIN_LOSS_SCALE => {
                self.console.print(&format!(
                    "step {step}: gradients overflowed with a loss scale of {scale}; the step was skipped, the scale is lowered"
                ));
                Ok(())
            }
            _ if loss.is_finite() && grad_norm.is_finite() => Ok(()),
            _ => Err(RunError::NotFinite { step, loss, grad_norm }),
        }
    }

    fn remember_loss(&mut self, loss: f64) {
        if !loss.is_finite() {
            return;
        }
        let kept = (self.prepared.plan.steps.value as usize / 10).max(1);
        self.state.last_losses.push(loss);
        if self.state.last_losses.len() > kept {
            self.state.last_losses.remove(0);
        }
    }

    fn save(&mut self) -> Result<(), RunError> {
        // A step that is not finite must be found before it replaces a good checkpoint.
        self.flush()?;
        let collected = self.trainer.model.collect_weights();
        let ranks = &self.trainer.ranks;
        if !ranks.is_main() {
            return self.save_part();
        }
        self.sinks.flush();
        self.state.wall_s = self.wall_s();
        self.state.loss_scale = self.trainer.optimizer.loss_scale_state();
        let texts = [("config.toml", self.prepared.recipe.to_toml()), ("plan.toml", self.prepared.plan.to_toml())];
        let snapshot = Snapshot {
            model: &self.trainer.model,
            weights: &self.weights,
            collected,
            optimizer: &self.trainer.optimizer,
            state: &self.state,
            texts: &texts,
        };
        self.is_saving.store(true, Ordering::Relaxed);
        let parts_of_others = || {
            if self.trainer.optimizer.is_partial() {
                // The folder is there; then all parts are in it.
                self.trainer.ranks.barrier()?;
                self.trainer.ranks.barrier()?;
            }
            Ok(())
        };
        let saved = snapshot.save(self.folder.path(), self.prepared.plan.checkpoints_kept.value, parts_of_others);
        self.is_saving.store(false, Ordering::Relaxed);
        saved?;
        Ok(())
    }

    /// On a rank other than 0: adds its share of the optimizer's state to the checkpoint, where ranks divide it.
    fn save_part(&self) -> Result<(), RunError> {
        let Trainer { ranks, optimizer, .. } = &self.trainer;
        if optimizer.is_partial() {
            ranks.barrier()?;
            save_part(self.folder.path(), self.state.step, ranks.rank(), optimizer)?;
            ranks.barrier()?;
        }
        Ok(())
    }

    fn finish(mut self) -> Result<Outcome, RunError> {
        // Everything is saved: a run that is stopped here is evaluated and finished by the one that resumes it.
        let Some(after) = self.evaluation()? else { return Ok(self.interrupted()) };
        report_evaluation(&mut self.sinks, self.state.step, &after);
        self.sinks.flush();
        self.sinks.close(RunEnd::Finished);
        let plan = &self.prepared.plan;
        let is_main = self.trainer.ranks.is_main();
        // A pass over weights that ranks divide is one of all ranks.
        let weights = if is_main || self.trainer.model.is_divided() { self.results()? } else { PathBuf::new() };
        let summary = Summary {
            steps: self.state.step,
            train_loss: mean(&self.state.last_losses),
            eval_loss_before: self.state.before.loss,
            eval_loss_after: after.loss,
            token_accuracy_before: self.state.before.token_accuracy,
            token_accuracy_after: after.token_accuracy,
            exact_match_before: self.state.before.exact_match,
            exact_match_after: after.exact_match,
            pairs_before: self.state.before.pairs.map(Box::new),
            pairs_after: after.pairs.map(Box::new),
            loss_tokens: self.state.loss_tokens,
            tokens_per_s: if self.step_s > 0.0 { self.step_tokens as f64 / self.step_s } else { 0.0 },
            wall_s: self.wall_s(),
            backend: plan.backend.value.to_string(),
            arithmetic: plan.arithmetic.value.clone(),
            weights: weights.display().to_string(),
            ranks: self.rank_meter.mean().map(Box::new),
        };
        let text = serde_json::to_string_pretty(&summary).expect("a summary of plain fields is expressible as JSON");
        if is_main {
            self.folder.write(&self.folder.summary_json(), &(text + "\n"))?;
        }
        self.console.summary(&summary, plan);
        self.write_report_page();
        Ok(Outcome::Finished(summary))
    }

    /// Writes the report of the run. A run does not fail for its report.
    fn write_report_page(&self) {
        if !self.trainer.ranks.is_main() {
            return;
        }
        match report::write(self.folder.path(), None) {
            Ok(path) => self.console.print(&format!("  report: {}", path.display())),
            Err(error) => self.console.print(&format!("warning: the report was not written: {error}")),
        }
    }

    /// Prints sample answers and writes the trained weights. Returns their folder.
    fn results(&self) -> Result<PathBuf, RunError> {
        let prompts = &self.prepared.plan.sample_prompts.value;
        let samples = finish::sample(&self.prepared, &self.trainer.model)?;
        self.console.samples("before", prompts, &self.state.samples_before);
        self.console.samples("after ", prompts, &samples);
        let collected = self.trainer.model.collect_weights();
        if !self.trainer.ranks.is_main() {
            return Ok(PathBuf::new());
        }
        finish::write_weights(self.folder.path(), &self.weights, &self.trainer.model, collected)
    }

    /// Seconds from start, over all resumed parts.
    fn wall_s(&self) -> f64 {
        self.wall_before + self.started.elapsed().as_secs_f64()
    }
}

/// The times of one rank in a step that took `ms` milliseconds. `exchanged` is the part spent in exchanges through host memory. Where devices
/// exchange tensors themselves, the host exchanges only a few numbers, and no device waits for them.
fn rank_times(ms: f64, exchanged: Duration, numbers: &StepNumbers) -> RankTimes {
    let exchanged = 1e3 * exchanged.as_secs_f64();
    let measured = |on_device: Option<f32>| on_device.filter(|_| numbers.comm_ms.is_some_and(|ms| ms > 0.0));
    let comm_wait = measured(numbers.comm_wait_ms).map_or(exchanged, f64::from);
    let collectives = measured(numbers.comm_ms).map_or(exchanged, f64::from);
    RankTimes { own: (ms - comm_wait).max(0.0), collectives, comm_wait }
}

fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

/// The files of metrics, with the evaluation before the first step if that comes next.
fn open_sinks(
    folder: &RunFolder,
    resumed: Option<u64>,
    state: &RunState,
    plan: &Plan,
) -> Result<MetricSinks, RunError> {
    let mut sinks = MetricSinks::default();
    sinks.push(JsonLines::open(&folder.metrics_jsonl(), resumed)?);
    sinks.push(EventWriter::create(&folder.tensorboard(), resumed)?);
    if let Some(target) = &plan.mlflow {
        let note = folder.path().join("mlflow.json");
        sinks.push(Mlflow::start(&target.value, folder.name(), &plan.parameters(), &note, resumed.is_some())?);
    }
    if resumed.is_none() {
        report_evaluation(&mut sinks, 0, &state.before);
    }
    Ok(sinks)
}

/// Starts to sample how busy the device of this rank and this process are.
fn watch_usage(prepared: &Prepared, local_rank: usize, console: Console) -> UsageMonitor {
    let (target, note) = usage_target(prepared.plan.backend.value, local_rank);
    if let Some(note) = note {
        console.print(&format!("note: {note}"));
    }
    UsageMonitor::start(target)
}

/// Sends an evaluation to the sinks.
fn report_evaluation(sinks: &mut MetricSinks, step: u64, evaluation: &Evaluation) {
    if let Some(metrics) = EvalMetrics::new(step, evaluation) {
        sinks.eval(&metrics);
    }
}

/// Builds the trainer, and shows how far its weights are read.
fn load<B: Kernels>(
    prepared: &Prepared,
    checkpoint: Option<&Path>,
    ranks: Ranks,
    console: Console,
    device: &B::Device,
) -> Result<Trainer<B>, RunError> {
    let (mut plan, model) = (prepared.plan.clone(), &prepared.model_config);
    if let (Some(lora), Some(checkpoint)) = (&mut plan.lora.value, checkpoint) {
        // Where the base lost a part to the adapter, the checkpoint says which.
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
