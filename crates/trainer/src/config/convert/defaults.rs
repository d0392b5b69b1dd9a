//! What another trainer does where a key is absent, and what several keys mean together.
//!
//! Trade-off: the trainer is recognized by its keys, so a file without any of them gets the defaults here.

use toml::{Table, Value};

use super::rules::text_of;
use super::{Draft, Setting, datasets};

/// A default of another trainer: the key here, its value there.
type Default = (&'static str, fn() -> Value);

/// What axolotl does where a key is absent.
const AXOLOTL: [Default; 4] = [
    ("pack", || false.into()),
    ("max_seq_len", || 512.into()),
    ("data.overflow", || "drop".into()),
    ("checkpoint.every_epochs", || 1.0.into()),
];
/// The same of LLaMA-Factory.
const LLAMA_FACTORY: [Default; 5] = [
    ("train.learning_rate", || 5e-5.into()),
    ("train.schedule", || "linear".into()),
    ("train.warmup_steps", || 0.into()),
    ("train.epochs", || 3.0.into()),
    ("train.micro_batch_size", || 8.into()),
];
/// The same of TRL.
const TRL: [Default; 6] = [
    ("pack", || false.into()),
    ("max_seq_len", || 1024.into()),
    ("train.schedule", || "linear".into()),
    ("train.warmup_steps", || 0.into()),
    ("train.epochs", || 3.0.into()),
    ("train.micro_batch_size", || 8.into()),
];
/// What TRL's adapters are where a key is absent; PEFT's modules.
const TRL_LORA: [Default; 4] = [
    ("lora.r", || 16.into()),
    ("lora.alpha", || 32.into()),
    ("lora.dropout", || 0.05.into()),
    ("lora.target", || Value::Array(vec!["q_proj".into(), "v_proj".into()])),
];
/// Keys that decide the same thing, so that a default of one is not added to another.
const SAME: [[&str; 2]; 3] = [
    ["train.epochs", "train.steps"],
    ["train.warmup_steps", "train.warmup_ratio"],
    ["checkpoint.every_epochs", "checkpoint.every_steps"],
];

/// Adds what follows from the defaults of the other trainer, and from keys together.
pub(super) fn complete(all: &[Setting], draft: &mut Draft) {
    let has = |names: &[&str]| all.iter().any(|setting| names.contains(&&*setting.path));
    let is_axolotl = has(&["base_model"]);
    let is_llama_factory = has(&["finetuning_type", "stage", "template", "cutoff_len"]) && !is_axolotl;
    let is_trl = has(&["model_name_or_path"]) && !is_axolotl && !is_llama_factory;
    if is_llama_factory && !has(&["finetuning_type"]) {
        draft.add("lora", Table::new().into(), "their default");
    }
    let has_preference = draft.keys.iter().any(|(key, ..)| key.starts_with("preference."));
    if is_trl && has_preference {
        draft.add("preference.loss", "dpo".into(), "their trainer");
    }
    if draft.problem.is_some() {
        draft.keys.retain(|(key, ..)| !key.starts_with("preference"));
    } else {
        complete_mode(draft, !is_axolotl && !is_llama_factory && !is_trl);
    }
    let has_adapter = draft.has("lora");
    let is_plain = all.iter().any(|setting| setting.path == "stage" && setting.value.as_str() == Some("pt"));
    let defaults: &[Default] = match (is_axolotl, is_llama_factory, is_trl) {
        (true, ..) => &AXOLOTL,
        (_, true, _) => &LLAMA_FACTORY,
        (.., true) => &TRL,
        _ => &[],
    };
    for (key, value) in defaults.iter().chain(TRL_LORA.iter().filter(|_| is_trl && has_adapter)) {
        let decided =
            SAME.iter().find(|same| same.contains(key)).is_some_and(|same| same.iter().any(|key| draft.has(key)));
        if !decided {
            draft.add(key, value(), "their default");
        }
    }
    let is_alpaca = |source: &Table| source.get("format").and_then(Value::as_str) == Some("alpaca");
    let sources = &draft.sources[0];
    if is_axolotl && !sources.is_empty() && sources.iter().all(is_alpaca) && !has(&["chat_template"]) {
        // There such records are headings and never a chat, whatever template the model has.
        draft.add("data.chat_template", "alpaca".into(), "the prompt of type alpaca");
    }
    if is_llama_factory {
        draft.add("pack", is_plain.into(), "their default");
    }
    if is_trl {
        draft.add("train.learning_rate", if has_preference { 1e-6 } else { 2e-5 }.into(), "their default");
        if !draft.has("data.train_on") {
            let note = "There every token of a conversation counts in the loss; here what the assistant writes does. data.train_on = \"all\" \
                        is theirs.";
            draft.notes.push(note.to_owned());
        }
    }
    if is_llama_factory && has_adapter {
        draft.add("lora.r", 8.into(), "their default");
        let rank = draft.keys.iter().find(|(key, ..)| key == "lora.r").and_then(|(_, rank, _)| rank.as_integer());
        draft.add("lora.alpha", rank.unwrap_or(8).saturating_mul(2).into(), "their default");
        draft.add("lora.target", "all-linear".into(), "their default");
    }
    let is_pairs = draft.has("preference.loss");
    if let Some((_, Value::Integer(tokens), from)) =
        draft.keys.iter_mut().find(|(key, ..)| is_pairs && key == "max_seq_len")
    {
        // There each answer has so many tokens; here both share a row.
        *tokens = tokens.saturating_mul(2);
        from.path += ", for both answers of a pair";
    }
    let revision = ["model_revision", "revision_of_model"].iter().find_map(|name| text_of(all, name));
    if let (Some(revision), Some((_, Value::String(model), _))) =
        (revision, draft.keys.iter_mut().find(|(key, ..)| key == "model"))
    {
        *model += &format!("@{revision}");
    }
    datasets::complete(all, draft);
}

/// Says what trains. `by_keys`: keys of an adapter mean that there is one.
fn complete_mode(draft: &mut Draft, by_keys: bool) {
    let has_keys = draft.keys.iter().any(|(key, ..)| key.starts_with("lora.") && by_keys);
    if !draft.has("lora") && !has_keys && !draft.has("mode") {
        draft.add("mode", "full".into(), "no adapter");
    }
    if draft.keys.iter().any(|(key, value, _)| key == "mode" && value.as_str() == Some("full")) {
        let is_kept = |key: &str| !key.starts_with("bnb_4bit") && key != "base" && !key.starts_with("lora");
        let (kept, dropped) = std::mem::take(&mut draft.keys).into_iter().partition(|(key, ..)| is_kept(key));
        draft.keys = kept;
        let dropped: Vec<(String, Value, Setting)> = dropped;
        let why = "every weight trains, so there is no adapter and no frozen base";
        draft.left.extend(dropped.iter().map(|(.., setting)| setting.remark(why)));
    }
}
