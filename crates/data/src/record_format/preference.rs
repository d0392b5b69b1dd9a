//! Sets for preference training (DPO, KTO, ...), recognized by their keys and refused by name.
//!
//! Their records contain bad answers on purpose. Trade-off: recognized by the first record of a source.

use serde_json::Value as Json;

use super::fields::Fields;
use super::row::Object;
use super::value::RecordFormatError;
use crate::place::Place;

/// Keys of KTO sets: whether the answer is a good one.
const LABELS: [&str; 2] = ["label", "kto_tag"];
/// Keys of a record that has an answer.
const ANSWERS: [&str; 6] = ["messages", "conversations", "completion", "output", "response", "answer"];

/// Refuses a record with chosen and rejected answers, unless the recipe maps one of them; and one whose answer has a
/// label.
pub(super) fn refuse(fields: &Object, names: &Fields, place: &Place) -> Result<(), RecordFormatError> {
    let refused = |method, key: &str, hint: String| {
        let problem = format!(
            "the key {key:?} shows a set for preference training ({method}), which is not supported yet: its bad answers \
             would be trained like the good ones. {hint}"
        );
        Err(RecordFormatError { place: place.clone(), problem })
    };
    let is_of_pair =
        |key: &str| ["chosen", "rejected"].iter().any(|word| key == *word || key.starts_with(&format!("{word}_")));
    let rejected =
        fields.keys().find(|key| key.starts_with("rejected") && is_of_pair(key) && !fields[*key].is_number());
    if let Some(key) = rejected
        && !names.all().any(is_of_pair)
    {
        return refused("DPO", key, hint(fields, &key.replacen("rejected", "chosen", 1)));
    }
    let has_answer = ANSWERS.into_iter().chain(names.messages.as_deref()).any(|key| fields.contains_key(key));
    match LABELS.into_iter().find(|key| matches!(fields.get(*key), Some(Json::Bool(_)))) {
        Some(key) if has_answer => {
            let hint = format!(
                "To train on the good answers, make a file of the rows whose {key} is true; to train on all, leave the key out \
                 with `columns`"
            );
            refused("KTO", key, hint)
        }
        _ => Ok(()),
    }
}

/// How to train on the chosen answers alone, where a mapping of keys can express it.
fn hint(fields: &Object, chosen: &str) -> String {
    let mapped = match fields.get(chosen) {
        Some(Json::Array(_)) => "messages",
        Some(Json::String(_)) if fields.contains_key("prompt") => "completion",
        _ => {
            return "To train on the chosen answers alone, append each to its messages in a file of its own".to_owned();
        }
    };
    format!("To train on the chosen answers alone, name their key: fields = {{ {mapped} = {chosen:?} }}")
}
