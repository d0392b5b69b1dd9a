//! What keys of a config.json mean, what absent ones mean, and which are refused with which words: tables in JSON, and what reads them.
//!
//! `defaults.json` is transformers', written by `tests/golden/make_config_defaults.py`; the others are written by hand. A row of those is a family,
//! changes to the keys of a tiny model, and what is expected.

mod reading;

use std::path::Path;

use firebrick_arch::{ArchError, FAMILIES, Family, ModelConfig};
use serde_json::{Map, Value, from_str, json};

use reading::reading;

/// Family, changed keys, and expected readings: by their path in the spec, where `*` is each entry of a list.
type Reading = (String, Map<String, Value>, Map<String, Value>);

fn parse(config: &Value) -> Result<ModelConfig, ArchError> {
    ModelConfig::parse(&config.to_string(), Path::new("m/config.json"))
}

fn tiny(model_type: &str, changes: Map<String, Value>) -> Result<ModelConfig, ArchError> {
    let family = FAMILIES.iter().find(|family| family.model_type == model_type).unwrap();
    let mut config = json!({
        "architectures": [family.architecture], "model_type": model_type, "hidden_act": "silu", "vocab_size": 11,
        "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 64
    });
    config.as_object_mut().unwrap().extend(changes);
    parse(&config)
}

#[test]
fn absent_keys_mean_what_transformers_writes_in_their_place() {
    let defaults: Value = from_str(include_str!("defaults.json")).unwrap();
    let rows = defaults["rows"].as_array().unwrap();
    for row in rows {
        let read = |config: &Value| parse(config).unwrap_or_else(|error| panic!("{error}: {config}"));
        let [given, whole] = [read(&row["given"]), read(&row["whole"])];
        let others = |config: &ModelConfig| (config.dtype.clone(), config.router_aux_loss_coef, config.wrapper);
        assert_eq!((&given.spec, others(&given)), (&whole.spec, others(&whole)), "{}", row["given"]);
    }
    let is_there = |family: &Family| rows.iter().any(|row| row["whole"]["model_type"] == family.model_type);
    assert!(FAMILIES.iter().all(is_there), "a family has no row");
}

#[test]
fn keys_mean_what_the_table_says() {
    let rows: Vec<Reading> = from_str(include_str!("readings.json")).unwrap();
    for (family, changes, expected) in rows {
        let shown = format!("{family} {}", Value::from(changes.clone()));
        let spec = tiny(&family, changes).unwrap_or_else(|error| panic!("{shown}: {error}")).spec;
        for (path, expected) in expected {
            assert_eq!(reading(&spec, &path), expected, "{shown}: {path}");
        }
    }
}

#[test]
fn what_cannot_be_computed_is_refused_with_the_words_of_the_table() {
    let rows: Vec<Vec<Value>> = from_str(include_str!("refusals.json")).unwrap();
    for row in rows {
        let [family, changes, parts @ ..] = &row[..] else { panic!("{row:?}") };
        let read = tiny(family.as_str().unwrap(), changes.as_object().unwrap().clone());
        // A part may end with the line break, and so be the end of the message.
        let message = format!("{}\n", read.err().unwrap_or_else(|| panic!("{family} {changes} is read")));
        assert!(message.starts_with("`m/config.json`"), "{message}");
        for part in parts {
            assert!(message.contains(part.as_str().unwrap()), "{family} {changes}: {message}");
        }
    }
}
