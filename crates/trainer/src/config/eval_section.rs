//! `[eval]` and `[checkpoint]`: when a run is evaluated and saved.
//!
//! Trade-off: intervals in epochs become whole steps in the plan, which knows the rows.

use firebrick_data::RecordFormat;

use crate::config::RunConfig;
use crate::config::extraction::Extraction;
use crate::config::section::{COUNT, Epochs, ROWS, Rule, TOKENS, Whole, rule, rules, section};
use crate::config::train_section::Interval;

/// Steps between two checkpoints if the recipe does not set them.
const DEFAULT_CHECKPOINT_STEPS: u64 = 500;

section! {
    /// `[eval]`: evaluation before, during and after training; needs `data.eval_path` or `data.eval_fraction`.
    pub struct EvalConfig in "eval." {
        /// Evaluate every this many steps; 0 only before and after training. Default 0 if `every_epochs` is absent.
        every_steps: Option<u64> = None, Whole(0, COUNT);
        /// The same in epochs, or as a fraction of one, rounded to whole steps. Default: absent.
        every_epochs: Option<f64> = None, Epochs;
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
        every_epochs: Option<f64> = None, Epochs;
        /// Number of newest checkpoints to keep. Default 3.
        keep: usize = 3, Whole(1, COUNT);
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

    /// Returns the rows per forward pass of the evaluation.
    pub fn eval_micro_batch_size(&self) -> usize {
        self.eval.micro_batch_size.unwrap_or(self.train.micro_batch_size)
    }
}

/// Returns the rules of `[eval]`, which needs data to evaluate on.
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
    rules
}
