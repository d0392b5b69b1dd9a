//! What a run says about itself, step by step, and where it goes: metrics.jsonl, TensorBoard, the progress bar.
//!
//! A line is written when it is due and reaches the disk at the next flush; a checkpoint flushes first. A resumed run drops
//! the lines that lie after the step it resumes from, because it will write them again.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::Value;

use crate::storage::{StorageError, write_atomically};
use crate::tensorboard::EventWriter;

/// The numbers of one step. In JSON a number that is not finite is `null`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StepMetrics {
    /// Steps done, this one included.
    pub step: u64,
    /// Mean loss over the trained tokens of the step, in nats.
    pub loss: f64,
    /// Learning rate of the step.
    #[serde(rename = "lr")]
    pub learning_rate: f64,
    /// Global norm of the gradients, before clipping.
    pub grad_norm: f64,
    /// Trained tokens of the run so far.
    pub trained_tokens: u64,
    /// Input tokens of the step per second, padding left out.
    pub tokens_per_s: f64,
    /// Milliseconds of the step.
    pub ms: f64,
    /// Most bytes in use where tensors live: of the card as its driver counts, of this process on other backends.
    #[serde(rename = "memory")]
    pub memory_bytes: u64,
}

/// The numbers of one evaluation.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct EvalMetrics {
    /// Steps done before this evaluation.
    pub step: u64,
    /// Mean loss over the trained tokens of the evaluation data, in nats.
    pub eval_loss: f64,
    /// `exp(eval_loss)`.
    pub perplexity: f64,
    /// Part of the held-out prompts that were answered exactly right, where it was measured.
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

/// Somewhere that metrics go.
pub trait MetricSink {
    /// Takes the numbers of a step.
    ///
    /// # Errors
    /// [`StorageError`] where they cannot be written.
    fn step(&mut self, metrics: &StepMetrics) -> Result<(), StorageError>;

    /// Takes the numbers of an evaluation.
    ///
    /// # Errors
    /// [`StorageError`] where they cannot be written.
    fn eval(&mut self, metrics: &EvalMetrics) -> Result<(), StorageError>;

    /// Waits until everything taken so far is on the disk.
    ///
    /// # Errors
    /// [`StorageError`] where the disk refuses.
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

/// `metrics.jsonl`: one JSON object per line.
#[derive(Debug)]
pub struct JsonLines {
    file: File,
    path: PathBuf,
}

impl JsonLines {
    /// Opens the file to append to it. With `resumed_step`, lines of later steps are dropped first, and a last line that
    /// was cut off by a crash.
    ///
    /// # Errors
    /// [`StorageError`] where the file cannot be read or written.
    pub fn open(path: &Path, resumed_step: Option<u64>) -> Result<JsonLines, StorageError> {
        if let Some(step) = resumed_step.filter(|_| path.exists()) {
            drop_later_lines(path, step)?;
        }
        let file = File::options().create(true).append(true).open(path);
        let file = file.map_err(|source| StorageError::io("open", path, source))?;
        Ok(JsonLines { file, path: path.to_path_buf() })
    }

    /// Appends one line, in one write.
    fn append(&mut self, metrics: &impl Serialize) -> Result<(), StorageError> {
        // Invariant: metrics are plain structs of numbers, and JSON can hold all of them.
        let mut line = serde_json::to_string(metrics).expect("metrics are plain numbers");
        line.push('\n');
        self.file
            .write_all(line.as_bytes())
            .map_err(|source| StorageError::writing(&self.path, line.len() as u64, source))
    }
}

impl MetricSink for JsonLines {
    fn step(&mut self, metrics: &StepMetrics) -> Result<(), StorageError> {
        self.append(metrics)
    }

    fn eval(&mut self, metrics: &EvalMetrics) -> Result<(), StorageError> {
        self.append(metrics)
    }

