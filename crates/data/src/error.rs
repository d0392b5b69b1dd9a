//! Everything that can be wrong with a tokenizer folder or a data file, said so that its owner can mend it.
//!
//! Gives up error chaining: each message is whole by itself, causes are part of the text (`reason`), so a caller that
//! prints the chain prints nothing twice.

use std::fmt::{Display, Formatter, Result as FormatResult};
use std::io::Error as IoError;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::cache::CacheError;
use crate::shape::ShapeError;
use crate::source::SourceError;

/// A line of a data file, shown as `path:line`. Parquet and Arrow files have no lines: there it is the row.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// The data file.
    pub path: PathBuf,
    /// Line number (or row number), the first is 1.
    pub line: usize,
}

impl Display for Place {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> FormatResult {
        write!(formatter, "{}:{}", self.path.display(), self.line)
    }
}

/// What went wrong while turning text into batches.
#[derive(Debug, Error)]
pub enum DataError {
    /// The data cannot be found or read.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// A record is not what its shape asks for, or too many records teach nothing.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// The cache of tokenised data cannot be used.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// The operating system refused to open or read a file.
    #[error("cannot read {}: {reason}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the operating system said.
        reason: IoError,
    },
    /// A tokenizer folder without `tokenizer.json`.
    #[error(
        "no tokenizer.json in {}: {hint}", folder.display()
    )]
    NoTokenizer {
        /// The folder that was looked into.
        folder: PathBuf,
        /// What to do, from what else lies in the folder.
        hint: String,
    },
    /// A file of the tokenizer folder that cannot be understood.
    #[error("cannot use {}: {reason}", path.display())]
    BadTokenizerFile {
        /// The file.
        path: PathBuf,
        /// What is wrong in it.
        reason: String,
    },
    /// Chat rows need a template and the tokenizer has none.
    #[error(
        "the tokenizer has no chat template; looked for {looked_for}. Use the folder of an instruction-tuned model of \
         the same family, or write a template into chat_template.jinja of the tokenizer folder, or train on rows like \
         {{\"text\": ...}}, which need no template"
    )]
    NoChatTemplate {
        /// The files and keys that were looked at.
        looked_for: String,
    },
    /// A chat template was asked for by a name that the tokenizer does not have.
    #[error("the tokenizer has no chat template named {name:?}; those it has: {names}")]
    NoSuchTemplate {
        /// What was asked for.
        name: String,
        /// The names there are.
        names: String,
    },
    /// The chat template does not parse.
    #[error("the chat template in {} does not parse: {reason}", path.display())]
    BadChatTemplate {
        /// Where the template came from.
        path: PathBuf,
        /// The parser's message, with the template's line.
        reason: String,
    },
    /// The chat template refused the messages or failed on them.
    #[error(
        "the chat template cannot render these messages (roles: {roles}): {reason}. Change the roles or their order to \
         what the template accepts, or change the template"
    )]
    TemplateFailed {
        /// The roles in order.
        roles: String,
        /// What the template or its engine said.
        reason: String,
    },
    /// Rendering fewer messages does not give the beginning of rendering all: the assistant's text cannot be located.
    #[error(
        "cannot tell which text is the assistant's in message {message}: the template renders the messages {prefix} to \
         a text that is not the beginning of the whole conversation (they part at byte {byte}: {found:?} against \
         {expected:?}). Put {{% generation %}} and {{% endgeneration %}} around the assistant's text in the chat \
         template, or set train_on = \"all\""
    )]
    NotAPrefix {
        /// The assistant's message, the first is 1.
        message: usize,
        /// Which rendering was compared: "before it" or "up to it".
        prefix: &'static str,
        /// Where the two texts part.
        byte: usize,
        /// A few characters of the shorter rendering from there.
        found: String,
        /// A few characters of the whole conversation from there.
        expected: String,
    },
    /// The text of a message that is to be trained stands nowhere in the rendered conversation, or more than once.
    #[error(
        "cannot tell which text is that of message {message} ({role}): the chat template changes it, leaves it out, or \
         writes it twice. Take the training flag from the message, or set train_on = \"all\""
    )]
    MessageNotFound {
        /// The message, the first is 1.
        message: usize,
        /// Who speaks in it.
        role: String,
    },
    /// The tokenizer failed on a text.
    #[error("the tokenizer failed: {reason}")]
    Tokenize {
        /// What the tokenizer said.
        reason: String,
    },
    /// Two beginning-of-text tokens in front.
    #[error(
        "the conversation begins with the beginning-of-text token {token:?} twice: the chat template writes it once \
         already. Remove it from the text of the first message, or from the template"
    )]
    DoubledBos {
        /// The token as text.
        token: String,
    },
    /// A pretokenized row that was made with another tokenizer.
    #[error(
        "the row has the token {token}, but the tokenizer has only {vocab_size}: it was made with another tokenizer. \
         Tokenise it again, or use that tokenizer"
    )]
    ForeignToken {
        /// The token id.
        token: u32,
        /// Tokens that the tokenizer has.
        vocab_size: usize,
    },
    /// Text rows are closed by an end-of-text token and the tokenizer names none.
    #[error(
        "the tokenizer names no eos_token, which closes every {{\"text\": ...}} row; looked for {looked_for}. Add \
         \"eos_token\" to tokenizer_config.json"
    )]
    NoEosToken {
        /// The files and keys that were looked at.
        looked_for: String,
    },
    /// A failure of the template or of the tokenizer, with the row that caused it.
    #[error("{place}: {reason}")]
    InRow {
        /// File and line.
        place: Place,
        /// The failure.
        reason: Box<DataError>,
    },
    /// A source without rows.
    #[error("{} has no rows: every line is blank, or its files are empty", path.display())]
    EmptyDataset {
        /// The source, as it was named.
        path: PathBuf,
    },
    /// Only flagged messages are to be trained, and no message has a flag.
    #[error(
        "none of the {rows} rows has a message that says itself whether it is trained, and train_on = \"flags\" trains \
         only those that say yes. Write \"train\": true into the messages to train (\"training\", \"trained\", and \
         \"weight\": 1 mean the same), or set train_on = \"assistant\""
    )]
    NoFlags {
        /// Rows read.
        rows: u64,
    },
    /// Every row was dropped.
    #[error(
        "{} has nothing to train on: {report}. Raise max_seq_len if rows were cut before the first trained token",
        path.display()
    )]
    NothingToTrain {
        /// The first source, as it was named.
        path: PathBuf,
        /// What was read and why it was dropped.
        report: String,
    },
    /// `max_seq_len` leaves no room for a token and its target.
    #[error("max_seq_len = {max_seq_len} is too short: a row needs at least 2 tokens, one to read and one to predict")]
    SequenceTooShort {
        /// What was asked for.
        max_seq_len: usize,
    },
    /// A split that would leave one side empty.
    #[error(
        "cannot hold out {asked} of {examples} examples ({distinct} distinct) for evaluation: both sides need at least \
         one, and equal examples stay together. Give a smaller share, more data, or a separate evaluation file"
    )]
    BadSplit {
        /// What was asked for.
        asked: String,
        /// Examples there are.
        examples: usize,
        /// Examples that differ.
        distinct: usize,
    },
}
