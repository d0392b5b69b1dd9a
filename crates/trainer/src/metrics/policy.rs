//! The numbers of learning from rewards, under TRL's names.

use std::collections::BTreeMap;

use serde::Serialize;

/// Means over the completions of a step, or over their tokens.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct PolicyMetrics {
    /// Reward: the sum of its parts times their weights. Completions without one do not count.
    pub reward: f64,
    /// Standard deviation of the rewards.
    pub reward_std: f64,
    /// Each reward by its name, before its weight: `rewards/NAME`.
    #[serde(flatten)]
    pub parts: BTreeMap<String, f64>,
    /// Share of the prompts whose completions all have the same reward, which teaches nothing.
    pub frac_reward_zero_std: f64,
    /// Share of the completions that no reward could score.
    pub unscored: f64,
    /// Tokens of a completion.
    #[serde(rename = "completions/mean_length")]
    pub mean_length: f64,
    /// Share of the completions that were cut.
    #[serde(rename = "completions/clipped_ratio")]
    pub truncated: f64,
    /// Distance from the reference; 0 without one.
    pub kl: f64,
    /// Share of the ratios that were clipped below 1.
    #[serde(rename = "clip_ratio/low_mean")]
    pub clipped_low: f64,
    /// Share of the ratios that were clipped above 1.
    #[serde(rename = "clip_ratio/high_mean")]
    pub clipped_high: f64,
    /// Entropy in nats per token, estimated by the tokens that were sampled.
    pub entropy: f64,
    /// `|log p (training) - log p (sampling)|` of a token, on average.
    #[serde(rename = "sampling/sampling_logp_difference/mean")]
    pub drift: f64,
    /// The largest of these.
    #[serde(rename = "sampling/sampling_logp_difference/max")]
    pub max_drift: f64,
    /// Share of the tokens of which a router chose other experts in training than in sampling, in the first step of a round; none in other steps and in
    /// models without experts.
    #[serde(rename = "sampling/experts_differ", skip_serializing_if = "Option::is_none")]
    pub experts_differ: Option<f64>,
    /// Tokens sampled per second, over all ranks, in the round of this step; 0 in the rest of a round that an earlier process has sampled.
    pub sampled_per_s: f64,
    /// Input tokens of the step per second over all ranks, without sampling and rewards.
    pub trained_per_s: f64,
    /// Seconds before this step's passes in which completions were sampled and scored; about 0 unless the step is the first of its round.
    pub round_s: f64,
    /// Seconds that rewards took in that round.
    pub reward_s: f64,
    /// Number of rewards in that round that are missing because no answer came in time.
    #[serde(rename = "reward_timeouts")]
    pub timeouts: u64,
    /// Numbers that reward processes named, as means over that round's completions on rank 0: `reward_metrics/NAME`.
    #[serde(flatten)]
    pub named: BTreeMap<String, f64>,
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::Value;

    use super::*;
    use crate::metrics::StepMetrics;

    #[test]
    fn every_number_of_a_line_is_plotted() {
        let by_name = |name: &str| BTreeMap::from([(name.to_owned(), 0.25)]);
        let policy = PolicyMetrics {
            parts: by_name("rewards/exact"),
            named: by_name("reward_metrics/digits"),
            sampled_per_s: 5237.5,
            kl: f64::NAN,
            ..PolicyMetrics::default()
        };
        let metrics = StepMetrics { policy: Some(policy), ..StepMetrics::default() };
        let Value::Object(line) = serde_json::to_value(&metrics).unwrap() else { panic!("a line is an object") };
        let plotted: BTreeMap<String, f64> = metrics.scalars().into_iter().collect();
        let without = ["step", "kl"];
        let keys = line.keys().filter(|key| !without.contains(&key.as_str())).map(|key| format!("train/{key}"));
        assert_eq!(keys.collect::<BTreeSet<_>>(), plotted.keys().cloned().collect::<BTreeSet<_>>());
        for (name, value) in [("rewards/exact", 0.25), ("reward_metrics/digits", 0.25), ("sampled_per_s", 5237.5)] {
            assert_eq!(plotted[&format!("train/{name}")], value, "{name}");
        }
        assert!(line["kl"].is_null() && line["completions/mean_length"].is_f64());
    }
}
