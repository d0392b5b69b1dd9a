//! Prompts without an answer, which the model that is trained writes itself (GRPO).
//!
//! ```text
//! prompt: text             the text as it is, without a chat template
//! prompt: messages         the messages, then the assistant's header
//! messages, conversations  the same without the answer at their end
//! instruction, question    the user's turn, with input, system and history
//! ```
//!
//! All keys of the record are columns that rewards see.

use super::fields::Fields;
use super::messages::parse_extras;
use super::preference::{Prompt, prompt};
use super::row::{ASSISTANT, Row};
use super::value::{Parsed, Reader, missing_key};

pub(super) fn parse(record: Reader<'_>, names: &Fields) -> Parsed<Row> {
    let content = match prompt(record, names)? {
        Some(Prompt::Text(text)) => Row::Text(text.into_owned()),
        Some(Prompt::Chat(mut chat)) => {
            parse_extras(record, names, &mut chat)?;
            while chat.turns.last().is_some_and(|turn| turn.role() == ASSISTANT) {
                chat.turns.pop();
            }
            Row::Chat(chat)
        }
        None => {
            let expected = format!("{:?}, \"messages\" or {:?}", names.prompt, names.instruction);
            let hint = "[grpo] trains on prompts; map another name with fields = { prompt = \"...\" }";
            return Err(missing_key(record.place, &expected, record.fields, hint));
        }
    };
    Ok(Row::Prompt(Box::new(content)))
}
