//! The numbers of steps, read one step late and combined with those of the other ranks, and of evaluations; all are sent to the sinks.
//!
//! Trade-off: with several ranks, a step is logged after the exchange of the next one.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use firebrick_hwprofile::usage::UsageMonitor;
use firebrick_kernels::Kernels;

use super::{Run, drift, first_loss};
use crate::console::Console;
use crate::error::RunError;
use crate::metrics::{
    EvalMetrics, Evaluation, EventWriter, JsonLines, MetricSinks, Mlflow, PolicyMetrics, RankMetrics, RankTimes,
    StepMetrics, Wandb, usage_target,
};
use crate::plan::Plan;
use crate::run::prepare::Prepared;
use crate::run::step::evaluate::Stage;
use crate::run::step::preference::StepCounts;
use crate::run::step::search::StepContent;
use crate::run::step::{StepNumbers, StepOutcome, Trainer};
use crate::run::train_loop::trace::NUMBERS;
use crate::state::best::Best;
use crate::state::checkpoint::RunState;
use crate::state::run_folder::RunFolder;

/// A step whose numbers are still on their way.
pub(super) struct Pending {
    pub(super) outcome: StepOutcome,
    pub(super) content: StepContent,
    /// Loss tokens of the run up to this step.
    pub(super) loss_tokens: u64,
    pub(super) tokens: u64,
    pub(super) seconds: f64,
    /// The part of `seconds` spent in exchanges with other ranks through host memory.
    pub(super) exchanged: Duration,
    /// Of a run that learns from rewards.
    pub(super) policy: Option<PolicyMetrics>,
}

/// The numbers of a step that this rank knows.
pub(super) struct Unreported {
    /// `None` if the step is not logged.
    pub(super) metrics: Option<StepMetrics>,
    pub(super) times: RankTimes,
}

impl<B: Kernels> Run<B> {
    /// Returns the evaluation after the last step, if this process has made it.
    pub(super) fn evaluated_now(&self) -> Option<Evaluation> {
        self.evaluated.clone().filter(|(step, _)| *step == self.state.step).map(|(_, evaluation)| evaluation)
    }

    /// Evaluates after a step, unless the run is about to end: then the resumed run evaluates first. Returns whether this is the best evaluation so
    /// far, the same on all ranks.
    pub(super) fn evaluate(&mut self) -> Result<bool, RunError> {
        self.flush()?;
        self.state.evaluation_is_due = true;
        let evaluation = self.evaluation()?;
        self.state.evaluation_is_due = evaluation.is_none();
        let Some(evaluation) = evaluation else { return Ok(false) };
        let step = self.state.step;
        report_evaluation(&mut self.sinks, step, &evaluation);
        let best = self.prepared.plan.best.as_ref();
        let is_best = best.is_some_and(|best| Best::compare(&mut self.state.best, &best.value, step, &evaluation));
        self.evaluated = Some((step, evaluation));
        Ok(is_best)
    }

    /// Evaluates a run that learns from rewards before its first step, unless the plan leaves that out.
    pub(super) fn evaluate_first(&mut self) -> Result<(), RunError> {
        let is_due = self.learner.is_some() && self.state.step == 0 && self.prepared.plan.eval_on_start.value;
        if is_due && let Some(evaluation) = self.evaluation()? {
            report_evaluation(&mut self.sinks, 0, &evaluation);
            self.state.before = evaluation;
        }
        Ok(())
    }

