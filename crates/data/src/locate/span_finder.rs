//! Locates the text of messages in a rendered conversation by rendering it again with marks, or by comparing prefixes.
//!
//! Trade-off: up to three more renders per conversation.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ops::Range;

use minijinja::Value;

use crate::chat_template::RenderedChat;
use crate::error::DataError;
use crate::record_format::Chat;
use crate::text_marks::{CONTENT_END, CONTENT_START, MARK_END, common_prefix, find_mark, trimmed};

/// Characters that a message header may end with.
const HEADER_END: [char; 4] = ['>', ']', ':', '\n'];

/// The range of each message's content in a text, if known.
pub(super) type Positions = Vec<Option<Range<usize>>>;

/// Removes the marks and returns the byte range between those of each of `turns` messages. A content that is written twice or incompletely has no
/// range. The last value tells which messages are written at all.
fn take_marks(marked: &str, turns: usize) -> (String, Positions, Vec<bool>) {
    let mut text = String::with_capacity(marked.len());
    let (mut starts, mut ends) = (vec![Vec::new(); turns], vec![Vec::new(); turns]);
    let mut rest = marked;
    while let Some(at) = find_mark(rest, &[CONTENT_START, CONTENT_END]) {
        text.push_str(&rest[..at]);
        let is_start = rest[at..].starts_with(CONTENT_START);
        let after = &rest[at + CONTENT_START.len_utf8()..];
        let Some((number, after)) = after.split_once(MARK_END) else {
            rest = after;
            continue;
        };
        if let Some(index) = number.parse::<usize>().ok().filter(|&index| index < turns) {
            let edges = if is_start { &mut starts } else { &mut ends };
            edges[index].push(text.len());
        }
        rest = after;
    }
    text.push_str(rest);
    let range = |(starts, ends): (Vec<usize>, Vec<usize>)| match (starts.as_slice(), ends.as_slice()) {
        (&[start], &[end]) if start <= end => Some(start..end),
        _ => None,
    };
    let written = starts.iter().map(|starts| !starts.is_empty()).collect();
    (text, starts.into_iter().zip(ends).map(range).collect(), written)
}

pub(super) struct SpanFinder<'a> {
    pub(super) rendered_chat: &'a RenderedChat<'a>,
    text: &'a str,
    /// The marked messages, the ranges of their contents, and whether each is written; `None` if marks change the output of the template.
    marks: Option<(Vec<Value>, Positions, Vec<bool>)>,
    /// The text between a message of a role and an answer.
    prompts: RefCell<HashMap<&'a str, String>>,
    /// The text after an answer without tool calls.
    closing: RefCell<Option<String>>,
}

impl<'a> SpanFinder<'a> {
    pub(super) fn new(rendered_chat: &'a RenderedChat<'a>, text: &'a str) -> Self {
        let marked = rendered_chat.marked();
        let marks = rendered_chat.render(&marked, false).ok().and_then(|(rendered, _)| {
            let (unmarked, positions, written) = take_marks(&rendered, marked.len());
            (unmarked == text).then_some((marked, positions, written))
        });
        Self { rendered_chat, text, marks, prompts: RefCell::default(), closing: RefCell::default() }
    }

    fn position(&self, index: usize) -> Option<Range<usize>> {
        self.marks.as_ref()?.1.get(index)?.clone()
    }

    /// Returns the end of an answer's content, if only the end of the turn follows it.
    pub(super) fn content_end(&self, index: usize) -> Option<usize> {
        self.position(index).filter(|_| !self.calls_tools(index)).map(|content| content.end)
    }

    /// Returns the messages with a text that the template does not write at all; none if marks change its output.
    pub(super) fn ignored(&self) -> Vec<usize> {
        let Some((_, _, written)) = &self.marks else { return Vec::new() };
        let turns = self.rendered_chat.chat.turns.iter().zip(written).enumerate();
        turns.filter(|(_, (turn, written))| !**written && trimmed(turn).is_some()).map(|(index, _)| index).collect()
    }

    /// Locates the assistant's text in message `index`: from the end of the generation prompt to the end of its turn.
    pub(super) fn assistant(&self, index: usize) -> Result<Vec<Range<usize>>, DataError> {
        if let Some(parts) = self.around_results(index)? {
            return Ok(parts);
        }
        let found = match self.start(index)? {
            Some(start) => self.end(index, start)?.filter(|&end| start <= end).map(|end| start..end),
            None => None,
        };
        Ok(vec![found.map_or_else(|| self.by_prefixes(index), Ok)?])
    }

