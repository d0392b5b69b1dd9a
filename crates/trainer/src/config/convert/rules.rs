//! What a key of another trainer becomes where that depends on other keys, or its value has another form.
//!
//! Trade-off: a value that no rule knows is taken as it is; if no recipe may have it, it becomes a comment with the recipe reader's own advice.

use std::path::Path;
use std::sync::LazyLock;

use toml::{Table, Value};

use super::Outcome::{Left, NotNeeded, Set};
use super::kind::Trainer;
use super::values::{self, plain_number};
use super::{Draft, Outcome, Setting, datasets};
use crate::config::other_names::{self, Answer};
use crate::config::schema::{KnownKeys, known_keys};

/// Prefixes of keys that say how another trainer computes what happens here anyway.
const FUSED: &str =
    "liger_ unsloth_ use_liger cut_cross_entropy use_kernels use_v1_kernels use_scattermoe experts_implementation";
/// Sections in which a name is looked for that several have: the first one is meant.
const SEARCHED: [&str; 9] = ["", "train", "data", "lora", "bnb_4bit", "preference", "checkpoint", "eval", "best"];
/// Words in the names of keys about images, sound and video.
const MEDIA: [&str; 6] = ["image", "video", "audio", "vision", "multi_modal", "processor_kwargs"];
/// Mappings whose keys are looked up by their own names; the names of others mean something else.
const PARENTS: &str = "lr_scheduler_kwargs peft_config lora_config training_args special_tokens optimizer lr_scheduler tokenizer model checkpointer \
                       quant_config bnb_config quantization_config";

/// Returns whether a mapping is one value to a rule.
pub(super) fn takes_whole(path: &str) -> bool {
    matches!(path, "train_dataset" | "deepspeed" | "gradient_checkpointing_kwargs")
}

/// Returns what becomes of a setting among `all`; data sets go into `draft` at once.
pub(super) fn outcome(setting: &Setting, all: &[Setting], draft: &mut Draft, file: &Path) -> Outcome {
    let trainer = draft.trainer;
    let mut of_path = values::of_path(trainer, setting);
    if let (Some(Set(keys)), true) = (&mut of_path, setting.path == "dataset._component_" && has(all, "source")) {
        keys.retain(|(key, _)| key != "data.path");
    }
    let known = datasets::outcome(setting, all, draft, file).or(of_path);
    let known = known.or_else(|| of_several_cards(setting, all)).or_else(|| elsewhere(setting));
    let known = known.or_else(|| beside_others(setting, all, trainer)).or_else(|| of_form(setting, all));
    known.or_else(|| values::named(trainer, setting.name(), &setting.value)).unwrap_or_else(|| of_table(setting))
}

fn set(key: &str, value: impl Into<Value>) -> Option<Outcome> {
    Some(Set(vec![(key.to_owned(), value.into())]))
}

fn needless(why: &str) -> Option<Outcome> {
    Some(NotNeeded(why.to_owned()))
}

fn left(why: &str) -> Option<Outcome> {
    Some(Left(why.to_owned()))
}

/// Returns why a setting has no counterpart; one that is off needs none.
fn unless_off(value: &Value, why: &str) -> Outcome {
    match value.as_bool() {
        Some(false) => NotNeeded("it is off".to_owned()),
        _ => Left(why.to_owned()),
    }
}

pub(super) fn nothing_does(value: &Value) -> Outcome {
    unless_off(value, "nothing here does this")
}

/// Returns the text of another setting.
pub(super) fn text_of<'a>(all: &'a [Setting], name: &str) -> Option<&'a str> {
    all.iter().find(|setting| setting.name() == name).and_then(|setting| setting.value.as_str())
}

fn is_true(all: &[Setting], name: &str) -> bool {
    all.iter().any(|setting| setting.name() == name && setting.value.as_bool() == Some(true))
}

fn has(all: &[Setting], name: &str) -> bool {
    all.iter().any(|setting| setting.name() == name)
}

/// Returns the number of another setting.
pub(super) fn number_of(all: &[Setting], name: &str) -> Option<f64> {
    all.iter().find(|setting| setting.name() == name).and_then(|setting| number(&setting.value))
}

/// Returns a number, also where it is written as a text.
fn number(value: &Value) -> Option<f64> {
    match value {
        Value::Integer(number) => Some(*number as f64),
        Value::Float(number) => Some(*number),
        Value::String(text) => text.parse().ok(),
        _ => None,
    }
}

