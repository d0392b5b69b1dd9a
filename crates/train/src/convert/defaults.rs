//! What another trainer does where a key is absent, and what several keys mean together.

use toml::{Table, Value};

use super::datasets::{self, is_evaluated};
use super::draft::Draft;
use super::kind::{Trainer, is_grpo};
use super::rules::grpo;
use super::setting::{Setting, number_of, text_of};
use super::values;

/// Keys that decide the same thing, so that a default of one is not added to another.
const SAME: [[&str; 2]; 4] = [
    ["train.epochs", "train.steps"],
    ["train.warmup_steps", "train.warmup_ratio"],
    ["checkpoint.every_epochs", "checkpoint.every_steps"],
    ["eval.every_epochs", "eval.every_steps"],
];
/// Why a key is there that was not typed.
const THEIRS: &str = "their default";

/// Adds what follows from the defaults of the other trainer, and from keys together.
pub(super) fn complete(all: &[Setting], draft: &mut Draft) {
    let trainer = draft.trainer;
    let has = |name: &str| all.iter().any(|setting| setting.path == name);
    let is_of_peft = |setting: &Setting| setting.path.contains("peft_config.") || setting.path.contains("lora_config.");
    let is_off = |setting: &Setting| setting.path == "use_peft" && setting.value.as_bool() == Some(false);
    let has_peft = all.iter().any(is_of_peft) && !all.iter().any(is_off);
    let has_adapter_by_default = match trainer {
        _ if has_peft => true,
        Trainer::LlamaFactory => !has("finetuning_type"),
        Trainer::Swift => !has("tuner_type") && !has("train_type"),
        Trainer::MlxLm => !has("fine_tune_type"),
        _ => false,
    };
    if has_adapter_by_default && draft.problem.is_none() {
        draft.add("lora", Table::new().into(), THEIRS);
    }
    complete_rewards(all, draft);
    complete_pairs(draft);
    if draft.problem.is_none() {
        complete_mode(draft);
    }
    complete_data(all, draft);
    let (has_lora, has_base) = (draft.has("lora"), draft.has("bnb_4bit"));
    let has_part =
        [("defaults", true), ("peft", has_peft && has_lora), ("adapters", has_lora), ("quantized", has_base)];
    for (table, _) in has_part.into_iter().filter(|(_, is_there)| *is_there) {
        for (key, value) in values::defaults(table, trainer) {
            // A length of null is none. Prompts are never cut.
            let is_left = key == "max_seq_len" && has("max_length") || key == "data.overflow" && draft.has("grpo");
            let same = SAME.iter().find(|same| same.contains(&key.as_str()));
            let is_there = same.is_some_and(|same| same.iter().any(|key| draft.has(key)));
            if !is_left && !is_there {
                draft.add(key, value.clone(), THEIRS);
            }
        }
    }
    if let (true, Trainer::LlamaFactory | Trainer::MlxLm) = (draft.has("lora"), trainer) {
        let rank = value_of(draft, "lora.r").and_then(Value::as_integer).unwrap_or(8);
        let scale = if trainer == Trainer::MlxLm { 20 } else { 2 };
        draft.add("lora.alpha", rank.saturating_mul(scale).into(), THEIRS);
    }
    complete_training(all, draft);
    complete_evaluation(all, draft);
    let revision = ["model_revision", "revision_of_model"].iter().find_map(|name| text_of(all, name));
    if let (Some(revision), Some((_, Value::String(model), _))) =
        (revision, draft.keys.iter_mut().find(|(key, ..)| key == "model"))
    {
        *model += &format!("@{revision}");
    }
    datasets::complete(all, draft);
}

fn value_of<'a>(draft: &'a Draft, key: &str) -> Option<&'a Value> {
    draft.keys.iter().find(|(name, ..)| name == key).map(|(_, value, _)| value)
}

