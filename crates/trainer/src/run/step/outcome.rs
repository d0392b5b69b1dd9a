//! The numbers of a step, on their way to the host and there.
//!
//! Trade-off: they arrive as one list of values, whose order the step and this file share.

use firebrick_kernels::{PAIR_NUMBERS, Readback};

use crate::metrics::PairMetrics;
use crate::run::step::preference::StepCounts;

/// A step that was queued, with its numbers on their way to the host.
#[derive(Debug)]
pub struct StepOutcome {
    /// The step, from 1.
    pub step: u64,
    /// Loss tokens of the step over all ranks.
    pub loss_tokens: u64,
    pub(super) counts: StepCounts,
    /// Micro-batches over all ranks, if they have an auxiliary loss.
    pub(super) balanced: Option<usize>,
    pub(super) nll_weight: f64,
    /// The learning rate that was used.
    pub learning_rate: f64,
    /// Gradient norm, the loss sum or the sums of pairs, the sum of auxiliary losses and the loss scale if there are any.
    pub(super) numbers: Readback,
    pub(super) restore_wait: Option<Readback>,
    pub(super) comm_wait: Option<Readback>,
    pub(super) comm_time: Option<Readback>,
}

/// The numbers of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepNumbers {
    /// Mean cross entropy over the loss tokens of all ranks; for pairs, their mean loss.
    pub loss: f32,
    /// The reported numbers of pairs.
    pub pairs: Option<PairMetrics>,
    /// Mean auxiliary loss of the micro-batches, without its weight.
    pub aux_loss: Option<f32>,
    /// Global norm of the gradients before clipping, without the loss scale.
    pub grad_norm: f32,
    /// The scale of the step's gradients, with dynamic loss scaling.
    pub loss_scale: Option<f32>,
    /// Milliseconds for which the device waited for tensors from host memory.
    pub restore_wait_ms: f32,
    /// Milliseconds for which the device waited for other ranks; `None` with one rank, or where it is not measured.
    pub comm_wait_ms: Option<f32>,
    /// Milliseconds of operations between devices; `None` under the same conditions.
    pub comm_ms: Option<f32>,
}

impl StepOutcome {
    /// Reads the numbers. Waits for the end of this step on the device, but not for later steps if the backend can distinguish them.
    pub fn read(self) -> StepNumbers {
        let numbers = self.numbers.wait();
        let counts = self.counts;
        let (loss, pairs, rest) = match numbers[1..].first_chunk::<PAIR_NUMBERS>() {
            Some(sums) if counts.pairs > 0 => {
                let (loss, pairs) =
                    PairMetrics::new(sums.map(f64::from), [counts.pairs, counts.chosen_targets], self.nll_weight);
                (loss as f32, Some(pairs), &numbers[1 + PAIR_NUMBERS..])
            }
            _ => (numbers[1] / self.loss_tokens as f32, None, &numbers[2..]),
        };
        let (aux_loss, rest) = match self.balanced {
            Some(micro_batches) => (Some(rest[0] / micro_batches as f32), &rest[1..]),
            None => (None, rest),
        };
        StepNumbers {
            loss,
            pairs,
            aux_loss,
            grad_norm: numbers[0],
            loss_scale: rest.first().copied(),
            restore_wait_ms: self.restore_wait.map_or(0.0, |wait| wait.wait()[0]),
            comm_wait_ms: self.comm_wait.map(|wait| wait.wait()[0]),
            comm_ms: self.comm_time.map(|time| time.wait()[0]),
        }
    }
}

impl StepNumbers {
    /// Returns whether the gradients overflowed under the loss scale, so that the step changed only the scale.
    pub fn was_skipped(&self) -> bool {
        self.loss_scale.is_some() && !self.grad_norm.is_finite()
    }
}
