//! The enums that recipes use as values accept exactly the words of the recipe.
//!
//! Trade-off: the words are repeated here, so that renaming a variant is noticed.

use std::fmt::Debug;

use firebrick_data::{FileFormat, Mix, MixUntil, OverflowPolicy, RecordFormat, TextDocument, TrainOn};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value as Json;

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
    let formats = ["auto", "chat", "sharegpt", "alpaca", "text", "prompt_completion", "pretokenized", "preference"];
    accepts_exactly::<RecordFormat>(&formats);
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
