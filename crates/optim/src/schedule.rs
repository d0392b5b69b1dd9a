//! The learning rate over a run: linear warm-up, then constant, or a linear or cosine decay to a minimum rate.
//!
//! Steps count from 1, as in the logs, and step `warmup_steps` is the first at the full rate. transformers counts from 0, so the rate of its first
//! warm-up step is 0: a step that takes time and changes nothing. So the rates of a run of T steps with W warm-up steps are those of transformers for
//! T + 1 steps and the same W, without the first one; without warm-up (W = 0) they are those of transformers for T steps.
//! Not supported: restarts.

use std::f64::consts::PI;

use serde::{Deserialize, Serialize};

/// Shape of the decay after warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum ScheduleKind {
    /// No decay.
    Constant,
    /// A straight line to the lowest rate.
    Linear,
    /// Half a cosine wave to the lowest rate (Loshchilov and Hutter, SGDR, 2017, without restarts).
    Cosine,
}

/// Learning rate by step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    /// Shape of the decay.
    pub kind: ScheduleKind,
    /// The rate at the end of the warm-up.
    pub peak: f64,
    /// The final rate of the decay, one step after the last.
    pub lowest: f64,
    /// Steps in which the rate increases linearly.
    pub warmup_steps: u64,
    /// Steps of the whole run.
    pub total_steps: u64,
}

impl Schedule {
    /// Returns the learning rate of step `step`, from 1.
    ///
    /// # Panics
    /// If `step` is 0.
    pub fn rate(&self, step: u64) -> f64 {
        assert!(step > 0, "steps count from 1");
        // Without warm-up the first step has the full rate, like the last step of a warm-up.
        let full_rate_at = self.warmup_steps.max(1);
        if step < full_rate_at {
            return self.peak * step as f64 / full_rate_at as f64;
        }
        let decay_steps = self.total_steps.saturating_sub(full_rate_at) + 1;
        let progress = ((step - full_rate_at) as f64 / decay_steps as f64).min(1.0);
        let share = match self.kind {
            ScheduleKind::Constant => 1.0,
            ScheduleKind::Linear => 1.0 - progress,
            ScheduleKind::Cosine => 0.5 * (1.0 + (PI * progress).cos()),
        };
        self.lowest + (self.peak - self.lowest) * share
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schedule(kind: ScheduleKind) -> Schedule {
        Schedule { kind, peak: 1.0, lowest: 0.0, warmup_steps: 4, total_steps: 12 }
    }

    /// Computes the factor of `get_linear_schedule_with_warmup` and `get_cosine_schedule_with_warmup` for a step that counts from 0.
    fn of_transformers(kind: ScheduleKind, step: u64, warmup: u64, total: u64) -> f64 {
        if step < warmup {
            return step as f64 / warmup.max(1) as f64;
        }
        let (step, warmup, total) = (step as f64, warmup as f64, total as f64);
        match kind {
            ScheduleKind::Constant => 1.0,
            ScheduleKind::Linear => ((total - step) / (total - warmup).max(1.0)).max(0.0),
            ScheduleKind::Cosine => {
                let progress = (step - warmup) / (total - warmup).max(1.0);
                (0.5 * (1.0 + (PI * 0.5 * 2.0 * progress).cos())).max(0.0)
            }
        }
    }

    #[test]
    fn rates_are_those_of_transformers() {
        for kind in [ScheduleKind::Constant, ScheduleKind::Linear, ScheduleKind::Cosine] {
            for (warmup_steps, total_steps) in [(0, 9), (1, 9), (4, 12), (12, 12), (0, 1)] {
                let schedule = Schedule { warmup_steps, total_steps, ..schedule(kind) };
                for step in 1..=total_steps {
                    // The step counted from 0: the same number if the first one was left out.
                    let (theirs, of) =
                        if warmup_steps == 0 { (step - 1, total_steps) } else { (step, total_steps + 1) };
                    let expected = of_transformers(kind, theirs, warmup_steps, of);
                    assert!((schedule.rate(step) - expected).abs() < 1e-12, "{schedule:?} step {step}");
                }
            }
        }
    }

    #[test]
    fn the_decay_leads_to_the_lowest_rate() {
        for kind in [ScheduleKind::Linear, ScheduleKind::Cosine] {
            let schedule = Schedule { peak: 2.0, lowest: 0.5, ..schedule(kind) };
            assert_eq!((schedule.rate(1), schedule.rate(4)), (0.5, 2.0));
            assert!((schedule.rate(13) - 0.5).abs() < 1e-12 && schedule.rate(12) > 0.5);
        }
    }
}
