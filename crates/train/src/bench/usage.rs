//! What it costs a step that the machine's usage is sampled meanwhile, as a training run does all the time.
//!
//! Steps with the sampling thread and steps without it take turns in blocks, so that a card that warms up slows both.
//! Trade-off: a sample is taken at most twice a second, so blocks are as long as several samples, and the measurement takes half a minute.

use std::fmt;
use std::time::{Duration, Instant};

use firebrick_hwprofile::usage::UsageMonitor;
use firebrick_kernels::Kernels;
use serde::Serialize;

use super::measure::{Case, step};
use super::synthetic::Synthetic;
use crate::error::RunError;
use crate::metrics::usage_target;
use crate::run::step::Trainer;

/// Blocks of each kind.
const BLOCKS: usize = 5;
/// Time of a block, at least.
const BLOCK: Duration = Duration::from_secs(3);

/// Steps with and without sampling.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct UsageCost {
    /// Steps of each kind.
    pub steps: [usize; 2],
    /// Mean seconds of a step while usage is sampled.
    pub sampled_step_s: f64,
    /// Mean seconds of a step while it is not.
    pub step_s: f64,
    /// The largest difference of two blocks without sampling, relative to their mean: what a difference has to exceed.
    pub noise: f64,
    /// Samples taken.
    pub samples: u64,
    /// Seconds that they took, on a thread of their own.
    pub sampling_s: f64,
}

impl UsageCost {
    /// Takes steps of both kinds in turn.
    ///
    /// # Errors
    /// A step failed.
    pub(super) fn measure<B: Kernels>(
        case: &Case<'_>,
        trainer: &mut Trainer<B>,
        batches: &mut Synthetic,
    ) -> Result<Self, RunError> {
        let (target, _) = usage_target(case.plan.backend.value, case.ranks.local_rank());
        let (mut with, mut without) = (Vec::new(), Vec::new());
        let (mut samples, mut sampling_s) = (0, 0.0);
        for _ in 0..BLOCKS {
            without.push(block(trainer, batches)?);
            let monitor = UsageMonitor::start(target.clone());
            with.push(block(trainer, batches)?);
            let (count, time) = monitor.cost();
            (samples, sampling_s) = (samples + count, sampling_s + time.as_secs_f64());
        }
        let mean = |blocks: &[(usize, f64)]| {
            let (steps, seconds) = blocks.iter().fold((0, 0.0), |sum, block| (sum.0 + block.0, sum.1 + block.1));
            (steps, seconds / steps as f64)
        };
        let ((with_steps, sampled_step_s), (without_steps, step_s)) = (mean(&with), mean(&without));
        let of_block = without.iter().map(|(steps, seconds)| seconds / *steps as f64);
        let [least, most] = of_block.fold([f64::INFINITY, 0.0f64], |[low, high], s| [low.min(s), high.max(s)]);
        let (steps, noise) = ([with_steps, without_steps], (most - least) / step_s);
        Ok(Self { steps, sampled_step_s, step_s, noise, samples, sampling_s })
    }
}

/// Steps for the time of a block: their number and the seconds that they took.
fn block<B: Kernels>(trainer: &mut Trainer<B>, batches: &mut Synthetic) -> Result<(usize, f64), RunError> {
    let (mut steps, mut seconds) = (0, 0.0);
    while seconds < BLOCK.as_secs_f64() {
        let batch = batches.next_batch();
        let started = Instant::now();
        step(trainer, &batch)?;
        (steps, seconds) = (steps + 1, seconds + started.elapsed().as_secs_f64());
    }
    Ok((steps, seconds))
}

impl fmt::Display for UsageCost {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { steps: [with, without], sampled_step_s, step_s, noise, samples, sampling_s } = self;
        write!(
            formatter,
            "  usage        a step takes {sampled_step_s:.4} s while usage is sampled ({with} steps) and {step_s:.4} s while it is not \
             ({without} steps): {:+.2} %, where blocks of the same kind differ by up to {:.2} %; {samples} samples of {:.2} ms",
            100.0 * (sampled_step_s / step_s - 1.0),
            100.0 * noise,
            1e3 * sampling_s / (*samples).max(1) as f64
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_says_what_sampling_costs_and_what_is_noise() {
        let cost = UsageCost {
            steps: [30, 31],
            sampled_step_s: 0.1002,
            step_s: 0.1,
            noise: 0.004,
            samples: 30,
            sampling_s: 0.015,
        };
        let text = cost.to_string();
        assert!(
            text.contains("+0.20 %") && text.contains("up to 0.40 %") && text.contains("30 samples of 0.50 ms"),
            "{text}"
        );
    }
}