/// Returns what becomes of a key that another key decides, or whose meaning another key changes.
fn beside_others(setting: &Setting, all: &[Setting], trainer: Trainer) -> Option<Outcome> {
    let Setting { value, .. } = setting;
    let (name, truth, text) = (setting.name(), value.as_bool(), value.as_str().unwrap_or_default());
    match name {
        "bf16" | "bfloat16" if truth == Some(true) && is_true(all, "fp8") => {
            needless("compute = \"fp8\" is for layers alone")
        }
        "bf16" | "bfloat16" if truth == Some(false) && (is_true(all, "fp16") || names_a_format(all)) => {
            needless("compute says it")
        }
        "torch_dtype" | "dtype" if is_true(all, "bf16") || is_true(all, "fp16") => needless("bf16 or fp16 says it"),
        "batch_size" if has(all, "micro_batch_size") => {
            let times = (number(value)? / number_of(all, "micro_batch_size")?).round().max(1.0);
            set("train.gradient_accumulation", times as i64)
        }
        "model_revision" | "revision_of_model" if !text.is_empty() => needless("it is in the name of the model"),
        "pissa_init" if truth == Some(true) => {
            let niter = number_of(all, "pissa_iter").unwrap_or(16.0);
            set("lora.init_lora_weights", if niter < 0.0 { "pissa".to_owned() } else { format!("pissa_niter_{niter}") })
        }
        "pissa_iter" if is_true(all, "pissa_init") => needless("it is in lora.init_lora_weights"),
        "pissa_iter" => needless("pissa_init is off"),
        "packing" if truth == Some(false) && is_true(all, "neat_packing") => needless("neat_packing says it"),
        "packing_strategy" if !is_true(all, "packing") => needless("rows are not packed"),
        "lora_target_modules" if is_true(all, "lora_target_linear") => {
            let names = value.to_string();
            match ["embed", "lm_head"].iter().any(|name| names.contains(name)) {
                true => left("embedding and head are trained whole, by lora.modules_to_save"),
                false => needless("all linear modules are trained"),
            }
        }
        "num_epochs" | "num_train_epochs" | "epochs" if has_steps(all) => needless("the steps take precedence"),
        "warmup_steps" | "warmup_ratio" if is_constant(all) => needless("a constant rate has no warm-up there"),
        "warmup_steps" if number(value) == Some(0.0) && has(all, "warmup_ratio") => needless("warmup_ratio says it"),
        "warmup_ratio"
            if all.iter().any(|other| other.name() == "warmup_steps" && number(&other.value) != Some(0.0)) =>
        {
            needless("warmup_steps takes precedence")
        }
        "evals_per_epoch" | "eval_steps" | "eval_strategy" | "evaluation_strategy" if !is_evaluated(all, trainer) => {
            needless("nothing is held out, so nothing is evaluated")
        }
        "eval_strategy" | "evaluation_strategy" if text == "steps" && !has(all, "eval_steps") => set(
            "eval.every_steps",
            number_of(all, "logging_steps").filter(|steps| *steps >= 1.0).unwrap_or(500.0) as i64,
        ),
        "save_strategy" if text == "steps" && !has(all, "save_steps") => set("checkpoint.every_steps", 500),
        "save_steps" if says_another(all, &["save_strategy"]) => needless("save_strategy says it"),
        "eval_steps" if says_another(all, &["eval_strategy", "evaluation_strategy"]) => {
            needless("eval_strategy says it")
        }
        "metric_for_best_model" | "greater_is_better" if !keeps_best(all) => {
            needless("the last weights are the result, not the best ones")
        }
        "rl" | "stage" | "trainer_type" | "rlhf_type" if text_of(all, "pref_loss") == Some("orpo") => {
            needless("pref_loss says it")
        }
        "pref_loss" if text_of(all, "stage") != Some("dpo") => needless("the stage is not dpo"),
        "output_dir" => output_dir(text, name_of_run(all)),
        _ => None,
    }
}

