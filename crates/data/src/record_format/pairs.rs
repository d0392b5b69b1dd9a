//! Records of a question and an answer: Alpaca's instruction, optional input and output, with an optional system message and
//! earlier turns (`history`, a list of `[question, answer]`, as in LLaMA-Factory); and a prompt with its completion, two
//! strings or two lists of messages.
//!
//! Trade-off: the sentence that the Alpaca project wrote before every instruction is there only as the format `alpaca_prompt`. With a chat template it
//! is foreign to the model, and without one the headings say the same.

use serde_json::Value as Json;

use super::fields::Fields;
use super::messages::{parse_extras, parse_list};
use super::row::{Chat, Row, Turn};
use super::value::{Parsed, Reader, list, text, wrong_type};

pub(crate) fn parse_instruction(record: Reader<'_>, names: &Fields) -> Parsed<Chat> {
    let mut chat = parse_question(record, names, &names.instruction)?;
    chat.turns.push(Turn::new("assistant", &record.need_text(&names.output)?));
    parse_extras(record, names, &mut chat)?;
    Ok(chat)
}

/// Parses the part before the answer to an instruction: system message, earlier turns, and the instruction, under the key `question`.
pub(crate) fn parse_question(record: Reader<'_>, names: &Fields, question: &str) -> Parsed<Chat> {
    let mut chat = Chat::default();
    if let Some(system) = record.text(&names.system)?.filter(|system| !system.is_empty()) {
        chat.turns.push(Turn::new("system", &system));
    }
    let history = match record.get("history") {
        Some(history) => list(history, "history", "a list of [question, answer]", record.place)?,
        None => &[],
    };
    for (index, pair) in history.iter().enumerate() {
        let key = format!("history[{index}]");
        let Some([question, answer]) = pair.as_array().map(Vec::as_slice) else {
            return Err(wrong_type(record.place, &key, "a list of a question and an answer", pair));
        };
        for (number, role, content) in [(0, "user", question), (1, "assistant", answer)] {
            chat.turns.push(Turn::new(role, &text(content, &format!("{key}[{number}]"), record.place)?));
        }
    }
    let instruction = record.need_text(question)?;
    let input = if names.input == question { None } else { record.text(&names.input)? };
    let question = match input.filter(|input| !input.is_empty()) {
        Some(input) if instruction.is_empty() => input.into_owned(),
        Some(input) => format!("{instruction}\n{input}"),
        None => instruction.into_owned(),
    };
    chat.turns.push(Turn::new("user", &question));
    Ok(chat)
}

/// Parses an instruction as the prompt of the Alpaca project. The text is that of axolotl's `type: alpaca`; the tokens can differ where prompt and
/// output meet, because both are tokenized as one text.
pub(crate) fn parse_alpaca_prompt(record: Reader<'_>, names: &Fields) -> Parsed<Row> {
    let instruction = record.need_text(&names.instruction)?;
    let input = record.text(&names.input)?.filter(|input| !input.is_empty() && names.input != names.instruction);
    let (paired, input) = match input {
        Some(input) => (", paired with an input that provides further context", format!("### Input:\n{input}\n\n")),
        None => ("", String::new()),
    };
    let prompt = format!(
        "Below is an instruction that describes a task{paired}. Write a response that appropriately completes the request.\n\n\
         ### Instruction:\n{instruction}\n\n{input}### Response:\n"
    );
    Ok(Row::PromptCompletion { prompt, completion: record.need_text(&names.output)?.into_owned() })
}

pub(crate) fn parse_prompt(record: Reader<'_>, names: &Fields) -> Parsed<Row> {
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
            prompt: record.need_text(&names.prompt)?.into_owned(),
            completion: record.need_text(&names.completion)?.into_owned(),
        }),
    }
}

/// Writes a conversation under plain headings, for tokenizers without a chat template, as prompt and completion.
///
/// `None` if it is more than an optional system message, a question and an answer.
pub(crate) fn headed_text(chat: &Chat) -> Option<(String, String)> {
    let roles: Vec<&str> = chat.turns.iter().map(Turn::role).collect();
    let (system, question, answer) = match (roles.as_slice(), chat.turns.as_slice()) {
        (["user", "assistant"], [question, answer]) => (None, question, answer),
        (["system", "user", "assistant"], [system, question, answer]) => (Some(system), question, answer),
        _ => return None,
    };
    let system = system.and_then(Turn::content).map(|text| format!("{text}\n\n")).unwrap_or_default();
    let prompt = format!("{system}### Instruction:\n{}\n\n### Response:\n", question.content()?);
    Some((prompt, answer.content()?.to_owned()))
}
