//! Conversations: OpenAI's `messages`, ShareGPT's `conversations`, tools, tool calls and training flags.
//!
//! A message keeps all its keys except nulls (as in transformers), because templates differ in what they read. Inside a value, too, a key that is
//! null is absent, as in tables; a JSON string keeps its nulls, because every file format keeps the string.
//!
//! Not supported: images and sound; the parts of a message must be texts.

use firebrick_arch::python_json;
use serde_json::Value as Json;

use super::fields::{Fields, MESSAGE_KEYS};
use super::row::{ASSISTANT, Chat, Object, Turn};
use super::value::{
    Parsed, Reader, bad_value, check_writable, list, missing_key, string, text, without_nulls, wrong_type,
};
use crate::source::RecordPlace;

/// Keys of a message that contain its training flag: a boolean, or a weight of 0 or 1 (OpenAI; `loss_weight` in LLaMA-Factory). An assistant's
/// message may also have it as `loss` (ms-swift).
const TRAIN_KEYS: [&str; 5] = ["train", "training", "trained", "weight", "loss_weight"];
/// Keys that a message may have instead of a content.
const OTHER_CONTENT: [&str; 5] = ["tool_calls", "function_call", "reasoning_content", "thinking", "reasoning"];

pub(crate) fn parse(record: Reader<'_>, names: &Fields, sharegpt: bool) -> Parsed<Chat> {
    let key = match &names.messages {
        Some(key) => key.as_str(),
        None => {
            let present = |key: &&&str| record.fields.get(**key).is_some_and(|value| !value.is_null());
            MESSAGE_KEYS.iter().find(present).copied().unwrap_or(MESSAGE_KEYS[usize::from(sharegpt)])
        }
    };
    let turns = parse_list(record.need(key)?, key, names, record.place)?;
    let mut chat = Chat { turns, ..Chat::default() };
    if let Some(system) = record.text(&names.system)?
        && !system.is_empty()
        && chat.turns.first().is_none_or(|turn| turn.role() != "system")
    {
        chat.turns.insert(0, Turn::new("system", &system));
    }
    parse_extras(record, names, &mut chat)?;
    Ok(chat)
}

/// Parses what accompanies the messages: tools, documents and template variables.
pub(crate) fn parse_extras(record: Reader<'_>, names: &Fields, chat: &mut Chat) -> Parsed<()> {
    let tools = record.objects(&names.tools, "a list of tools, or a JSON string that holds one")?;
    chat.tools = tools.map(|tools| tools.into_iter().map(wrap_tool).collect());
    chat.documents = record.objects("documents", "a list of documents")?;
    if let Some(arguments) = record.get("chat_template_kwargs") {
        check_writable(arguments, "chat_template_kwargs", record.place)?;
        let Json::Object(arguments) = without_nulls(arguments) else {
            return Err(wrong_type(record.place, "chat_template_kwargs", "an object", arguments));
        };
        chat.arguments = arguments;
    }
    Ok(())
}

/// Wraps the schema of a function in a tool, as servers pass it to templates, unless it is wrapped already; training then sees the same as serving.
fn wrap_tool(tool: Json) -> Json {
    let is_function = tool.get("name").is_some_and(Json::is_string) && tool.get("function").is_none();
    let is_typed = tool.get("type").is_some_and(|kind| kind != "function");
    if is_function && !is_typed { serde_json::json!({ "type": "function", "function": tool }) } else { tool }
}

/// Parses a list of messages; `key` names it in errors.
pub(crate) fn parse_list(value: &Json, key: &str, names: &Fields, place: &RecordPlace) -> Parsed<Vec<Turn>> {
    let messages = list(value, key, "a list of messages", place)?;
    let parse = |(index, message)| parse_message(message, &format!("{key}[{index}]"), names, place);
    messages.iter().enumerate().map(parse).collect()
}