/// Returns what becomes of a key whose value has another form here.
fn of_form(setting: &Setting, all: &[Setting]) -> Option<Outcome> {
    let Setting { value, .. } = setting;
    let (number, text) = (number(value), value.as_str().unwrap_or_default());
    match setting.name() {
        "torch_dtype" | "dtype" if !setting.path.contains('.') => match text {
            "auto" | "" => needless("weights are read in the format in which they are stored"),
            "bf16" | "fp16" | "fp32" => None,
            other => set("compute", other.trim_start_matches("torch.")),
        },
        "val_set_size" | "val_size" | "test_split_size" => match number {
            Some(0.0) => needless("nothing is held out unless it is requested"),
            Some(share) if share < 1.0 => set("data.eval_fraction", share),
            _ => left("a number of records: write data.eval_fraction, a share of them"),
        },
        "lora_target_modules" | "lora_target" | "target_modules" => set("lora.target", targets(value)),
        "additional_target" | "lora_modules_to_save" | "modules_to_save" => {
            set("lora.modules_to_save", names_of(value))
        }
        "max_steps" if number.is_none_or(|steps| steps <= 0.0) => needless("the epochs say it"),
        "max_steps_per_epoch" => set("train.steps", (number? * number_of(all, "epochs").unwrap_or(1.0)) as i64),
        "warmup_steps" if number.is_some_and(|steps| 0.0 < steps && steps < 1.0) => set("train.warmup_ratio", number?),
        "cosine_min_lr_ratio" | "min_lr_ratio" | "min_lr_rate" => match (number_of(all, "learning_rate"), number) {
            (Some(rate), Some(share)) => set("train.min_lr", rate * share),
            _ => left("write train.min_lr: a rate, this share of the learning rate"),
        },
        // There a weight alone turns the loss on.
        "moe_aux_loss_coef" | "router_aux_loss_coef" if number.is_some_and(|weight| weight > 0.0) => Some(Set(vec![
            ("train.router_aux_loss".to_owned(), true.into()),
            ("train.router_aux_loss_coef".to_owned(), plain_number(value)),
        ])),
        "saves_per_epoch" => per_epoch("checkpoint", value),
        "evals_per_epoch" => per_epoch("eval", value),
        name @ ("save_steps" | "eval_steps" | "logging_steps") if number.is_some_and(is_share) => {
            share_of_run(name, number?, all)
        }
        "report_to" => match value.to_string() {
            names if names.contains("wandb") => set("wandb", Table::new()),
            names if ["mlflow", "swanlab", "trackio", "comet", "all"].iter().any(|name| names.contains(name)) => {
                left("metrics.jsonl and TensorBoard files are always written; [wandb] and [mlflow] are there")
            }
            _ => needless("metrics.jsonl and TensorBoard files are always written"),
        },
        "init_weights" if text.starts_with("pissa_niter_") => set("lora.init_lora_weights", text),
        "chat_template_jinja" if text.ends_with(".jinja") => set("data.chat_template", text),
        "deepspeed" => deepspeed(value),
        "plugins" => plugins(value),
        "_component_" if setting.path == "model._component_" => Some(model_of_torchtune(text)),
        "lora_attn_modules" => set("lora.target", modules_of_torchtune(value, is_true(all, "apply_lora_to_mlp"))),
        _ => None,
    }
}

/// Returns what becomes of keys that are known by the mapping they are in, or by a part of their name.
fn elsewhere(setting: &Setting) -> Option<Outcome> {
    let name = setting.name();
    match setting.path.split_once('.') {
        Some((parent, _)) if PARENTS.split(' ').all(|known| known != parent) => Some(nothing_does(&setting.value)),
        _ if FUSED.split(' ').any(|prefix| name.starts_with(prefix)) || name.ends_with("_kernel") => {
            needless("fused kernels are always on")
        }
        _ if MEDIA.iter().any(|word| name.replace("revision", "").contains(word)) => {
            left("models train on text; images, sound and video are not read")
        }
        _ => None,
    }
}

/// Returns the class of a model in torchtune as the mode that it is.
fn model_of_torchtune(text: &str) -> Outcome {
    let name = text.rsplit('.').next().unwrap_or_default();
    let sections: &[&str] = match name.split('_').next() {
        Some("qlora") => &["lora", "bnb_4bit"],
        Some("lora") => &["lora"],
        _ => return Set(vec![("mode".to_owned(), "full".into())]),
    };
    Set(sections.iter().map(|section| ((*section).to_owned(), Table::new().into())).collect())
}

/// Returns the modules of torchtune's adapters under the names that they have in checkpoints.
fn modules_of_torchtune(value: &Value, has_mlp: bool) -> Value {
    let attention = value.as_array().into_iter().flatten().filter_map(Value::as_str);
    let names = attention.map(|name| if name == "output_proj" { "o_proj" } else { name });
    let mlp = ["gate_proj", "up_proj", "down_proj"].into_iter().filter(|_| has_mlp);
    Value::Array(names.chain(mlp).map(Value::from).collect())
}

