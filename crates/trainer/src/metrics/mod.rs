//! The numbers of a run, step by step, and where they go: metrics.jsonl, TensorBoard, MLflow, W&B, the progress bar.
//!
//! Trade-off: if a sink cannot write, for instance on a full disk, that is reported and it is tried again at the next step; the run continues, and
//! the numbers in between are missing there.

mod appended;
mod jsonl;
mod memory_meter;
mod mlflow;
mod pairs;
mod policy;
mod protobuf;
mod ranks;
mod tensorboard;
mod transaction_log;
mod usage_target;
mod wandb;

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use firebrick_hwprofile::usage::{Gauge, Usage};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::storage::StorageError;

pub use jsonl::JsonLines;
pub use memory_meter::{MemoryMeter, MemorySource};
pub use mlflow::{Mlflow, MlflowError, MlflowSection};
pub use pairs::PairMetrics;
pub use policy::PolicyMetrics;
pub use ranks::{RankMeter, RankMetrics, RankTimes};
pub use tensorboard::EventWriter;
pub(crate) use usage_target::usage_target;
pub use wandb::{Wandb, WandbMode, WandbSection};

/// The numbers of one step. In JSON a number that is not finite is `null`.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct StepMetrics {
    /// Steps done, this one included.
    pub step: u64,
    /// Mean cross entropy over the loss tokens of the step and of all ranks, in nats.
    pub loss: f64,
    /// Learning rate of the step.
    #[serde(rename = "lr")]
    pub learning_rate: f64,
    /// Global norm of the gradients, before clipping.
    pub grad_norm: f64,
    /// Loss tokens of the run so far.
    pub loss_tokens: u64,
    /// Input tokens of the step per second, without padding.
    pub tokens_per_s: f64,
    /// Wall time of the step, in milliseconds.
    pub ms: f64,
    /// Maximum bytes in use where tensors live: of the card as its driver counts, of this process on other backends.
    #[serde(rename = "memory")]
    pub memory_bytes: u64,
    /// Factor of this step's gradients, with dynamic loss scaling. The step was skipped if `grad_norm` is not finite.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<f64>,
    /// Rewards and log-probabilities, in preference training, where `loss` is a mean over pairs.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub pairs: Option<PairMetrics>,
    /// Rewards and completions, in learning from rewards.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub policy: Option<PolicyMetrics>,
    /// Mean auxiliary loss that balances experts, without its weight, if the model trains with it; not part of `loss`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub aux_loss: Option<f64>,
    /// Milliseconds of the step in which the device waited for tensors from host memory, if some are there: the cost of offloading and paging.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub restore_wait_ms: Option<f64>,
    /// Milliseconds of the step in which rank 0 waited for other ranks: communication that no other work hides, and slower ranks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub comm_wait_ms: Option<f64>,
    /// The waiting time of every rank, with its time in collectives and its own time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ranks: Option<RankMetrics>,
    /// Bytes that the backend's memory pools hold on the device, if no driver reports the memory of the card (wgpu).
    #[serde(rename = "allocated", skip_serializing_if = "Option::is_none")]
    pub allocated_bytes: Option<u64>,
    /// How busy rank 0's device and process were since the previous line; without values after a short step.
    #[serde(flatten)]
    pub usage: Usage,
}

impl StepMetrics {
    /// Returns all finite numbers by name, for sinks that plot: `train/loss`, ..., `usage/gpu_util`, ...
    pub fn scalars(&self) -> Vec<(String, f64)> {
        let line = StepMetrics { ranks: None, usage: Usage::default(), ..self.clone() };
        let train = numbers(&line).map(|(name, value)| (format!("train/{name}"), value));
        let ranks = self.ranks.iter().flat_map(RankMetrics::scalars);
        let usage = self.usage.values().map(|(gauge, value)| (format!("usage/{}", gauge.name()), value));
        let throttled = if self.usage.throttle().is_empty() { 0.0 } else { 1.0 };
        let throttled = self.usage.get(Gauge::PowerW).map(|_| ("usage/throttled".to_owned(), throttled));
        train.chain(ranks).chain(usage).chain(throttled).filter(|(_, value)| value.is_finite()).collect()
    }
}