/// Parses one message; `key` names it in errors.
pub(crate) fn parse_message(message: &Json, key: &str, names: &Fields, place: &RecordPlace) -> Parsed<Turn> {
    let Json::Object(fields) = message else {
        return Err(wrong_type(place, key, "an object with \"role\" and \"content\"", message));
    };
    let role_key = pick(fields, names.role.as_deref(), ["role", "from"]);
    let content_key = pick(fields, names.content.as_deref(), ["content", "value"]);
    let role_path = format!("{key}.{role_key}");
    let named_role = string(need(fields, role_key, key, place)?, &role_path, place)?;
    let role = template_role(named_role, names);
    if role.is_empty() {
        return Err(bad_value(place, &role_path, "is empty", "Write system, user, assistant or tool"));
    }
    let speaks_otherwise = OTHER_CONTENT.iter().any(|key| fields.get(*key).is_some_and(|value| !value.is_null()));
    if !speaks_otherwise {
        let content = need(fields, content_key, key, place)?;
        if content.is_null() {
            return Err(wrong_type(place, &format!("{key}.{content_key}"), "a string", content));
        }
    }
    let mut turn = Turn { message: Object::new(), train: None };
    // In the record's order, which `{{ message | tojson }}` prints.
    for (name, value) in fields.iter().filter(|(_, value)| !value.is_null()) {
        let path = format!("{key}.{name}");
        let (name, value) = match name.as_str() {
            name if name == role_key => ("role", Json::from(role)),
            name if name == content_key => {
                read_content(value, &path, place, &mut turn)?;
                continue;
            }
            // ms-swift's flag has a meaning only there.
            name if TRAIN_KEYS.contains(&name) || (name == "loss" && role == ASSISTANT) => {
                turn.train = Some(flag(value, &path, place)?);
                continue;
            }
            "tool_calls" => ("tool_calls", tool_calls(value, &path, place)?),
            name => (name, without_nulls(value)),
        };
        check_writable(&value, &path, place)?;
        turn.message.insert(name.to_owned(), value);
    }
    // ShareGPT's `function_call` holds the calls as JSON text. Any other text stays a text.
    if matches!(named_role, "function_call" | "tool_call")
        && let Some(calls) = turn.content().and_then(calls_of)
    {
        turn.message.remove("content");
        turn.message.insert("tool_calls".to_owned(), calls.into());
        check_writable(&turn.message["tool_calls"], &format!("{key}.{content_key}"), place)?;
    }
    Ok(turn)
}

/// Returns the named key of a message, or the first of the usual keys under which it has a value, or null.
fn pick<'a>(fields: &Object, named: Option<&'a str>, usual: [&'a str; 2]) -> &'a str {
    let has_value = |key: &&str| fields.get(*key).is_some_and(|value| !value.is_null());
    let first = || usual.into_iter().find(has_value).or(usual.into_iter().find(|key| fields.contains_key(*key)));
    named.or_else(first).unwrap_or(usual[0])
}

fn need<'a>(fields: &'a Object, name: &str, key: &str, place: &RecordPlace) -> Parsed<&'a Json> {
    let hint = "Each message needs \"role\" and \"content\" (or \"from\" and \"value\")";
    fields.get(name).ok_or_else(|| missing_key(place, &format!("{name:?} in {key}"), fields, hint))
}

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