    fn flush(&mut self) -> Result<(), StorageError> {
        self.file.sync_data().map_err(|source| StorageError::writing(&self.path, 0, source))
    }
}

/// Rewrites the file without the lines of steps after `step`.
fn drop_later_lines(path: &Path, step: u64) -> Result<(), StorageError> {
    let text = fs::read(path).map_err(|source| StorageError::io("read", path, source))?;
    let kept: Vec<u8> = text
        .split_inclusive(|&byte| byte == b'\n')
        .filter(|line| line.ends_with(b"\n"))
        .filter(|line| {
            let parsed: Option<Value> = serde_json::from_slice(line).ok();
            let line_step = parsed.as_ref().and_then(|value| value.get("step")).and_then(Value::as_u64);
            line_step.is_none_or(|line_step| line_step <= step)
        })
        .flatten()
        .copied()
        .collect();
    if kept == text { Ok(()) } else { write_atomically(path, &kept) }
}

impl MetricSink for EventWriter {
    fn step(&mut self, metrics: &StepMetrics) -> Result<(), StorageError> {
        self.scalars(
            metrics.step,
            &[
                ("train/loss", metrics.loss),
                ("train/lr", metrics.learning_rate),
                ("train/grad_norm", metrics.grad_norm),
                ("train/trained_tokens", metrics.trained_tokens as f64),
                ("train/tokens_per_s", metrics.tokens_per_s),
                ("train/ms", metrics.ms),
                ("train/memory", metrics.memory_bytes as f64),
            ],
        )
    }

    fn eval(&mut self, metrics: &EvalMetrics) -> Result<(), StorageError> {
        let mut values = vec![("eval/loss", metrics.eval_loss), ("eval/perplexity", metrics.perplexity)];
        values.extend(metrics.exact_match.map(|part| ("eval/exact_match", part)));
        self.scalars(metrics.step, &values)
    }

    fn flush(&mut self) -> Result<(), StorageError> {
        EventWriter::flush(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn step_metrics(step: u64) -> StepMetrics {
        StepMetrics {
            step,
            loss: 2.25,
            learning_rate: 2e-4,
            grad_norm: 0.5,
            trained_tokens: 100 * step,
            tokens_per_s: 1000.0,
            ms: 100.0,
            memory_bytes: 4096,
        }
    }

    #[test]
    fn line_holds_the_promised_keys() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let mut sinks = MetricSinks(vec![
            Box::new(JsonLines::open(&path, None).unwrap()),
            Box::new(EventWriter::create(folder.path(), None).unwrap()),
        ]);
        sinks.step(&step_metrics(1)).unwrap();
        sinks.eval(&EvalMetrics::new(1, 0.0, Some(0.25))).unwrap();
        sinks.flush().unwrap();
        assert_eq!(
            fs::read_to_string(&path).unwrap(),
            "{\"step\":1,\"loss\":2.25,\"lr\":0.0002,\"grad_norm\":0.5,\"trained_tokens\":100,\"tokens_per_s\":1000.0,\
             \"ms\":100.0,\"memory\":4096}\n{\"step\":1,\"eval_loss\":0.0,\"perplexity\":1.0,\"exact_match\":0.25}\n"
        );
    }

    #[test]
    fn resumed_run_drops_later_lines_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let mut lines = JsonLines::open(&path, None).unwrap();
        lines.eval(&EvalMetrics::new(0, 3.0, None)).unwrap();
        for step in 1..=4 {
            lines.step(&step_metrics(step)).unwrap();
        }
        lines.file.write_all(b"{\"step\":5,\"lo").unwrap();
        let before = fs::read_to_string(&path).unwrap();
        let mut resumed = JsonLines::open(&path, Some(2)).unwrap();
        let kept: String = before.split_inclusive('\n').take(3).collect();
        assert_eq!(fs::read_to_string(&path).unwrap(), kept);
        resumed.step(&step_metrics(3)).unwrap();
        resumed.step(&step_metrics(4)).unwrap();
        let uninterrupted: String = before.split_inclusive('\n').take(5).collect();
        assert_eq!(fs::read_to_string(&path).unwrap(), uninterrupted);
    }

    #[test]
    fn number_that_is_not_finite_is_null() {
        let line = serde_json::to_string(&StepMetrics { loss: f64::NAN, ..step_metrics(1) }).unwrap();
        assert!(line.contains("\"loss\":null"), "{line}");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn full_disk_is_a_clear_error() {
        let mut lines = JsonLines::open(Path::new("/dev/full"), None).unwrap();
        let error = lines.step(&step_metrics(1)).unwrap_err();
        assert!(matches!(error, StorageError::DiskFull { .. }), "{error}");
    }
}
