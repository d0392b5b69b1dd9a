//! How many weights stay on the device in 8 bits: what the recipe says, or as many as fit.
//!
//! Those of the backward come first: writing them transposed costs more than writing them as they are.
//! Trade-off: with "auto" the memory of a run depends on what is free; its numbers do not.

use firebrick_hwprofile::memory::human_bytes;
use firebrick_kernels::{BackendKind, TrainingShape, fp8_weights_bytes};

use crate::config::{DeviceBudget, RunConfig};
use crate::plan::chosen::Chosen;
use crate::plan::fit;

/// Decides, and enters it into the shape; `None` where no weights are converted to 8 bits.
pub(super) fn decide(case: &fit::Case<'_>, config: &RunConfig, training: &mut TrainingShape) -> Option<Chosen<u64>> {
    let [forward, backward] = fp8_weights_bytes(case.spec, training);
    let all = forward + backward;
    if case.backend != BackendKind::Cuda || all == 0 {
        return None;
    }
    let (budget, why) = match config.train.fp8_weights_gib {
        DeviceBudget::Gib(gib) => ((gib * (1u64 << 30) as f64) as u64, "train.fp8_weights_gib"),
        DeviceBudget::Auto => (case.left(training), "auto: what fits"),
    };
    let of_backward = budget.min(backward);
    training.kept_bytes = [(budget - of_backward).min(forward), of_backward];
    let kept = training.kept_bytes.iter().sum();
    Some(Chosen::new(kept, format!("{why}, of {} that would be written again in every pass", human_bytes(all))))
}
