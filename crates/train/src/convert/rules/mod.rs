//! What a key of another trainer becomes where that depends on other keys, or its value has another form.
//!
//! Trade-off: a value that no rule knows is taken as it is; if no recipe may have it, it becomes a comment with the recipe reader's own advice.

mod adapter;
mod cards;
pub(super) mod grpo;
mod schedule;

use std::path::Path;

use firebrick_trainer::config::other_names::{self, Answer};
use toml::{Table, Value};

use super::datasets;
use super::draft::{Draft, has_key};
use super::setting::Outcome::{self, NotNeeded, Set};
use super::setting::{Setting, has, is_true, left, needless, nothing_does, number, set, text_of, unless_off};
use super::values::{self, plain_number};

/// Sections in which a name is looked for that several have: the first one is meant.
const SEARCHED: [&str; 9] = ["", "train", "data", "lora", "bnb_4bit", "preference", "checkpoint", "eval", "best"];
/// Mappings whose keys are looked up by their own names; the names of others mean something else.
const PARENTS: &str = "lr_scheduler_kwargs peft_config lora_config training_args special_tokens optimizer lr_scheduler tokenizer model checkpointer \
                       quant_config bnb_config quantization_config lora_parameters";

/// Returns whether a mapping is one value to a rule.
pub(super) fn takes_whole(path: &str) -> bool {
    matches!(path, "train_dataset" | "deepspeed" | "gradient_checkpointing_kwargs")
}

/// Translates one setting of `all`; dataset settings go straight into `draft`.
pub(super) fn outcome(setting: &Setting, all: &[Setting], draft: &mut Draft, file: &Path) -> Outcome {
    let trainer = draft.trainer;
    if let Some(outcome) = grpo::outcome(setting, all, draft) {
        return outcome;
    }
    let mut of_path = values::of_path(trainer, setting);
    if let (Some(Set(keys)), true) = (&mut of_path, setting.path == "dataset._component_" && has(all, "source")) {
        keys.retain(|(key, _)| key != "data.path");
    }
    let known = datasets::outcome(setting, all, draft, file).or(of_path);
    let known = known.or_else(|| cards::outcome(setting, all)).or_else(|| elsewhere(setting));
    let known = known.or_else(|| of_format(setting, all)).or_else(|| adapter::outcome(setting, all));
    let known = known.or_else(|| schedule::of_length(setting, all));
    let known = known.or_else(|| schedule::of_times(setting, all, trainer)).or_else(|| of_others(setting, all));
    known.or_else(|| values::named(trainer, setting.name(), &setting.value)).unwrap_or_else(|| of_table(setting))
}

/// Returns what becomes of a number format that another key decides, or that has another form; `None` for any other setting.
fn of_format(setting: &Setting, all: &[Setting]) -> Option<Outcome> {
    let truth = setting.value.as_bool();
    match setting.name() {
        "bf16" | "bfloat16" if truth == Some(true) && is_true(all, "fp8") => {
            needless("compute = \"fp8\" is for layers alone")
        }
        "bf16" | "bfloat16" if truth == Some(false) && (is_true(all, "fp16") || names_a_format(all)) => {
            needless("compute says it")
        }
        "torch_dtype" | "dtype" if is_true(all, "bf16") || is_true(all, "fp16") => needless("bf16 or fp16 says it"),
        "torch_dtype" | "dtype" if !setting.path.contains('.') => match setting.value.as_str().unwrap_or_default() {
            "auto" | "" => needless("weights are read in the format in which they are stored"),
            "bf16" | "fp16" | "fp32" => None,
            other => set("compute", other.trim_start_matches("torch.")),
        },
        _ => None,
    }
}

