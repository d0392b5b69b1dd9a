//! The JSON schema of the recipe, for editors and for docs/config.schema.json, and the list of known keys derived from it.
//!
//! Trade-off: keys below a list such as `[[data.sources]]` are checked by serde, without a nearest key in the message.

use std::collections::BTreeMap;

use schemars::schema_for;
use serde_json::Value;

use crate::config::error::{ConfigError, RecipePlace, nearest};
use crate::config::other_names::Answer;
use crate::config::section::{Limit, Limited};
use crate::config::source::Source;
use crate::config::{RunConfig, other_names};

/// Returns the JSON schema (draft 2020-12) of a recipe, indented, with a newline at the end.
pub fn json_schema() -> String {
    let mut schema = schema();
    for Limited { key, limit, .. } in RunConfig::default().all_limits() {
        let Limit::Whole(_, largest) = limit else { continue };
        let (section, key) = key.split_once('.').unwrap_or(("", key));
        let section = reference(&schema["properties"][section]).unwrap_or_default();
        let pointer = format!("{section}/properties/{key}");
        // Invariant: a test finds each of these keys in the schema.
        schema.pointer_mut(&pointer).expect("a key with a limit is in the schema")["maximum"] = largest.into();
    }
    format!("{schema:#}\n")
}

/// Returns the schema without limits. To serde every key has a default, so the keys that a recipe must have are marked as required here.
pub(super) fn schema() -> Value {
    let mut schema = schema_for!(RunConfig).to_value();
    remove_nulls(&mut schema);
    for (section, keys) in [("", &["model", "data"][..]), ("/$defs/SourceConfig", &["path"])] {
        let section = schema.pointer_mut(section).and_then(Value::as_object_mut);
        // Invariant: a test compares this schema with docs/config.schema.json.
        let section = section.expect("each section is in the schema");
        for key in keys {
            if let Some(property) = section["properties"][key].as_object_mut() {
                property.remove("default");
            }
        }
        let after_properties = section.keys().position(|key| key == "properties").map_or(0, |index| index + 1);
        section.shift_insert(after_properties, "required".to_owned(), keys.into());
    }
    schema
}

/// Removes keys that are null: defaults of keys that are absent by default.
fn remove_nulls(schema: &mut Value) {
    match schema {
        Value::Object(map) => {
            map.retain(|_, value| !value.is_null());
            map.values_mut().for_each(remove_nulls);
        }
        Value::Array(list) => list.iter_mut().for_each(remove_nulls),
        _ => {}
    }
}

const MAX_LISTED: usize = 20;
/// What to do with a key of another trainer that is off.
const OFF: &str = "leave it out: without it, it is off";

/// Keys by section; the keys outside of sections are under "".
pub type KnownKeys = BTreeMap<String, Vec<String>>;

/// Refuses keys that are not in the schema, all of them at once, and a section that is not a table.
pub(super) fn refuse_unknown_keys(source: &Source<'_>) -> Result<(), ConfigError> {
    refuse_other_trainer(source)?;
    let known = known_keys();
    let (mut unknown, mut others) = (Vec::new(), 0);
    let mut entries: Vec<_> = source.entries.iter().collect();
    entries.sort_by_key(|entry| entry.key_span.start);
    for entry in entries {
        let (section, key) = entry.path.split_once('.').unwrap_or(("", &entry.path));
        if key.contains('.') {
            continue; // Below a key that takes no table: its type is refused when it is read.
        }
        if section.is_empty() && known.contains_key(key) {
            if !entry.is_table {
                let help = source.instead_of_value(entry);
                let problem = format!("is a section of keys, got {}: {help}", entry.type_name);
                return Err(ConfigError::key(source.place_of(&entry.key_span), key, problem));
            }
        } else if known.get(section).is_some_and(|keys| !keys.iter().any(|known| known == key)) {
            if unknown.len() == MAX_LISTED {
                others += 1;
                continue;
            }
            let is_top = section.is_empty();
            let home = if is_top { "at the top of the file".to_owned() } else { format!("in [{section}]") };
            let (place, hint) = (source.place_of(&entry.key_span), hint(&known, section, key, source.typed(entry)));
            unknown.push(format!("{place}: unknown key '{key}' {home}; {hint}"));
        }
    }
    unknown.extend((others > 0).then(|| format!("and {others} more unknown keys")));
    if unknown.is_empty() { Ok(()) } else { Err(ConfigError::UnknownKeys(unknown.join("\n"))) }
}

