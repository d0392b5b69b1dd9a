//! The JSON schema of the recipe, for editors and for docs/config.schema.json, and the list of known keys derived from it.
//!
//! Trade-off: keys below a list such as `[[data.sources]]` are checked by serde, without a nearest key in the message.

use std::collections::BTreeMap;

use schemars::schema_for;
use serde_json::Value;

use crate::config::error::{ConfigError, nearest};
use crate::config::recipe::RunConfig;
use crate::config::source::Source;

/// The JSON schema (draft 2020-12) of a recipe, indented, with a newline at the end.
#[must_use]
pub fn json_schema() -> String {
    let mut text = format!("{:#}", schema_for!(RunConfig).to_value());
    text.push('\n');
    text
}

/// Keys by section; the keys outside of sections are under "".
type KnownKeys = BTreeMap<String, Vec<String>>;

/// Names of other trainers, and our key.
const OTHER_NAMES: [(&str, &str); 26] = [
    ("base_model", "model"),
    ("model_name_or_path", "model"),
    ("sequence_len", "max_seq_len"),
    ("max_length", "max_seq_len"),
    ("sample_packing", "pack"),
    ("packing", "pack"),
    ("lr", "learning_rate"),
    ("lr_scheduler", "schedule"),
    ("lr_scheduler_type", "schedule"),
    ("num_epochs", "epochs"),
    ("num_train_epochs", "epochs"),
    ("max_steps", "steps"),
    ("batch_size", "micro_batch_size"),
    ("per_device_train_batch_size", "micro_batch_size"),
    ("gradient_accumulation_steps", "gradient_accumulation"),
    ("gradient_checkpointing", "grad_checkpointing"),
    ("optim", "optimizer"),
    ("logging_steps", "log_every"),
    ("save_steps", "every_steps"),
    ("eval_steps", "every_steps"),
    ("save_total_limit", "keep"),
    ("lora_r", "r"),
    ("lora_alpha", "alpha"),
    ("target_modules", "target"),
    ("rslora", "use_rslora"),
    ("use_double_quant", "double_quant"),
];

/// Refuses a key that is not in the schema, and a section that is not a table.
pub(super) fn refuse_unknown_keys(source: &Source<'_>) -> Result<(), ConfigError> {
    let known = known_keys();
    let mut entries: Vec<_> = source.entries().iter().collect();
    entries.sort_by_key(|entry| entry.key_span.start);
    for entry in entries {
        let (section, key) = entry.path.split_once('.').unwrap_or(("", &entry.path));
        if key.contains('.') {
            continue; // Below a key that takes no table: its type is refused when it is read.
        }
        if section.is_empty() && known.contains_key(key) {
            if !entry.is_table {
                return Err(ConfigError::WrongType {
                    place: source.place_of(&entry.key_span),
                    key: key.to_string(),
                    expected: format!("a table of keys: write [{key}] on a separate line and the keys below it"),
                    got: entry.type_name.to_string(),
                });
            }
        } else if known.get(section).is_some_and(|keys| !keys.iter().any(|known| known == key)) {
            return Err(ConfigError::UnknownKey {
                place: source.place_of(&entry.key_span),
                key: key.to_string(),
                section: in_section(section),
                hint: hint(&known, section, key),
            });
        }
    }
    Ok(())
}

/// "in `[train]`", "at the top of the file".
fn in_section(section: &str) -> String {
    if section.is_empty() { "at the top of the file".to_string() } else { format!("in [{section}]") }
}

/// The most helpful advice about an unknown key.
fn hint(known: &KnownKeys, section: &str, key: &str) -> String {
    let here = &known[section];
    let ours = OTHER_NAMES.iter().find(|(other, _)| *other == key).map_or(key, |(_, ours)| ours);
    if ours != key && here.iter().any(|known| known == ours) {
        return format!("did you mean '{ours}'?");
    }
    // A key that several sections have is most likely the one of [train].
    let has_it = |name: &str| name != section && known[name].iter().any(|known| known == ours);
    let sections = ["train"].into_iter().chain(known.keys().map(String::as_str));
    let elsewhere = sections.into_iter().find(|name| has_it(name));
    match (elsewhere, nearest(key, here.iter().map(String::as_str))) {
        (Some(home), _) if ours == key && home.is_empty() => {
            format!(
                "it belongs at the top of the file, before the first [section] (on the command line `--set {key}=…`)"
            )
        }
        (Some(home), _) if ours == key => format!("it belongs in [{home}]"),
        (Some(home), None) => format!("did you mean '{ours}' {}?", in_section(home)),
        (_, Some(nearest)) => format!("did you mean '{nearest}'?"),
        (None, None) => format!("known keys are {}", here.join(", ")),
    }
}

/// Reads the sections and their keys out of the schema.
fn known_keys() -> KnownKeys {
    let schema = schema_for!(RunConfig).to_value();
    let properties = |of: &Value| -> Vec<(String, Value)> {
        let map = of.get("properties").and_then(Value::as_object);
        map.into_iter().flatten().map(|(key, value)| (key.clone(), value.clone())).collect()
    };
    let mut known = KnownKeys::new();
    for (key, value) in properties(&schema) {
        known.entry(String::new()).or_default().push(key.clone());
        let section = reference(&value).and_then(|pointer| schema.pointer(pointer)).map(properties);
        if let Some(keys) = section.filter(|keys| !keys.is_empty()) {
            known.insert(key, keys.into_iter().map(|(key, _)| key).collect());
        }
    }
    known
}

/// The JSON pointer that a property refers to, directly or as one of several.
fn reference(value: &Value) -> Option<&str> {
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

    /// UPDATE_GOLDEN=1 writes the file instead of comparing.
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
        let known = known_keys();
        for section in ["", "bnb_4bit", "lora", "data", "train", "eval", "checkpoint"] {
            assert!(known.contains_key(section), "{section} is missing in {known:?}");
        }
        assert_eq!(known.len(), 7);
    }

    #[test]
    fn names_of_other_trainers_lead_to_ours() {
        let known = known_keys();
        for (other, ours) in OTHER_NAMES {
            assert!(known.values().flatten().any(|key| key == ours), "{ours} is no key");
            assert!(known.values().flatten().all(|key| key != other), "{other} is a key of ours");
        }
        assert_eq!(hint(&known, "train", "lr"), "did you mean 'learning_rate'?");
        assert_eq!(hint(&known, "train", "lora_r"), "did you mean 'r' in [lora]?");
        assert_eq!(hint(&known, "", "num_epochs"), "did you mean 'epochs' in [train]?");
    }

    #[test]
    fn every_key_is_described_with_its_default() {
        let schema = schema_for!(RunConfig).to_value();
        let mut described = 0;
        let mut sections = vec![schema.clone()];
        sections.extend(schema["$defs"].as_object().unwrap().values().cloned());
        for section in sections {
            for (key, value) in section.get("properties").and_then(Value::as_object).into_iter().flatten() {
                assert!(value["description"].as_str().is_some_and(|text| text.len() > 10), "{key} has no description");
                described += 1;
            }
        }
        assert!(described > 40, "only {described} keys");
    }
}
