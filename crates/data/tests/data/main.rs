//! The guarantees of the crate, tested through its public interface, and a small tokenizer for these tests.
//!
//! Trade-off: the tokenizer is written to a folder for each test, like a model's. The words of recipes are repeated here, so that renaming a variant
//! is noticed.

mod containers;
mod corpus;
mod encoder;
mod record_formats;
mod tables;
mod template_golden;

use std::fmt::Debug;
use std::fs::{copy, write};
use std::path::Path;

use firebrick_data::{FileFormat, Mix, MixUntil, OverflowPolicy, RecordFormat, TextDocument, Tokenizer, TrainOn};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value as Json, json};
use tempfile::TempDir;

pub(crate) const TEMPLATE: &str = "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}\
    {{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}";

/// Returns the `tokenizer_config.json` of a tokenizer that adds a beginning-of-text token and pads with the end-of-text token.
pub(crate) fn config() -> Json {
    json!({ "bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>", "add_bos_token": true })
}

/// Returns the tokenizer of a folder of the goldens with a template and a configuration.
pub(crate) fn tokenizer(golden: &str, template: Option<&str>, config: &Json) -> Tokenizer {
    let folder = TempDir::new().unwrap();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(golden).join("tokenizer.json");
    copy(golden, folder.path().join("tokenizer.json")).unwrap();
    write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    if let Some(template) = template {
        write(folder.path().join("chat_template.jinja"), template).unwrap();
    }
    Tokenizer::from_folder(folder.path()).unwrap()
}

fn accepts_exactly<T: DeserializeOwned + Serialize + Debug>(words: &[&str]) {
    for &word in words {
        let value: T = serde_json::from_value(Json::from(word)).unwrap();
        assert_eq!(serde_json::to_value(&value).unwrap(), word, "{value:?}");
    }
    let error = serde_json::from_value::<T>(Json::from("?")).unwrap_err().to_string();
    assert_eq!(error.matches('`').count(), 2 * words.len() + 2, "{error}");
}

#[test]
fn recipe_values_have_the_words_of_the_recipe() {
    accepts_exactly::<FileFormat>(&["parquet", "arrow", "jsonl", "json", "csv", "tsv", "text"]);
    let formats = ["auto", "chat", "sharegpt", "alpaca", "alpaca_prompt", "text", "prompt_completion", "pretokenized"];
    accepts_exactly::<RecordFormat>(&[&formats[..], &["preference", "prompt"]].concat());
    accepts_exactly::<TrainOn>(&["assistant", "last", "all", "flags"]);
    accepts_exactly::<OverflowPolicy>(&["truncate", "split", "drop"]);
    accepts_exactly::<Mix>(&["concatenate", "size", "weight"]);
    accepts_exactly::<MixUntil>(&["first", "all", "never"]);
    accepts_exactly::<TextDocument>(&["file", "line"]);
}

#[test]
fn defaults_are_those_of_the_recipe() {
    let found =
        (RecordFormat::default(), TrainOn::default(), Mix::default(), MixUntil::default(), TextDocument::default());
    let expected = (RecordFormat::Auto, TrainOn::Assistant, Mix::Concatenate, MixUntil::First, TextDocument::File);
    assert_eq!(found, expected);
}

#[cfg(feature = "schemars")]
#[test]
fn schemas_list_the_words_with_descriptions() {
    let schema = schemars::schema_for!(RecordFormat).to_value().to_string();
    for word in ["auto", "chat", "sharegpt", "prompt_completion", "Detected from the keys"] {
        assert!(schema.contains(word), "{word} is not in {schema}");
    }
}