/// Refuses the configuration of another trainer as a whole: several of its keys, and no data.
fn refuse_other_trainer(source: &Source<'_>) -> Result<(), ConfigError> {
    const FEWEST: usize = 3;
    if source.is_typed("data") {
        return Ok(());
    }
    let of_others = source.entries.iter().filter(|entry| other_names::key(&entry.path).is_some());
    let mut found: Vec<_> = of_others.filter_map(|entry| Some((source.place_in_file(entry)?, entry))).collect();
    found.sort_by_key(|(_, entry)| entry.key_span.start);
    let (place, file) = match found.first() {
        Some((place @ RecipePlace::Line(file, _), _)) if found.len() >= FEWEST => (place.clone(), file.clone()),
        _ => return Ok(()),
    };
    let names: Vec<&str> = found.iter().take(FEWEST).map(|(_, entry)| entry.path.as_str()).collect();
    let (names, file) = (names.join(", "), file.display());
    let message = format!(
        "this is a configuration of another trainer ({names}, ...): `firebrick convert {file}` makes a recipe of it"
    );
    Err(ConfigError::At { place, message })
}

/// Returns what to write on the command line instead of an option `--name` that is a key of recipes, here or in another trainer; `None` if it is no
/// key. `value` is what was typed after it, quoted for a shell.
pub fn instead_of_option(name: &str, value: Option<&str>) -> Option<String> {
    let known = known_keys();
    let set = |path: &str| format!("--set {path}={}", value.unwrap_or("VALUE"));
    let home = |key: &str| {
        let mut order = ["", "train", "data", "lora"].into_iter().chain(known.keys().map(String::as_str));
        order.find(|section| known[*section].iter().any(|known| known == key))
    };
    let path_of =
        |section: &str, key: &str| if section.is_empty() { key.to_owned() } else { format!("{section}.{key}") };
    if let Some((section, key)) = name.split_once('.') {
        let is_key = known.get(section).is_some_and(|keys| keys.iter().any(|known| known == key));
        return is_key.then(|| format!("write {}", set(name)));
    }
    if known.contains_key(name) {
        return Some(format!("it is a section of the recipe; write its keys as in --set {name}.KEY=VALUE"));
    }
    if let Some(section) = home(name) {
        return Some(format!("write {}", set(&path_of(section, name))));
    }
    Some(match other_names::key(name) {
        Some(Answer::Key(path, None)) => format!("write {}", set(path)),
        Some(Answer::Key(path, Some(note))) => format!("write --set {path}=VALUE: {note}"),
        Some(Answer::Section(section)) => {
            format!("write the section [{section}] in the recipe, or its keys as in --set {section}.KEY=VALUE")
        }
        Some(Answer::NotYet(why)) => format!("not there yet: {why}"),
        Some(Answer::NotNeeded(why)) => format!("not needed: {why}"),
        None => {
            let key = nearest(name, known.values().flatten().map(String::as_str))?;
            format!("did you mean {}?", set(&path_of(home(key)?, key)))
        }
    })
}

