//! Sets for preference training: a prompt with a chosen and a rejected answer (DPO, ORPO). They are read if the recipe requests pairs, and refused by
//! name otherwise; KTO's sets, whose answers have a label each, are always refused.
//!
//! ```text
//! prompt                   chosen, rejected
//! prompt: text             texts: joined without a template, unless `fields` maps the prompt to the instruction; messages: the
//!                          prompt is the user's turn
//! prompt: messages         messages, one message, or text of the assistant
//! messages, conversations  the same (axolotl, LLaMA-Factory's sharegpt)
//! instruction, question    texts: turns of a chat, with input, system and history (LLaMA-Factory's alpaca, Intel, Argilla)
//! none                     whole conversations or texts: what both begin with is the prompt
//! ```
//!
//! A prompt next to whole conversations is already part of them, as in TRL. Trade-off: the form is recognized by the first record of a source.

use std::borrow::Cow;

use serde_json::Value as Json;

use super::fields::{Fields, MESSAGE_KEYS};
use super::messages::{self, parse_extras, parse_list, parse_message};
use super::pairs::parse_question;
use super::row::{ASSISTANT, Chat, Object, Row, Turn};
use super::value::{Parsed, Reader, RecordFormatError, bad_value, is_text, missing_key, text, wrong_type};
use crate::source::RecordPlace;

/// Keys of KTO sets that say whether the answer is good.
const LABELS: [&str; 2] = ["label", "kto_tag"];
/// Keys of a record that has an answer.
const ANSWERS: [&str; 6] = ["messages", "conversations", "completion", "output", "response", "answer"];
/// Keys of a question that has no key named in `fields`; the first is its usual name.
const QUESTIONS: [&str; 4] = ["instruction", "question", "query", "input"];

/// Refuses a record with chosen and rejected answers, unless the recipe maps one of them; and a record whose answer has a label.
pub(super) fn refuse(fields: &Object, names: &Fields, place: &RecordPlace) -> Parsed<()> {
    let rejected =
        fields.keys().find(|key| key.starts_with("rejected") && is_of_pair(key) && !fields[*key].is_number());
    if let Some(key) = rejected
        && !names.all().any(is_of_pair)
    {
        let problem = format!(
            "the key {key:?} shows a set for preference training (DPO): its bad answers would be trained like the good ones. To train \
             on pairs, add the section [preference] (loss = \"dpo\" or \"orpo\"). {}",
            hint(fields, &key.replacen("rejected", "chosen", 1))
        );
        return Err(RecordFormatError::new(place, problem));
    }
    refuse_labels(fields, names, place)
}

fn refuse_labels(fields: &Object, names: &Fields, place: &RecordPlace) -> Parsed<()> {
    let has_answer = ANSWERS.into_iter().chain(names.messages.as_deref()).any(|key| fields.contains_key(key));
    match LABELS.into_iter().find(|key| matches!(fields.get(*key), Some(Json::Bool(_)))) {
        Some(key) if has_answer => {
            let problem = format!(
                "the key {key:?} shows a set for preference training (KTO), which is not supported yet: its bad answers would be \
                 trained like the good ones. To train on the good answers, make a file of the rows whose {key} is true; to train on \
                 all, leave the key out with `columns`"
            );
            Err(RecordFormatError::new(place, problem))
        }
        _ => Ok(()),
    }
}

fn is_of_pair(key: &str) -> bool {
    ["chosen", "rejected"].iter().any(|word| key == *word || key.starts_with(&format!("{word}_")))
}

/// Returns advice on training on the chosen answers alone, if a mapping of keys can express it.
fn hint(fields: &Object, chosen: &str) -> String {
    let is_whole = |turns: &[Json]| {
        let role = turns.first().and_then(|turn| turn.get("role").or(turn.get("from"))?.as_str());
        matches!(role, Some("user" | "system" | "human"))
    };
    let mapped = match fields.get(chosen) {
        Some(Json::Array(turns)) if is_whole(turns) => "messages",
        Some(Json::Array(_)) if fields.get("prompt").is_some_and(Json::is_array) => "completion",
        Some(Json::String(_)) if fields.contains_key("prompt") => "completion",
        _ => {
            return "To train on the chosen answers alone, append each to its messages in a file of its own".to_owned();
        }
    };
    format!("To train on the chosen answers alone, name their key: fields = {{ {mapped} = {chosen:?} }}")
}

