//! The largest value of each whole number in a recipe.
//!
//! Bounds are far above what any run uses, and low enough that the plan's products of several numbers fit into 64 bits.
//! Trade-off: one bound for every model and machine. Whether a run fits into memory is found by the plan.

use crate::config::recipe::RunConfig;
use crate::config::rule::{Rule, at_most, rule};

/// Tokens of a row, of an answer, of a chunk of the loss.
const TOKENS: u64 = 1 << 24;
/// Rows of a micro-batch.
const ROWS: u64 = 1 << 16;
/// Tokens of a micro-batch.
const MICRO_BATCH_TOKENS: u64 = 1 << 32;
/// Micro-batches of a step.
const MICRO_BATCHES: u64 = 1 << 20;
/// Steps, records, and what else is counted.
pub(super) const COUNT: u64 = 1 << 32;
/// Passes over the data.
const EPOCHS: f64 = 1e6;
/// Rank of an adapter: no module of a model is as wide.
const RANK: u64 = 1 << 16;
/// Threads that tokenize, or build batches: each takes about 0.2 MB.
const THREADS: u64 = 1 << 10;
/// The largest whole number of TOML.
const SEED: u64 = i64::MAX as u64;

/// The largest value of a key.
pub(super) struct Bound {
    pub(super) key: &'static str,
    pub(super) largest: u64,
    /// The key's value; `None` where it is absent.
    value: fn(&RunConfig) -> Option<u64>,
}

const fn bound(key: &'static str, largest: u64, value: fn(&RunConfig) -> Option<u64>) -> Bound {
    Bound { key, largest, value }
}

/// Every whole number that is neither in a list nor bounded by what it selects.
pub(super) const BOUNDS: [Bound; 20] = [
    bound("max_seq_len", TOKENS, |config| Some(config.max_seq_len as u64)),
    bound("seed", SEED, |config| Some(config.seed)),
    bound("lora.r", RANK, |config| config.lora.as_ref().map(|lora| lora.r as u64)),
    bound("data.limit", COUNT, |config| config.data.limit),
    bound("data.data_seed", SEED, |config| config.data.data_seed),
    bound("data.pad_to_multiple_of", TOKENS, |config| config.data.pad_to_multiple_of.map(|tokens| tokens as u64)),
    bound("data.workers", THREADS, |config| config.data.workers.map(|threads| threads as u64)),
    bound("train.micro_batch_size", ROWS, |config| Some(config.train.micro_batch_size as u64)),
    bound("train.gradient_accumulation", MICRO_BATCHES, |config| Some(config.train.gradient_accumulation as u64)),
    bound("train.warmup_steps", COUNT, |config| config.train.warmup_steps),
    bound("train.steps", COUNT, |config| config.train.steps),
    bound("train.log_every", COUNT, |config| config.train.log_every),
    bound("train.loss_chunk_tokens", TOKENS, |config| Some(config.train.loss_chunk_tokens as u64)),
    bound("eval.every_steps", COUNT, |config| config.eval.every_steps),
    bound("eval.micro_batch_size", ROWS, |config| config.eval.micro_batch_size.map(|rows| rows as u64)),
    bound("eval.max_batches", COUNT, |config| Some(config.eval.max_batches as u64)),
    bound("eval.exact_match_prompts", COUNT, |config| Some(config.eval.exact_match_prompts as u64)),
    bound("eval.max_new_tokens", TOKENS, |config| Some(config.eval.max_new_tokens as u64)),
    bound("checkpoint.every_steps", COUNT, |config| config.checkpoint.every_steps),
    bound("checkpoint.keep", COUNT, |config| Some(config.checkpoint.keep as u64)),
];

/// Numbers that are not above their bounds.
pub(super) fn rules(config: &RunConfig) -> Vec<Rule> {
    let of_key = |bound: &Bound| Some(at_most(bound.key, (bound.value)(config)?, bound.largest));
    let mut rules: Vec<Rule> = BOUNDS.iter().filter_map(of_key).collect();
    let ranks = config.lora.iter().flat_map(|lora| lora.rank_pattern.iter());
    rules.extend(ranks.map(|(_, rank)| at_most("lora.rank_pattern", rank as u64, RANK)));
    let rows = [
        ("train.micro_batch_size", config.train.micro_batch_size),
        ("eval.micro_batch_size", config.eval_micro_batch_size()),
    ];
    rules.extend(rows.map(|(key, rows)| {
        let tokens = (rows as u64).saturating_mul(config.max_seq_len as u64);
        let problem = format!("{rows} rows of {} tokens are more than {MICRO_BATCH_TOKENS}", config.max_seq_len);
        rule(tokens <= MICRO_BATCH_TOKENS, key, problem, "write fewer rows, or a smaller max_seq_len")
    }));
    let epochs = [
        ("train.epochs", config.train.epochs),
        ("train.log_every_epochs", config.train.log_every_epochs),
        ("eval.every_epochs", config.eval.every_epochs),
        ("checkpoint.every_epochs", config.checkpoint.every_epochs),
    ];
    rules.extend(epochs.into_iter().filter_map(|(key, epochs)| {
        let problem = format!("must be at most {EPOCHS}, got {}", epochs?);
        Some(rule(epochs? <= EPOCHS, key, problem, "write a smaller number"))
    }));
    rules
}
