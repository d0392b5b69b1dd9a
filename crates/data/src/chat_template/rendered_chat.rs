//! A conversation as values of the template engine, prepared as in transformers (nulls removed, reasoning under each of its names), plain and with
//! marks around its contents.
//!
//! Trade-off: a message that contains the marks itself is not marked.

use std::ops::Range;

use minijinja::Value;
use serde_json::{Map, Value as Json};

use super::dict::{dict, from_json};
use super::template::{ChatTemplate, REASONING};
use crate::error::DataError;
use crate::record_format::{Chat, Turn};
use crate::text_marks::{CONTENT_END, CONTENT_START, MARK_END, trimmed};

pub(crate) struct RenderedChat<'a> {
    pub(crate) template: &'a ChatTemplate,
    pub(crate) chat: &'a Chat,
    tools: Value,
    documents: Value,
    /// Approximate bytes of the conversation.
    bytes: usize,
    pub(crate) plain: Vec<Value>,
}

impl<'a> RenderedChat<'a> {
    pub(crate) fn new(template: &'a ChatTemplate, chat: &'a Chat) -> Self {
        let list = |items: &Option<Vec<Json>>| -> Value {
            items.as_ref().map_or(Value::from(()), |items| items.iter().map(from_json).collect::<Vec<_>>().into())
        };
        let (tools, documents) = (list(&chat.tools), list(&chat.documents));
        let plain = chat.turns.iter().map(|turn| to_value(&turn.message, None)).collect();
        Self { template, chat, tools, documents, bytes: chat.bytes(), plain }
    }

    /// Renders some of the messages. Returns the text and the byte ranges that came from `{% generation %}` blocks.
    pub(crate) fn render(&self, messages: &[Value], prompt: bool) -> Result<(String, Vec<Range<usize>>), DataError> {
        let (tools, documents) = (self.tools.clone(), self.documents.clone());
        let variables = [("tools", tools), ("documents", documents), ("add_generation_prompt", prompt.into())];
        let rendered = self.template.render_values(messages, variables, &self.chat.arguments, self.bytes);
        rendered.map_err(|error| self.explain_ids(error))
    }

    /// Adds advice if ids are the problem: Mistral's templates demand nine characters, which OpenAI's `call_...` do not have.
    fn explain_ids(&self, error: DataError) -> DataError {
        let DataError::TemplateFailed { roles, mut reason } = error else { return error };
        let source: String = self.template.source().split_whitespace().collect();
        let demands_nine = ["length!=9", "length==9"].iter().any(|test| source.contains(test));
        if demands_nine && !self.chat.turns.iter().all(has_ids_of_nine) {
            reason.push_str(
                ". This template demands ids of nine letters or digits: give each tool call such an `id`, and its result the \
                 same as `tool_call_id`",
            );
        }
        DataError::TemplateFailed { roles, reason }
    }

    pub(crate) fn marked(&self) -> Vec<Value> {
        let mark = |(index, (turn, plain)): (usize, (&Turn, &Value))| {
            let Some(range) = trimmed(turn) else { return plain.clone() };
            let content = turn.content().unwrap_or_default();
            let (before, text, after) = (&content[..range.start], &content[range.clone()], &content[range.end..]);
            let marked = format!("{before}{CONTENT_START}{index}{MARK_END}{text}{CONTENT_END}{index}{MARK_END}{after}");
            to_value(&turn.message, Some(&marked))
        };
        self.chat.turns.iter().zip(&self.plain).enumerate().map(mark).collect()
    }
}

impl ChatTemplate {
    /// Renders a conversation as `apply_chat_template(..., tokenize=False)` of transformers does, after the default system prompt if it has no system
    /// message. `add_generation_prompt` appends the text that precedes an assistant's answer. Errors: the template refuses the messages (an unknown
    /// role, two users in a row, ...), takes too long or writes too much.
    pub fn render(&self, chat: &Chat, add_generation_prompt: bool) -> Result<String, DataError> {
        let chat = chat.clone().with_system(self.defaults.system_prompt.as_deref());
        let rendered_chat = RenderedChat::new(self, &chat);
        Ok(rendered_chat.render(&rendered_chat.plain, add_generation_prompt)?.0)
    }

    /// Returns whether the text of a conversation depends on the date.
    pub fn writes_date(&self, chat: &Chat) -> bool {
        // A Thursday in January and a Sunday in September.
        let [first, second] = [0, 1_000_000_000].map(|unix_seconds| {
            let mut dated = self.clone();
            dated.set_date(unix_seconds);
            dated.render(chat, false).ok()
        });
        first != second
    }
}

/// Returns whether the tool calls of a message, or the call that it answers, have ids of nine letters or digits.
fn has_ids_of_nine(turn: &Turn) -> bool {
    let is_id = |id: Option<&Json>| {
        let id = id.and_then(Json::as_str).unwrap_or_default();
        id.len() == 9 && id.bytes().all(|byte| byte.is_ascii_alphanumeric())
    };
    let mut calls = turn.message.get("tool_calls").and_then(Json::as_array).into_iter().flatten();
    calls.all(|call| is_id(call.get("id"))) && (turn.role() != "tool" || is_id(turn.message.get("tool_call_id")))
}

/// Converts a message to a value of the engine, with another content if one is given.
fn to_value(message: &Map<String, Json>, content: Option<&str>) -> Value {
    let mut pairs: Vec<(Value, Value)> = Vec::with_capacity(message.len() + 2);
    let reasoning = REASONING.iter().find_map(|key| message.get(*key).filter(|value| !value.is_null()));
    if let Some(reasoning) = reasoning
        && message.get("thinking").is_none_or(Json::is_null)
    {
        pairs.push((Value::from("thinking"), from_json(reasoning)));
    }
    let kept = message.iter().filter(|(_, value)| !value.is_null());
    pairs.extend(kept.map(|(key, item)| match content.filter(|_| key == "content") {
        Some(content) => (Value::from(key.as_str()), Value::from(content)),
        None => (Value::from(key.as_str()), from_json(item)),
    }));
    if let Some(reasoning) = reasoning
        && !message.contains_key("reasoning_content")
    {
        pairs.push((Value::from("reasoning_content"), from_json(reasoning)));
    }
    dict(&Value::from_iter(pairs))
}
