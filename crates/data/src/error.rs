//! Errors of tokenizers, chat templates and datasets, worded so that the user can fix the cause.
//!
//! Trade-off: no error chaining. Each message is complete and includes its cause (`reason`), so a caller that prints the whole chain prints nothing
//! twice.

use std::io::Error as IoError;
use std::path::PathBuf;

use firebrick_arch::counted;
use thiserror::Error;

use crate::cache::CacheError;
use crate::record_format::RecordFormatError;
use crate::source::RecordPlace;
use crate::source::SourceError;

/// An error on the way from text to batches.
#[derive(Debug, Error)]
#[expect(missing_docs, reason = "messages say what variants and their fields are")]
pub enum DataError {
    #[error(transparent)]
    Source(#[from] SourceError),

    #[error(transparent)]
    RecordFormat(#[from] RecordFormatError),

    #[error(transparent)]
    Cache(#[from] CacheError),

    #[error("cannot read {}: {reason}", path.display())]
    Io { path: PathBuf, reason: IoError },

    /// The tokenizer's files are missing or damaged, it lacks a token or a chat template, or it failed on a text.
    #[error("{0}")]
    Tokenizer(String),

    #[error(
        "the chat template cannot render these messages (roles: {roles}): {reason}. Change the messages, or the system \
         prompt, to what the template accepts, or choose another template"
    )]
    TemplateFailed { roles: String, reason: String },

    /// The chat template exceeded a limit of time, memory, instructions or text: it does not end, or it is hostile.
    #[error(
        "the chat template runs out of its limits: {0}. It is not rendered again. Use another template, or remove this \
         record if the template renders others"
    )]
    TemplateRanOut(String),

    /// The text that counts in the loss cannot be located in the rendered conversation.
    #[error("cannot locate the {0}")]
    MaskNotFound(String),

    #[error(
        "the conversation begins with the beginning-of-text token {0:?} twice: the chat template writes it once \
         already. Remove it from the text of the first message, or from the template"
    )]
    DoubledBos(String),

    #[error(
        "the record has the token {token}, but the vocabulary has only {vocab_size}: it comes from another tokenizer. \
         Tokenize it again, or use that tokenizer"
    )]
    ForeignToken { token: u32, vocab_size: usize },

    /// A failure of the template or of the tokenizer, with the record that caused it.
    #[error("{place}: {reason}")]
    InRow { place: RecordPlace, reason: Box<DataError> },

    #[error(
        "{path} has no records: {}",
        if *bytes == 0 { "it is empty (0 bytes)" } else { "every line is blank, or its list is empty" }
    )]
    EmptyDataset { path: String, bytes: u64 },

    #[error(
        "none of the {0} records has a message with a training flag, and train_on = \"flags\" trains only on \
         messages whose flag is true. Write \"train\": true into these messages (\"training\", \"trained\", and \
         \"weight\": 1 mean the same), or set train_on = \"assistant\""
    )]
    NoFlags(u64),

    /// More records were dropped, or lost a part, than allowed.
    #[error(
        "{bad} of {} ({:.1} %) cannot be trained on, or not without losing a part; the limit is {:.1} % \
         (max_bad_share).\n{report}", counted(*rows, "record"), 100.0 * *bad as f64 / *rows as f64, 100.0 * allowed
    )]
    TooManyBadRows {
        bad: u64,
        rows: u64,
        /// The maximum share, 0 to 1.
        allowed: f64,
        /// The reasons, with counts, places and advice.
        report: String,
    },

    #[error(
        "none of the {chats} conversations has the token that ends the assistant's turn in its loss, so the model would never \
         learn to stop: {why}"
    )]
    EndNeverTrained { chats: u64, why: &'static str },

    #[error("{path} has nothing to train on: {report}\n{remedy}")]
    NothingToTrain {
        /// The first source as the recipe names it.
        path: String,
        /// Counts of what was read, and why it was dropped.
        report: String,
        remedy: String,
    },

    #[error("max_seq_len = {0} is too short: a sequence needs at least 2 tokens, an input and a target")]
    SequenceTooShort(usize),
}