    /// Evaluates the model as it is; `None` if the run is about to end.
    pub(super) fn evaluation(&mut self) -> Result<Option<Evaluation>, RunError> {
        let (interrupt, sinks) = (&self.interrupt, &mut self.sinks);
        let watch = &mut |stage: Stage| {
            sinks.activity(&stage.to_string());
            if interrupt.is_requested() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        let Trainer { model, ranks, .. } = &self.trainer;
        let evaluation = match &mut self.learner {
            Some(learner) => learner.evaluate(&self.trainer, &self.prepared, self.state.step, watch)?,
            None => self.prepared.evaluation.evaluate_watched(model, &self.prepared.tokenizer, ranks, watch)?,
        };
        if evaluation.is_none() {
            self.agree_on_step(StepCounts::default(), 0)?;
        }
        Ok(evaluation)
    }

    /// Sums the next step's denominators and its tokens over all ranks, and notes whether a rank is requested to end.
    pub(super) fn agree_on_step(&mut self, counts: StepCounts, tokens: u64) -> Result<(StepCounts, u64), RunError> {
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
    pub(super) fn report(&mut self, times: Vec<RankTimes>) {
        let Some(Unreported { metrics, .. }) = self.unreported.take() else { return };
        self.rank_meter.add(&times);
        if let Some(metrics) = metrics {
            self.sinks.step(&StepMetrics { ranks: Some(RankMetrics::new(&times)), ..metrics });
        }
    }

    /// Reports that step without the other ranks, of which one is lost.
    pub(super) fn report_alone(&mut self) {
        if let Some(metrics) = self.unreported.take().and_then(|step| step.metrics) {
            self.sinks.step(&metrics);
        }
    }

    /// Reports that step now; all ranks do so after the same step.
    pub(super) fn report_now(&mut self) -> Result<(), RunError> {
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

    /// Reads the numbers of the step in flight.
    pub(super) fn flush(&mut self) -> Result<(), RunError> {
        self.report_now()?;
        if let Some(pending) = self.pending.take() {
            self.log(pending)?;
        }
        self.report_now()
    }

    pub(super) fn log(&mut self, pending: Pending) -> Result<(), RunError> {
        let Pending { outcome, content, loss_tokens, tokens, seconds, exchanged, mut policy } = pending;
        let StepOutcome { step, learning_rate, .. } = outcome;
        let started = Instant::now();
        let numbers = self.watchdog.waiting_for_device(|| outcome.read());
        let seconds = match &mut policy {
            Some(policy) => self.complete(policy, step, tokens, [seconds, started.elapsed().as_secs_f64()]),
            None => seconds,
        };
        if !self.trainer.ranks.is_exact_after_loss() {
            self.trainer.ranks.check("a step")?;
        }
        self.note(NUMBERS, step, started);
        self.judge(step, &numbers, &content)?;
        if step == 1
            && let Some(note) = first_loss::check(&self.prepared.plan, &numbers, self.reference_file.as_deref())?
        {
            self.console.print(&note);
        }
        self.remember_loss(f64::from(numbers.loss));
        let plan = &self.prepared.plan;
        let is_alone = self.trainer.ranks.world_size() == 1;
        let times = rank_times(1e3 * seconds, exchanged, &numbers);
        let mut metrics = None;
        if step == 1 || step.is_multiple_of(plan.log_every.value) {
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
                policy,
                aux_loss: numbers.aux_loss.map(f64::from),
                restore_wait_ms: waits.then_some(f64::from(numbers.restore_wait_ms)),
                comm_wait_ms: (!is_alone).then_some(times.comm_wait),
                ranks: None,
                allocated_bytes: self.prepared.plan.backend.value.allocated_bytes(),
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

    /// Adds the speed of training to the numbers of a step with `[grpo]`, and warns of drift once. Returns the seconds of the whole step: those until it
    /// was queued and those `waited` for its end, since no other step is in flight.
    fn complete(&mut self, policy: &mut PolicyMetrics, step: u64, tokens: u64, [queued, waited]: [f64; 2]) -> f64 {
        self.state.step_s += waited;
        policy.trained_per_s = tokens as f64 / (queued + waited - policy.round_s);
        if let Some(learner) = self.learner.as_mut().filter(|learner| !learner.has_warned)
            && let Some(warning) = drift::warning(&self.prepared.plan, step, policy)
        {
            learner.has_warned = true;
            self.console.print(&warning);
        }
        queued + waited
    }

    /// Reports a skipped step, and ends the run at one that the recipe does not skip.
    fn judge(&mut self, step: u64, numbers: &StepNumbers, content: &StepContent) -> Result<(), RunError> {
        let &StepNumbers { loss, grad_norm, loss_scale, .. } = numbers;
        match self.state.guard.judge(&self.prepared.plan.train, [loss, grad_norm], loss_scale) {
            Ok(why) => {
                why.iter().for_each(|why| self.console.print(&format!("step {step}: {why}")));
                Ok(())
            }
            Err(problem) => Err(self.stop_at(step, problem, content)),
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
}

/// Returns the times of one rank in a step that took `ms` milliseconds. `exchanged` is the part spent in exchanges through host memory. If devices
/// exchange tensors themselves, the host exchanges only a few numbers, and no device waits for them.
fn rank_times(ms: f64, exchanged: Duration, numbers: &StepNumbers) -> RankTimes {
    let exchanged = 1e3 * exchanged.as_secs_f64();
    let measured = |on_device: Option<f32>| on_device.filter(|_| numbers.comm_ms.is_some_and(|ms| ms > 0.0));
    let comm_wait = measured(numbers.comm_wait_ms).map_or(exchanged, f64::from);
    let collectives = measured(numbers.comm_ms).map_or(exchanged, f64::from);
    RankTimes { own: (ms - comm_wait).max(0.0), collectives, comm_wait }
}

/// Opens the files of metrics; writes the evaluation before the first step if that comes next.
pub(super) fn open_sinks(
    folder: &RunFolder,
    resumed: Option<u64>,
    state: &RunState,
    plan: &Plan,
) -> Result<MetricSinks, RunError> {
    let mut sinks = MetricSinks::default();
    let (lines, evaluated) = JsonLines::open(&folder.path().join("metrics.jsonl"), resumed)?;
    sinks.push(lines);
    sinks.push(EventWriter::create(&folder.path().join("tensorboard"), resumed)?);
    if let Some(section) = &plan.wandb {
        let run = (folder.path(), folder.name());
        sinks.push(Wandb::start(&section.value, run, &plan.parameters(), resumed.is_some())?);
    }
    evaluated.into_iter().for_each(|step| sinks.have_evaluation(step));
    // What its server has got is asked: numbers on their way are lost where a run is killed.
    if let Some(target) = &plan.mlflow {
        let note = folder.path().join("mlflow.json");
        sinks.push(Mlflow::start(&target.value, folder.name(), &plan.parameters(), &note, resumed.is_some())?);
    }
    if resumed.is_none() {
        report_evaluation(&mut sinks, 0, &state.before);
    }
    Ok(sinks)
}

/// Starts to sample the usage of this rank's device and of this process.
pub(super) fn watch_usage(prepared: &Prepared, local_rank: usize, console: Console) -> UsageMonitor {
    let (target, note) = usage_target(prepared.plan.backend.value, local_rank);
    if let Some(note) = note {
        console.print(&format!("note: {note}"));
    }
    UsageMonitor::start(target)
}

pub(super) fn report_evaluation(sinks: &mut MetricSinks, step: u64, evaluation: &Evaluation) {
    if let Some(metrics) = EvalMetrics::new(step, evaluation) {
        sinks.eval(&metrics);
    }
}
