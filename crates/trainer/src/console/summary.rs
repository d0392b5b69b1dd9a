//! The outcome of a run, and its results in numbers: `summary.json`.
//!
//! Trade-off: rates and times cover this process and the resumed parts before it as their fields say; they are not comparable
//! across machines.

use std::fmt;

use chrono::DateTime;
use firebrick_arch::counted;
use serde::{Deserialize, Serialize};

use crate::console::grouped;
use crate::metrics::{PairMetrics, RankMetrics};

/// Writes a date and time, such as `2026-07-30 12:34 UTC`, from seconds since 1970.
pub fn date_and_time(seconds: i64) -> String {
    DateTime::from_timestamp(seconds, 0).unwrap_or_default().format("%Y-%m-%d %H:%M UTC").to_string()
}

/// The results of a finished run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// Steps taken over all parts of the run.
    pub steps: u64,
    /// The step whose weights are the result, with `[best]`; the numbers after training are of it too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub best_step: Option<u64>,
    /// Mean loss of the last tenth of the steps.
    pub train_loss: Option<f64>,
    /// Held-out loss before the first step.
    pub eval_loss_before: Option<f64>,
    /// Held-out loss after the last step.
    pub eval_loss_after: Option<f64>,
    /// Mean reward of held-out prompts before the first step, in learning from rewards.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eval_reward_before: Option<f64>,
    /// The same after the last one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eval_reward_after: Option<f64>,
    /// Fraction of the held-out loss tokens that were the most probable token, before the first step.
    pub token_accuracy_before: Option<f64>,
    /// The same after the last step.
    pub token_accuracy_after: Option<f64>,
    /// Fraction of the held-out prompts answered as the reference before the first step.
    pub exact_match_before: Option<f64>,
    /// The same after the last step.
    pub exact_match_after: Option<f64>,
    /// Rewards and log-probabilities of held-out pairs before the first step, in preference training.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pairs_before: Option<Box<PairMetrics>>,
    /// The same after the last step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pairs_after: Option<Box<PairMetrics>>,
    /// Loss tokens over the whole run.
    pub loss_tokens: u64,
    /// Input tokens per second of training over all resumed parts, without padding and evaluation.
    pub tokens_per_s: f64,
    /// Tokens sampled per second of sampling over all resumed parts, in learning from rewards; `tokens_per_s` has that time and that of rewards in it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sampled_per_s: Option<f64>,
    /// Input tokens per second without sampling and rewards.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trained_per_s: Option<f64>,
    /// Seconds from start to end, over all resumed parts.
    pub wall_s: f64,
    /// Seconds in which steps of this process waited for checkpoints, without the one at the end.
    #[serde(default)]
    pub waited_for_saves_s: f64,
    /// Name of the backend, such as `cuda`.
    pub backend: String,
    /// Share of the operations of a step per number format, as the plan counts them.
    pub arithmetic: String,
    /// What every rank measured, as means over the steps of this process; with several ranks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ranks: Option<Box<RankMetrics>>,
    /// Folder of the adapter, or of the model if all of it was trained.
    pub weights: String,
    /// The sample prompts with their answers, in the order of the recipe.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub samples: Vec<SampleAnswer>,
    /// Date and time of the end, such as `2026-07-30 12:34 UTC`; empty in older summaries.
    #[serde(default)]
    pub ended: String,
}

/// A sample prompt with its answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SampleAnswer {
    /// The prompt.
    pub prompt: String,
    /// The answer before the first step; `None` if there was no such prompt then.
    pub before: Option<String>,
    /// The answer of the trained weights.
    pub after: String,
}

/// A held-out loss above this multiple of the one before the run causes a warning.
const RISEN: f64 = 1.01;

impl fmt::Display for Summary {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            formatter,
            "\ndone: {}, {}, {} tokens/s, {:.0} s on {}",
            counted(self.steps, "step"),
            counted(self.loss_tokens, "loss token"),
            grouped(self.tokens_per_s),
            self.wall_s,
            self.backend
        )?;
        let loss = |value: Option<f64>| value.map(|loss| format!("{loss:.4}"));
        let share = |value: Option<f64>| value.map(|share| format!("{:.1} %", 100.0 * share));
        let of_pairs = |number: fn(&PairMetrics) -> f64| {
            [&self.pairs_before, &self.pairs_after].map(|pairs| pairs.as_deref().map(number))
        };
        let changes = [
            ("held-out loss", [self.eval_loss_before, self.eval_loss_after].map(loss)),
            ("held-out reward", [self.eval_reward_before, self.eval_reward_after].map(loss)),
            ("token accuracy", [self.token_accuracy_before, self.token_accuracy_after].map(share)),
            ("exact match", [self.exact_match_before, self.exact_match_after].map(share)),
            ("reward margin", of_pairs(|pairs| pairs.margin).map(loss)),
            ("pairs ranked", of_pairs(|pairs| pairs.accuracy).map(share)),
        ];
        for (name, numbers) in changes {
            match numbers {
                [Some(before), Some(after)] => write!(formatter, "\n  {name:<14} {before} -> {after}")?,
                [None, Some(after)] => write!(formatter, "\n  {name:<14} {after}")?,
                [_, None] => {}
            }
        }
        if let Some((sampled, trained)) = self.sampled_per_s.zip(self.trained_per_s) {
            let (sampled, trained) = (grouped(sampled), grouped(trained));
            write!(formatter, "\n  speeds         sampling {sampled} and training {trained} tokens/s")?;
        }
        write!(formatter, "\n  arithmetic     {}", self.arithmetic)?;
        if let Some(ranks) = &self.ranks {
            write!(formatter, "\n  ranks          {ranks}")?;
        }
        write!(formatter, "\n  saved          {}", self.weights)?;
        if let Some(step) = self.best_step {
            write!(formatter, ", the best weights: those after step {step}")?;
        }
        match self.eval_loss_before.zip(self.eval_loss_after) {
            Some((before, after)) if after > RISEN * before => write!(
                formatter,
                "\n\nWARNING: the held-out loss rose: the model predicts that data worse than before the run. Look at the curve in the \
                 report; a lower learning rate or fewer steps are the first things to try"
            ),
            _ => Ok(()),
        }
    }
}

/// The outcome of a run.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// Every step was taken.
    Finished(Box<Summary>),
    /// A signal came, or the time is up; everything is saved.
    Interrupted {
        /// Steps taken.
        step: u64,
        /// The exit status of a program that ends so; 0 if the run was stopped without a signal.
        status: u8,
        /// The run's name.
        name: String,
        /// The run folder, which `--resume` takes.
        folder: std::path::PathBuf,
    },
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn learning_from_rewards_has_both_speeds() {
        let mut summary = json!({ "steps": 20, "loss_tokens": 5000, "tokens_per_s": 900.0, "wall_s": 60.0, "backend": "cuda",
            "arithmetic": "all in bfloat16", "weights": "w", "eval_reward_before": 0.05, "eval_reward_after": 0.8 });
        let shown = |summary: &serde_json::Value| Summary::deserialize(summary).unwrap().to_string();
        assert!(!shown(&summary).contains("speeds"));
        (summary["sampled_per_s"], summary["trained_per_s"]) = (json!(5237.4), json!(23456.0));
        let text = shown(&summary);
        assert!(text.contains("\n  held-out reward 0.0500 -> 0.8000"), "{text}");
        assert!(text.contains("\n  speeds         sampling 5,237 and training 23,456 tokens/s\n"), "{text}");
    }
}
