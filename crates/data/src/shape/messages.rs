//! Conversations: OpenAI's `messages`, ShareGPT's `conversations`, tools, calls of tools, training flags.
//!
//! A message keeps every key that it has, because templates differ in what they read; nulls go, as in transformers.
//! Gives up images and sound: a message's parts must be texts.

use serde_json::Value as Json;

use crate::error::Place;
use crate::shape::value::{Object, Reader, list, names, string, wrong_type};
use crate::shape::{Chat, Fields, MESSAGE_KEYS, ShapeError, Turn};

/// Keys of a message that say whether it is trained: a boolean, or a weight of 0 or 1 (OpenAI).
const TRAIN_KEYS: [&str; 4] = ["train", "training", "trained", "weight"];
/// What a message may have instead of a content.
const OTHER_CONTENT: [&str; 5] = ["tool_calls", "function_call", "reasoning_content", "thinking", "reasoning"];

/// Reads a conversation.
pub(crate) fn parse(record: Reader<'_>, names: &Fields, sharegpt: bool) -> Result<Chat, ShapeError> {
    let key = match &names.messages {
        Some(key) => key.as_str(),
        None => {
            let present = |key: &&&str| record.has(key);
            MESSAGE_KEYS.iter().find(present).copied().unwrap_or(MESSAGE_KEYS[usize::from(sharegpt)])
        }
    };
    let turns = parse_list(record.need(key)?, key, names, record.place)?;
    let mut chat = Chat { turns, ..Chat::default() };
    if let Some(system) = record.string(&names.system)?
        && !system.is_empty()
        && chat.turns.first().is_none_or(|turn| turn.role() != "system")
    {
        chat.turns.insert(0, Turn::new("system", system));
    }
    read_beside(record, names, &mut chat)?;
    Ok(chat)
}

/// What stands beside the messages: tools, documents, variables for the template.
pub(crate) fn read_beside(record: Reader<'_>, names: &Fields, chat: &mut Chat) -> Result<(), ShapeError> {
    chat.tools = record.objects(&names.tools, "a list of tools, or a JSON string that holds one")?;
    chat.documents = record.objects("documents", "a list of documents")?;
    if let Some(arguments) = record.get("chat_template_kwargs") {
        let Json::Object(arguments) = arguments else {
            return Err(wrong_type(record.place, "chat_template_kwargs", "an object", arguments));
        };
        chat.arguments = arguments.clone();
    }
    Ok(())
}

/// Reads a list of messages; `key` names it in errors.
pub(crate) fn parse_list(value: &Json, key: &str, names: &Fields, place: &Place) -> Result<Vec<Turn>, ShapeError> {
    let messages = list(value, key, "a list of messages", place)?;
    let parse = |(index, message)| parse_message(message, &format!("{key}[{index}]"), names, place);
    messages.iter().enumerate().map(parse).collect()
}

fn parse_message(message: &Json, key: &str, names: &Fields, place: &Place) -> Result<Turn, ShapeError> {
    let Json::Object(fields) = message else {
        return Err(wrong_type(place, key, "an object with \"role\" and \"content\"", message));
    };
    let role_key = pick(fields, names.role.as_deref(), ["role", "from"]);
    let content_key = pick(fields, names.content.as_deref(), ["content", "value"]);
    let role_path = format!("{key}.{role_key}");
    let said = string(need(fields, role_key, key, place)?, &role_path, place)?;
    let role = template_role(said, names);
    if role.is_empty() {
        return Err(bad(place, &role_path, "is empty".to_owned(), "Say who speaks: system, user, assistant or tool"));
    }
    let speaks_otherwise = OTHER_CONTENT.iter().any(|key| fields.get(*key).is_some_and(|value| !value.is_null()));
    if !speaks_otherwise {
        string_or_parts(need(fields, content_key, key, place)?, &format!("{key}.{content_key}"), place)?;
    }
    let mut turn = Turn { message: Object::new(), trained: None };
    // In the record's order, which `{{ message | tojson }}` shows.
    for (name, value) in fields.iter().filter(|(_, value)| !value.is_null()) {
        let path = format!("{key}.{name}");
        let (name, value) = match name.as_str() {
            name if name == role_key => ("role", Json::from(role)),
            name if name == content_key => ("content", Json::from(string_or_parts(value, &path, place)?)),
            name if TRAIN_KEYS.contains(&name) => {
                turn.trained = Some(flag(value, &path, place)?);
                continue;
            }
            "tool_calls" => ("tool_calls", tool_calls(value, &path, place)?),
            name => (name, value.clone()),
        };
        turn.message.insert(name.to_owned(), value);
    }
    if matches!(said, "function_call" | "tool_call") {
        turn = call_of_text(turn);
    }
    Ok(turn)
}

