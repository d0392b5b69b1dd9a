//! Tests extreme whole numbers in a recipe: each key of the schema, from 0 to the largest number of 64 bits, and all numbers between them with `cargo
//! xtask test --slow`.

use std::path::Path;
use std::time::{Duration, Instant};

use firebrick_hwprofile::{AcceleratorSpec, HardwareProfile};
use serde_json::Value;

use crate::config::{RunConfig, json_schema};
use crate::plan::fixtures::{TINY, full_rows, inputs, read_model};
use crate::plan::{DataShape, Plan, PlanInputs, PlanRequest};

/// A recipe that uses as many of its numbers as one recipe can.
const RECIPE: &str = "name='n'\nmodel='m'\nbackend='flex'\nmax_seq_len=64\n[lora]\nr=4\n[data]\npath='d'\neval_fraction=0.1\n\
                      [eval]\nexact_match_prompts=8\nprompts=['a']\n";

const VALUES: [u64; 9] = [0, 1, 1 << 10, 1 << 20, 1 << 24, 1 << 32, 1 << 53, i64::MAX as u64, u64::MAX];

/// Adds an override for each whole number below a node of the schema, with `#` in the place of the number.
fn collect(schema: &Value, node: &Value, path: &str, around: &str, found: &mut Vec<String>) {
    let inside = |part: &str| around.replace('#', part);
    if let Some(reference) = node.get("$ref").and_then(Value::as_str) {
        let target = schema.pointer(reference.trim_start_matches('#')).unwrap();
        collect(schema, target, path, around, found);
    }
    for one in ["anyOf", "oneOf"].into_iter().filter_map(|key| node.get(key)?.as_array()).flatten() {
        collect(schema, one, path, around, found);
    }
    for (key, value) in node.get("properties").and_then(Value::as_object).into_iter().flatten() {
        match path {
            "" => collect(schema, value, key, "#", found),
            // A source in a list must have a path.
            _ if around.contains('[') => {
                collect(schema, value, path, &inside(&format!("{{path='d', {key}=#}}")), found)
            }
            _ => collect(schema, value, &format!("{path}.{key}"), "#", found),
        }
    }
    if let Some(items) = node.get("items") {
        collect(schema, items, path, &inside("[#]"), found);
    }
    if let Some(values) = node.get("additionalProperties") {
        collect(schema, values, path, &inside("{q_proj=#}"), found);
    }
    let types = node.get("type").map(ToString::to_string).unwrap_or_default();
    if types.contains("\"integer\"") {
        found.push(format!("{path}={around}"));
    }
}

/// Reads the recipe with an override and plans it for a processor and for a card, with and without `--force`.
fn plan(set: &str) -> Result<(), String> {
    let config =
        RunConfig::from_toml(RECIPE, Path::new("r.toml"), &[set.to_owned()]).map_err(|error| error.to_string())?;
    let model = read_model(TINY);
    let data = DataShape { rows: 100, documents_per_row: 4, has_chats: true, ..full_rows(config.max_seq_len()) };
    let card = HardwareProfile::of_machine(AcceleratorSpec::named("h100").unwrap());
    for profile in [HardwareProfile::described(4, 8 << 30, Vec::new()), card] {
        for force in [false, true] {
            let request = PlanRequest { force, ..PlanRequest::default() };
            let inputs = PlanInputs { request: &request, ..inputs(&config, &profile, &model, &data) };
            let plan = Plan::resolve(inputs).map_err(|error| error.to_string());
            if let (Err(error), true) = (&plan, force) {
                return Err(error.clone());
            }
            let text = plan.map(|plan| format!("{plan}{}{}", plan.to_toml(), config.to_toml()));
            assert!(!text.as_ref().is_ok_and(|text| text.contains("NaN")), "{set}: {text:?}");
        }
    }
    Ok(())
}

#[test]
fn no_whole_number_of_a_recipe_panics_or_hangs_and_the_largest_of_each_key_is_refused() {
    let schema: Value = serde_json::from_str(&json_schema()).unwrap();
    let mut keys = Vec::new();
    collect(&schema, &schema, "", "#", &mut keys);
    for key in [
        "max_seq_len=#",
        "data.workers=#",
        "lora.r=#",
        "lora.rank_pattern={q_proj=#}",
        "data.sources=[{path='d', limit=#}]",
    ] {
        assert!(keys.iter().any(|found| found == key), "{key} is missing in {keys:?}");
    }
    assert!(keys.len() >= 27, "only {keys:?}");
    // The first and the last are always among them.
    let step = if std::env::var_os("FIREBRICK_SLOW_TESTS").is_some() { 1 } else { 2 };
    for key in keys {
        let began = Instant::now();
        for value in VALUES.into_iter().step_by(step) {
            let answer = plan(&key.replace('#', &value.to_string()));
            assert!(answer.is_err() || value < u64::MAX, "{key} takes {value}");
        }
        assert!(began.elapsed() < Duration::from_secs(10), "{key} takes {:?}", began.elapsed());
    }
}
