//! The columns of prompts, which rewards see: read again from the sources, since token files have only tokens.
//!
//! Trade-off: they are in memory, some kilobytes per prompt.

use std::collections::HashMap;

use firebrick_data::{DataError, DocumentSet};
use serde_json::{Map, Value};

use crate::error::RunError;
use crate::grpo::reward::RewardSection;
use crate::run::prepare::data_sets::Input;

/// A prompt besides its tokens.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PromptColumns {
    /// A text, or messages.
    pub prompt: Value,
    /// All keys of its record; `answer` is the last answer of a conversation, if no key is called so.
    pub row: Map<String, Value>,
}

/// Reads the columns of each document.
pub fn columns(documents: &DocumentSet, inputs: &[Input]) -> Result<Vec<PromptColumns>, DataError> {
    let place = |document: usize| {
        let origin = documents.entry(document).origin;
        (origin.source, origin.file, origin.line)
    };
    let mut wanted: HashMap<_, Vec<usize>> = HashMap::new();
    (0..documents.len()).for_each(|document| wanted.entry(place(document)).or_default().push(document));
    let mut columns = vec![PromptColumns::default(); documents.len()];
    for (source, input) in inputs.iter().enumerate() {
        for record in input.source.records() {
            let record = match record {
                Err(error) if error.can_continue() => continue,
                record => record?,
            };
            let line = u32::try_from(record.place.line).unwrap_or(u32::MAX);
            for &document in wanted.get(&(source as u32, record.file, line)).into_iter().flatten() {
                columns[document] = of_record(record.fields.clone(), &input.options.fields.prompt);
            }
        }
    }
    Ok(columns)
}

/// Refuses a reward whose column has a value in no prompt of `source`, with its name and the columns that are there: nothing would be scored.
pub fn check_answers(rewards: &[RewardSection], prompts: &[PromptColumns], source: &str) -> Result<(), RunError> {
    let has_value = |column: &str| prompts.iter().any(|prompt| prompt.row.get(column).is_some_and(|it| !it.is_null()));
    let unscored = |reward: &&RewardSection| reward.answer.as_ref().is_some_and(|column| !has_value(column));
    let (Some(reward), Some(first)) = (rewards.iter().find(unscored), prompts.first()) else { return Ok(()) };
    let (name, column, columns) = (reward.name(), &reward.answer, first.row.keys().collect::<Vec<_>>());
    Err(RunError::Refused(format!(
        "grpo.rewards: reward '{name}': no record of {source} has a value in the column {:?}, so nothing would be scored; write answer = \
         \"...\" with a column of the first record: {columns:?}",
        column.as_deref().unwrap_or_default()
    )))
}

fn of_record(mut row: Map<String, Value>, key: &str) -> PromptColumns {
    let messages = ["messages", "conversations"].into_iter().find_map(|key| row.get(key)?.as_array().cloned());
    let is_answer = |message: &Value| {
        let role = message.get("role").or_else(|| message.get("from")).and_then(Value::as_str);
        matches!(role, Some("assistant" | "gpt"))
    };
    let prompt = match (row.get(key), messages) {
        (Some(prompt), _) => prompt.clone(),
        (None, Some(mut messages)) => {
            let mut answer = None;
            while let Some(message) = messages.pop_if(|message| is_answer(message)) {
                answer = message.get("content").or_else(|| message.get("value")).cloned();
            }
            if let Some(answer) = answer {
                row.entry("answer").or_insert(answer);
            }
            Value::Array(messages)
        }
        (None, None) => row.get("instruction").or_else(|| row.get("question")).cloned().unwrap_or_default(),
    };
    if let Some(output) = row.get("output").cloned() {
        row.entry("answer").or_insert(output);
    }
    PromptColumns { prompt, row }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_conversation_is_a_prompt_and_its_answer() {
        let row = json!({ "messages": [{ "role": "user", "content": "2 + 2" }, { "role": "assistant", "content": "4" }], "n": 1 });
        let found = of_record(row.as_object().unwrap().clone(), "prompt");
        assert_eq!(found.prompt, json!([{ "role": "user", "content": "2 + 2" }]));
        assert_eq!((found.row["answer"].clone(), found.row["n"].clone()), (json!("4"), json!(1)));
        let row = json!({ "prompt": "2 + 2 =", "answer": "4" });
        let found = of_record(row.as_object().unwrap().clone(), "prompt");
        assert_eq!((&found.prompt, &found.row["answer"]), (&json!("2 + 2 ="), &json!("4")));
    }
}