/// Adds a content to a message: a string, or parts. The texts of parts are joined; parts with reasoning or tool calls
/// (LLaMA-Factory) become what templates read.
fn read_content(content: &Json, key: &str, place: &RecordPlace, turn: &mut Turn) -> Parsed<()> {
    let Json::Array(parts) = content else {
        turn.message.insert("content".to_owned(), text(content, key, place)?.into());
        return Ok(());
    };
    let (mut whole, mut reasoning, mut calls) = (String::new(), String::new(), Vec::new());
    for (index, part) in parts.iter().enumerate() {
        let path = format!("{key}[{index}]");
        let fields = match part {
            Json::String(_) => {
                whole.push_str(string(part, &path, place)?);
                continue;
            }
            Json::Object(fields) => fields,
            other => return Err(wrong_type(place, &path, "a part like {\"type\": \"text\", \"text\": ...}", other)),
        };
        let kind = fields.get("type").and_then(Json::as_str).unwrap_or("text");
        if !["text", "reasoning", "tool_call"].contains(&kind) {
            let hint = "Only texts can be trained on; remove the part or the row";
            return Err(bad_value(place, &path, &format!("is a part of type {kind:?}"), hint));
        }
        let Some(value) =
            [kind, "text", "value"].iter().find_map(|key| fields.get(*key).filter(|value| !value.is_null()))
        else {
            let hint = "A part of a message is like {\"type\": \"text\", \"text\": ...}";
            return Err(missing_key(place, &format!("\"text\" in {path}"), fields, hint));
        };
        let value = || text(value, &path, place);
        match kind {
            "reasoning" => reasoning.push_str(&value()?),
            "tool_call" => calls.extend(calls_of(&value()?).ok_or_else(|| {
                let hint = "Write {\"name\": ..., \"arguments\": ...} as a string";
                bad_value(place, &path, "is no tool call", hint)
            })?),
            _ => whole.push_str(&value()?),
        }
    }
    turn.message.insert("content".to_owned(), whole.into());
    if !reasoning.is_empty() {
        turn.message.insert("reasoning_content".to_owned(), reasoning.into());
    }
    if !calls.is_empty() {
        turn.message.insert("tool_calls".to_owned(), calls.into());
    }
    Ok(())
}

fn flag(value: &Json, key: &str, place: &RecordPlace) -> Parsed<bool> {
    match value {
        Json::Bool(flag) => Ok(*flag),
        Json::Number(weight) if weight.as_f64() == Some(0.0) => Ok(false),
        Json::Number(weight) if weight.as_f64() == Some(1.0) => Ok(true),
        Json::Number(weight) => {
            let hint = "The weight of a message must be 0 or 1";
            Err(bad_value(place, key, &format!("is the weight {weight}"), hint))
        }
        other => Err(wrong_type(place, key, "true, false, 0 or 1", other)),
    }
}

/// Reads tool calls. OpenAI writes the arguments as a string of JSON; templates (and the servers that fill them) expect an object, so the string is
/// parsed. A string that is not a JSON object stays a string.
fn tool_calls(value: &Json, key: &str, place: &RecordPlace) -> Parsed<Json> {
    let calls = list(value, key, "a list of tool calls", place)?;
    let read = |(index, call): (usize, &Json)| {
        if !call.is_object() {
            return Err(wrong_type(place, &format!("{key}[{index}]"), "an object", call));
        }
        let mut call = without_nulls(call);
        let is_wrapped = call.get("function").is_some();
        match if is_wrapped { &mut call["function"] } else { &mut call } {
            Json::Object(function) => parse_arguments(function),
            other => return Err(wrong_type(place, &format!("{key}[{index}].function"), "an object", other)),
        }
        Ok(call)
    };
    calls.iter().enumerate().map(read).collect()
}

fn parse_arguments(function: &mut Object) {
    if let Some(arguments) = function.get_mut("arguments")
        && let Some(Ok(parsed @ Json::Object(_))) =
            arguments.as_str().map(|text| python_json::from_slice(text.as_bytes()))
    {
        *arguments = parsed;
    }
}

/// Parses the calls in a JSON text: `{"name": ..., "arguments": ...}` or a list of those.
fn calls_of(text: &str) -> Option<Vec<Json>> {
    let content = python_json::from_slice(text.as_bytes()).ok()?;
    let calls = if let Json::Array(calls) = content { calls } else { vec![content] };
    let is_call = |call: &Json| call.get("name").is_some_and(Json::is_string) && call.get("arguments").is_some();
    if calls.is_empty() || !calls.iter().all(is_call) {
        return None;
    }
    let wrap = |call: Json| {
        let Json::Object(mut function) = call else { unreachable!("checked above: a call is an object") };
        parse_arguments(&mut function);
        serde_json::json!({ "type": "function", "function": function })
    };
    Some(calls.into_iter().map(wrap).collect())
}
