//! A prompt and its completion, as two strings or as two lists of messages.
//!
//! Gives up mixing the two: a list for one and a string for the other is refused.

use serde_json::Value as Json;

use crate::shape::messages::{parse_list, read_beside};
use crate::shape::value::{Reader, wrong_type};
use crate::shape::{Chat, Fields, Row, ShapeError};

/// Reads a prompt and its completion.
pub(crate) fn parse(record: Reader<'_>, names: &Fields) -> Result<Row, ShapeError> {
    let (prompt, completion) = (record.need(&names.prompt)?, record.need(&names.completion)?);
    match (prompt, completion) {
        (Json::Array(_), Json::Array(_)) => {
            let mut chat = Chat { turns: parse_list(prompt, &names.prompt, names, record.place)?, ..Chat::default() };
            chat.prompt_turns = chat.turns.len();
            chat.turns.extend(parse_list(completion, &names.completion, names, record.place)?);
            read_beside(record, names, &mut chat)?;
            Ok(Row::Chat(chat))
        }
        (Json::Array(_), other) => {
            Err(wrong_type(record.place, &names.completion, "a list of messages, as the prompt is", other))
        }
        _ => Ok(Row::PromptCompletion {
            prompt: record.need_string(&names.prompt)?.to_owned(),
            completion: record.need_string(&names.completion)?.to_owned(),
        }),
    }
}