fn is_share(number: f64) -> bool {
    0.0 < number && number < 1.0
}

/// Returns a share of the run as steps, or as epochs.
fn share_of_run(name: &str, share: f64, all: &[Setting]) -> Option<Outcome> {
    let (steps_key, epochs_key) = match name {
        "save_steps" => ("checkpoint.every_steps", "checkpoint.every_epochs"),
        "eval_steps" => ("eval.every_steps", "eval.every_epochs"),
        _ => ("train.log_every", "train.log_every_epochs"),
    };
    let epochs = ["num_epochs", "num_train_epochs"].iter().find_map(|name| number_of(all, name));
    let epochs = epochs.unwrap_or(if has(all, "base_model") { 1.0 } else { 3.0 });
    match number_of(all, "max_steps").filter(|steps| *steps > 0.0) {
        Some(steps) => set(steps_key, (steps * share).ceil() as i64),
        None => set(epochs_key, share * epochs),
    }
}

/// Returns whether the weights have a format, which is that of the computation unless another is named.
fn names_a_format(all: &[Setting]) -> bool {
    let is_it = |other: &Setting| matches!(&*other.path, "torch_dtype" | "dtype");
    all.iter().any(|other| is_it(other) && !matches!(other.value.as_str(), None | Some("auto" | "")))
}

/// Returns whether the best weights are the result.
fn keeps_best(all: &[Setting]) -> bool {
    is_true(all, "load_best_model_at_end") || all.iter().any(|other| other.name().starts_with("early_stopping"))
}

/// Returns the name that a run is given.
fn name_of_run(all: &[Setting]) -> Option<&str> {
    ["run_name", "wandb_name"].iter().find_map(|name| text_of(all, name)).filter(|name| !name.is_empty())
}

/// Returns whether anything is held out. TRL has the split `test` whenever it evaluates.
pub(super) fn is_evaluated(all: &[Setting], trainer: Trainer) -> bool {
    let strategy = |name| text_of(all, name).is_some_and(|strategy| strategy != "no");
    let splits = trainer == Trainer::Trl && (strategy("eval_strategy") || strategy("evaluation_strategy"));
    splits
        || all.iter().any(|other| match other.name() {
            "val_set_size" | "val_size" | "test_split_size" | "split_dataset_ratio" => {
                number(&other.value).is_some_and(|size| size > 0.0)
            }
            name => matches!(name, "test_datasets" | "eval_dataset" | "dataset_test_split" | "val_dataset"),
        })
}

/// Returns whether the run is given in steps.
fn has_steps(all: &[Setting]) -> bool {
    ["max_steps", "max_steps_per_epoch"].iter().any(|name| number_of(all, name).is_some_and(|steps| steps > 0.0))
}

/// Returns whether a strategy says that steps are not what counts.
fn says_another(all: &[Setting], names: &[&str]) -> bool {
    names.iter().any(|name| {
        let text = text_of(all, name);
        let is_off = all.iter().any(|other| other.name() == *name && other.value.as_bool() == Some(false));
        matches!(text, Some("epoch" | "no")) || is_off
    })
}

fn is_constant(all: &[Setting]) -> bool {
    ["lr_scheduler", "lr_scheduler_type"].iter().any(|name| text_of(all, name) == Some("constant"))
}

fn per_epoch(section: &str, value: &Value) -> Option<Outcome> {
    match number(value) {
        Some(times) if times > 0.0 => set(&format!("{section}.every_epochs"), 1.0 / times),
        Some(_) => set(&format!("{section}.every_steps"), 0),
        None => left("a number of times per epoch was expected"),
    }
}

/// Returns the run's folder as the folder of all runs and the run's name. A run with a name of its own gets a folder of that name in it.
fn output_dir(text: &str, name: Option<&str>) -> Option<Outcome> {
    if name.is_some() {
        return set("output_dir", text);
    }
    let path = Path::new(text);
    let name = path.file_name()?.to_string_lossy().into_owned();
    let above = path.parent().map(|above| above.to_string_lossy().into_owned()).filter(|above| !above.is_empty());
    let above = above.unwrap_or_else(|| ".".to_owned());
    Some(Set(vec![("name".to_owned(), name.into()), ("output_dir".to_owned(), above.into())]))
}

fn targets(value: &Value) -> Value {
    let is_all = |name: &str| name == "all" || name.eq_ignore_ascii_case("all-linear");
    match names_of(value) {
        Value::Array(names) if matches!(&names[..], [Value::String(name)] if is_all(name)) => "all-linear".into(),
        target => target,
    }
}