/// The numbers of one evaluation.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct EvalMetrics {
    /// Steps done before this evaluation.
    pub step: u64,
    /// Mean cross entropy over the loss tokens of the evaluation data, in nats; for pairs, their mean loss.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eval_loss: Option<f64>,
    /// Mean reward of held-out prompts, in learning from rewards.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eval_reward: Option<f64>,
    /// `exp(eval_loss)`, if that is a cross entropy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub perplexity: Option<f64>,
    /// Fraction of the loss tokens that were the most probable token, given the true tokens before.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_accuracy: Option<f64>,
    /// Fraction of the held-out prompts that were answered as the reference, if it was measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exact_match: Option<f64>,
    /// Rewards and log-probabilities of held-out pairs.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub pairs: Option<PairMetrics>,
    /// The loss of each set that has a name, as `eval_NAME_loss`.
    #[serde(flatten)]
    pub sets: BTreeMap<String, f64>,
}

impl EvalMetrics {
    /// Returns the numbers of an evaluation after `step` steps, with its perplexity; `None` if it has neither loss nor reward.
    pub fn new(step: u64, evaluation: &Evaluation) -> Option<Self> {
        let Evaluation { loss: eval_loss, reward: eval_reward, token_accuracy, exact_match, pairs, ref set_losses } =
            *evaluation;
        eval_loss.or(eval_reward)?;
        let sets = set_losses.iter().map(|(name, loss)| (format!("eval_{name}_loss"), *loss)).collect();
        let perplexity = eval_loss.filter(|_| pairs.is_none()).map(f64::exp);
        Some(EvalMetrics { step, eval_loss, eval_reward, perplexity, token_accuracy, exact_match, pairs, sets })
    }

    /// Returns all finite numbers by name, for sinks that plot: `eval/loss`, ...
    pub fn scalars(&self) -> Vec<(String, f64)> {
        numbers(self)
            .map(|(name, value)| (format!("eval/{}", name.strip_prefix("eval_").unwrap_or(&name)), value))
            .collect()
    }
}

/// Returns the finite numbers of a line by their keys, except for the step.
fn numbers(line: &impl Serialize) -> impl Iterator<Item = (String, f64)> {
    let Ok(Value::Object(line)) = serde_json::to_value(line) else { unreachable!("a line is values by name") };
    line.into_iter().filter(|(name, _)| name != "step").filter_map(|(name, value)| Some((name, value.as_f64()?)))
}

/// Quality on held-out data.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// Mean cross entropy over the loss tokens, in nats; `None` without held-out rows.
    pub loss: Option<f64>,
    /// Mean reward of completions of held-out prompts, in learning from rewards.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reward: Option<f64>,
    /// Fraction of the loss tokens that were the most probable token; `None` without held-out rows.
    pub token_accuracy: Option<f64>,
    /// Fraction of the prompts whose greedy answer counts as the reference; `None` without prompts.
    pub exact_match: Option<f64>,
    /// Numbers of held-out pairs of answers; then `loss` is their mean loss, and there is no token accuracy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pairs: Option<PairMetrics>,
    /// The loss of each held-out set that has a name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub set_losses: BTreeMap<String, f64>,
}

/// The end of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunEnd {
    /// All steps were taken.
    Finished,
    /// A signal came; the run can be resumed.
    Interrupted,
    /// An error.
    Failed,
}

/// Returns the name under which trackers show runs, unless a recipe has another.
fn program() -> String {
    "firebrick".to_owned()
}

/// Returns the time since 1970.
fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// A destination of metrics: of lines, or of numbers that it plots.
pub trait MetricSink {
    /// Takes the numbers of a step.
    fn step(&mut self, metrics: &StepMetrics) -> Result<(), StorageError> {
        self.plot(metrics.step, metrics.scalars(), false)
    }

    /// Takes the numbers of an evaluation.
    fn eval(&mut self, metrics: &EvalMetrics) -> Result<(), StorageError> {
        self.plot(metrics.step, metrics.scalars(), true)
    }

    /// Takes numbers by name, where they are not taken as lines.
    fn plot(&mut self, _step: u64, _scalars: Vec<(String, f64)>, _is_evaluation: bool) -> Result<(), StorageError> {
        Ok(())
    }

    /// Waits until everything taken so far is on the disk.
    fn flush(&mut self) -> Result<(), StorageError> {
        Ok(())
    }

    /// Takes note of how the run ended; no numbers come after that. A sink dropped without this call belongs to a run that failed.
    fn end(&mut self, _how: RunEnd) {}

    /// Shows what the run is doing besides steps, if the user looks at this sink.
    fn activity(&mut self, _what: &str) {}

    /// Shows a sentence, if the user looks at this sink.
    fn notice(&mut self, _text: &str) {}
}

/// Several sinks as one, served in order. A sink that fails is reported and tried again.
#[derive(Default)]
pub struct MetricSinks {
    sinks: Vec<Entry>,
}

struct Entry {
    sink: Box<dyn MetricSink>,
    /// Count of numbers that were lost since the sink last took any.
    missing: u64,
    /// The step of the last evaluation that the sink has got in an earlier part of the run.
    evaluated: Option<u64>,
}

