//! The numbers of a run, step by step, and where they go: metrics.jsonl, TensorBoard, the progress bar.
//!
//! Trade-off: a sink that cannot write ends the run, so that no metrics are lost unnoticed.

mod jsonl;
mod memory_meter;
mod tensorboard;

use serde::{Deserialize, Serialize};

use crate::state::storage::StorageError;

pub use jsonl::JsonLines;
pub use memory_meter::{MemoryMeter, MemorySource};
pub use tensorboard::EventWriter;

/// The numbers of one step. In JSON a number that is not finite is `null`.
#[derive(Debug, Clone, PartialEq, Serialize)]
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
    /// Milliseconds of the step.
    pub ms: f64,
    /// Maximum bytes in use where tensors live: of the card as its driver counts, of this process on other backends.
    #[serde(rename = "memory")]
    pub memory_bytes: u64,
}

/// The numbers of one evaluation.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct EvalMetrics {
    /// Steps done before this evaluation.
    pub step: u64,
    /// Mean cross entropy over the loss tokens of the evaluation data, in nats.
    pub eval_loss: f64,
    /// `exp(eval_loss)`.
    pub perplexity: f64,
    /// Fraction of the held-out prompts that were answered exactly as the reference, if it was measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exact_match: Option<f64>,
}

impl EvalMetrics {
    /// Adds the perplexity to an evaluation loss.
    #[must_use]
    pub fn new(step: u64, eval_loss: f64, exact_match: Option<f64>) -> Self {
        EvalMetrics { step, eval_loss, perplexity: eval_loss.exp(), exact_match }
    }
}

/// Quality on held-out data.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// Mean cross entropy over the loss tokens, in nats; `None` without held-out rows.
    pub loss: Option<f64>,
    /// Fraction of the prompts whose greedy answer is exactly the reference; `None` without prompts.
    pub exact_match: Option<f64>,
}

/// A place where metrics go.
pub trait MetricSink {
    /// Takes the numbers of a step.
    ///
    /// # Errors
    /// [`StorageError`] if they cannot be written.
    fn step(&mut self, metrics: &StepMetrics) -> Result<(), StorageError>;

    /// Takes the numbers of an evaluation.
    ///
    /// # Errors
    /// [`StorageError`] if they cannot be written.
    fn eval(&mut self, metrics: &EvalMetrics) -> Result<(), StorageError>;

    /// Waits until everything taken so far is on the disk.
    ///
    /// # Errors
    /// [`StorageError`] if the disk refuses.
    fn flush(&mut self) -> Result<(), StorageError>;
}

/// Several sinks as one, served in order.
#[derive(Default)]
pub struct MetricSinks(pub Vec<Box<dyn MetricSink>>);

impl MetricSink for MetricSinks {
    fn step(&mut self, metrics: &StepMetrics) -> Result<(), StorageError> {
        self.0.iter_mut().try_for_each(|sink| sink.step(metrics))
    }

    fn eval(&mut self, metrics: &EvalMetrics) -> Result<(), StorageError> {
        self.0.iter_mut().try_for_each(|sink| sink.eval(metrics))
    }

    fn flush(&mut self) -> Result<(), StorageError> {
        self.0.iter_mut().try_for_each(|sink| sink.flush())
    }
}