/// Takes the names of the answers from the first record if they are common ones, and checks that there are two.
pub(super) fn resolve(fields: &Object, names: &mut Fields, place: &RecordPlace) -> Parsed<()> {
    for name in [&mut names.chosen, &mut names.rejected] {
        let alias = format!("{name}_response");
        if !fields.contains_key(name.as_str()) && fields.contains_key(&alias) {
            *name = alias;
        }
    }
    // A record that lacks one of them is counted, as later ones are.
    if fields.contains_key(&names.chosen) || fields.contains_key(&names.rejected) {
        return Ok(());
    }
    refuse_labels(fields, names, place)?;
    let expected = format!("{:?} and the key {:?}", names.chosen, names.rejected);
    let hint = "[preference] trains on pairs of answers: remove it to train on these records as they are, or map other names with \
                fields = { chosen = \"...\", rejected = \"...\" }";
    Err(missing_key(place, &expected, fields, hint))
}

pub(super) fn parse(record: Reader<'_>, names: &Fields) -> Parsed<Row> {
    let answers = [record.need(&names.chosen)?, record.need(&names.rejected)?];
    let are_lists = answers.map(Json::is_array);
    if are_lists[0] != are_lists[1] {
        let (key, expected) = match are_lists[0] {
            true => (&names.rejected, "a list of messages, as the chosen answer is"),
            false => (&names.chosen, "a list of messages, as the rejected answer is"),
        };
        return Err(wrong_type(record.place, key, expected, answers[usize::from(are_lists[0])]));
    }
    let [chosen, rejected] = match prompt(record, names)? {
        Some(Prompt::Text(text)) if answers.iter().all(|answer| is_text(answer)) => {
            texts(&text, answers, record, names)?
        }
        prompt => conversations(prompt, answers, record, names)?,
    };
    Ok(Row::Pair { chosen: Box::new(chosen), rejected: Box::new(rejected) })
}

pub(super) enum Prompt<'a> {
    /// Text to be joined with its answer, or the user's turn.
    Text(Cow<'a, str>),
    Chat(Chat),
}

/// Reads the prompt of a record, under any of its names.
pub(super) fn prompt<'a>(record: Reader<'a>, names: &Fields) -> Parsed<Option<Prompt<'a>>> {
    let of_messages = |key: &String| names.messages.as_ref() == Some(key) || MESSAGE_KEYS.contains(&key.as_str());
    if record.fields.iter().any(|(key, value)| of_messages(key) && !value.is_null()) {
        return messages::parse(record, names, false).map(|chat| Some(Prompt::Chat(chat)));
    }
    // A question that the recipe names is the user's turn, even if it is called `prompt`.
    let question = names.instruction.as_str();
    let is_question = |value: &Json| value.is_null() || is_text(value);
    if question != QUESTIONS[0] && record.fields.get(question).is_none_or(is_question) {
        return parse_question(record, names, question).map(|chat| Some(Prompt::Chat(chat)));
    }
    match record.get(&names.prompt) {
        Some(value) if is_text(value) => {
            return text(value, &names.prompt, record.place).map(|text| Some(Prompt::Text(text)));
        }
        Some(value) => {
            let turns = parse_list(value, &names.prompt, names, record.place)?;
            return Ok(Some(Prompt::Chat(Chat { turns, ..Chat::default() })));
        }
        None => {}
    }
    let has_text = |key: &&str| record.fields.get(*key).is_some_and(is_text);
    match [question].into_iter().chain(QUESTIONS).find(has_text) {
        Some(question) => Ok(Some(Prompt::Chat(parse_question(record, names, question)?))),
        None => Ok(None),
    }
}

/// Builds completions from texts that are joined without a template.
fn texts(prompt: &str, answers: [&Json; 2], record: Reader<'_>, names: &Fields) -> Parsed<[Row; 2]> {
    let row = |answer: &Json, key: &str| -> Parsed<Row> {
        let completion = text(answer, key, record.place)?.into_owned();
        Ok(Row::PromptCompletion { prompt: prompt.to_owned(), completion })
    };
    Ok([row(answers[0], &names.chosen)?, row(answers[1], &names.rejected)?])
}

