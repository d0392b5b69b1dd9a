//! `[grpo]`: learning from the model's own completions and their rewards, under TRL's names.
//!
//! A row of a step is a completion, so `train.rows_per_step` is a number of completions: `num_generations` for each prompt.

use firebrick_data::{OverflowPolicy, RecordFormat};

use crate::config::RunConfig;
use crate::config::section::{AboveZero, COUNT, FACTOR, ROWS, Rule, TOKENS, Whole, ZeroOrMore, rules, section};
use crate::config::weights::Mode;
use crate::grpo::reward::{self, RewardSection};
use crate::grpo::{ImportanceSampling, LossType, Objective, ScaleRewards};

section! {
    /// `[grpo]`: the model writes several completions of each prompt, and learns from those with more reward than the others (GRPO). The data are
    /// prompts; `train.rows_per_step` counts completions.
    pub struct GrpoSection in "grpo." {
        /// Completions of a prompt that are compared with each other. Default 8.
        num_generations: usize = 8, Whole(2, ROWS);
        /// Maximum tokens of a completion, its end included. Default 512.
        max_completion_length: usize = 512, Whole(1, TOKENS);
        /// Divisor of the logits while sampling and in the loss. Default 1.
        temperature: f64 = 1.0, AboveZero(FACTOR);
        /// Sample from the most probable tokens up to this sum of probabilities; 1: all. The loss does not correct for it. Default 1.
        top_p: f64 = 1.0, AboveZero(1.0);
        /// Sample from the tokens with at least this fraction of the largest probability; 0: all. Default 0.
        min_p: f64 = 0.0, ZeroOrMore(1.0);
        /// Weight of the distance (KL) from the base without its adapter. Default 0: no reference is computed.
        beta: f64 = 0.0, ZeroOrMore(FACTOR);
        /// How far below 1 a ratio of probabilities counts. Default 0.2.
        epsilon: f64 = 0.2, ZeroOrMore(1.0);
        /// How far above 1 a ratio of probabilities counts (DAPO: 0.28). Default: `epsilon`.
        #[serde(skip_serializing_if = "Option::is_none")]
        epsilon_high: Option<f64> = None, ZeroOrMore(FACTOR);
        /// What the losses of tokens are divided by: "dapo" (all tokens of the step), "grpo" (each completion's by its own tokens, then by the
        /// number of completions), or "dr_grpo" (completions times `max_completion_length`). Default "dapo".
        loss_type: LossType = LossType::Dapo;
        /// What has a ratio and is clipped: "token", or "sequence" (GSPO). Default "token".
        importance_sampling_level: ImportanceSampling = ImportanceSampling::Token;
        /// What differences of rewards are divided by: the standard deviation of the "group" or of the "batch", or "none". Default "group".
        scale_rewards: ScaleRewards = ScaleRewards::Group;
        /// Passes over the completions of a round. Default 1.
        num_iterations: usize = 1, Whole(1, COUNT);
        /// Steps whose completions are sampled in one round. Default 1.
        steps_per_generation: usize = 1, Whole(1, COUNT);
        /// Whether completions that were cut at `max_completion_length` do not train. Default false.
        mask_truncated_completions: bool = false;
        /// Temperature at which held-out prompts are completed; 0: the most probable tokens. Default 0.
        eval_temperature: f64 = 0.0, ZeroOrMore(FACTOR);
        /// What scores completions; at least one.
        rewards: Vec<RewardSection> = Vec::new();
    }
}

impl GrpoSection {
    /// Returns the loss.
    pub fn objective(&self) -> Objective {
        Objective {
            loss_type: self.loss_type,
            level: self.importance_sampling_level,
            epsilon: self.epsilon,
            epsilon_high: self.epsilon_high.unwrap_or(self.epsilon),
            beta: self.beta,
            max_completion_length: self.max_completion_length,
        }
    }

    /// Returns the optimizer steps of a round.
    pub fn steps_per_round(&self) -> u64 {
        (self.steps_per_generation * self.num_iterations) as u64
    }
}

/// Returns the index of the first reward that is wrong.
pub(super) fn bad_reward(config: &RunConfig) -> Option<usize> {
    let rewards = &config.grpo.as_ref()?.rewards;
    (0..rewards.len()).find(|&index| !reward::check(&rewards[..=index]).is_empty())
}

/// Returns the rules of prompts and rewards. Without the section, no source may contain prompts alone.
pub(super) fn rules(config: &RunConfig) -> Vec<Rule> {
    let data = &config.data;
    let sources = data.training_sources().into_iter().chain(data.held_out_sources());
    let formats: Vec<RecordFormat> = sources.map(|source| source.format).collect();
    let Some(grpo) = &config.grpo else {
        return rules! {
            "data.format": !formats.contains(&RecordFormat::Prompt),
                "\"prompt\" is read by learning from rewards alone" => "add the section [grpo] with a reward";
        };
    };
    let fits = config.max_seq_len() > grpo.max_completion_length;
    let divides = config.train.rows_per_step.is_none_or(|rows| rows.is_multiple_of(grpo.num_generations));
    let example = "[[grpo.rewards]] with answer = \"answer\", regex = \"...\" or command = [\"python\", \"reward.py\"]";
    let none = grpo.rewards.is_empty().then(|| format!("there is none; write for example {example}"));
    let problem = none.or_else(|| reward::check(&grpo.rewards).into_iter().next());
    let are_prompts = |format: &RecordFormat| matches!(format, RecordFormat::Auto | RecordFormat::Prompt);
    let has_base = config.mode() != Mode::Full && !config.reference_is_precomputed_always();
    let generations = grpo.num_generations;
    rules! {
        "grpo": config.preference.is_none(),
            "[preference] is there too" => "keep one of the two sections";
        "grpo.rewards": problem.is_none(),
            problem.unwrap_or_default() => "";
        "grpo.max_completion_length": fits,
            format!("is {}, and a row of max_seq_len = {} tokens holds a prompt as well", grpo.max_completion_length, config.max_seq_len()) =>
            "raise max_seq_len, or lower this key";
        "train.rows_per_step": divides,
            format!("counts completions, and is no multiple of grpo.num_generations = {generations}") =>
            "write a multiple of it";
        "grpo.beta": grpo.beta == 0.0 || has_base,
            "the reference is the base without its adapter, and mode = \"full\", modules_to_save or new tokens change that" =>
            "write beta = 0, or train a new adapter ([lora]) without modules_to_save and without tokens of its own";
        "train.zero_stage": !config.train.zero_stage.divides_gradients(),
            "divides weights or gradients, and ranks that sample run different numbers of passes" => "write 0 or 1";
        "lora.dropout": config.lora.as_ref().is_none_or(|lora| lora.lora_dropout == 0.0),
            "is not 0, and the probabilities of sampling and training would differ" => "remove it with [grpo]";
        "data.format": formats.iter().all(are_prompts),
            "[grpo] trains on prompts, whose answers the model writes" =>
            "remove it: prompts are recognized by the keys";
        "data.overflow": data.overflow != Some(OverflowPolicy::Split),
            "is \"split\", and a prompt is never divided" => "remove it: longer prompts are dropped and counted";
        "eval.exact_match_prompts": config.eval.exact_match_prompts == 0,
            "[grpo] evaluates held-out prompts by their reward" => "remove it";
    }
}
