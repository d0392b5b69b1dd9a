//! Measures how much sampling the machine's usage slows a step; a training run samples all the time.
//!
//! Blocks of steps with and without the sampling thread alternate, so that a card that warms up slows both; all ranks take as many steps.
//! Trade-off: samples are seconds apart if a driver answers slowly, so the measurement takes half a minute.

use std::fmt;

use firebrick_hwprofile::usage::UsageMonitor;
use firebrick_kernels::Kernels;
use serde::Serialize;

use super::samples::{Synthetic, timed};
use super::{Case, step};
use firebrick_trainer::RunError;
use firebrick_trainer::metrics::usage_target;
use firebrick_trainer::run::step::Trainer;

const BLOCKS: usize = 5;
/// Approximate seconds of a block.
const BLOCK_S: f64 = 3.0;

/// Steps with and without sampling.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct UsageCost {
    steps: usize,
    /// Mean seconds of a step while usage is sampled.
    sampled_step_s: f64,
    step_s: f64,
    /// The largest difference between two blocks without sampling, relative to their mean; a significant difference exceeds it.
    noise: f64,
    samples: u64,
    /// Seconds that the sampling thread needed for the samples.
    sampling_s: f64,
    /// Sentences about what could not be sampled.
    notes: Vec<String>,
}

impl UsageCost {
    /// Alternates steps of both kinds; a step takes about `step_s` seconds.
    pub(super) fn measure<B: Kernels>(
        case: &Case<'_>,
        trainer: &mut Trainer<B>,
        batches: &mut Synthetic,
        step_s: f64,
    ) -> Result<Self, RunError> {
        let (target, note) = usage_target(case.plan.backend.value, case.ranks.local_rank());
        let of_all_ranks = case.ranks.all_reduce_count((BLOCK_S / step_s).ceil() as u64)?;
        let per_block = (of_all_ranks as usize / case.ranks.world_size()).max(1);
        let (mut with, mut without) = ([0.0; BLOCKS], [0.0; BLOCKS]);
        let (mut samples, mut sampling_s, mut notes) = (0, 0.0, Vec::from_iter(note));
        for (with, without) in with.iter_mut().zip(&mut without) {
            *without = block(trainer, batches, per_block)?;
            let monitor = UsageMonitor::start(target.clone());
            *with = block(trainer, batches, per_block)?;
            let (count, time) = monitor.cost();
            (samples, sampling_s) = (samples + count, sampling_s + time.as_secs_f64());
            notes.extend(monitor.notes());
        }
        notes.sort_unstable();
        notes.dedup();
        let [sampled_step_s, step_s] = [&with, &without].map(|steps| steps.iter().sum::<f64>() / BLOCKS as f64);
        let [least, most] = without.iter().fold([f64::INFINITY, 0.0f64], |[low, high], s| [low.min(*s), high.max(*s)]);
        let (steps, noise) = (BLOCKS * per_block, (most - least) / step_s);
        Ok(Self { steps, sampled_step_s, step_s, noise, samples, sampling_s, notes })
    }
}

/// Takes this many steps and returns their mean seconds.
fn block<B: Kernels>(trainer: &mut Trainer<B>, batches: &mut Synthetic, steps: usize) -> Result<f64, RunError> {
    let mut seconds = 0.0;
    for _ in 0..steps {
        let batch = batches.next_batch();
        let (time, done) = timed(|| step(trainer, &batch));
        done?;
        seconds += time;
    }
    Ok(seconds / steps as f64)
}

impl fmt::Display for UsageCost {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { steps, sampled_step_s, step_s, noise, samples, sampling_s, notes } = self;
        write!(
            formatter,
            "  usage        a step takes {sampled_step_s:.4} s while usage is sampled and {step_s:.4} s while it is not ({steps} steps of each \
             kind): {:+.2} %, where blocks of the same kind differ by up to {:.2} %; {samples} samples of {:.2} ms",
            100.0 * (sampled_step_s / step_s - 1.0),
            100.0 * noise,
            1e3 * sampling_s / (*samples).max(1) as f64
        )?;
        notes.iter().try_for_each(|note| write!(formatter, "\n               {note}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_says_what_sampling_costs_and_what_is_noise() {
        let cost = UsageCost {
            steps: 30,
            sampled_step_s: 0.1002,
            step_s: 0.1,
            noise: 0.004,
            samples: 30,
            sampling_s: 0.015,
            notes: vec!["no NVML".to_owned()],
        };
        let text = cost.to_string();
        for part in ["+0.20 %", "up to 0.40 %", "30 samples of 0.50 ms", "\n               no NVML"] {
            assert!(text.contains(part), "{text}");
        }
    }
}