/// Returns a text with names of modules as a list of them. A regular expression stays a text.
fn names_of(value: &Value) -> Value {
    let is_in_names = |letter: char| letter.is_alphanumeric() || "_-., ".contains(letter);
    match value {
        Value::String(text) if !text.is_empty() && text.chars().all(is_in_names) => {
            Value::Array(text.split(',').map(str::trim).filter(|name| !name.is_empty()).map(Value::from).collect())
        }
        other => other.clone(),
    }
}

/// Returns the stage that a file of DeepSpeed's settings has in its name or in itself.
fn deepspeed(value: &Value) -> Option<Outcome> {
    let text = value.to_string().to_lowercase();
    let is_named = |stage: &i64| ["z", "zero", "stage = "].iter().any(|name| text.contains(&format!("{name}{stage}")));
    match [3, 2, 1, 0].into_iter().find(is_named) {
        Some(stage) => set("train.zero_stage", stage),
        None => left("write train.zero_stage = 1, 2 or 3 for what its ranks divide"),
    }
}

fn of_several_cards(setting: &Setting, all: &[Setting]) -> Option<Outcome> {
    if !["fsdp", "ddp_", "dist_config"].iter().any(|start| setting.path.starts_with(start)) {
        return None;
    }
    if setting.name().ends_with("offload_params") && setting.value.as_bool() == Some(true) {
        return left("weights are not offloaded: train.zero_stage = 3 divides them");
    }
    let keeps_weights = |other: &Setting| {
        let is_off = other.value.as_bool() == Some(false);
        other.value.to_string().to_uppercase().contains("SHARD_GRAD_OP")
            || other.name().ends_with("reshard_after_forward") && is_off
    };
    if keeps_weights(setting) {
        return set("train.zero_stage", 2);
    }
    let is_none = all.iter().any(|other| {
        let text = other.value.to_string();
        other.path.starts_with("fsdp") && text.contains("NO_SHARD")
            || other.path == "fsdp" && matches!(&*text, "[]" | "{}" | "\"\"" | "false")
    });
    let first = all.iter().find(|other| other.path.starts_with("fsdp") || other.path == "dist_config.name");
    let is_first = first.is_some_and(|first| first.path == setting.path);
    match is_first && !is_none && !all.iter().any(keeps_weights) {
        true => set("train.zero_stage", 3),
        false => needless("train.zero_stage says what ranks divide"),
    }
}

fn plugins(value: &Value) -> Option<Outcome> {
    let is_fused = |name: &&str| ["cut_cross_entropy", "liger", "kernels"].iter().any(|part| name.contains(part));
    match value.as_array().into_iter().flatten().filter_map(Value::as_str).find(|name| !is_fused(name)) {
        None => needless("fused kernels are always on"),
        Some(other) => left(&format!("there are no plugins: {other}")),
    }
}

/// Returns the key of the recipe that a name is, with its section.
fn path_of(name: &str) -> Option<String> {
    if let Some(Answer::Key(path, _)) = other_names::key(name) {
        return Some(path.to_owned());
    }
    // Made from the whole schema, once.
    static KNOWN: LazyLock<KnownKeys> = LazyLock::new(known_keys);
    let has = |section: &&str| KNOWN.get(*section).is_some_and(|keys| keys.iter().any(|key| key == name));
    let section = SEARCHED.into_iter().find(has)?;
    Some(if section.is_empty() { name.to_owned() } else { format!("{section}.{name}") })
}

/// Returns what the table of other names says of a setting.
fn of_table(setting: &Setting) -> Outcome {
    let name = setting.name();
    let known = path_of(name).filter(|path| !setting.path.contains('.') || path.contains('.'));
    match (other_names::key(name), known) {
        (Some(Answer::NotNeeded(why)), _) => NotNeeded(why.to_owned()),
        (Some(Answer::NotYet(why)), _) => unless_off(&setting.value, why),
        (Some(Answer::Section(section)), _) => match setting.value.as_bool() {
            Some(false) => NotNeeded(format!("[{section}] is left out")),
            _ => Set(vec![(section.to_owned(), Table::new().into())]),
        },
        (_, Some(path)) if path.starts_with("wandb.") || path == "name" => Set(vec![(path, setting.value.clone())]),
        (_, Some(path)) => Set(vec![(path, plain_number(&setting.value))]),
        (_, None) => nothing_does(&setting.value),
    }
}
