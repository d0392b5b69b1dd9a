//! Which tokens are targets: what is asked for, and how characters become tokens.
//!
//! Masks are by position in the text, never by token id, so a padding token that is also the end-of-text token is
//! trained where the assistant wrote it. Gives up weights between 0 and 1.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::shape::{Chat, Turn};
use crate::tokenizer::Tokenizer;

/// The role whose text is trained with [`TrainOn::Assistant`].
pub(crate) const ASSISTANT: &str = "assistant";

/// Which tokens of a conversation, or of a prompt with its completion, are trained. Of a text, all are. A message that
/// says itself whether it is trained (`train`, `training`, `trained`, or a `weight` of 0 or 1) is believed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TrainOn {
    /// What the assistant says, and the token that closes its turn.
    #[default]
    Assistant,
    /// What the assistant says after the user's last message.
    LastTurn,
    /// Everything but the first token.
    All,
    /// What stands in messages that say themselves that they are trained, whoever speaks; nothing else.
    Flags,
}

/// The messages of a conversation that are trained, or with `inverted` the only ones that are not.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Selection {
    /// By message.
    pub(crate) turns: Vec<bool>,
    /// Everything but the selected messages is trained, headers included.
    pub(crate) inverted: bool,
}

impl Selection {
    /// What is asked for, as far as the messages do not say otherwise.
    pub(crate) fn new(chat: &Chat, train_on: TrainOn) -> Self {
        let turns = chat.turns.iter();
        if train_on == TrainOn::All {
            return Self { turns: turns.map(|turn| turn.trained == Some(false)).collect(), inverted: true };
        }
        if train_on == TrainOn::Flags {
            return Self { turns: turns.map(|turn| turn.trained == Some(true)).collect(), inverted: false };
        }
        let last_user = chat.turns.iter().rposition(|turn| turn.role() == "user").map_or(0, |user| user + 1);
        let first = if train_on == TrainOn::LastTurn { last_user.max(chat.prompt_turns) } else { chat.prompt_turns };
        let selected =
            |(index, turn): (usize, &Turn)| turn.trained.unwrap_or(index >= first && turn.role() == ASSISTANT);
        Self { turns: turns.enumerate().map(selected).collect(), inverted: false }
    }

    /// Whether exactly the assistant's messages are selected.
    pub(crate) fn is_every_assistant(&self, chat: &Chat) -> bool {
        self.turns.iter().zip(&chat.turns).all(|(&selected, turn)| selected == (turn.role() == ASSISTANT))
    }
}

/// Where a message stands in a rendered conversation, in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Span {
    /// What is to be trained, roughly: templates put white space and more behind the token that ends the turn.
    pub(crate) range: Range<usize>,
    /// Where the content ends, if nothing of the message but the end of its turn comes behind it.
    pub(crate) content_end: Option<usize>,
}

impl From<Range<usize>> for Span {
    fn from(range: Range<usize>) -> Self {
        Self { range, content_end: None }
    }
}

/// A text with its tokens, for mapping characters to tokens.
pub(crate) struct Tokens<'a> {
    pub(crate) tokenizer: &'a Tokenizer,
    pub(crate) text: &'a str,
    pub(crate) ids: &'a [u32],
    /// Byte range of each token.
    pub(crate) offsets: &'a [(usize, usize)],
}

impl Tokens<'_> {
    /// The tokens of a span, and the one that closes the turn, if there is one.
    ///
    /// A token that crosses the edge of the span belongs to it. The span ends with the special token that closes the
    /// turn: white space behind it is the template's, nobody has to write it, and a closing token right behind the span
    /// is the assistant's to write even where the template's block leaves it out.
    pub(crate) fn of_span(&self, span: &Span) -> (Range<usize>, Option<usize>) {
        let range = &span.range;
        let is_special = |&index: &usize| self.tokenizer.is_special(self.ids[index]);
        let mut first = self.offsets.partition_point(|&(_, end)| end <= range.start);
        let last = self.offsets.partition_point(|&(start, _)| start < range.end).max(first);
        // A header's token may take the white space that an answer begins with; it is the header's all the same.
        while first < last && self.offsets[first].0 < range.start && is_special(&first) {
            first += 1;
        }
        let is_blank = |from: usize, to: usize| self.text.get(from..to).is_none_or(|text| text.trim().is_empty());
        if let Some(end) = span.content_end {
            let behind = self.offsets.partition_point(|&(start, _)| start < end).max(first);
            let closing = (behind..last).find(is_special).filter(|&closing| is_blank(end, self.offsets[closing].0));
            if closing.is_some() {
                return (first..closing.map_or(last, |closing| closing + 1), closing);
            }
        }
        let closing = (first..last).rev().find(is_special);
        if let Some(closing) = closing.filter(|&closing| is_blank(self.offsets[closing].1, range.end)) {
            return (first..closing + 1, Some(closing));
        }
        let closes_behind = last < self.ids.len() && is_special(&last);
        if closes_behind { (first..last + 1, Some(last)) } else { (first..last, None) }
    }

    /// Marks the tokens of spans; gives the mask, and the tokens that close a trained turn.
    pub(crate) fn mask(&self, spans: &[Span], inverted: bool, end_of_turn: bool) -> (Vec<bool>, Vec<usize>) {
        let mut trained = vec![inverted; self.ids.len()];
        let mut closings = Vec::new();
        for span in spans.iter().filter(|span| !span.range.is_empty()) {
            let (range, closing) = self.of_span(span);
            trained[range].fill(!inverted);
            if let Some(closing) = closing.filter(|_| !inverted) {
                trained[closing] = end_of_turn;
                closings.push(closing);
            }
        }
        if let Some(first) = trained.first_mut() {
            *first = false;
        }
        (trained, closings)
    }
}