/// Completes learning from rewards: the rewards themselves, and a length that holds a prompt with its completion.
fn complete_rewards(all: &[Setting], draft: &mut Draft) {
    if draft.problem.is_some() || !is_grpo(all, draft.trainer) {
        return;
    }
    draft.add("grpo", Table::new().into(), "their trainer");
    if draft.trainer == Trainer::Swift {
        draft.add("grpo.loss_type", "grpo".into(), THEIRS);
        match draft.has("lora") || draft.has("grpo.beta") {
            true => draft.add("grpo.beta", 0.04.into(), THEIRS),
            false => {
                draft.notes.push("There beta is 0.04, of the distance from the first weights; here it is 0.".into())
            }
        }
    }
    if !draft.has("grpo.rewards") {
        let rewards = vec![Value::Table(grpo::of_function("MODULE", "FUNCTION"))];
        draft.add("grpo.rewards", rewards.into(), "the functions are in a program");
        let why = "grpo.rewards: write the module and the function of each reward in place of MODULE:FUNCTION";
        draft.incomplete.get_or_insert(why.to_owned());
    }
    let completion = value_of(draft, "grpo.max_completion_length").and_then(Value::as_integer).unwrap_or(grpo::LENGTH);
    let prompt = ["max_prompt_length", "max_length"].iter().find_map(|name| number_of(all, name));
    let both = completion.saturating_add(prompt.map_or(grpo::LENGTH, |tokens| tokens as i64));
    match draft.keys.iter_mut().find(|(key, ..)| key == "max_seq_len") {
        Some((_, Value::Integer(tokens), from)) if *tokens <= completion => {
            *tokens = both;
            from.path += ", for a prompt and its completion";
        }
        Some(_) => {}
        None => draft.add("max_seq_len", both.into(), "a prompt and its completion"),
    }
}

/// Completes training on pairs of answers. TRL's configuration of DPO does not name it; elsewhere its keys mean nothing alone.
fn complete_pairs(draft: &mut Draft) {
    let is_pairs_key = |key: &str| key.starts_with("preference");
    if draft.problem.is_some() {
        return draft.leave("of a method that is not there", |key| is_pairs_key(key) || key.starts_with("grpo"));
    }
    match draft.trainer {
        Trainer::Trl if !draft.has("grpo") && draft.keys.iter().any(|(key, ..)| is_pairs_key(key)) => {
            draft.add("preference.loss", "dpo".into(), "their trainer");
        }
        Trainer::Other => {}
        _ if !draft.has("preference.loss") => draft.leave("no training on pairs of answers is named", is_pairs_key),
        _ => {}
    }
    let is_orpo = value_of(draft, "preference.loss").and_then(Value::as_str) == Some("orpo");
    if is_orpo && draft.trainer == Trainer::LlamaFactory {
        draft.add("preference.prompt_loss", false.into(), THEIRS);
    }
    let dropout_is_on = draft.not_needed.iter().any(|remark| remark.setting.starts_with("disable_dropout: false"));
    let turns_off = !matches!(draft.trainer, Trainer::Torchtune | Trainer::Other) && !dropout_is_on;
    let is_grpo = draft.has("grpo");
    if draft.has("preference.loss") && turns_off || is_grpo {
        if draft.has("lora") {
            draft.add("lora.dropout", 0.0.into(), THEIRS);
        }
        if let Some((_, value, from)) = draft.keys.iter_mut().find(|(key, ..)| key == "lora.dropout") {
            *value = 0.0.into();
            from.path += if is_grpo { ", off with rewards" } else { ", off on pairs of answers" };
        }
    }
}

/// Says what trains. Of an unknown trainer, keys of an adapter mean that there is one.
fn complete_mode(draft: &mut Draft) {
    let by_keys = draft.trainer == Trainer::Other;
    let has_keys = draft.keys.iter().any(|(key, ..)| key.starts_with("lora.") && by_keys);
    if !draft.has("lora") && !has_keys && !draft.has("mode") {
        draft.add("mode", "full".into(), "no adapter");
    }
    if value_of(draft, "mode").and_then(Value::as_str) == Some("full") {
        let is_of_base = |key: &str| key.starts_with("bnb_4bit") || key == "base" || key.starts_with("lora");
        draft.leave("every weight trains, so there is no adapter and no frozen base", is_of_base);
    } else if !draft.has("bnb_4bit") && !by_keys {
        draft.leave("the base is not quantized by load_in_4bit", |key| key.starts_with("bnb_4bit."));
    }
}

