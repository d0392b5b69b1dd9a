//! Finds which characters of a rendered conversation come from which message.
//!
//! A template with `{% generation %}` blocks marks the assistant's text itself. For other templates the text is compared with what the template is
//! known to write between contents (`skeleton.rs`). If it differs, the conversation is rendered a second time with marks around every content, which
//! must give the same text apart from the marks. An assistant's span then begins after the text that a generation prompt adds after the previous
//! message, and extends to where the conversation truncated after this message would end. So a template may rewrite earlier turns (for example,
//! remove their reasoning), because only the text between two messages is compared. If marks change the output of a template, whole prefixes are
//! compared instead, and the comparison is checked rather than assumed.
//!
//! Not supported: templates that both depend on contents and rewrite earlier turns. They are refused with advice.

mod learn;
mod span_finder;

use std::ops::Range;

use crate::chat_template::{ChatTemplate, RenderedChat};
use crate::error::DataError;
use crate::record_format::{ASSISTANT, Chat};
use crate::selection::{Selection, Span};
use learn::skeleton_of;
use span_finder::SpanFinder;

/// A rendered conversation and the spans of the selected messages.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Located {
    pub(crate) text: String,
    pub(crate) spans: Vec<Span>,
    /// Messages with a text that the template does not write at all.
    pub(crate) ignored: Vec<usize>,
}

/// Renders a conversation and locates the text of the selected messages. Errors: the template refuses the messages, or the text of a message cannot
/// be located.
pub(crate) fn locate(template: &ChatTemplate, chat: &Chat, selection: &Selection) -> Result<Located, DataError> {
    let rendered_chat = RenderedChat::new(template, chat);
    let (text, blocks) = rendered_chat.render(&rendered_chat.plain, false)?;
    if !selection.turns.contains(&true) {
        let ignored = ignored(&rendered_chat, &text);
        return Ok(Located { text, spans: Vec::new(), ignored });
    }
    if template.marks_generation() && selection.is_every_assistant(chat) {
        let spans = blocks.into_iter().map(Span::from).collect();
        let ignored = ignored(&rendered_chat, &text);
        return Ok(Located { text, spans, ignored });
    }
    if !template.marks_generation()
        && let Some(located) = by_comparing(&rendered_chat, &text, selection)
    {
        return Ok(Located { text, ..located });
    }
    let (spans, ignored) = by_marks(&rendered_chat, &text, &blocks, selection)?;
    Ok(Located { text, spans, ignored })
}

/// Returns the messages that the template omits, if nothing else is to be located.
fn ignored(rendered_chat: &RenderedChat<'_>, text: &str) -> Vec<usize> {
    match skeleton_of(rendered_chat) {
        Some(skeleton) => skeleton.left_out(),
        None => SpanFinder::new(rendered_chat, text).ignored(),
    }
}

/// Compares the text with the template's skeleton. The text of the result is empty.
fn by_comparing(rendered_chat: &RenderedChat<'_>, text: &str, selection: &Selection) -> Option<Located> {
    let skeleton = skeleton_of(rendered_chat)?;
    let spans = skeleton.spans(rendered_chat.chat, text)?.into_iter().zip(&selection.turns);
    let spans = spans.filter(|(_, selected)| **selected).map(|(span, _)| span).collect::<Option<_>>()?;
    Some(Located { text: String::new(), spans, ignored: skeleton.left_out() })
}

/// Renders the conversation again with marks around its contents.
fn by_marks(
    rendered_chat: &RenderedChat<'_>,
    text: &str,
    blocks: &[Range<usize>],
    selection: &Selection,
) -> Result<(Vec<Span>, Vec<usize>), DataError> {
    let (template, chat) = (rendered_chat.template, rendered_chat.chat);
    let finder = SpanFinder::new(rendered_chat, text);
    let assistants: Vec<usize> = (0..chat.turns.len()).filter(|&index| chat.turns[index].role() == ASSISTANT).collect();
    let mut spans = Vec::new();
    for index in (0..chat.turns.len()).filter(|&index| selection.turns[index]) {
        match assistants.binary_search(&index) {
            Err(_) => spans.push(finder.content(index)?.into()),
            Ok(_) if !template.marks_generation() => {
                spans.push(Span { range: finder.assistant(index)?, content_end: finder.content_end(index) });
            }
            Ok(number) if blocks.len() == assistants.len() => spans.push(blocks[number].clone().into()),
            Ok(_) => spans.extend(finder.blocks_of(index, blocks)?.into_iter().map(Span::from)),
        }
    }
    Ok((spans, finder.ignored()))
}
