//! Learns, once per sequence of roles, the text that a template writes between the contents of messages.
//!
//! Most templates write every content, unchanged or trimmed, between texts that depend only on the roles. These texts, and where in them an answer
//! begins and ends, are learned once by rendering a synthetic conversation with the same roles and with marks (`locate/learn.rs`). A conversation
//! whose rendered text consists of exactly these texts with its contents between them is then located by comparison, without rendering it again.
//! Texts that differ by a byte, and all messages that are more than a role and a text, are left to the marks.
//!
//! Example: for the roles user, assistant the template of ChatML has the parts `"<|im_start|>user\n"` and
//! `"<|im_end|>\n<|im_start|>assistant\n"` and the end `"<|im_end|>\n"`. The answer begins 0 bytes before its content and ends
//! 11 bytes after the beginning of the text that follows it, so in the text of any such conversation the span follows from
//! the lengths of the two contents.
//!
//! Trade-off: at most [`MAX_SKELETONS`] sequences of roles of at most [`MAX_MESSAGES`] messages are remembered.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, PoisonError, RwLock};

use crate::record_format::{ASSISTANT, Chat, Turn};
use crate::selection::Span;
use crate::text_marks::{CONTENT_END, CONTENT_START, MARK_END, common_prefix, find_mark, is_space};

/// Ends the reasoning inside a content. Templates split contents there.
const THOUGHT_END: &str = "</think>";
/// Maximum number of sequences of roles that are remembered; some hundred bytes per message.
const MAX_SKELETONS: usize = 1024;
const MAX_MESSAGES: usize = 64;

/// The skeletons of a template, shared by threads.
#[derive(Debug, Default)]
pub(crate) struct Skeletons(RwLock<HashMap<String, Option<Arc<Skeleton>>>>);

impl Clone for Skeletons {
    /// Returns an empty set: the copy of a template may get another date.
    fn clone(&self) -> Self {
        Self::default()
    }
}

/// The text that a template writes for a sequence of roles.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Skeleton {
    /// Parts per message. `None` if the template writes nothing of the message.
    pub(crate) parts: Vec<Option<Part>>,
    /// The text after the last content.
    pub(crate) end: String,
}

/// The text that a template writes before the content of a message, after that of the previous one.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) text: String,
    /// For an answer: how many bytes before its content it begins, and how many after the beginning of the next text it ends. `None` if unknown.
    pub(crate) answer: Option<(usize, usize)>,
}

impl Skeletons {
    /// Returns the skeleton of a conversation, which `learn` builds if it is not known; `None` if the messages are more than texts, or the template
    /// has no skeleton.
    pub(crate) fn get_or_learn(&self, chat: &Chat, learn: impl FnOnce() -> Option<Skeleton>) -> Option<Arc<Skeleton>> {
        let is_short = chat.turns.len() <= MAX_MESSAGES;
        if !is_short || chat.tools.is_some() || chat.documents.is_some() || !chat.turns.iter().all(is_text) {
            return None;
        }
        let key = key_of(chat);
        let known = self.0.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(skeleton) = known.get(&key) {
            return skeleton.clone();
        }
        if known.len() >= MAX_SKELETONS {
            return None;
        }
        drop(known);
        let skeleton = learn().map(Arc::new);
        self.0.write().unwrap_or_else(PoisonError::into_inner).insert(key, skeleton.clone());
        skeleton
    }

