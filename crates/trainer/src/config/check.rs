//! Checks of a recipe: missing keys, values beyond their limits, and keys that exclude each other. The rules are in the files of the sections.
//!
//! Trade-off: only the first problem is reported.

use firebrick_hub::has_secrets;
use serde_json::Value;

use crate::config::error::ConfigError;
use crate::config::section::{Rule, rules};
use crate::config::source::{RIVALS, Source};
use crate::config::{
    RunConfig, compute, data_section, eval_section, grpo_section, preference_section, train_section, weights,
};

/// Refuses the recipe for the first problem found, with the place where it was typed.
pub(super) fn refuse_impossible(config: &RunConfig, source: &Source<'_>) -> Result<(), ConfigError> {
    refuse_missing(config, source)?;
    // Two keys for the same setting are refused, unless both are allowed as long as they agree.
    for (one, other, may_agree) in RIVALS {
        if !may_agree && source.is_typed(one) && source.is_typed(other) {
            let problem = format!("{other} is there too, and both keys decide the same thing; keep one of them");
            return Err(ConfigError::key(source.place(one), one, problem));
        }
    }
    // A password, or a query that may hold a token, would be saved with the run, in several files. The message does not repeat it.
    // Invariant: a RunConfig is plain strings, numbers, lists and tables, and JSON can hold all of them.
    let values = serde_json::to_value(config).expect("a RunConfig is always expressible as JSON");
    if let Some(key) = key_with_secret(&values, "") {
        let problem =
            "holds a user name, a password or a query, which would be saved with the run; write the address alone";
        let help = match key.as_str() {
            "mlflow.tracking_uri" => {
                ", and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN, in the environment"
            }
            _ => "",
        };
        return Err(ConfigError::key(source.place(&key), &key, format!("{problem}{help}")));
    }
    weights::refuse_missing_mode(config, source)?;
    let rules = [
        names(config),
        config.all_limits().iter().map(Rule::from).collect(),
        weights::rules(config, source),
        compute::agreement(config, source).into_iter().collect(),
        train_section::rules(config),
        data_section::rules(config),
        preference_section::rules(config),
        grpo_section::rules(config),
        eval_section::rules(config),
    ];
    for Rule { holds, key, problem, help } in rules.into_iter().flatten() {
        if !holds {
            let place = match grpo_section::bad_reward(config) {
                Some(index) if key == "grpo.rewards" => source.place_of_item("grpo", "rewards", index),
                _ => source.place(&key),
            };
            let help = if help.is_empty() { String::new() } else { format!("; {help}") };
            return Err(ConfigError::key(place, &key, format!("{problem}{help}")));
        }
    }
    Ok(())
}

/// Refuses a recipe without the keys that have no default: the model, and data to train on.
fn refuse_missing(config: &RunConfig, source: &Source<'_>) -> Result<(), ConfigError> {
    let names_data = !config.data.sources.is_empty() || source.is_typed("data.path");
    let (key, help) = if !source.is_typed("model") {
        ("model", "add `model = \"folder\"`: the folder with config.json, the safetensors and tokenizer.json")
    } else if !source.is_typed("data") {
        ("data", "add `[data]` and below it `path = \"train.jsonl\"`")
    } else if !names_data {
        let help =
            "add `path = \"train.jsonl\"`: the file, folder or Hub dataset to train on, or [[data.sources]] tables";
        ("data.path", help)
    } else {
        return Ok(());
    };
    let place = if key == "data.path" { source.place("data") } else { source.file_place() };
    Err(ConfigError::missing(place, key, help))
}

/// Returns the key of a URL with something secret. What a model reads may hold any URL.
fn key_with_secret(value: &Value, key: &str) -> Option<String> {
    match value {
        Value::String(text) => {
            let is_url = !text.trim().contains(char::is_whitespace)
                && !["prompt", "template"].iter().any(|part| key.contains(part));
            (is_url && has_secrets(text)).then(|| key.to_owned())
        }
        Value::Array(list) => list.iter().find_map(|value| key_with_secret(value, key)),
        Value::Object(map) => map.iter().find_map(|(name, value)| {
            key_with_secret(value, &if key.is_empty() { name.clone() } else { format!("{key}.{name}") })
        }),
        _ => None,
    }
}

fn names(config: &RunConfig) -> Vec<Rule> {
    let name = &config.name;
    let is_folder_name = !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\\', '\0']);
    rules! {
        "name": is_folder_name,
            "must be usable as a folder name" => "write a word such as \"llama-8b-qlora\"";
        "model": !config.model.is_empty(),
            "is empty" => "write the folder of the model";
        "output_dir": !config.output_dir.is_empty(),
            "is empty" => "write a folder such as \"runs\"";
        "wandb.project": config.wandb.as_ref().is_none_or(|section| !section.project.is_empty()),
            "is empty" => "write the name of a project, or leave the key out";
        "mlflow.tracking_uri": config.mlflow.as_ref().is_none_or(|server| server.tracking_uri.starts_with("http://") || server.tracking_uri.starts_with("https://")),
            "is no address of a server" =>
            "write the one that `mlflow server` prints, such as \"http://127.0.0.1:5000\"";
    }
}
