//! What a recipe may not say: values out of range, and keys that cannot be together.

use crate::config::check_data;
use crate::config::data_keys::DataFormat;
use crate::config::error::ConfigError;
use crate::config::keys::{ComputeDtype, Init, LoraTarget, Recompute, RunConfig};
use crate::config::source::{EXCLUSIVE, Source};

/// A rule: whether it holds, the key that breaks it, what is wrong, and what to write instead.
pub(super) type Rule = (bool, &'static str, String, &'static str);

/// Refuses the first thing that cannot work, at the place where it was typed.
pub(super) fn refuse_impossible(config: &RunConfig, source: &Source<'_>) -> Result<(), ConfigError> {
    refuse_rivals(source)?;
    check_data::refuse_missing(config, source)?;
    let rules = [
        names(config),
        ranges(config),
        weights(config, source),
        agreements(config),
        check_data::rules(config),
        evaluation(config),
    ];
    for (holds, key, problem, help) in rules.into_iter().flatten() {
        if !holds {
            let key = key.to_string();
            return Err(ConfigError::Impossible { place: source.place(&key), key, problem, help: help.to_string() });
        }
    }
    Ok(())
}

/// Refuses two keys that say the same thing, except `recompute` beside `grad_checkpointing`, which may agree.
fn refuse_rivals(source: &Source<'_>) -> Result<(), ConfigError> {
    for (one, other) in EXCLUSIVE {
        if one != "train.recompute" && source.is_typed(one) && source.is_typed(other) {
            return Err(ConfigError::Impossible {
                place: source.place(one),
                key: one.to_string(),
                problem: format!("{other} is there too, and they say the same thing twice"),
                help: "keep one of them".to_string(),
            });
        }
    }
    Ok(())
}

/// Names and paths.
fn names(config: &RunConfig) -> Vec<Rule> {
    let name = &config.name;
    let is_folder_name = !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\\', '\0']);
    vec![
        (is_folder_name, "name", "must be usable as a folder name".into(), "write a word such as \"llama-8b-qlora\""),
        (!config.model.is_empty(), "model", "is empty".into(), "write the folder of the model"),
        (!config.output_dir.is_empty(), "output_dir", "is empty".into(), "write a folder such as \"runs\""),
    ]
}

/// Numbers within their ranges.
fn ranges(config: &RunConfig) -> Vec<Rule> {
    let train = &config.train;
    let at_least_one = |key, value: u64| at_least(key, value, 1);
    let mut rules = vec![
        at_least("max_seq_len", config.max_seq_len as u64, 2),
        at_least_one("train.micro_batch_size", train.micro_batch_size as u64),
        at_least_one("train.gradient_accumulation", train.gradient_accumulation as u64),
        at_least_one("train.log_every", train.log_every),
        at_least_one("train.loss_chunk_tokens", train.loss_chunk_tokens as u64),
        at_least_one("train.steps", train.steps.unwrap_or(1)),
        at_least_one("checkpoint.keep", config.checkpoint.keep as u64),
        at_least_one("eval.max_new_tokens", config.eval.max_new_tokens as u64),
        at_least_one("eval.micro_batch_size", config.eval.micro_batch_size.unwrap_or(1) as u64),
        above_zero("train.epochs", train.epochs.unwrap_or(1.0)),
        above_zero("train.learning_rate", train.learning_rate),
        above_zero("train.adam_epsilon", train.adam_epsilon),
        zero_or_more("train.weight_decay", train.weight_decay),
        zero_or_more("train.max_grad_norm", train.max_grad_norm),
        below_one("train.adam_beta1", train.adam_beta1),
        below_one("train.adam_beta2", train.adam_beta2),
        below_one("train.warmup_ratio", train.warmup_ratio.unwrap_or(0.0)),
    ];
    if let Some(lora) = &config.lora {
        rules.push(at_least_one("lora.r", lora.r as u64));
        rules.push(above_zero("lora.alpha", lora.alpha));
    }
    if let (Some(warmup), Some(steps)) = (train.warmup_steps, train.steps) {
        let problem = format!("{warmup} steps of warm-up are longer than the run of {steps}");
        rules.push((warmup <= steps, "train.warmup_steps", problem, "warm up for about 3 % of the steps"));
    }
    rules
}

