//! `metrics.jsonl`: one JSON object per logged step or evaluation.
//!
//! A line is written as soon as it is due and reaches the disk at the next flush; a checkpoint flushes first. A resumed run drops the lines after the
//! step that it resumes from, because it writes them again.

use std::fs::{self, File};
use std::path::Path;

use serde::Serialize;
use serde_json::Value;

use crate::metrics::appended::AppendedFile;
use crate::metrics::{EvalMetrics, MetricSink, StepMetrics};
use crate::storage::{StorageError, write_atomically};

/// `metrics.jsonl`: one JSON object per line.
#[derive(Debug)]
pub struct JsonLines {
    file: AppendedFile,
}

impl JsonLines {
    /// Opens the file to append to it. With `resumed_step`, the lines of later steps and a last line that a crash cut off are dropped first.
    /// Returns also the step of the last evaluation that stays.
    pub fn open(path: &Path, resumed_step: Option<u64>) -> Result<(JsonLines, Option<u64>), StorageError> {
        let mut evaluated = None;
        if let Some(step) = resumed_step.filter(|_| path.exists()) {
            let text = fs::read(path).map_err(|source| StorageError::io("read", path, source))?;
            let mut kept = Vec::new();
            for line in text.split_inclusive(|&byte| byte == b'\n').filter(|line| line.ends_with(b"\n")) {
                let parsed: Value = serde_json::from_slice(line).unwrap_or_default();
                let of_line = parsed["step"].as_u64();
                if of_line.is_none_or(|of_line| of_line <= step) {
                    kept.extend_from_slice(line);
                    let is_evaluation = ["eval_loss", "eval_reward"].iter().any(|key| parsed.get(key).is_some());
                    evaluated = evaluated.max(of_line.filter(|_| is_evaluation));
                }
            }
            if kept != text {
                write_atomically(path, &kept)?;
            }
        }
        let file = File::options().create(true).append(true).open(path);
        let file = file.map_err(|source| StorageError::io("open", path, source))?;
        Ok((JsonLines { file: AppendedFile::new(file, path.to_path_buf()) }, evaluated))
    }

    /// Appends one line, in one write.
    fn append(&mut self, metrics: &impl Serialize) -> Result<(), StorageError> {
        // Invariant: metrics are plain structs of numbers, and JSON can hold all of them.
        let mut line = serde_json::to_string(metrics).expect("metrics are plain numbers");
        line.push('\n');
        self.file.append(line.as_bytes())
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
        self.file.flush()
    }
}

#[cfg(test)]
mod tests {
    use firebrick_hwprofile::usage::{Gauge, Throttle, Usage};

    use super::*;
    use crate::metrics::{Evaluation, EventWriter, MetricSinks};

    fn step_metrics(step: u64) -> StepMetrics {
        StepMetrics {
            step,
            loss: 2.25,
            learning_rate: 2e-4,
            grad_norm: 0.5,
            loss_tokens: 100 * step,
            tokens_per_s: 1000.0,
            ms: 100.0,
            memory_bytes: 4096,
            ..StepMetrics::default()
        }
    }

    fn eval_metrics(step: u64, loss: f64) -> EvalMetrics {
        let evaluation = Evaluation {
            loss: Some(loss),
            token_accuracy: Some(0.5),
            exact_match: Some(0.25),
            ..Evaluation::default()
        };
        EvalMetrics::new(step, &evaluation).unwrap()
    }

    #[test]
    fn line_has_the_documented_keys() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let mut sinks = MetricSinks::default();
        sinks.push(JsonLines::open(&path, None).unwrap().0);
        sinks.push(EventWriter::create(folder.path(), None).unwrap());
        sinks.step(&step_metrics(1));
        sinks.eval(&eval_metrics(1, 0.0));
        sinks.flush();
        assert_eq!(
            fs::read_to_string(&path).unwrap(),
            "{\"step\":1,\"loss\":2.25,\"lr\":0.0002,\"grad_norm\":0.5,\"loss_tokens\":100,\"tokens_per_s\":1000.0,\
             \"ms\":100.0,\"memory\":4096}\n{\"step\":1,\"eval_loss\":0.0,\"perplexity\":1.0,\
             \"token_accuracy\":0.5,\"exact_match\":0.25}\n"
        );
    }

    #[test]
    fn usage_follows_the_other_keys_of_a_step() {
        let usage = Usage::of([(Gauge::GpuUtil, 98.5), (Gauge::PowerW, 650.0)], [Throttle::PowerCap]);
        let metrics = StepMetrics { allocated_bytes: Some(64), usage, ..step_metrics(1) };
        let line = serde_json::to_string(&metrics).unwrap();
        assert!(line.ends_with(
            "\"memory\":4096,\"allocated\":64,\"gpu_util\":98.5,\"power_w\":650.0,\"throttle\":[\"power_cap\"]}"
        ));
        let plotted = metrics.scalars();
        let names: Vec<&str> = plotted.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names[..2], ["train/loss", "train/lr"]);
        assert_eq!(names[7..], ["train/allocated", "usage/gpu_util", "usage/power_w", "usage/throttled"]);
    }

    #[test]
    fn resumed_run_drops_later_lines_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let mut lines = JsonLines::open(&path, None).unwrap().0;
        lines.eval(&eval_metrics(0, 3.0)).unwrap();
        for step in 1..=4 {
            lines.step(&step_metrics(step)).unwrap();
        }
        lines.file.append(b"{\"step\":5,\"lo").unwrap();
        let before = fs::read_to_string(&path).unwrap();
        let (mut resumed, evaluated) = JsonLines::open(&path, Some(2)).unwrap();
        assert_eq!(evaluated, Some(0));
        let kept: String = before.split_inclusive('\n').take(3).collect();
        assert_eq!(fs::read_to_string(&path).unwrap(), kept);
        resumed.step(&step_metrics(3)).unwrap();
        resumed.step(&step_metrics(4)).unwrap();
        let uninterrupted: String = before.split_inclusive('\n').take(5).collect();
        assert_eq!(fs::read_to_string(&path).unwrap(), uninterrupted);
    }

    #[test]
    fn an_evaluation_by_rewards_alone_is_not_written_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let mut lines = JsonLines::open(&path, None).unwrap().0;
        let by_reward = Evaluation { reward: Some(0.5), ..Evaluation::default() };
        lines.eval(&EvalMetrics::new(2, &by_reward).unwrap()).unwrap();
        assert_eq!(JsonLines::open(&path, Some(2)).unwrap().1, Some(2));
        assert_eq!(fs::read_to_string(&path).unwrap(), "{\"step\":2,\"eval_reward\":0.5}\n");
    }

    #[test]
    fn number_that_is_not_finite_is_null() {
        let line = serde_json::to_string(&StepMetrics { loss: f64::NAN, ..step_metrics(1) }).unwrap();
        assert!(line.contains("\"loss\":null"), "{line}");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn full_disk_is_a_clear_error() {
        let mut lines = JsonLines::open(Path::new("/dev/full"), None).unwrap().0;
        let error = lines.step(&step_metrics(1)).unwrap_err();
        assert!(matches!(error, StorageError::DiskFull { .. }), "{error}");
    }
}
