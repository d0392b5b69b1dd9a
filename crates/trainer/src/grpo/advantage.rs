//! Advantages: how much better a completion is than the others of its prompt.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Added to a standard deviation that rewards are divided by.
const EPSILON: f64 = 1e-4;

/// What the differences of rewards from their group's mean are divided by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ScaleRewards {
    /// The standard deviation of the group.
    #[default]
    Group,
    /// The standard deviation of all completions of the batch.
    Batch,
    /// Nothing.
    None,
}

/// Returns the reward of a completion, the sum of its parts times their weights. A part that could not be scored adds nothing; `None` if none could.
pub fn reward_of(parts: &[Option<f64>], weights: &[f64]) -> Option<f64> {
    assert_eq!(parts.len(), weights.len(), "each reward has a weight");
    let scored = || parts.iter().zip(weights).filter_map(|(part, weight)| Some(part.as_ref()? * weight));
    scored().next().is_some().then(|| scored().sum())
}

/// Rewards of a batch in relation to each other.
#[derive(Clone, Debug, PartialEq)]
pub struct Scored {
    /// One per completion; 0 where there is no reward.
    pub advantages: Vec<f64>,
    /// Share of the groups whose rewards are all equal: they teach nothing.
    pub equal_groups: f64,
}

/// Computes the advantages of completions, of which `group` successive ones answer one prompt. A completion without a reward counts in no mean and no
/// deviation. Deviations are those of samples (n - 1).
///
/// # Panics
/// If the completions are no whole groups.
pub fn advantages(rewards: &[Option<f64>], group: usize, scale: ScaleRewards) -> Scored {
    assert!(group > 0 && rewards.len().is_multiple_of(group), "{} completions in groups of {group}", rewards.len());
    let of_batch = deviation(rewards);
    let groups = || rewards.chunks(group);
    let of_group = |rewards: &[Option<f64>]| {
        let (mean, own) = (mean(rewards), deviation(rewards));
        let divisor = match scale {
            ScaleRewards::Group => own + EPSILON,
            ScaleRewards::Batch => of_batch + EPSILON,
            ScaleRewards::None => 1.0,
        };
        rewards.iter().map(|reward| reward.map_or(0.0, |reward| (reward - mean) / divisor)).collect::<Vec<_>>()
    };
    let equal = groups().filter(|rewards| deviation(rewards) < 1e-8).count();
    Scored {
        advantages: groups().flat_map(of_group).collect(),
        equal_groups: equal as f64 / groups().count().max(1) as f64,
    }
}

fn mean(rewards: &[Option<f64>]) -> f64 {
    let (sum, count) = rewards.iter().flatten().fold((0.0, 0.0), |(sum, count), reward| (sum + reward, count + 1.0));
    sum / f64::max(count, 1.0)
}

fn deviation(rewards: &[Option<f64>]) -> f64 {
    let (mean, count) = (mean(rewards), rewards.iter().flatten().count());
    let squares: f64 = rewards.iter().flatten().map(|reward| (reward - mean).powi(2)).sum();
    if count > 1 { (squares / (count - 1) as f64).sqrt() } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_completion_without_a_reward_moves_nothing() {
        let rewards = [Some(1.0), None, Some(3.0), None, None, Some(2.0)];
        let scored = advantages(&rewards, 3, ScaleRewards::None);
        assert_eq!(scored.advantages, [-1.0, 0.0, 1.0, 0.0, 0.0, 0.0]);
        assert_eq!(scored.equal_groups, 0.5, "one reward has no variance");
        assert_eq!(reward_of(&[None, None], &[1.0, 2.0]), None);
        assert_eq!(reward_of(&[Some(0.0), None], &[1.0, 2.0]), Some(0.0));
    }

    #[test]
    fn a_group_of_equal_rewards_teaches_nothing_and_is_counted() {
        let rewards = [0.1, 0.1, 0.1, 0.1, 0.0, 1.0].map(Some);
        for scale in [ScaleRewards::Group, ScaleRewards::Batch, ScaleRewards::None] {
            let Scored { advantages, equal_groups } = advantages(&rewards, 2, scale);
            assert!(advantages[..4].iter().all(|advantage| advantage.abs() < 1e-12), "{scale:?}: {advantages:?}");
            assert!(advantages[4] < -0.1 && (advantages[4] + advantages[5]).abs() < 1e-12, "{scale:?}: {advantages:?}");
            assert_eq!(equal_groups, 2.0 / 3.0);
        }
    }
}
