//! The best evaluation of a run so far, and whether the run has gone on for too long without a better one.
//!
//! It follows from the evaluations alone, whose numbers are the same on every rank, so all ranks keep the same best and end after the same step.
//! Trade-off: a run that is continued with another metric starts over, because values of two metrics cannot be compared.

use serde::{Deserialize, Serialize};

use crate::config::{BestMetric, BestMode, BestSection};
use crate::metrics::Evaluation;

/// The best evaluation so far.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Best {
    /// The metric that was compared.
    pub metric: BestMetric,
    /// The direction in which it improves.
    pub mode: BestMode,
    /// Steps taken before this evaluation: the checkpoint of this step has the best weights.
    pub step: u64,
    /// The numbers of this evaluation.
    pub evaluation: Evaluation,
    /// Evaluations since the metric last improved by more than the threshold.
    pub without_improvement: u64,
    /// The step of the last evaluation that was compared.
    pub compared: u64,
}

impl Best {
    /// Compares the evaluation after `step` with the best so far, as transformers' `EarlyStoppingCallback` does: any improvement makes it the best,
    /// and one by more than the threshold begins the count again. An evaluation that was compared before, or whose metric is absent or not finite
    /// where there is none to compare with, changes nothing. Returns whether it is the best now.
    pub fn compare(best: &mut Option<Self>, section: &BestSection, step: u64, evaluation: &Evaluation) -> bool {
        let (metric, mode) = (section.metric, section.mode());
        let value = metric.of(evaluation).filter(|value| value.is_finite());
        let new = Self { metric, mode, step, evaluation: evaluation.clone(), without_improvement: 0, compared: step };
        let Some(old) = best.as_mut().filter(|old| old.is_of(section)) else {
            *best = value.map(|_| new);
            return best.is_some();
        };
        if step <= old.compared {
            return false;
        }
        old.compared = step;
        let gain =
            value.zip(metric.of(&old.evaluation)).map_or(f64::NEG_INFINITY, |(value, old)| mode.gain(old, value));
        let without_improvement = if gain > section.threshold { 0 } else { old.without_improvement + 1 };
        if gain > 0.0 {
            *old = new;
        }
        old.without_improvement = without_improvement;
        gain > 0.0
    }

    /// Returns whether the run ends early: as many evaluations as the patience allows brought no improvement.
    pub fn ends(best: Option<&Self>, section: Option<&BestSection>) -> bool {
        best.zip(section).is_some_and(|(best, section)| {
            let is_over = section.patience.is_some_and(|patience| best.without_improvement >= patience);
            is_over && best.is_of(section)
        })
    }

    fn is_of(&self, section: &BestSection) -> bool {
        (self.metric, self.mode) == (section.metric, section.mode())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loss(loss: f64) -> Evaluation {
        Evaluation { loss: Some(loss), ..Evaluation::default() }
    }

    /// Compares these losses, one per step; returns the best step and the count after each, and whether the run ends there.
    fn course(section: &BestSection, losses: &[f64]) -> Vec<(u64, u64, bool)> {
        let mut best = None;
        let after = |(number, value): (usize, &f64)| {
            Best::compare(&mut best, section, number as u64 + 1, &loss(*value));
            let found = best.as_ref().expect("the first loss is finite");
            (found.step, found.without_improvement, Best::ends(Some(found), Some(section)))
        };
        losses.iter().enumerate().map(after).collect()
    }

    #[test]
    fn patience_counts_evaluations_without_improvement() {
        let section = BestSection { patience: Some(2), ..BestSection::default() };
        let expected = [(1, 0, false), (1, 1, false), (3, 0, false), (3, 1, false), (3, 2, true)];
        assert_eq!(course(&section, &[2.0, 2.5, 1.0, 1.0, f64::NAN]), expected);
        let never = BestSection::default();
        assert!(course(&never, &[1.0, 2.0, 2.0, 2.0]).iter().all(|(best, _, ends)| *best == 1 && !ends));
    }

    /// The values are those of transformers 5.24: `EarlyStoppingCallback` with `early_stopping_threshold=0.1`.
    #[test]
    fn small_improvements_do_not_begin_again() {
        let section = BestSection { patience: Some(2), threshold: 0.1, ..BestSection::default() };
        assert_eq!(course(&section, &[1.0, 0.95, 0.8, 0.75, 0.7]).last(), Some(&(5, 2, true)));
        assert_eq!(course(&section, &[1.0, 0.95, 0.8]), [(1, 0, false), (2, 1, false), (3, 0, false)]);
    }

    #[test]
    fn mode_max_prefers_larger_values() {
        let section = BestSection { metric: BestMetric::TokenAccuracy, ..BestSection::default() };
        let share = |share: f64| Evaluation { token_accuracy: Some(share), ..loss(1.0) };
        let mut best = None;
        let found: Vec<bool> = [0.5, 0.4, 0.6]
            .iter()
            .zip(1..)
            .map(|(value, step)| Best::compare(&mut best, &section, step, &share(*value)))
            .collect();
        assert_eq!((found, best.unwrap().step), (vec![true, false, true], 3));
        let largest_loss = BestSection { mode: Some(BestMode::Max), ..BestSection::default() };
        assert_eq!(course(&largest_loss, &[1.0, 2.0, 1.5]).last(), Some(&(2, 1, false)));
    }

    #[test]
    fn an_evaluation_counts_once() {
        let section = BestSection { patience: Some(1), ..BestSection::default() };
        let mut best = None;
        assert!(Best::compare(&mut best, &section, 2, &loss(1.0)));
        let before = best.clone();
        assert!(!Best::compare(&mut best, &section, 2, &loss(9.0)));
        assert_eq!(best, before);
        let other = BestSection { metric: BestMetric::TokenAccuracy, ..section };
        assert!(Best::compare(&mut best, &other, 4, &Evaluation { token_accuracy: Some(0.1), ..loss(9.0) }));
        assert!(!Best::compare(&mut None, &other, 4, &loss(f64::NAN)), "there is no token accuracy");
    }
}