/// Returns what becomes of any other key that depends on others, or whose value has another form.
fn of_others(setting: &Setting, all: &[Setting]) -> Option<Outcome> {
    let Setting { value, .. } = setting;
    let (truth, text) = (value.as_bool(), value.as_str().unwrap_or_default());
    match setting.name() {
        "model_revision" | "revision_of_model" if !text.is_empty() => needless("it is in the name of the model"),
        "packing" if truth == Some(false) && is_true(all, "neat_packing") => needless("neat_packing says it"),
        "packing_strategy" if !is_true(all, "packing") => needless("rows are not packed"),
        "rl" | "stage" | "trainer_type" | "rlhf_type" if text_of(all, "pref_loss") == Some("orpo") => {
            needless("pref_loss says it")
        }
        "pref_loss" if text_of(all, "stage") != Some("dpo") => needless("the stage is not dpo"),
        "output_dir" => output_dir(text, all),
        "val_set_size" | "val_size" | "test_split_size" => match number(value) {
            Some(0.0) => needless("nothing is held out unless it is requested"),
            Some(share) if share < 1.0 => set("data.eval_fraction", share),
            _ => left("a number of records: write data.eval_fraction, a share of them"),
        },
        // There a weight alone turns the loss on.
        "moe_aux_loss_coef" | "router_aux_loss_coef" if number(value).is_some_and(|weight| weight > 0.0) => {
            Some(Set(vec![
                ("train.router_aux_loss".to_owned(), true.into()),
                ("train.router_aux_loss_coef".to_owned(), plain_number(value)),
            ]))
        }
        "report_to" => report_to(&value.to_string()),
        "chat_template_jinja" if text.ends_with(".jinja") => set("data.chat_template", text),
        "deepspeed" => cards::deepspeed(value),
        "plugins" => plugins(value),
        _ => None,
    }
}

fn report_to(names: &str) -> Option<Outcome> {
    if names.contains("wandb") {
        return set("wandb", Table::new());
    }
    match ["mlflow", "swanlab", "trackio", "comet", "all"].iter().any(|name| names.contains(name)) {
        true => left("metrics.jsonl and TensorBoard files are always written; [wandb] and [mlflow] are there"),
        false => needless("metrics.jsonl and TensorBoard files are always written"),
    }
}

/// Returns what becomes of keys that are known by the mapping they are in.
fn elsewhere(setting: &Setting) -> Option<Outcome> {
    let (parent, _) = setting.path.split_once('.')?;
    match other_names::key(parent) {
        _ if PARENTS.split(' ').any(|known| known == parent) => None,
        Some(Answer::NotNeeded(why)) => needless(why),
        Some(Answer::NotYet(why)) => Some(unless_off(&setting.value, why)),
        _ => Some(nothing_does(&setting.value)),
    }
}

/// Returns whether the weights have a format, which is that of the computation unless another is named.
fn names_a_format(all: &[Setting]) -> bool {
    let is_it = |other: &Setting| matches!(&*other.path, "torch_dtype" | "dtype");
    all.iter().any(|other| is_it(other) && !matches!(other.value.as_str(), None | Some("auto" | "")))
}

/// Returns the run's folder as the folder of all runs and the run's name. A run with a name of its own gets a folder of that name in it.
fn output_dir(text: &str, all: &[Setting]) -> Option<Outcome> {
    if ["run_name", "wandb_name"].iter().find_map(|name| text_of(all, name)).is_some_and(|name| !name.is_empty()) {
        return set("output_dir", text);
    }
    let path = Path::new(text);
    let name = path.file_name()?.to_string_lossy().into_owned();
    let above = path.parent().map(|above| above.to_string_lossy().into_owned()).filter(|above| !above.is_empty());
    let above = above.unwrap_or_else(|| ".".to_owned());
    Some(Set(vec![("name".to_owned(), name.into()), ("output_dir".to_owned(), above.into())]))
}

fn plugins(value: &Value) -> Option<Outcome> {
    let is_fused = |name: &&str| ["cut_cross_entropy", "liger", "kernels"].iter().any(|part| name.contains(part));
    match value.as_array().into_iter().flatten().filter_map(Value::as_str).find(|name| !is_fused(name)) {
        None => needless("fused kernels are always on"),
        Some(other) => left(&format!("there are no plugins: {other}")),
    }
}

/// Returns what the table of other names says of a setting.
fn of_table(setting: &Setting) -> Outcome {
    let name = setting.name();
    let in_section = |section: &str| if section.is_empty() { name.to_owned() } else { format!("{section}.{name}") };
    let known = match other_names::key(name) {
        Some(Answer::Key(path, _)) => Some(path.to_owned()),
        _ => SEARCHED.into_iter().find(|section| has_key(section, name)).map(in_section),
    };
    let known = known.filter(|path| !setting.path.contains('.') || path.contains('.'));
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
