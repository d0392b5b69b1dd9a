//! The numbers of preference training, under TRL's names.
//!
//! Trade-off: means over pairs, except for the cross entropy, which is a mean over tokens.

use firebrick_kernels::PAIR_NUMBERS;
use serde::{Deserialize, Serialize};

/// Means over the pairs of a step or of an evaluation, under TRL's names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PairMetrics {
    /// Reward of the chosen answers: `beta` times the log ratio to the reference; ORPO: times the log-probability per token.
    #[serde(rename = "rewards/chosen")]
    pub chosen_reward: f64,
    /// Reward of the rejected answers.
    #[serde(rename = "rewards/rejected")]
    pub rejected_reward: f64,
    /// Reward of the chosen answer minus that of the rejected one.
    #[serde(rename = "rewards/margins")]
    pub margin: f64,
    /// Fraction of the pairs whose chosen answer has the higher reward.
    #[serde(rename = "rewards/accuracies")]
    pub accuracy: f64,
    /// Log-probability of the chosen answers; ORPO: per token.
    #[serde(rename = "logps/chosen")]
    pub chosen_log_prob: f64,
    /// Log-probability of the rejected answers; ORPO: per token.
    #[serde(rename = "logps/rejected")]
    pub rejected_log_prob: f64,
    /// Mean cross entropy over the targets of the chosen.
    pub nll_loss: f64,
}

impl PairMetrics {
    /// Returns the loss, and the means over this many pairs and targets of chosen documents of sums as `PairResult::numbers` has them.
    pub fn new(sums: [f64; PAIR_NUMBERS], [pairs, chosen_targets]: [u64; 2], nll_weight: f64) -> (f64, Self) {
        let [loss, nll, chosen_reward, rejected_reward, correct, chosen, rejected] = sums;
        let per_pair = |sum: f64| sum / pairs as f64;
        let nll_loss = nll / chosen_targets as f64;
        let metrics = Self {
            chosen_reward: per_pair(chosen_reward),
            rejected_reward: per_pair(rejected_reward),
            margin: per_pair(chosen_reward - rejected_reward),
            accuracy: per_pair(correct),
            chosen_log_prob: per_pair(chosen),
            rejected_log_prob: per_pair(rejected),
            nll_loss,
        };
        (per_pair(loss) + nll_weight * nll_loss, metrics)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loss_is_the_mean_over_pairs() {
        let (loss, metrics) = PairMetrics::new([3.0, 40.0, 1.0, -2.0, 1.0, -8.0, -6.0], [2, 10], 0.5);
        assert_eq!(loss, 1.5 + 0.5 * 4.0);
        assert_eq!((metrics.margin, metrics.accuracy, metrics.nll_loss), (1.5, 0.5, 4.0));
        assert_eq!((metrics.chosen_log_prob, metrics.rejected_log_prob), (-4.0, -3.0));
    }
}
