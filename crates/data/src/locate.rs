//! Finds which characters of a rendered conversation come from which message.
//!
//! A template with `{% generation %}` blocks marks the assistant's text itself. For other templates the conversation is rendered a second time with
//! marks around every content, which must give the same text apart from the marks. An assistant's span then begins after the text that a generation
//! prompt adds after the previous message, and extends to where the conversation truncated after this message would end. So a template may rewrite
//! earlier turns (for example, remove their reasoning), because only the text between two messages is compared. If marks change the output of a
//! template, whole prefixes are compared instead, and the comparison is checked rather than assumed.
//!
//! An answer is in two parts where the template writes the results of its tool calls before its content (Gemma 4).
//!
//! Not supported: templates that both depend on contents and rewrite earlier turns. They are refused with advice.

mod span_finder;

use std::ops::Range;

use crate::chat_template::{ChatTemplate, RenderedChat};
use crate::error::DataError;
use crate::record_format::{ASSISTANT, Chat};
use crate::selection::{Selection, Span};
use span_finder::SpanFinder;

/// A rendered conversation and the spans of the selected messages.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Located {
    pub(crate) text: String,
    pub(crate) spans: Vec<Span>,
    /// Messages with a text that the template does not write at all.
    pub(crate) ignored: Vec<usize>,
}

/// Renders a conversation and locates the selected messages. Errors: the template refuses the messages, or a message's text cannot be located.
pub(crate) fn locate(template: &ChatTemplate, chat: &Chat, selection: &Selection) -> Result<Located, DataError> {
    let rendered_chat = RenderedChat::new(template, chat);
    let (text, blocks) = rendered_chat.render(&rendered_chat.plain, false)?;
    let finder = SpanFinder::new(&rendered_chat, &text);
    let spans = if !selection.turns.contains(&true) {
        Vec::new()
    } else if template.marks_generation && selection.is_every_assistant(chat) {
        blocks.into_iter().map(Span::from).collect()
    } else {
        by_marks(&finder, &blocks, selection)?
    };
    let ignored = finder.ignored();
    Ok(Located { text, spans, ignored })
}

/// Locates the selected messages between their marks; with generation blocks, answers in these.
fn by_marks(finder: &SpanFinder<'_>, blocks: &[Range<usize>], selection: &Selection) -> Result<Vec<Span>, DataError> {
    let (template, chat) = (finder.rendered_chat.template, finder.rendered_chat.chat);
    let assistants: Vec<usize> = (0..chat.turns.len()).filter(|&index| chat.turns[index].role() == ASSISTANT).collect();
    let mut spans = Vec::new();
    for index in (0..chat.turns.len()).filter(|&index| selection.turns[index]) {
        match assistants.binary_search(&index) {
            Err(_) => spans.push(finder.content(index)?.into()),
            Ok(_) if !template.marks_generation => {
                let content_end = finder.content_end(index);
                spans.extend(finder.assistant(index)?.into_iter().map(|range| Span { range, content_end }));
            }
            Ok(number) if blocks.len() == assistants.len() => spans.push(blocks[number].clone().into()),
            Ok(_) => spans.extend(finder.blocks_of(index, blocks)?.into_iter().map(Span::from)),
        }
    }
    Ok(spans)
}