/// The key of a message: the one that is named, or the first of the usual ones that it has.
fn pick<'a>(fields: &Object, named: Option<&'a str>, usual: [&'a str; 2]) -> &'a str {
    named.unwrap_or_else(|| usual.into_iter().find(|key| fields.contains_key(*key)).unwrap_or(usual[0]))
}

fn need<'a>(fields: &'a Object, name: &str, key: &str, place: &Place) -> Result<&'a Json, ShapeError> {
    fields.get(name).ok_or_else(|| ShapeError::MissingKey {
        place: place.clone(),
        expected: format!("{name:?} in {key}"),
        found: names(fields),
        hint: "Each message needs \"role\" and \"content\" (or \"from\" and \"value\")".to_owned(),
    })
}

/// The name that chat templates give to a role.
fn template_role<'a>(role: &'a str, names: &'a Fields) -> &'a str {
    if let Some(name) = names.roles.get(role) {
        return name;
    }
    match role {
        "human" => "user",
        "gpt" | "chatgpt" | "bot" | "bing" | "bard" | "function_call" | "tool_call" => "assistant",
        "observation" | "function_response" | "tool_response" | "tool_result" => "tool",
        role => role,
    }
}

/// The text of a content: a string, or parts that are texts, joined.
fn string_or_parts(content: &Json, key: &str, place: &Place) -> Result<String, ShapeError> {
    let Json::Array(parts) = content else { return string(content, key, place).map(str::to_owned) };
    let mut text = String::new();
    for (index, part) in parts.iter().enumerate() {
        let path = format!("{key}[{index}]");
        match part {
            Json::String(_) => text.push_str(string(part, &path, place)?),
            Json::Object(fields) => {
                let kind = fields.get("type").and_then(Json::as_str).unwrap_or("text");
                if kind != "text" {
                    let hint = "Only texts can be trained on; remove the part or the row";
                    return Err(bad(place, &path, format!("is a part of type {kind:?}"), hint));
                }
                let said = fields.get("text").unwrap_or(&Json::Null);
                text.push_str(string(said, &format!("{path}.text"), place)?);
            }
            other => return Err(wrong_type(place, &path, "a part like {\"type\": \"text\", \"text\": ...}", other)),
        }
    }
    Ok(text)
}

fn flag(value: &Json, key: &str, place: &Place) -> Result<bool, ShapeError> {
    match value {
        Json::Bool(flag) => Ok(*flag),
        Json::Number(weight) if weight.as_f64() == Some(0.0) => Ok(false),
        Json::Number(weight) if weight.as_f64() == Some(1.0) => Ok(true),
        Json::Number(weight) => {
            let hint = "A message is trained or not; write 0 or 1";
            Err(bad(place, key, format!("is the weight {weight}"), hint))
        }
        other => Err(wrong_type(place, key, "true, false, 0 or 1", other)),
    }
}

/// Calls of tools. OpenAI writes the arguments as a string of JSON; templates (and the servers that fill them) expect an
/// object, so such a string is parsed. One that is no JSON object stays a string.
fn tool_calls(value: &Json, key: &str, place: &Place) -> Result<Json, ShapeError> {
    let calls = list(value, key, "a list of tool calls", place)?;
    let read = |(index, call): (usize, &Json)| {
        let Json::Object(call) = call else {
            return Err(wrong_type(place, &format!("{key}[{index}]"), "an object", call));
        };
        let mut call = call.clone();
        match call.get_mut("function") {
            Some(Json::Object(function)) => parse_arguments(function),
            Some(other) => return Err(wrong_type(place, &format!("{key}[{index}].function"), "an object", other)),
            None => parse_arguments(&mut call),
        }
        Ok(Json::Object(call))
    };
    calls.iter().enumerate().map(read).collect()
}

fn parse_arguments(function: &mut Object) {
    if let Some(arguments) = function.get_mut("arguments")
        && let Some(Ok(parsed @ Json::Object(_))) = arguments.as_str().map(serde_json::from_str)
    {
        *arguments = parsed;
    }
}

/// ShareGPT's `function_call` says the call as JSON text: `{"name": ..., "arguments": ...}` or a list of such. A text that
/// is not that stays a text.
fn call_of_text(mut turn: Turn) -> Turn {
    let Some(Ok(said)) = turn.content().map(serde_json::from_str::<Json>) else { return turn };
    let calls = if let Json::Array(calls) = said { calls } else { vec![said] };
    let is_call = |call: &Json| call.get("name").is_some_and(Json::is_string) && call.get("arguments").is_some();
    if calls.is_empty() || !calls.iter().all(is_call) {
        return turn;
    }
    let wrap = |call: Json| {
        let Json::Object(mut function) = call else { unreachable!("checked above: a call is an object") };
        parse_arguments(&mut function);
        serde_json::json!({ "type": "function", "function": function })
    };
    turn.message.remove("content");
    turn.message.insert("tool_calls".to_owned(), calls.into_iter().map(wrap).collect());
    turn
}

fn bad(place: &Place, key: &str, problem: String, hint: &'static str) -> ShapeError {
    ShapeError::BadValue { place: place.clone(), key: key.to_owned(), problem, hint }
}