/// Returns the most helpful advice about an unknown key: where it belongs, what it is called here, or the key it is a misspelling of.
fn hint(known: &KnownKeys, section: &str, key: &str, typed: &str) -> String {
    if let Some(answer) = other_names::key(key) {
        return if answer.is_off(typed) { OFF.to_owned() } else { answer.advice(section) };
    }
    if (section, key) == ("", "bf16") {
        return "it belongs in [train], as true or false; or write compute = \"auto\", \"bfloat16\" or another format here".to_owned();
    }
    // If several sections have the key, the one of [train] is most likely meant.
    let has_it =
        |name: &str| name != section && known.get(name).is_some_and(|keys| keys.iter().any(|known| known == key));
    let sections = ["train"].into_iter().chain(known.keys().map(String::as_str));
    let here = &known[section];
    match (sections.into_iter().find(|name| has_it(name)), nearest(key, here.iter().map(String::as_str))) {
        (Some(""), _) => {
            format!(
                "it belongs at the top of the file, before the first [section] (on the command line `--set {key}=…`)"
            )
        }
        (Some(home), _) => format!("it belongs in [{home}]"),
        (None, Some(nearest)) => format!("did you mean '{nearest}'?"),
        (None, None) => format!("known keys are {}", here.join(", ")),
    }
}

/// Reads the sections and their keys out of the schema.
pub fn known_keys() -> KnownKeys {
    let schema = schema();
    let keys_of = |of: &Value| properties(of).map(|(key, _)| key.to_owned()).collect::<Vec<_>>();
    let mut known = KnownKeys::from([(String::new(), keys_of(&schema))]);
    for (name, value) in properties(&schema) {
        let keys = reference(value).and_then(|pointer| schema.pointer(pointer)).map(keys_of);
        if let Some(keys) = keys.filter(|keys| !keys.is_empty()) {
            known.insert(name.to_owned(), keys);
        }
    }
    known
}

pub(super) fn properties(of: &Value) -> impl Iterator<Item = (&str, &Value)> {
    of["properties"].as_object().into_iter().flatten().map(|(key, value)| (key.as_str(), value))
}

