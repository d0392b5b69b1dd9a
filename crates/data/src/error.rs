//! Errors of tokenizers, chat templates and datasets, worded so that the user can fix the cause.
//!
//! Trade-off: no error chaining. Each message is complete and includes its cause (`reason`), so a caller that prints the whole chain prints nothing
//! twice.

use std::io::Error as IoError;
use std::path::Path;

use thiserror::Error;

use crate::cache::CacheError;
use crate::record_format::RecordFormatError;
use crate::source::Place;
use crate::source::SourceError;

/// An error on the way from text to batches.
#[derive(Debug, Error)]
pub enum DataError {
    /// The data cannot be found or read.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// A record does not have the format of its source.
    #[error(transparent)]
    RecordFormat(#[from] RecordFormatError),
    /// The cache of tokenized data cannot be used.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// The tokenizer's files are missing or damaged, it lacks a token or a chat template, or it failed on a text.
    #[error("{0}")]
    Tokenizer(String),
    /// The chat template refused the messages, or failed on them.
    #[error(
        "the chat template cannot render these messages (roles: {roles}): {reason}. Change the messages to what the \
         template accepts, or choose another template"
    )]
    TemplateFailed {
        /// The roles in order.
        roles: String,
        /// The error of the template or of its engine.
        reason: String,
    },
    /// The chat template exceeded a limit of time, memory, instructions or text: it does not end, or it is hostile.
    #[error(
        "the chat template runs out of its limits: {0}. It is not rendered again. Use another template, or remove this \
         record if the template renders others"
    )]
    TemplateRanOut(String),
    /// The text that counts in the loss cannot be located in the rendered conversation.
    #[error("cannot locate the {0}")]
    MaskNotFound(String),
    /// Two beginning-of-text tokens at the start.
    #[error(
        "the conversation begins with the beginning-of-text token {0:?} twice: the chat template writes it once \
         already. Remove it from the text of the first message, or from the template"
    )]
    DoubledBos(String),
    /// A failure of the template or of the tokenizer, with the record that caused it.
    #[error("{place}: {reason}")]
    InRow {
        /// File and line.
        place: Place,
        /// The failure.
        reason: Box<DataError>,
    },
    /// A source without records.
    #[error("{0} has no records: every line is blank, or its files are empty")]
    EmptyDataset(String),
    /// Records of which too many, or all, cannot be trained on, or options that leave nothing to train on: why, and what to do.
    #[error("{0}")]
    Unfit(String),
}

impl DataError {
    /// Creates the error for a tokenizer's file that the operating system could not open or read.
    pub(crate) fn unreadable(path: &Path) -> impl Fn(IoError) -> Self + '_ {
        |reason| Self::Tokenizer(format!("cannot read {}: {reason}", path.display()))
    }
}
