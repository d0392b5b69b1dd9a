//! Findings: the unusual properties of a record, and why it was dropped, cut or doubted.

use serde::{Deserialize, Serialize};

/// The kinds of findings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FindingKind {
    /// Dropped: blank text, no messages.
    Empty,
    /// Dropped: the row of the file cannot be read.
    Unreadable,
    /// Dropped: a value that is absent, null, or a list or an object where a text is expected.
    BadCell,
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
    /// Dropped: the chosen and the rejected answer of a pair are the same.
    SameAnswers,
    /// Kept: cut at `max_seq_len`.
    Truncated,
    /// Kept: the beginning of the prompt of a pair was cut off.
    PromptCut,
    /// Kept: split at `max_seq_len`.
    Split,
    /// Kept: the chat template writes nothing of a message with a text.
    MessageIgnored,
    /// Kept: the chat template writes nothing of the tools.
    ToolsIgnored,
    /// Kept: the chat template writes nothing of the tool calls.
    ToolCallsIgnored,
    /// Kept: the chat template writes nothing of the reasoning.
    ReasoningIgnored,
    /// Kept: the chat template writes nothing of the documents.
    DocumentsIgnored,
    /// Kept: only the end of an answer is trained.
    EmptyAnswer,
    /// Kept: every token counts in the loss although only the assistant's were selected.
    AllTrained,
}

impl FindingKind {
    /// Returns whether it counts against the share of bad records. Results of the options do not.
    pub fn is_bad(self) -> bool {
        !matches!(
            self,
            Self::Empty | Self::TooLong | Self::SameAnswers | Self::Truncated | Self::PromptCut | Self::Split
        )
    }

    /// Returns whether records with it give no document.
    pub fn is_drop(self) -> bool {
        self < Self::Truncated
    }

    /// Describes what happened to records with it; the text follows their number.
    pub fn description(self) -> &'static str {
        match self {
            Self::Empty => "dropped, empty",
            Self::Unreadable => "dropped, a row of the file cannot be read",
            Self::BadCell => "dropped, a value is missing or no text",
            Self::NothingToTrain => "dropped, nothing to train",
            Self::NoFlags => "dropped, no message has a training flag (train_on = \"flags\")",
            Self::CutToNothing => {
                "dropped, every loss token is after max_seq_len (raise it, or set overflow = \"split\")"
            }
            Self::TemplateRefused => "dropped, the chat template refuses the messages",
            Self::MaskNotFound => "dropped, the text to train on cannot be located",
            Self::DoubledBos => "dropped, the beginning-of-text token occurs twice",
            Self::TooLong => "dropped, longer than max_seq_len",
            Self::SameAnswers => "dropped, the chosen and the rejected answer are the same",
            Self::Truncated => "cut at max_seq_len",
            Self::PromptCut => "trained without the beginning of their prompt (a pair has to fit into max_seq_len)",
            Self::Split => "split at max_seq_len",
            Self::MessageIgnored => {
                "trained without one of their messages, which the chat template leaves out (set data.chat_template to one \
                 that writes it, or move a system message into the first user message)"
            }
            Self::ToolsIgnored => {
                "trained without their tools, which the chat template leaves out (set data.chat_template to one that knows \
                 tools)"
            }
            Self::ToolCallsIgnored => "trained without their tool calls, which the chat template leaves out",
            Self::ReasoningIgnored => "trained without their reasoning, which the chat template leaves out",
            Self::DocumentsIgnored => "trained without their documents, which the chat template leaves out",
            Self::EmptyAnswer => "trained to answer with nothing but the end of the turn",
            Self::AllTrained => "trained whole, the user's text too",
        }
    }
}

/// Something unusual about a record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// The kind.
    pub kind: FindingKind,
    /// The exact problem, and the remedy.
    pub detail: String,
}