fn conversations(
    prompt: Option<Prompt<'_>>,
    answers: [&Json; 2],
    record: Reader<'_>,
    names: &Fields,
) -> Parsed<[Row; 2]> {
    if prompt.is_none() && answers.iter().all(|answer| is_text(answer)) {
        return implicit_texts(answers, record, names);
    }
    let turns = |answer, key| answer_turns(answer, key, record, names);
    let [chosen, rejected] = [turns(answers[0], &names.chosen)?, turns(answers[1], &names.rejected)?];
    let is_whole = chosen.first().is_some_and(|turn| matches!(turn.role(), "system" | "user"));
    let mut chat = match prompt {
        // The prompt is already part of the conversations.
        _ if is_whole => Chat::default(),
        Some(Prompt::Chat(chat)) => chat,
        Some(Prompt::Text(text)) => Chat { turns: vec![Turn::new("user", &text)], ..Chat::default() },
        None => Chat::default(),
    };
    if chat.turns.iter().all(|turn| turn.role() != "system")
        && let Some(system) = record.text(&names.system)?.filter(|system| !system.is_empty())
        && chosen.first().is_none_or(|turn| turn.role() != "system")
    {
        chat.turns.insert(0, Turn::new("system", &system));
    }
    parse_extras(record, names, &mut chat)?;
    let common = common_turns(&chosen, &rejected);
    if chat.turns.iter().all(|turn| turn.role() == "system") && common == 0 {
        let problem = "and the rejected answer begin with different messages, and there is no prompt";
        let hint = "Write the prompt as `prompt` or `messages`, or into both conversations";
        return Err(without_prompt(record, names, problem, hint));
    }
    let whole = |answer: Vec<Turn>| {
        let mut chat = chat.clone();
        chat.prompt_turns = chat.turns.len() + common;
        chat.turns.extend(answer);
        Row::Chat(chat)
    };
    Ok([whole(chosen), whole(rejected)])
}

/// Creates the error for a record whose prompt cannot be found; only this record is bad.
fn without_prompt(record: Reader<'_>, names: &Fields, problem: &str, hint: &str) -> RecordFormatError {
    RecordFormatError { is_bad_cell: true, ..bad_value(record.place, &names.chosen, problem, hint) }
}

fn answer_turns(answer: &Json, key: &str, record: Reader<'_>, names: &Fields) -> Parsed<Vec<Turn>> {
    match answer {
        Json::Array(_) => parse_list(answer, key, names, record.place),
        Json::Object(_) => parse_message(answer, key, names, record.place).map(|turn| vec![turn]),
        value if is_text(value) => Ok(vec![Turn::new(ASSISTANT, &text(value, key, record.place)?)]),
        other => Err(wrong_type(record.place, key, "a text, a message or a list of messages", other)),
    }
}

/// Counts the messages that both conversations begin with; the last one of the shorter is never among them.
fn common_turns(chosen: &[Turn], rejected: &[Turn]) -> usize {
    let most = chosen.len().min(rejected.len()).saturating_sub(1);
    chosen.iter().zip(rejected).take(most).take_while(|(one, other)| one.message == other.message).count()
}

/// Splits whole texts: the prompt is what both begin with; a space before the answers belongs to them, as in TRL.
fn implicit_texts(answers: [&Json; 2], record: Reader<'_>, names: &Fields) -> Parsed<[Row; 2]> {
    let chosen = text(answers[0], &names.chosen, record.place)?;
    let rejected = text(answers[1], &names.rejected, record.place)?;
    let common = chosen.char_indices().zip(rejected.chars()).find(|((_, one), other)| one != other);
    let mut end = common.map_or(chosen.len().min(rejected.len()), |((at, _), _)| at);
    if chosen[..end].ends_with(' ') {
        end -= 1;
    }
    if end == 0 {
        let problem = "and the rejected answer begin with different characters, and there is no prompt";
        return Err(without_prompt(record, names, problem, "Write the prompt as `prompt`"));
    }
    let row = |text: &str| Row::PromptCompletion { prompt: text[..end].to_owned(), completion: text[end..].to_owned() };
    Ok([row(&chosen), row(&rejected)])
}
