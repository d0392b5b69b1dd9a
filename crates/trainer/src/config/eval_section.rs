//! `[eval]`, `[checkpoint]` and `[best]`: when a run is evaluated and saved, and what decides between its checkpoints.
//!
//! Trade-off: intervals in epochs become whole steps in the plan, which knows the rows.

use firebrick_data::RecordFormat;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::config::RunConfig;
use crate::config::section::{
    AboveZero, COUNT, EPOCHS, FACTOR, ROWS, Rule, TOKENS, Whole, ZeroOrMore, rule, rules, section,
};
use crate::config::train_section::Interval;
use crate::extraction::Extraction;
use crate::metrics::Evaluation;

/// Steps between two checkpoints if the recipe does not set them.
const DEFAULT_CHECKPOINT_STEPS: u64 = 500;

section! {
    /// `[eval]`: evaluation before, during and after training; needs `data.eval_path` or `data.eval_fraction`.
    pub struct EvalConfig in "eval." {
        /// Evaluate every this many steps; 0 only before and after training. Default 0 if `every_epochs` is absent.
        every_steps: Option<u64> = None, Whole(0, COUNT);
        /// The same in epochs, or as a fraction of one, rounded to whole steps. Default: absent.
        every_epochs: Option<f64> = None, AboveZero(EPOCHS);
        /// Evaluate and answer `prompts` before the first step too, to see what training changes. Default true.
        on_start: bool = true;
        /// Rows per forward pass of the evaluation. Default: `train.micro_batch_size`.
        micro_batch_size: Option<usize> = None, Whole(1, ROWS);
        /// Maximum number of micro-batches for the evaluation loss; 0 takes all. Default 0.
        max_batches: usize = 0, Whole(0, COUNT);
        /// Number of held-out prompts that are answered greedily in each evaluation and compared with the reference answer, the last
        /// one of the record; 0 for none. Records without a complete last answer are skipped and counted. Default 0.
        exact_match_prompts: usize = 0, Whole(0, COUNT);
        /// What of the two answers is compared: "whole" (without white space around it), "last_number" (the last number, without
        /// separators of thousands: math), "choice" (the last letter from A to J that stands alone: multiple choice), or a regular
        /// expression with one group, whose last match is taken. An answer in which nothing is found is wrong. Default "whole".
        extract: String = "whole".to_owned();
        /// Maximum tokens of an answer. Default 64.
        max_new_tokens: usize = 64, Whole(1, TOKENS);
        /// Prompts whose answers are shown before and after training. Default: none.
        prompts: Vec<String> = Vec::new();
    }
}

section! {
    /// `[checkpoint]`: when to save, and how many checkpoints to keep. The end of a run is always saved.
    pub struct CheckpointConfig in "checkpoint." {
        /// Save every this many steps; 0 only at the end. Default 500 if `every_epochs` is absent.
        every_steps: Option<u64> = None, Whole(0, COUNT);
        /// The same in epochs, or as a fraction of one, rounded to whole steps. Default: absent.
        every_epochs: Option<f64> = None, AboveZero(EPOCHS);
        /// Number of newest checkpoints to keep; with `[best]` the best one is among them, and next to the newest where this is 1. Default 3.
        keep: usize = 3, Whole(1, COUNT);
    }
}

section! {
    /// `[best]`: the run's `adapter/` or `model/` has the weights of the best evaluation after the first step instead of the last ones, and
    /// the run may end early. Every evaluation that improves is saved; needs `eval.every_steps` or `eval.every_epochs`.
    pub struct BestSection in "best." {
        /// The number of an evaluation that decides, as metrics.jsonl calls it: "eval_loss", "token_accuracy", "exact_match", on pairs of
        /// answers "rewards/margins" or "rewards/accuracies", and with `[grpo]` "eval_reward". Default "eval_loss".
        metric: BestMetric = BestMetric::EvalLoss;
        /// Whether smaller values are better ("min") or larger ones ("max"). Default: "min" for "eval_loss", "max" for the others.
        #[serde(skip_serializing_if = "Option::is_none")]
        mode: Option<BestMode> = None;
        /// End the run once this many evaluations in a row brought no improvement. Default: absent, all steps are taken.
        #[serde(skip_serializing_if = "Option::is_none")]
        patience: Option<u64> = None, Whole(1, COUNT);
        /// An improvement by no more than this counts as none for `patience`; the best weights are the best all the same. Default 0.
        threshold: f64 = 0.0, ZeroOrMore(FACTOR);
    }
}

/// `best.metric`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum BestMetric {
    /// The held-out loss.
    #[default]
    EvalLoss,
    /// The fraction of loss tokens that were the most probable token.
    TokenAccuracy,
    /// The fraction of prompts that were answered as the reference.
    ExactMatch,
    /// The mean reward of chosen answers over that of rejected ones.
    #[serde(rename = "rewards/margins")]
    Margin,
    /// The fraction of pairs whose chosen answer has the higher reward.
    #[serde(rename = "rewards/accuracies")]
    Accuracy,
    /// The mean reward of held-out prompts.
    EvalReward,
}