    /// Locates an answer whose content is written after the results of its tool calls (Gemma 4): calls, then content. `None` if it is no such answer.
    fn around_results(&self, index: usize) -> Result<Option<Vec<Range<usize>>>, DataError> {
        let Some(own) = self.position(index) else { return Ok(None) };
        let is_before = |later: &usize| self.position(*later).is_some_and(|later| later.end <= own.start);
        let Some(last) = (index + 1..self.rendered_chat.chat.turns.len()).rev().find(is_before) else {
            return Ok(None);
        };
        let (Some(start), Some((anchor, before))) = (self.start(index)?, self.anchor(index)) else { return Ok(None) };
        // Without its results, the calls are followed by its content, and this by what ends the turn.
        let (alone, closing) = (self.text_after(index, anchor, false)?, self.text_after(index, index, false)?);
        let with_results = self.text_after(last, index, false)?;
        let (Some(alone), Some(closing), Some(with_results)) = (alone, closing, with_results) else { return Ok(None) };
        let calls_end = before.end + common_prefix(&alone, &self.text[before.end..]);
        let is_closed = self.text[calls_end..].starts_with(&closing);
        let calls = start..calls_end + if is_closed { closing.len() } else { 0 };
        let content = own.start..own.end + common_prefix(&with_results, &self.text[own.end..]);
        Ok((calls.start <= calls.end && calls.end <= content.start).then(|| vec![calls, content]))
    }

    /// Returns the end of the generation prompt before message `index`.
    fn start(&self, index: usize) -> Result<Option<usize>, DataError> {
        let own = self.position(index);
        if index == 0 {
            return Ok(own.map(|own| own.start));
        }
        let Some((anchor, before)) = self.anchor(index) else { return Ok(None) };
        let limit = own.as_ref().map_or(self.text.len(), |own| own.start);
        let Some(literal) = self.text.get(before.end..limit) else { return Ok(None) };
        let role = self.rendered_chat.chat.turns[anchor].role();
        let is_next = anchor + 1 == index;
        if let Some(prompt) = self.prompts.borrow().get(role).filter(|_| is_next)
            && literal.starts_with(prompt.as_str())
        {
            return Ok(Some(before.end + prompt.len()));
        }
        let Some(prompt) = self.text_after(index - 1, anchor, true)? else { return Ok(None) };
        let mut common = common_prefix(&prompt, literal);
        if common < prompt.len() {
            // A generation prompt may contain more than the header of earlier turns (an opened <think>, for example).
            // The common part must end where a header may end.
            common = literal[..common].rfind(HEADER_END).map_or(0, |end| end + 1);
            return Ok((common > 0).then_some(before.end + common));
        }
        if is_next {
            self.prompts.borrow_mut().insert(role, prompt);
        }
        Ok(Some(before.end + common))
    }

    /// Returns the last message before `index` whose content is in the text.
    fn anchor(&self, index: usize) -> Option<(usize, Range<usize>)> {
        (0..index).rev().find_map(|before| Some((before, self.position(before)?)))
    }

    /// Returns the end of the turn: the text agrees that far with the end of the conversation truncated after this message.
    fn end(&self, index: usize, start: usize) -> Result<Option<usize>, DataError> {
        if index + 1 == self.rendered_chat.chat.turns.len() {
            return Ok(Some(self.text.len()));
        }
        let own = self.position(index).map(|own| (index, own));
        let is_plain = own.is_some() && !self.calls_tools(index);
        let Some((anchor, content)) = own.or_else(|| self.anchor(index)) else { return Ok(None) };
        let literal = &self.text[content.end..];
        if is_plain
            && let Some(closing) = self.closing.borrow().as_ref()
            && literal.starts_with(closing.as_str())
        {
            return Ok(Some(content.end + closing.len()));
        }
        let Some(closing) = self.text_after(index, anchor, false)? else { return Ok(None) };
        let common = common_prefix(&closing, literal);
        if is_plain || common == closing.len() {
            if is_plain && common == closing.len() && common > 0 {
                *self.closing.borrow_mut() = Some(closing);
            }
            return Ok(Some(content.end + common));
        }
        // As the last turn it has another form. Either that form only begins with more (with reasoning, for example), or the text that ends a plain
        // answer ends this turn too.
        if let Some(name) = self.called_name(index)
            && let Some(length) = tail_that_starts(&closing, &self.text[start..])
            && self.text[start..start + length].contains(name)
        {
            return Ok(Some(start + length));
        }
        let next = self.position(index + 1).map_or(self.text.len(), |next| next.start);
        let Some(closing) = self.plain_closing()? else { return Ok(None) };
        Ok(self.text.get(start..next).and_then(|turn| Some(start + turn.find(&closing)? + closing.len())))
    }

    /// Returns whether the message has tool calls that the template writes, judging by the text after its content.
    fn calls_tools(&self, index: usize) -> bool {
        if !self.rendered_chat.chat.turns[index].message.contains_key("tool_calls") {
            return false;
        }
        let name = self.called_name(index);
        let next = (index + 1..self.rendered_chat.chat.turns.len()).find_map(|later| self.position(later));
        let from = self.position(index).map_or(0, |own| own.end);
        let after = self.text.get(from..next.map_or(self.text.len(), |next| next.start));
        name.zip(after).is_none_or(|(name, after)| after.contains(name))
    }