/// Says what counts in the loss and what becomes of long documents, where that depends on the data.
fn complete_data(all: &[Setting], draft: &mut Draft) {
    let has = |name: &str| all.iter().any(|setting| setting.path == name);
    let is_text = |source: &Table| source.get("format").and_then(Value::as_str) == Some("text");
    let texts = draft.sources[0].iter().filter(|source| is_text(source)).count();
    let is_plain = text_of(all, "stage") == Some("pt");
    match draft.trainer {
        Trainer::Axolotl => {
            // Completions are cut into pieces whatever excess_length_strategy says; only of streamed ones the rest is lost.
            if texts > 0 {
                draft.leave("texts are cut into pieces", |key| key == "data.overflow");
            } else {
                draft.add("data.overflow", "drop".into(), THEIRS);
            }
            if texts > 0 && texts < draft.sources[0].len() {
                let note =
                    "There a conversation beyond max_seq_len is left out; here it is cut, since texts are split.";
                draft.notes.push(note.to_owned());
            }
            if has("pretraining_dataset") {
                draft.add("pack", true.into(), "texts in a row");
            }
        }
        Trainer::LlamaFactory => {
            draft.add("pack", is_plain.into(), THEIRS);
            if is_plain && value_of(draft, "pack").and_then(Value::as_bool) == Some(false) {
                draft.add("data.overflow", "truncate".into(), "no packing");
            }
        }
        Trainer::Trl if !["data.train_on", "preference.loss", "grpo"].iter().any(|key| draft.has(key)) => {
            draft.add("data.train_on", "all".into(), THEIRS);
            let note = "There every token of a conversation or a text counts in the loss, which data.train_on = \"all\" is. Of \
                        records with prompt and completion the completion counts: remove the key for those.";
            draft.notes.push(note.to_owned());
        }
        Trainer::MlxLm if draft.has("lora") && !has("num_layers") => {
            let note = "There the last 16 layers get adapters, here all: lora.layers_to_transform lists some, from 0.";
            draft.notes.push(note.to_owned());
        }
        Trainer::Torchtune => {
            let data = all.iter().find(|setting| setting.path == "dataset._component_");
            if data.and_then(|setting| setting.value.as_str()).is_some_and(|name| name.contains("alpaca")) {
                draft.add("data.train_on", "all".into(), THEIRS);
                let note = "There the user's message is the Alpaca project's prompt, with its preamble and headings, in the chat \
                            template; here it is the instruction with its input.";
                draft.notes.push(note.to_owned());
            }
        }
        _ => {}
    }
}

/// Adds what depends on the method: the learning rate, the rows of a step, the length of pairs.
fn complete_training(all: &[Setting], draft: &mut Draft) {
    let (has_adapter, has_pairs) = (draft.has("lora"), draft.has("preference.loss"));
    match draft.trainer {
        Trainer::Trl => {
            draft.add("train.learning_rate", if has_pairs || draft.has("grpo") { 1e-6 } else { 2e-5 }.into(), THEIRS)
        }
        Trainer::Swift => {
            draft.add("train.learning_rate", if has_adapter { 1e-4 } else { 1e-5 }.into(), THEIRS);
            let rows = number_of(all, "per_device_train_batch_size").filter(|rows| *rows >= 1.0).unwrap_or(1.0);
            draft.add("train.gradient_accumulation", ((16.0 / rows).ceil() as i64).into(), "their default on one card");
        }
        _ => {}
    }
    let length = draft.keys.iter_mut().find(|(key, ..)| key == "max_seq_len");
    if let Some((_, Value::Integer(tokens), from)) = length.filter(|_| has_pairs) {
        // There each answer has so many tokens; here both share a row.
        *tokens = tokens.saturating_mul(2);
        from.path += ", for both answers of a pair";
    }
}

/// Says when a run evaluates, and on what; without that no checkpoint is the best.
fn complete_evaluation(all: &[Setting], draft: &mut Draft) {
    let is_held_out = is_evaluated(all, draft.trainer);
    if is_held_out && draft.trainer == Trainer::Axolotl {
        let why = "their default before version 0.10; later ones do not evaluate then";
        if !draft.has("eval.every_steps") {
            draft.add("eval.every_epochs", 1.0.into(), why);
        }
    }
    if is_held_out && draft.trainer == Trainer::Swift && !draft.has("eval.every_epochs") {
        let steps = value_of(draft, "checkpoint.every_steps").cloned().unwrap_or(500.into());
        match value_of(draft, "checkpoint.every_epochs").cloned() {
            Some(epochs) => draft.add("eval.every_epochs", epochs, THEIRS),
            None => draft.add("eval.every_steps", steps, THEIRS),
        }
    }
    let names_a_split = draft.has("data.eval_path") || draft.has("data.eval_fraction") || !draft.sources[1].is_empty();
    if is_held_out && draft.trainer == Trainer::Trl && !names_a_split {
        let at = Setting { path: THEIRS.to_owned(), value: "test".into(), line: 0 };
        let split = datasets::test_split(Some("test"), all);
        draft.take(&at, split);
    }
    let is_often = |key: &str| value_of(draft, key).is_some_and(|value| *value != Value::Integer(0));
    if !is_held_out || !is_often("eval.every_steps") && !is_often("eval.every_epochs") {
        draft.leave("nothing is evaluated during the run, so no weights are the best", |key| key.starts_with("best"));
    }
}