/// Returns the JSON pointer that a property refers to, directly or as one of several.
pub(super) fn reference(value: &Value) -> Option<&str> {
    let direct = |value: &'_ Value| value.get("$ref").is_some();
    let holder = if direct(value) {
        Some(value)
    } else {
        ["anyOf", "allOf"].iter().filter_map(|key| value.get(key)?.as_array()?.iter().find(|one| direct(one))).next()
    };
    holder?.get("$ref")?.as_str()?.strip_prefix('#')
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;

    /// Writes the file instead of comparing it if UPDATE_GOLDEN=1.
    #[test]
    fn schema_in_docs_is_the_schema_of_the_code() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/config.schema.json");
        if std::env::var_os("UPDATE_GOLDEN").is_some() {
            fs::write(&path, json_schema()).unwrap();
        }
        let kept = fs::read_to_string(&path).unwrap_or_default();
        assert_eq!(kept, json_schema(), "run this test once with UPDATE_GOLDEN=1 to write {}", path.display());
    }

    #[test]
    fn known_keys_hold_every_section() {
        let sections: Vec<_> = known_keys().into_keys().collect();
        let expected = " best bnb_4bit checkpoint data eval grpo lora mlflow preference train wandb";
        assert_eq!(sections.join(" "), expected, "the first is the top of the file");
    }

    #[test]
    fn names_of_other_trainers_lead_to_keys_and_sections_that_exist() {
        let known = known_keys();
        let names: Vec<_> = other_names::names().collect();
        let ours = known.values().flatten().find(|key| other_names::key(key).is_some());
        assert!(names.len() >= 800 && ours.is_none(), "{} names, {ours:?} is a key here", names.len());
        for (name, answer) in names {
            let (section, key) = match answer {
                Answer::Key(path, _) => path.split_once('.').unwrap_or(("", path)),
                Answer::Section(section) => (section, ""),
                Answer::NotYet(_) | Answer::NotNeeded(_) => continue,
            };
            let keys = known.get(section).unwrap_or_else(|| panic!("{name} leads to [{section}], which is no section"));
            assert!(key.is_empty() || keys.iter().any(|known| known == key), "{name} leads to {section}.{key}");
        }
    }

    #[test]
    fn hints_lead_to_the_right_section_and_never_to_another_meaning() {
        let known = known_keys();
        let cases = [
            ("train", "lr", "here it is 'learning_rate'"),
            ("train", "lora_r", "here it is 'r' in [lora]"),
            ("", "num_epochs", "here it is 'epochs' in [train]"),
            ("", "micro_batch_size", "it belongs in [train]"),
            ("train", "eval_steps", "here it is 'every_steps' in [eval]"),
            ("", "eval_steps", "here it is 'every_steps' in [eval]"),
            ("", "peft_use_dora", "here it is 'use_dora' in [lora]"),
            ("train", "fp16", "'compute' at the top of the file"),
            ("train", "fp8", "write compute = \"fp8\""),
            ("data", "dataset_text_field", "here it is 'fields'"),
            ("train", "gradient_clipping", "here it is 'max_grad_norm'"),
            ("", "load_in_4bit", "write the section [bnb_4bit]"),
            ("", "adapter", "'mode'"),
            ("", "rl", "'loss' in [preference]"),
            ("train", "rpo_alpha", "it belongs in [preference]"),
            ("bnb_4bit", "bnb_4bit_quant_type", "here it is 'quant_type'"),
            ("train", "max_seq_length", "here it is 'max_seq_len' at the top of the file"),
            ("", "val_set_size", "here it is 'eval_fraction' in [data]"),
            ("", "lora_dropout", "here it is 'dropout' in [lora]"),
            ("train", "loraplus_lr_ratio", "it belongs in [lora]"),
            ("", "lora_modules_to_save", "here it is 'modules_to_save' in [lora]"),
            ("", "flash_attention", "not needed"),
            ("train", "learning_rates", "did you mean 'learning_rate'?"),
            ("", "trian", "did you mean 'train'?"),
            ("checkpoint", "quux", "known keys are"),
        ];
        for (section, key, expected) in cases {
            let hint = hint(&known, section, key, "true");
            assert!(hint.contains(expected), "[{section}] {key}: {hint}");
        }
    }

    #[test]
    fn an_option_that_is_a_key_is_answered_with_its_override() {
        let cases = [
            ("learning_rate", Some("1e-4"), "write --set train.learning_rate=1e-4"),
            ("output_dir", None, "write --set output_dir=VALUE"),
            ("train.steps", Some("5"), "write --set train.steps=5"),
            ("num_train_epochs", Some("3"), "write --set train.epochs=3"),
            ("per_device_train_batch_size", Some("2"), "write --set train.micro_batch_size=2"),
            ("r", Some("8"), "write --set lora.r=8"),
            ("load_in_4bit", None, "--set bnb_4bit.KEY=VALUE"),
            ("train_on_inputs", None, "write --set data.train_on=VALUE: true is"),
            ("lora", None, "it is a section of the recipe"),
            ("deepspeed", Some("ds.json"), "train.zero_stage"),
            ("neftune_noise_alpha", None, "not there yet: "),
            ("learning_rat", Some("1e-4"), "did you mean --set train.learning_rate=1e-4?"),
        ];
        for (name, value, part) in cases {
            let said = instead_of_option(name, value).unwrap_or_default();
            assert!(said.contains(part), "{name}: {said}");
        }
        assert_eq!(instead_of_option("quux", None), None);
    }

    #[test]
    fn every_key_is_described_with_its_default() {
        let schema = schema();
        let mut described = 0;
        let mut sections = vec![schema.clone()];
        sections.extend(schema["$defs"].as_object().unwrap().values().cloned());
        for section in sections {
            for (key, value) in properties(&section) {
                assert!(value["description"].as_str().is_some_and(|text| text.len() > 10), "{key} has no description");
                described += 1;
            }
        }
        assert!(described > 40, "only {described} keys");
    }
}