/// `best.mode`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum BestMode {
    /// Smaller is better.
    Min,
    /// Larger is better.
    Max,
}

impl BestMetric {
    /// Returns the value of an evaluation, if it has one.
    pub fn of(self, evaluation: &Evaluation) -> Option<f64> {
        match self {
            Self::EvalLoss => evaluation.loss,
            Self::TokenAccuracy => evaluation.token_accuracy,
            Self::ExactMatch => evaluation.exact_match,
            Self::Margin => evaluation.pairs.map(|pairs| pairs.margin),
            Self::Accuracy => evaluation.pairs.map(|pairs| pairs.accuracy),
            Self::EvalReward => evaluation.reward,
        }
    }

    fn is_of_pairs(self) -> bool {
        matches!(self, Self::Margin | Self::Accuracy)
    }
}

impl BestMode {
    /// Returns how much better `new` is than `old`; negative if it is worse.
    pub fn gain(self, old: f64, new: f64) -> f64 {
        match self {
            Self::Min => old - new,
            Self::Max => new - old,
        }
    }
}

impl BestSection {
    /// Returns the direction in which the metric improves.
    pub fn mode(&self) -> BestMode {
        self.mode.unwrap_or(if self.metric == BestMetric::EvalLoss { BestMode::Min } else { BestMode::Max })
    }
}

impl RunConfig {
    /// Returns how often the held-out data is evaluated.
    pub fn eval_interval(&self) -> Interval {
        Interval::of(self.eval.every_steps, self.eval.every_epochs, 0)
    }

    /// Returns how often a checkpoint is saved.
    pub fn checkpoint_interval(&self) -> Interval {
        Interval::of(self.checkpoint.every_steps, self.checkpoint.every_epochs, DEFAULT_CHECKPOINT_STEPS)
    }

    /// Returns the rows per forward pass of the evaluation; `None`: those of training, which the plan decides.
    pub fn eval_micro_batch_size(&self) -> Option<usize> {
        self.eval.micro_batch_size.or(self.train.micro_batch_size.given())
    }
}

pub(super) fn rules(config: &RunConfig) -> Vec<Rule> {
    let eval = &config.eval;
    let with_data = |is_absent: bool, key: &'static str| {
        let help = "add data.eval_path, or data.eval_fraction = 0.05, or remove this key";
        rule(is_absent || config.has_eval_data(), key, "there is nothing to evaluate on", help)
    };
    let extraction = Extraction::parse(&eval.extract).err();
    let mut rules = vec![
        with_data(eval.every_steps.is_none_or(|steps| steps == 0), "eval.every_steps"),
        with_data(eval.every_epochs.is_none(), "eval.every_epochs"),
        with_data(eval.exact_match_prompts == 0, "eval.exact_match_prompts"),
    ];
    rules.extend(rules! {
        "eval.exact_match_prompts": eval.exact_match_prompts == 0 || config.data.format != RecordFormat::Text,
            "needs chat records, whose last assistant turn is the reference answer" =>
            "set it to 0 for format = \"text\"";
        "eval.extract": extraction.is_none(),
            extraction.unwrap_or_default() =>
            "write \"whole\", \"last_number\", \"choice\", or a regular expression such as \"#### (-?[0-9]+)\"";
    });
    rules.extend(config.best.iter().flat_map(|best| best_rules(best, config)));
    rules
}

fn best_rules(best: &BestSection, config: &RunConfig) -> Vec<Rule> {
    let (metric, is_of_pairs) = (best.metric, config.preference.is_some());
    let is_reward = metric == BestMetric::EvalReward;
    rules! {
        "best": config.has_eval_data(),
            "there is nothing to evaluate on" =>
            "add data.eval_fraction = 0.05 (or data.eval_path), and eval.every_epochs = 0.25 if no interval is there, or remove this section";
        "best": config.eval_interval() != Interval::Steps(0),
            "the run is evaluated at its end only, so there is nothing to compare" =>
            "add eval.every_steps or eval.every_epochs, such as every_epochs = 0.25, or remove this section";
        "best.metric": metric != BestMetric::ExactMatch || config.eval.exact_match_prompts > 0,
            "no prompt is answered" => "set eval.exact_match_prompts, or write \"eval_loss\"";
        "best.metric": !metric.is_of_pairs() || is_of_pairs,
            "needs pairs of answers" => "write \"eval_loss\", or add [preference]";
        "best.metric": metric == BestMetric::EvalLoss || metric.is_of_pairs() == is_of_pairs,
            "is not measured on pairs of answers" => "write \"eval_loss\", \"rewards/margins\" or \"rewards/accuracies\"";
        "best.metric": is_reward || config.grpo.is_none(),
            "[grpo] measures the reward of held-out prompts alone" => "write \"eval_reward\"";
        "best.metric": !is_reward || config.grpo.is_some(),
            "is measured in learning from rewards alone" => "write \"eval_loss\", or add [grpo]";
    }
}