/// Which weights are trained.
fn weights(config: &RunConfig, source: &Source<'_>) -> Vec<Rule> {
    let frozen_base = config.lora.is_some() || config.bnb_4bit.is_some();
    vec![
        (
            config.init == Init::Pretrained || !frozen_base,
            if source.is_typed("init") { "init" } else { "lora" },
            "init = \"random\" makes a base that knows nothing, and [lora] or [bnb_4bit] would freeze it".into(),
            "train all weights (remove [lora] and [bnb_4bit]) or start from init = \"pretrained\"",
        ),
        (
            config.bnb_4bit.is_none() || config.lora.is_some(),
            "bnb_4bit",
            "a base in 4 bits is frozen, and there is nothing else to train".into(),
            "add a [lora] section (QLoRA), or remove [bnb_4bit] to train all weights",
        ),
        (
            config.lora.as_ref().is_none_or(|lora| lora.target != LoraTarget::Modules(Vec::new())),
            "lora.target",
            "names no module".into(),
            "write \"all-linear\", or module names such as [\"q_proj\", \"v_proj\"]",
        ),
    ]
}

/// Keys that speak of the same thing must say the same.
fn agreements(config: &RunConfig) -> Vec<Rule> {
    let (bf16, checkpointing) = (config.train.bf16, config.train.grad_checkpointing);
    let dtype = config.bnb_4bit.as_ref().and_then(|bnb| bnb.compute_dtype);
    let bf16_agrees = bf16.zip(dtype).is_none_or(|(bf16, dtype)| bf16 == (dtype == ComputeDtype::Bfloat16));
    let recompute_agrees = checkpointing
        .zip(config.train.recompute)
        .is_none_or(|(checkpointing, recompute)| checkpointing == (recompute == Recompute::Full));
    vec![
        (
            bf16_agrees,
            "bnb_4bit.compute_dtype",
            format!("contradicts train.bf16 = {}", bf16.unwrap_or(true)),
            "a run computes in one number format: remove one of the two keys",
        ),
        (
            recompute_agrees,
            "train.recompute",
            format!("contradicts train.grad_checkpointing = {}", checkpointing.unwrap_or(true)),
            "remove one of the two keys: true is \"full\", false is \"selective\" or \"none\"",
        ),
        (
            config.train.offload != Some(true) || config.recompute() == Recompute::Full,
            "train.offload",
            "there are no block inputs to move: blocks keep more than their input".into(),
            "write train.recompute = \"full\", or remove this key",
        ),
    ]
}

/// Evaluation needs something to evaluate on.
fn evaluation(config: &RunConfig) -> Vec<Rule> {
    let eval = &config.eval;
    let nothing = || "there is nothing to evaluate on".to_string();
    let help = "add data.eval_path, or data.eval_fraction = 0.05, or set this key to 0";
    vec![
        (config.has_eval_data() || eval.every_steps == 0, "eval.every_steps", nothing(), help),
        (config.has_eval_data() || eval.exact_match_prompts == 0, "eval.exact_match_prompts", nothing(), help),
        (
            eval.exact_match_prompts == 0 || config.data.format != DataFormat::Text,
            "eval.exact_match_prompts",
            "needs chat rows, whose last assistant turn is the right answer".into(),
            "set it to 0 for format = \"text\"",
        ),
    ]
}

pub(super) fn at_least(key: &'static str, value: u64, least: u64) -> Rule {
    (value >= least, key, format!("must be at least {least}, got {value}"), "write a larger number")
}

fn above_zero(key: &'static str, value: f64) -> Rule {
    let holds = value.is_finite() && value > 0.0;
    (holds, key, format!("must be above 0 and finite, got {value}"), "write a positive number")
}

fn zero_or_more(key: &'static str, value: f64) -> Rule {
    let holds = value.is_finite() && value >= 0.0;
    (holds, key, format!("must be 0 or more and finite, got {value}"), "write 0 to turn it off")
}

fn below_one(key: &'static str, value: f64) -> Rule {
    let holds = (0.0..1.0).contains(&value);
    (holds, key, format!("must be 0 or more and below 1, got {value}"), "write a number such as 0.9 or 0.03")
}