    /// Returns the name in the first tool call of a message.
    fn called_name(&self, index: usize) -> Option<&str> {
        let call = self.rendered_chat.chat.turns[index].message.get("tool_calls")?.get(0)?;
        call.get("function").unwrap_or(call).get("name")?.as_str()
    }

    /// Returns the text that the template writes after a plain answer, without white space at the end; `None` if it is empty.
    fn plain_closing(&self) -> Result<Option<String>, DataError> {
        let chat = Chat::new(&[("user", "question"), ("assistant", "answer")]);
        let rendered_chat = RenderedChat::new(self.rendered_chat.template, &chat);
        let (rendered, _) = rendered_chat.render(&rendered_chat.marked(), false)?;
        let (text, positions, _) = take_marks(&rendered, chat.turns.len());
        let closing = positions[1].as_ref().map(|answer| text[answer.end..].trim_end().to_owned());
        Ok(closing.filter(|closing| !closing.is_empty()))
    }

    /// Returns the text after the content of message `anchor` in the conversation truncated after message `last`.
    fn text_after(&self, last: usize, anchor: usize, prompt: bool) -> Result<Option<String>, DataError> {
        let Some((marked, _, _)) = &self.marks else { return Ok(None) };
        // A template may refuse a conversation that ends there.
        let Ok((rendered, _)) = self.rendered_chat.render(&marked[..=last], prompt) else { return Ok(None) };
        let (text, positions, _) = take_marks(&rendered, marked.len());
        Ok(positions[anchor].as_ref().map(|content| text[content.end..].to_owned()))
    }

    /// Locates an answer by whole prefixes: the text that is added when the rendering includes it.
    fn by_prefixes(&self, index: usize) -> Result<Range<usize>, DataError> {
        let messages = &self.rendered_chat.plain;
        let (before, _) = self.rendered_chat.render(&messages[..index], true)?;
        check_prefix(&before, self.text, index, "before it")?;
        if index + 1 == messages.len() {
            return Ok(before.len()..self.text.len());
        }
        let (with, _) = self.rendered_chat.render(&messages[..=index], false)?;
        check_prefix(&with, self.text, index, "up to it")?;
        check_prefix(&before, &with, index, "before it")?;
        Ok(before.len()..with.len())
    }

    /// Returns the content of a message that is not the assistant's.
    pub(super) fn content(&self, index: usize) -> Result<Range<usize>, DataError> {
        self.position(index).ok_or_else(|| not_found(index, self.rendered_chat.chat))
    }

    /// Returns the generation blocks between the messages around an answer.
    pub(super) fn blocks_of(&self, index: usize, blocks: &[Range<usize>]) -> Result<Vec<Range<usize>>, DataError> {
        let missing = || not_found(index, self.rendered_chat.chat);
        let from = if index == 0 { 0 } else { self.position(index - 1).ok_or_else(missing)?.end };
        let to = if index + 1 == self.rendered_chat.chat.turns.len() {
            self.text.len()
        } else {
            self.position(index + 1).ok_or_else(missing)?.start
        };
        Ok(blocks.iter().filter(|block| from <= block.start && block.end <= to).cloned().collect())
    }
}

/// Returns the length in bytes of the longest end of `text` that `other` starts with, if there is one.
fn tail_that_starts(text: &str, other: &str) -> Option<usize> {
    text.char_indices().map(|(start, _)| &text[start..]).find(|tail| other.starts_with(tail)).map(str::len)
}

fn not_found(index: usize, chat: &Chat) -> DataError {
    DataError::MaskNotFound(format!(
        "text of message {} ({}): the chat template changes it, omits it, or writes it twice. Remove the training flag from the \
         message, or set train_on = \"all\"",
        index + 1,
        chat.turns[index].role()
    ))
}

fn check_prefix(prefix: &str, whole: &str, index: usize, name: &str) -> Result<(), DataError> {
    if whole.starts_with(prefix) {
        return Ok(());
    }
    let byte = common_prefix(prefix, whole);
    let excerpt = |text: &str| text[byte..].chars().take(24).collect::<String>();
    Err(DataError::MaskNotFound(format!(
        "assistant's text in message {}: the template renders the messages {name} to a text that is not a prefix of the whole \
         conversation (they differ at byte {byte}: {:?} and {:?}). Put {{% generation %}} and {{% endgeneration %}} around the \
         assistant's text in the chat template, or set train_on = \"all\"",
        index + 1,
        excerpt(prefix),
        excerpt(whole)
    )))
}
