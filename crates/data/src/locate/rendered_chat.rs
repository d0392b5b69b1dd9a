//! A conversation as values of the template engine, plain and with marks around its contents.
//!
//! Trade-off: a message that contains the marks itself is not marked.

use std::ops::Range;

use minijinja::Value;

use crate::chat_template::{ChatTemplate, RenderInput, TemplateInput, to_value};
use crate::error::DataError;
use crate::record_format::{Chat, Turn};
use crate::skeleton::trimmed;
use crate::text_marks::{CONTENT_END, CONTENT_START, MARK_END};

/// A conversation as values of the template engine.
pub(crate) struct RenderedChat<'a> {
    pub(super) template: &'a ChatTemplate,
    pub(super) chat: &'a Chat,
    input: RenderInput<'a>,
    pub(crate) plain: Vec<Value>,
}

impl<'a> RenderedChat<'a> {
    pub(crate) fn new(template: &'a ChatTemplate, chat: &'a Chat) -> Self {
        let input = TemplateInput {
            tools: chat.tools.as_deref(),
            documents: chat.documents.as_deref(),
            arguments: Some(&chat.arguments),
            ..TemplateInput::default()
        };
        let plain = chat.turns.iter().map(|turn| to_value(&turn.message, None)).collect();
        Self { template, chat, input: RenderInput::new(input), plain }
    }

    pub(crate) fn render(&self, messages: &[Value], prompt: bool) -> Result<(String, Vec<Range<usize>>), DataError> {
        self.template.render_marked(messages, &self.input, prompt)
    }

    /// The messages with marks around their contents.
    pub(super) fn marked(&self) -> Vec<Value> {
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
