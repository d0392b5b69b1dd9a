//! Findings: the unusual properties of a record, and why it was dropped, cut or doubted.

use serde::{Deserialize, Serialize};

/// The kinds of findings; those that drop a record come before the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[expect(missing_docs, reason = "`description` says what each is")]
pub enum FindingKind {
    Empty,
    Unreadable,
    BadCell,
    NothingToTrain,
    NoFlags,
    CutToNothing,
    TemplateRefused,
    MaskNotFound,
    DoubledBos,
    TooLong,
    SameAnswers,
    Truncated,
    PromptCut,
    Split,
    MessageIgnored,
    ToolsIgnored,
    ToolCallsIgnored,
    ReasoningIgnored,
    DocumentsIgnored,
    EmptyAnswer,
    AllTrained,
    OtherRole,
    AnswerFirst,
}

impl FindingKind {
    /// Returns whether it counts against the share of bad records. Results of the options do not.
    pub fn is_bad(self) -> bool {
        !matches!(
            self,
            Self::Empty
                | Self::TooLong
                | Self::SameAnswers
                | Self::Truncated
                | Self::PromptCut
                | Self::Split
                | Self::OtherRole
                | Self::AnswerFirst
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
            Self::BadCell => "dropped, a value is missing or does not fit",
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
            Self::OtherRole => "with a role that chat templates do not know",
            Self::AnswerFirst => {
                "in which the assistant speaks first, and a user last, without an answer (are the messages in the wrong order?)"
            }
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
