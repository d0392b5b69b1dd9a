//! What the lengths of a run and the steps at which it does something become.

use firebrick_trainer::config::other_names::{self, Answer};
use toml::Value;

use crate::convert::datasets::is_evaluated;
use crate::convert::kind::Trainer;
use crate::convert::setting::{Outcome, Setting, has, is_true, left, needless, number, number_of, set, text_of};

/// Returns what becomes of a setting of the run's length, rows and rate that depends on others, or has another form; `None` for any other.
pub(super) fn of_length(setting: &Setting, all: &[Setting]) -> Option<Outcome> {
    let is_positive = |name| number_of(all, name).is_some_and(|steps| steps > 0.0);
    let has_steps = is_positive("max_steps") || is_positive("max_steps_per_epoch");
    let is_warmup = |other: &Setting| other.name() == "warmup_steps" && number(&other.value) != Some(0.0);
    let is_constant = |name: &&str| text_of(all, name) == Some("constant");
    let is_constant = ["lr_scheduler", "lr_scheduler_type"].iter().any(is_constant);
    let number = number(&setting.value);
    match setting.name() {
        "batch_size" if has(all, "micro_batch_size") => {
            let times = (number? / number_of(all, "micro_batch_size")?).round().max(1.0);
            set("train.gradient_accumulation", times as i64)
        }
        "num_epochs" | "num_train_epochs" | "epochs" if has_steps => needless("the steps take precedence"),
        "max_steps" if number.is_none_or(|steps| steps <= 0.0) => needless("the epochs say it"),
        "max_steps_per_epoch" => set("train.steps", (number? * number_of(all, "epochs").unwrap_or(1.0)) as i64),
        // mlx-lm counts passes of a batch, and says so where a key is not the steps it looks like.
        name @ ("iters" | "steps_per_report" | "steps_per_eval" | "save_every") => {
            let Some(Answer::Key(key, _)) = other_names::key(name) else { return None };
            let passes = number_of(all, "grad_accumulation_steps").unwrap_or(1.0).max(1.0);
            set(key, (number? / passes).floor().max(1.0) as i64)
        }
        "warmup_steps" | "warmup_ratio" if is_constant => needless("a constant rate has no warm-up there"),
        "warmup_steps" if number == Some(0.0) && has(all, "warmup_ratio") => needless("warmup_ratio says it"),
        "warmup_steps" if number.is_some_and(is_share) => set("train.warmup_ratio", number?),
        "warmup_ratio" if all.iter().any(is_warmup) => needless("warmup_steps takes precedence"),
        "cosine_min_lr_ratio" | "min_lr_ratio" | "min_lr_rate" => match (number_of(all, "learning_rate"), number) {
            (Some(rate), Some(share)) => set("train.min_lr", rate * share),
            _ => left("write train.min_lr: a rate, this share of the learning rate"),
        },
        _ => None,
    }
}

/// Returns what becomes of a setting that says when the run saves, evaluates and logs, if that depends on others, or has another form.
pub(super) fn of_times(setting: &Setting, all: &[Setting], trainer: Trainer) -> Option<Outcome> {
    let Setting { value, .. } = setting;
    let text = value.as_str().unwrap_or_default();
    let stops_early = |other: &Setting| other.name().starts_with("early_stopping");
    let keeps_best = is_true(all, "load_best_model_at_end") || all.iter().any(stops_early);
    match setting.name() {
        "evals_per_epoch" | "eval_steps" | "eval_strategy" | "evaluation_strategy" if !is_evaluated(all, trainer) => {
            needless("nothing is held out, so nothing is evaluated")
        }
        "eval_strategy" | "evaluation_strategy" if text == "steps" && !has(all, "eval_steps") => {
            let steps = number_of(all, "logging_steps").filter(|steps| *steps >= 1.0);
            set("eval.every_steps", steps.unwrap_or(500.0) as i64)
        }
        "save_strategy" if text == "steps" && !has(all, "save_steps") => set("checkpoint.every_steps", 500),
        "save_steps" if says_another(all, &["save_strategy"]) => needless("save_strategy says it"),
        "eval_steps" if says_another(all, &["eval_strategy", "evaluation_strategy"]) => {
            needless("eval_strategy says it")
        }
        "metric_for_best_model" | "greater_is_better" if !keeps_best => {
            needless("the last weights are the result, not the best ones")
        }
        "saves_per_epoch" => per_epoch("checkpoint", value),
        "evals_per_epoch" => per_epoch("eval", value),
        name @ ("save_steps" | "eval_steps" | "logging_steps") if number(value).is_some_and(is_share) => {
            let (steps_key, epochs_key) = match name {
                "save_steps" => ("checkpoint.every_steps", "checkpoint.every_epochs"),
                "eval_steps" => ("eval.every_steps", "eval.every_epochs"),
                _ => ("train.log_every", "train.log_every_epochs"),
            };
            let epochs = ["num_epochs", "num_train_epochs"].iter().find_map(|name| number_of(all, name));
            let epochs = epochs.unwrap_or(if has(all, "base_model") { 1.0 } else { 3.0 });
            let share = number(value)?;
            match number_of(all, "max_steps").filter(|steps| *steps > 0.0) {
                Some(steps) => set(steps_key, (steps * share).ceil() as i64),
                None => set(epochs_key, share * epochs),
            }
        }
        _ => None,
    }
}

fn is_share(number: f64) -> bool {
    0.0 < number && number < 1.0
}

/// Returns whether a strategy says that steps are not what counts.
fn says_another(all: &[Setting], names: &[&str]) -> bool {
    names.iter().any(|name| {
        let text = text_of(all, name);
        let is_off = all.iter().any(|other| other.name() == *name && other.value.as_bool() == Some(false));
        matches!(text, Some("epoch" | "no")) || is_off
    })
}

fn per_epoch(section: &str, value: &Value) -> Option<Outcome> {
    match number(value) {
        Some(times) if times > 0.0 => set(&format!("{section}.every_epochs"), 1.0 / times),
        Some(_) => set(&format!("{section}.every_steps"), 0),
        None => left("a number of times per epoch was expected"),
    }
}
