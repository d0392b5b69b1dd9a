//! What keys mean together: pairs of keys that describe one setting, and keys whose default depends on another key.

use firebrick_data::{RecordFormat, TrainOn};
use firebrick_kernels::Recompute;

use crate::config::recipe::RunConfig;

/// The fraction of a run that warms up if the recipe has no key for it.
const DEFAULT_WARMUP_RATIO: f64 = 0.03;

/// How long a run is: `train.steps` or `train.epochs`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RunLength {
    /// Optimizer steps.
    Steps(u64),
    /// Passes over the data.
    Epochs(f64),
}

/// How long the learning rate increases: `train.warmup_steps` or `train.warmup_ratio`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Warmup {
    /// Optimizer steps.
    Steps(u64),
    /// A fraction of the run.
    Ratio(f64),
}

impl RunConfig {
    /// How long the run is.
    #[must_use]
    pub fn length(&self) -> RunLength {
        match self.train.steps {
            Some(steps) => RunLength::Steps(steps),
            None => RunLength::Epochs(self.train.epochs.unwrap_or(1.0)),
        }
    }

    /// How long the learning rate increases.
    #[must_use]
    pub fn warmup(&self) -> Warmup {
        match self.train.warmup_steps {
            Some(steps) => Warmup::Steps(steps),
            None => Warmup::Ratio(self.train.warmup_ratio.unwrap_or(DEFAULT_WARMUP_RATIO)),
        }
    }

    /// What the backward pass of a layer computes again.
    #[must_use]
    pub fn recompute(&self) -> Recompute {
        match (self.train.recompute, self.train.grad_checkpointing) {
            (Some(recompute), _) => recompute,
            (None, Some(false)) => Recompute::None,
            (None, _) => Recompute::Full,
        }
    }

    /// Which tokens count in the loss.
    #[must_use]
    pub fn train_on(&self) -> TrainOn {
        match (self.data.train_on, self.data.format) {
            (Some(train_on), _) => train_on,
            (None, RecordFormat::Text) => TrainOn::All,
            (None, _) => TrainOn::Assistant,
        }
    }

    /// Rows per forward pass of the evaluation.
    #[must_use]
    pub fn eval_micro_batch_size(&self) -> usize {
        self.eval.micro_batch_size.unwrap_or(self.train.micro_batch_size)
    }

    /// Rows per step of one rank: the effective batch.
    #[must_use]
    pub fn rows_per_step(&self) -> usize {
        self.train.micro_batch_size * self.train.gradient_accumulation
    }

    /// Whether there is anything to evaluate on.
    #[must_use]
    pub fn has_eval_data(&self) -> bool {
        let data = &self.data;
        data.eval_path.is_some() || data.eval_fraction.is_some() || !data.eval_sources.is_empty()
    }

    /// The same recipe with every default that depends on another key filled in, and one name for each setting.
    #[must_use]
    pub(super) fn resolved(&self) -> RunConfig {
        let mut config = self.clone();
        match self.length() {
            RunLength::Steps(steps) => config.train.steps = Some(steps),
            RunLength::Epochs(epochs) => config.train.epochs = Some(epochs),
        }
        match self.warmup() {
            Warmup::Steps(steps) => config.train.warmup_steps = Some(steps),
            Warmup::Ratio(ratio) => config.train.warmup_ratio = Some(ratio),
        }
        config.train.recompute = Some(self.recompute());
        config.train.grad_checkpointing = Some(self.recompute() == Recompute::Full);
        config.compute = Some(self.compute());
        config.train.bf16 = None;
        if let Some(bnb) = &mut config.bnb_4bit {
            bnb.compute_dtype = None;
        }
        config.data.train_on = Some(self.train_on());
        config.eval.micro_batch_size = Some(self.eval_micro_batch_size());
        config
    }
}
