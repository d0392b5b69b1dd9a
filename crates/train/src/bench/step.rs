//! One step of a benchmark, and what every part of a measurement is given.
//!
//! Trade-off: a step ends when its loss has been read, so steps do not overlap as they do in a run.

use std::time::Instant;

use firebrick_arch::ModelConfig;
use firebrick_data::Batch;
use firebrick_hwprofile::measure::ProcessClock;
use firebrick_kernels::Kernels;
use firebrick_parallel::Ranks;
use firebrick_trainer::RunError;
use firebrick_trainer::plan::Plan;
use firebrick_trainer::run::step::{StepNumbers, Trainer};

use super::options::BenchOptions;

/// What is measured, and where progress goes.
pub(super) struct Case<'a> {
    pub(super) options: &'a BenchOptions,
    pub(super) plan: &'a Plan,
    pub(super) model: &'a ModelConfig,
    pub(super) ranks: &'a Ranks,
    pub(super) clock: ProcessClock,
    pub(super) print: &'a dyn Fn(&str),
}

/// One step to its end: the mean loss, read back, and the seconds before the host waited for it.
pub(super) fn step<B: Kernels>(trainer: &mut Trainer<B>, batch: &Batch) -> Result<(f32, f64), RunError> {
    let started = Instant::now();
    let outcome = trainer.step(std::slice::from_ref(batch))?;
    let host_s = started.elapsed().as_secs_f64();
    let step = outcome.step;
    let numbers = outcome.read();
    let StepNumbers { loss, grad_norm, .. } = numbers;
    if loss.is_finite() && (grad_norm.is_finite() || numbers.was_skipped()) {
        Ok((loss, host_s))
    } else {
        Err(RunError::NotFinite { step, loss, grad_norm })
    }
}
