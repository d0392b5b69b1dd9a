//! Judges the numbers of each step: whether it counts, was skipped, or ends the run.
//!
//! The device has skipped a step whose gradients are not finite, or whose norm is above the limit that it was given, before its numbers arrive. All
//! ranks see the same numbers and judge alike.
//! Trade-off: the limit of a step leaves out the step before it, even where its norm is known already, so that it does not depend on timing.

use serde::{Deserialize, Serialize};

use crate::config::{OnNonfinite, PlannedTrain};

/// Steps whose median a spike is compared with, as many as OLMo's `SkipStepOptimizer` looks at.
const WINDOW: usize = 128;
/// With fewer steps there is no limit.
const LEAST: usize = 16;
/// Below this loss scale, float16 cannot be the reason why gradients overflow (fairseq's `min_loss_scale`).
const MIN_LOSS_SCALE: f32 = 1e-4;

/// What is remembered of earlier steps.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Guard {
    /// Gradient norms of the last steps, oldest first; the largest number for one that is not finite. Empty without a rule for spikes.
    norms: Vec<f32>,
    /// Steps in a row that were skipped.
    skipped: u64,
}

impl Guard {
    /// Returns whether nothing is remembered.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Returns the norm above which the next step is a spike; the largest number for none. `knows_last`: the last step was judged already.
    pub fn limit(&self, spike_factor: f64, knows_last: bool) -> f32 {
        let known = self.norms.len().saturating_sub(usize::from(knows_last));
        let mut sorted = self.norms[known.saturating_sub(WINDOW)..known].to_vec();
        sorted.sort_by(f32::total_cmp);
        let median = if sorted.len() < LEAST { 0.0 } else { sorted[sorted.len() / 2] };
        let limit = (spike_factor * f64::from(median)) as f32;
        // If most steps have no gradient, as with rewards that are all equal, one that has is no spike.
        if limit > 0.0 { limit.min(f32::MAX) } else { f32::MAX }
    }

    /// Judges the next step by its loss and gradient norm, and its loss scale if it has one. Returns why it was skipped; `None` if it counts.
    ///
    /// # Errors
    /// Why the step ends the run.
    pub fn judge(
        &mut self,
        rules: &PlannedTrain,
        [loss, grad_norm]: [f32; 2],
        loss_scale: Option<f32>,
    ) -> Result<Option<String>, String> {
        let (is_finite, factor, most) =
            (grad_norm.is_finite(), rules.spike_factor.value, rules.max_skipped_steps.value);
        let limit = self.limit(factor, true);
        if factor > 0.0 {
            self.norms.push(if is_finite { grad_norm } else { f32::MAX });
            self.norms.drain(..self.norms.len().saturating_sub(WINDOW + 1));
        }
        if let Some(scale) = loss_scale.filter(|scale| !is_finite && *scale >= MIN_LOSS_SCALE) {
            let problem = format!("gradients overflowed with a loss scale of {scale}");
            return Ok(Some(format!("{problem}; the step was skipped, the scale is lowered")));
        }
        let problem = if !loss.is_finite() || !is_finite {
            let problem = format!("loss is {loss}, gradient norm is {grad_norm}");
            // A loss alone skips nothing: the gradients were finite and have changed the weights.
            if is_finite || rules.on_nonfinite.value == OnNonfinite::Stop {
                return Err(problem);
            }
            problem
        } else if grad_norm > limit {
            format!("gradient norm is {grad_norm}, above {limit}: train.spike_factor = {factor}")
        } else {
            self.skipped = 0;
            return Ok(None);
        };
        if self.skipped >= most {
            return Err(format!("{problem}, after train.max_skipped_steps = {most} skipped steps in a row"));
        }
        self.skipped += 1;
        Ok(Some(format!("{problem}; the step was skipped")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::TrainConfig;

    fn rules(change: impl FnOnce(&mut TrainConfig)) -> PlannedTrain {
        let mut section = TrainConfig::default();
        change(&mut section);
        PlannedTrain::new(&section)
    }

    #[test]
    fn overflows_of_float16_count_as_no_skipped_step_and_a_loss_alone_ends_the_run() {
        let (bad, mut guard) = ([f32::NAN, f32::INFINITY], Guard::default());
        let skip = rules(|train| train.on_nonfinite = OnNonfinite::Skip);
        assert!(guard.judge(&rules(|_| ()), bad, Some(1024.0)).unwrap().is_some() && guard.is_empty());
        assert!(guard.judge(&rules(|_| ()), bad, Some(1e-5)).is_err() && guard.is_empty());
        assert!(guard.judge(&skip, bad, None).unwrap().is_some() && !guard.is_empty());
        assert!(guard.judge(&skip, [f32::NAN, 1.0], None).is_err());
    }

    #[test]
    fn nothing_is_a_spike_without_earlier_gradients() {
        let limit = |norms: Vec<f32>| Guard { norms, skipped: 0 }.limit(4.0, true);
        assert_eq!([limit(vec![0.0; 100]), limit(vec![2.0; LEAST])], [f32::MAX; 2]);
        assert_eq!(limit(vec![2.0; LEAST + 1]), 8.0);
    }
}
