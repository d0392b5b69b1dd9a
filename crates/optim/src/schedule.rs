//! The learning rate over a run: linear warm-up, then constant, linear or cosine decay to zero.
//!
//! Steps count from 1, as in the logs, and step `warmup_steps` is the first at the full rate. Decay reaches zero one step after the
//! last, so that no step has a learning rate of zero. (transformers counts from 0, and its first warm-up step has a rate of 0.)
//! Not supported: restarts, and a final learning rate above zero.

use std::f64::consts::PI;

use serde::{Deserialize, Serialize};

/// Shape of the decay after warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum ScheduleKind {
    /// No decay.
    Constant,
    /// A straight line to zero.
    Linear,
    /// Half a cosine wave to zero (Loshchilov and Hutter, SGDR, 2017, without restarts).
    Cosine,
}

/// Learning rate by step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    /// Shape of the decay.
    pub kind: ScheduleKind,
    /// The highest rate.
    pub peak: f64,
    /// Steps in which the rate increases linearly.
    pub warmup_steps: u64,
    /// Steps of the whole run.
    pub total_steps: u64,
}

impl Schedule {
    /// Learning rate of step `step`, from 1.
    ///
    /// # Panics
    /// If `step` is 0.
    pub fn rate(&self, step: u64) -> f64 {
        assert!(step > 0, "steps count from 1");
        if step < self.warmup_steps {
            return self.peak * step as f64 / self.warmup_steps as f64;
        }
        let decay_steps = (self.total_steps.saturating_sub(self.warmup_steps) + 1).max(1) as f64;
        let progress = ((step - self.warmup_steps.min(step)) as f64 / decay_steps).min(1.0);
        self.peak
            * match self.kind {
                ScheduleKind::Constant => 1.0,
                ScheduleKind::Linear => 1.0 - progress,
                ScheduleKind::Cosine => 0.5 * (1.0 + (PI * progress).cos()),
            }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schedule(kind: ScheduleKind) -> Schedule {
        Schedule { kind, peak: 1.0, warmup_steps: 4, total_steps: 12 }
    }

    #[test]
    fn warmup_increases_linearly_to_the_peak() {
        let rates: Vec<f64> = (1..=4).map(|step| schedule(ScheduleKind::Cosine).rate(step)).collect();
        assert_eq!(rates, [0.25, 0.5, 0.75, 1.0]);
    }

    #[test]
    fn the_rate_falls_at_every_step_of_the_decay_and_is_above_zero_at_the_last() {
        for kind in [ScheduleKind::Linear, ScheduleKind::Cosine] {
            let rates: Vec<f64> = (4..=12).map(|step| schedule(kind).rate(step)).collect();
            assert!(rates.windows(2).all(|pair| pair[1] < pair[0]), "{rates:?}");
            assert!(*rates.last().unwrap() > 0.0 && schedule(kind).rate(13) < 1e-12);
        }
        assert_eq!(schedule(ScheduleKind::Constant).rate(12), 1.0);
    }

    #[test]
    fn cosine_is_half_the_peak_in_the_middle_of_the_decay() {
        let schedule = Schedule { kind: ScheduleKind::Cosine, peak: 2.0, warmup_steps: 0, total_steps: 9 };
        assert!((schedule.rate(5) - 1.0).abs() < 1e-12);
    }
}