impl MetricSinks {
    /// Adds a sink.
    pub fn push(&mut self, sink: impl MetricSink + 'static) {
        self.sinks.push(Entry { sink: Box::new(sink), missing: 0, evaluated: None });
    }

    /// Notes that all sinks have got the evaluation after this step: a run that was killed between it and its end makes it again.
    pub fn have_evaluation(&mut self, step: u64) {
        self.sinks.iter_mut().for_each(|entry| entry.evaluated = Some(step));
    }

    /// Gives the numbers of a step to every sink.
    pub fn step(&mut self, metrics: &StepMetrics) {
        self.each(None, |sink| sink.step(metrics));
    }

    /// Gives the numbers of an evaluation to every sink.
    pub fn eval(&mut self, metrics: &EvalMetrics) {
        self.each(Some(metrics.step), |sink| sink.eval(metrics));
    }

    /// Waits until every sink has written what it took.
    pub fn flush(&mut self) {
        let failures: Vec<StorageError> = self.sinks.iter_mut().filter_map(|entry| entry.sink.flush().err()).collect();
        for failure in failures {
            self.notice(&format!("warning: {}. The run goes on; metrics may be missing", failure.problem()));
        }
    }

    /// Shows what the run is doing besides steps.
    pub fn activity(&mut self, what: &str) {
        self.sinks.iter_mut().for_each(|entry| entry.sink.activity(what));
    }

    /// Closes every sink and tells it how the run ended.
    pub fn close(&mut self, how: RunEnd) {
        self.sinks.iter_mut().for_each(|entry| entry.sink.end(how));
        self.sinks.clear();
    }

    /// Gives numbers to the sinks, except for those of an evaluation that a sink has.
    fn each(&mut self, eval: Option<u64>, mut give: impl FnMut(&mut dyn MetricSink) -> Result<(), StorageError>) {
        let mut notices = Vec::new();
        for entry in self.sinks.iter_mut().filter(|entry| eval.is_none() || entry.evaluated != eval) {
            let missing = entry.missing;
            match give(&mut *entry.sink) {
                Ok(()) => {
                    entry.missing = 0;
                    if missing > 0 {
                        notices.push(format!("metrics are written again; {missing} lines are missing"));
                    }
                }
                Err(error) => {
                    entry.missing += 1;
                    if missing == 0 {
                        let consequence = "The run goes on; numbers are missing in that file until it can be written";
                        notices.push(format!("warning: {}. {consequence}", error.problem()));
                    }
                }
            }
        }
        for notice in notices {
            self.notice(&notice);
        }
    }

    fn notice(&mut self, text: &str) {
        self.sinks.iter_mut().for_each(|entry| entry.sink.notice(text));
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::rc::Rc;

    use super::*;

    /// A disk that is full for some of the writes, and the messages that the user saw.
    #[derive(Clone, Default)]
    struct Disk {
        is_full: Rc<RefCell<bool>>,
        notices: Rc<RefCell<Vec<String>>>,
        written: Rc<RefCell<Vec<u64>>>,
    }

    impl MetricSink for Disk {
        fn step(&mut self, metrics: &StepMetrics) -> Result<(), StorageError> {
            if *self.is_full.borrow() {
                let source = std::io::Error::from(std::io::ErrorKind::StorageFull);
                return Err(StorageError::writing(std::path::Path::new("metrics.jsonl"), 9, source));
            }
            self.written.borrow_mut().push(metrics.step);
            Ok(())
        }

        fn eval(&mut self, _: &EvalMetrics) -> Result<(), StorageError> {
            Ok(())
        }

        fn notice(&mut self, text: &str) {
            self.notices.borrow_mut().push(text.to_owned());
        }
    }

    fn metrics(step: u64) -> StepMetrics {
        StepMetrics { step, loss: 1.0, ..StepMetrics::default() }
    }

    #[test]
    fn a_full_disk_is_reported_once() {
        let disk = Disk::default();
        let mut sinks = MetricSinks::default();
        sinks.push(disk.clone());
        for (step, is_full) in [(1, false), (2, true), (3, true), (4, false), (5, false)] {
            *disk.is_full.borrow_mut() = is_full;
            sinks.step(&metrics(step));
        }
        assert_eq!(*disk.written.borrow(), [1, 4, 5]);
        let notices = disk.notices.borrow();
        assert_eq!(notices.len(), 2, "{notices:?}");
        assert!(notices[0].starts_with("warning: ") && notices[0].contains("The run goes on"), "{notices:?}");
        assert_eq!(notices[1], "metrics are written again; 2 lines are missing");
    }
}
