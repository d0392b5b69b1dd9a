//! A prompt and its completion, as two strings or as two lists of messages.
//!
//! Not supported: a list for one and a string for the other.

use serde_json::Value as Json;

use super::fields::Fields;
use super::messages::{parse_extras, parse_list};
use super::row::{Chat, Row};
use super::value::{Reader, RecordFormatError, wrong_type};

/// Parses a prompt and its completion.
pub(crate) fn parse(record: Reader<'_>, names: &Fields) -> Result<Row, RecordFormatError> {
    let (prompt, completion) = (record.need(&names.prompt)?, record.need(&names.completion)?);
    match (prompt, completion) {
        (Json::Array(_), Json::Array(_)) => {
            let mut chat = Chat { turns: parse_list(prompt, &names.prompt, names, record.place)?, ..Chat::default() };
            chat.prompt_turns = chat.turns.len();
            chat.turns.extend(parse_list(completion, &names.completion, names, record.place)?);
            parse_extras(record, names, &mut chat)?;
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