    /// Forgets all skeletons, because the template's input has changed.
    pub(crate) fn clear(&mut self) {
        self.0.get_mut().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

/// Returns everything that a skeleton depends on: roles and variables.
fn key_of(chat: &Chat) -> String {
    let mut key = String::with_capacity(16 * chat.turns.len());
    for turn in &chat.turns {
        // The length makes the keys of different sequences of roles different.
        key.push_str(&turn.role().len().to_string());
        key.push(':');
        key.push_str(turn.role());
    }
    if !chat.arguments.is_empty() {
        key.extend(serde_json::to_string(&chat.arguments));
    }
    key
}

/// Returns the part of a content that no template trims or splits: without white space at the ends and without reasoning. `None` if nothing is left,
/// or if it contains the marks themselves.
pub(crate) fn trimmed(turn: &Turn) -> Option<Range<usize>> {
    let content = turn.content()?;
    let thought = content.rfind(THOUGHT_END).map_or(0, |thought| thought + THOUGHT_END.len());
    let answer = content[thought..].trim_start_matches(is_space);
    let start = content.len() - answer.len();
    let end = start + answer.trim_end_matches(is_space).len();
    let has_marks = find_mark(content, &[CONTENT_START, CONTENT_END, MARK_END]).is_some();
    (start < end && !has_marks).then_some(start..end)
}

/// Returns whether a message is a role and a text that no template splits.
fn is_text(turn: &Turn) -> bool {
    turn.message.len() == 2
        && turn.message.contains_key("role")
        && turn.content().is_some_and(|content| !content.contains(THOUGHT_END))
        && trimmed(turn).is_some()
}

impl Skeleton {
    /// Returns the messages that the template does not write at all.
    pub(crate) fn left_out(&self) -> Vec<usize> {
        self.parts.iter().enumerate().filter(|(_, part)| part.is_none()).map(|(index, _)| index).collect()
    }

    /// Locates the messages of a conversation in its text: an answer with the end of its turn, otherwise the content. `None` if the text does not
    /// match this skeleton; for a message, if its place is unknown.
    pub(crate) fn spans(&self, chat: &Chat, text: &str) -> Option<Vec<Option<Span>>> {
        let mut spans: Vec<Option<Span>> = vec![None; chat.turns.len()];
        let (mut at, mut space) = (0, "");
        // The span that waits for the end of the last answer, and the distance of that end from the beginning of the next text.
        let mut open: Option<(usize, usize)> = None;
        let mut close = |spans: &mut [Option<Span>], begin: usize, next: Option<(usize, usize)>| {
            if let Some((index, after)) = std::mem::replace(&mut open, next)
                && let Some(span) = &mut spans[index]
            {
                span.range.end = begin + after;
            }
        };
        for (index, (turn, part)) in chat.turns.iter().zip(&self.parts).enumerate() {
            let Some(part) = part else { continue };
            let content = turn.content()?;
            let trimmed_range = trimmed(turn)?;
            let begin = after_space(text, at, space, &part.text)?;
            let is_answer = turn.role() == ASSISTANT;
            close(&mut spans, begin, part.answer.filter(|_| is_answer).map(|(_, after)| (index, after)));
            at = begin + part.text.len();
            let rest = text[at..].trim_start_matches(is_space);
            let kept = &text[at..text.len() - rest.len()];
            if !content[..trimmed_range.start].ends_with(kept) || !rest.starts_with(&content[trimmed_range.clone()]) {
                return None;
            }
            let located = at + kept.len()..at + kept.len() + trimmed_range.len();
            spans[index] = if is_answer {
                // No prompt precedes an answer that comes first: it begins with its content, as with marks.
                let start = |(before, _)| if index == 0 { located.start } else { at - before };
                part.answer.map(|answer| Span { range: start(answer)..located.end, content_end: Some(located.end) })
            } else {
                Some(located.clone().into())
            };
            at = located.end;
            space = &content[trimmed_range.end..];
        }
        let end = after_space(text, at, space, &self.end)?;
        close(&mut spans, end, None);
        (end + self.end.len() == text.len()).then_some(spans)
    }
}

/// Returns where `expected` begins: at `at`, or after as much of a content's trailing white space as the template keeps. `None` if it occurs nowhere
/// or in several such places.
fn after_space(text: &str, at: usize, space: &str, expected: &str) -> Option<usize> {
    let rest = &text[at..];
    let kept = common_prefix(space, rest);
    let ends = space[..kept].char_indices().map(|(end, _)| end).chain([kept]);
    let mut places = ends.filter(|&end| rest[end..].starts_with(expected));
    let first = places.next()?;
    places.next().is_none().then_some(at + first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn white_space_after_a_content_takes_linear_time() {
        let space = " ".repeat(4 << 20);
        let text = format!("{space}</s>");
        assert_eq!(after_space(&text, 0, &space, "</s>"), Some(space.len()));
        assert_eq!(after_space(&text, 0, &space, " "), None);
    }
}
