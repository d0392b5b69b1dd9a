//! Selects the messages that count in the loss.
//!
//! Trade-off: no weights between 0 and 1.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::record_format::{ASSISTANT, Chat, Turn};

/// Which tokens count in the loss. A training flag of a message (`train`, `training`, `trained`, or a `weight` of 0 or
/// 1) takes precedence. For plain text, all tokens count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum TrainOn {
    /// What the assistant writes, and the token that ends its turn.
    #[default]
    Assistant,
    /// What the assistant writes after the user's last message.
    Last,
    /// Every token but the first.
    All,
    /// The content of messages whose training flag is true, whatever their role; nothing else.
    Flags,
}

/// The messages of a conversation that count in the loss, or with `inverted` those that do not.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Selection {
    /// One entry per message.
    pub(crate) turns: Vec<bool>,
    /// Everything but the selected messages counts, headers included.
    pub(crate) inverted: bool,
}

impl Selection {
    /// Selects messages by `train_on` and, for "assistant" and "last", by these roles; flags of messages take precedence.
    pub(crate) fn new(chat: &Chat, train_on: TrainOn, roles: &[String]) -> Self {
        let turns = chat.turns.iter();
        if train_on == TrainOn::All {
            return Self { turns: turns.map(|turn| turn.train == Some(false)).collect(), inverted: true };
        }
        if train_on == TrainOn::Flags {
            return Self { turns: turns.map(|turn| turn.train == Some(true)).collect(), inverted: false };
        }
        let last_user = chat.turns.iter().rposition(|turn| turn.role() == "user").map_or(0, |user| user + 1);
        let first = if train_on == TrainOn::Last { last_user.max(chat.prompt_turns) } else { chat.prompt_turns };
        let selected = |(index, turn): (usize, &Turn)| {
            turn.train.unwrap_or_else(|| index >= first && roles.iter().any(|role| role == turn.role()))
        };
        Self { turns: turns.enumerate().map(selected).collect(), inverted: false }
    }

    pub(crate) fn is_every_assistant(&self, chat: &Chat) -> bool {
        self.turns.iter().zip(&chat.turns).all(|(&selected, turn)| selected == (turn.role() == ASSISTANT))
    }
}

/// The range of a message in a rendered conversation, in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Span {
    /// Approximately the text that counts in the loss: templates write white space and more after the token that ends the turn.
    pub(crate) range: Range<usize>,
    /// The end of the content, if only the end of the turn follows it.
    pub(crate) content_end: Option<usize>,
}

impl From<Range<usize>> for Span {
    fn from(range: Range<usize>) -> Self {
        Self { range, content_end: None }
    }
}
