//! Errors of tokenizers, chat templates and datasets, worded so that the user can fix the cause.
//!
//! Trade-off: no error chaining. Each message is complete and includes its cause (`reason`), so a caller that prints
//! the whole chain prints nothing twice.

use std::io::Error as IoError;
use std::path::PathBuf;

use thiserror::Error;

use crate::cache::CacheError;
use crate::place::Place;
use crate::record_format::RecordFormatError;
use crate::source::SourceError;

/// What went wrong on the way from text to batches.
#[derive(Debug, Error)]
pub enum DataError {
    /// The data cannot be found or read.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// A record does not have the format of its source, or too many records cannot be trained on.
    #[error(transparent)]
    RecordFormat(#[from] RecordFormatError),
    /// The cache of tokenized data cannot be used.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// The operating system could not open or read a file.
    #[error("cannot read {}: {reason}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The operating system's error.
        reason: IoError,
    },
    /// A tokenizer folder without `tokenizer.json`.
    #[error(
        "no tokenizer.json in {}: {hint}", folder.display()
    )]
    NoTokenizer {
        /// The folder that was searched.
        folder: PathBuf,
        /// What to do, given what else is in the folder.
        hint: String,
    },
    /// A file of the tokenizer folder that cannot be parsed.
    #[error("cannot use {}: {reason}", path.display())]
    BadTokenizerFile {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// Chat records need a template and the tokenizer has none.
    #[error(
        "the tokenizer has no chat template; looked for {looked_for}. Use the folder of an instruction-tuned model of \
         the same family, or write a template into chat_template.jinja of the tokenizer folder, or train on records like \
         {{\"text\": ...}}, which need no template"
    )]
    NoChatTemplate {
        /// The files and keys that were searched.
        looked_for: String,
    },
    /// The tokenizer has no chat template with the requested name.
    #[error(
        "no chat template is named {name:?}: the tokenizer has {names}, built in are {built_in}, and a file is named with its path"
    )]
    NoSuchTemplate {
        /// The requested name.
        name: String,
        /// The tokenizer's names.
        names: String,
        /// The built-in names.
        built_in: String,
    },
    /// A built-in template writes a token that the vocabulary lacks.
    #[error(
        "the built-in chat template {name:?} writes {token}, which is no token of this tokenizer: it would be cut into pieces \
         that the model never saw as one, and no token would end a turn. {hint}"
    )]
    TemplateToken {
        /// The template's name.
        name: &'static str,
        /// The token.
        token: &'static str,
        /// Templates that need no special tokens.
        hint: &'static str,
    },
    /// The chat template does not parse.
    #[error("the chat template in {} does not parse: {reason}", path.display())]
    BadChatTemplate {
        /// Where the template came from.
        path: PathBuf,
        /// The parser's message with the line of the template.
        reason: String,
    },
    /// The chat template refused the messages, failed on them, or exceeded a limit.
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
    /// The assistant's text cannot be located: rendering fewer messages does not give a prefix of the full rendering.
    #[error(
        "cannot locate the assistant's text in message {message}: the template renders the messages {prefix} to \
         a text that is not a prefix of the whole conversation (they differ at byte {byte}: {found:?} and \
         {expected:?}). Put {{% generation %}} and {{% endgeneration %}} around the assistant's text in the chat \
         template, or set train_on = \"all\""
    )]
    NotAPrefix {
        /// Number of the assistant's message, counted from 1.
        message: usize,
        /// Which rendering was compared: "before it" or "up to it".
        prefix: &'static str,
        /// Byte offset at which the two texts differ.
        byte: usize,
        /// A few characters of the shorter rendering from that offset.
        found: String,
        /// A few characters of the whole conversation from that offset.
        expected: String,
    },
    /// The text of a selected message occurs nowhere in the rendered conversation, or more than once.
    #[error(
        "cannot locate the text of message {message} ({role}): the chat template changes it, omits it, or \
         writes it twice. Remove the training flag from the message, or set train_on = \"all\""
    )]
    MessageNotFound {
        /// Number of the message, counted from 1.
        message: usize,
        /// Role of the message.
        role: String,
    },
    /// The tokenizer failed on a text.
    #[error("the tokenizer failed: {reason}")]
    Tokenize {
        /// The tokenizer library's error.
        reason: String,
    },
    /// Two beginning-of-text tokens at the start.
    #[error(
        "the conversation begins with the beginning-of-text token {token:?} twice: the chat template writes it once \
         already. Remove it from the text of the first message, or from the template"
    )]
    DoubledBos {
        /// The token as text.
        token: String,
    },
    /// A pretokenized record that comes from another tokenizer.
    #[error(
        "the record has the token {token}, but the vocabulary has only {vocab_size}: it comes from another tokenizer. \
         Tokenize it again, or use that tokenizer"
    )]
    ForeignToken {
        /// The token id.
        token: u32,
        /// Size of the tokenizer's vocabulary.
        vocab_size: usize,
    },
    /// Text records end with an end-of-text token and the tokenizer defines none.
    #[error(
        "the tokenizer defines no eos_token, which ends every {{\"text\": ...}} record; looked for {looked_for}. Add \
         \"eos_token\" to tokenizer_config.json"
    )]
    NoEosToken {
        /// The files and keys that were searched.
        looked_for: String,
    },
    /// A failure of the template or of the tokenizer, with the record that caused it.
    #[error("{place}: {reason}")]
    InRow {
        /// File and line.
        place: Place,
        /// The failure.
        reason: Box<DataError>,
    },
    /// A source without records.
    #[error("{} has no records: every line is blank, or its files are empty", path.display())]
    EmptyDataset {
        /// The source as the recipe names it.
        path: PathBuf,
    },
    /// Only flagged messages are trained on, and no message has a flag.
    #[error(
        "none of the {rows} records has a message with a training flag, and train_on = \"flags\" trains only on \
         messages whose flag is true. Write \"train\": true into these messages (\"training\", \"trained\", and \
         \"weight\": 1 mean the same), or set train_on = \"assistant\""
    )]
    NoFlags {
        /// Records read.
        rows: u64,
    },
    /// Every record was dropped.
    #[error(
        "{} has nothing to train on: {report}. Raise max_seq_len if records were cut before the first loss token",
        path.display()
    )]
    NothingToTrain {
        /// The first source as the recipe names it.
        path: PathBuf,
        /// What was read and why it was dropped.
        report: String,
    },
    /// `max_seq_len` has no room for a token and its target.
    #[error("max_seq_len = {max_seq_len} is too short: a sequence needs at least 2 tokens, an input and a target")]
    SequenceTooShort {
        /// The requested length in tokens.
        max_seq_len: usize,
    },
}
