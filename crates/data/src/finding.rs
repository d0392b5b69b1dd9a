//! What can be unusual about a record: why it was dropped, cut or doubted.
//!
//! Trade-off: the detail is text. Programs decide by the kind.

use serde::{Deserialize, Serialize};

/// What can be unusual about a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FindingKind {
    /// Dropped: blank text, no messages.
    Empty,
    /// Dropped: no token would count in the loss.
    NothingToTrain,
    /// Dropped: only flagged messages are trained on, and none has a flag.
    NoFlags,
    /// Dropped: every loss token is after `max_seq_len`.
    CutToNothing,
    /// Dropped: the chat template refuses the messages.
    TemplateRefused,
    /// Dropped: the text that is trained on cannot be located.
    MaskNotFound,
    /// Dropped: the beginning-of-text token occurs twice.
    DoubledBos,
    /// Dropped because of `overflow`: longer than `max_seq_len`.
    TooLong,
    /// Kept: cut at `max_seq_len`.
    Truncated,
    /// Kept: split at `max_seq_len`.
    Split,
    /// Kept: the chat template omits the system message.
    SystemIgnored,
    /// Kept: every token counts in the loss although only the assistant's were selected.
    AllTrained,
}

impl FindingKind {
    /// Whether it counts against the share of bad records. What the options ask for does not.
    pub fn is_bad(self) -> bool {
        !matches!(self, Self::Empty | Self::TooLong | Self::Truncated | Self::Split)
    }

    pub(crate) fn description(self) -> &'static str {
        match self {
            Self::Empty => "dropped, empty",
            Self::NothingToTrain => "dropped, nothing to train",
            Self::NoFlags => "dropped, no message has a training flag (train_on = \"flags\")",
            Self::CutToNothing => {
                "dropped, every loss token is after max_seq_len (raise it, or set overflow = \"split\")"
            }
            Self::TemplateRefused => "dropped, the chat template refuses the messages",
            Self::MaskNotFound => "dropped, the text to train on cannot be located",
            Self::DoubledBos => "dropped, the beginning-of-text token occurs twice",
            Self::TooLong => "dropped, longer than max_seq_len",
            Self::Truncated => "cut at max_seq_len",
            Self::Split => "split at max_seq_len",
            Self::SystemIgnored => "trained without their system message",
            Self::AllTrained => "trained whole, the user's text too",
        }
    }
}

/// Something unusual about a record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// The kind.
    pub kind: FindingKind,
    /// What exactly, and what to do.
    pub detail: String,
}
