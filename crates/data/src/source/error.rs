//! Everything that can be wrong with a data source, said so that its owner can mend it.
//!
//! Gives up error chaining, as [`DataError`](crate::DataError) does: each message is whole by itself.

use std::path::PathBuf;

use thiserror::Error;

use crate::error::Place;

/// What went wrong between a path or Hub id and its records.
#[derive(Debug, Error)]
pub enum SourceError {
    /// The operating system refused to open or look at a file.
    #[error("cannot open {}: {reason}", path.display())]
    Open {
        /// The file or folder.
        path: PathBuf,
        /// What the operating system said.
        reason: std::io::Error,
    },
    /// Reading or unpacking failed on the way.
    #[error("{place}: cannot read on from here: {reason}")]
    Read {
        /// The file and the line (or row) that was being read.
        place: Place,
        /// What the operating system or the decompressor said.
        reason: String,
    },
    /// Neither a file, nor a folder, nor a Hub id.
    #[error("no data at {path:?}: {hint}")]
    NotFound {
        /// What was asked for.
        path: String,
        /// What is near, or what to do.
        hint: String,
    },
    /// A pattern without a match.
    #[error("nothing matches {pattern:?}: {hint}")]
    NoMatch {
        /// The pattern.
        pattern: String,
        /// What lies in its folder.
        hint: String,
    },
    /// A folder or a dataset without files that can be read.
    #[error("no data files in {place}: {hint}")]
    NoDataFiles {
        /// The folder or dataset.
        place: String,
        /// What is there, or what to do.
        hint: String,
    },
    /// The name of a file does not show its format.
    #[error(
        "cannot tell the format of {}: its name ends with none of {}. Name it with format = \"...\"",
        path.display(), super::format::known_endings()
    )]
    UnknownFormat {
        /// The file.
        path: PathBuf,
    },
    /// Files of several formats in one source.
    #[error(
        "{place} holds files of several formats ({formats}). Read one of them with a pattern like \"{place}/*.jsonl\" \
         or name it with format = \"...\", or make each a source of its own"
    )]
    MixedFormats {
        /// The folder, pattern or dataset.
        place: String,
        /// The formats, with how many files each has.
        formats: String,
    },
    /// The first bytes contradict the format.
    #[error("{} is read as {expected}, but it is {found}. {hint}", path.display())]
    WrongFormat {
        /// The file.
        path: PathBuf,
        /// The format it was read as.
        expected: String,
        /// What the bytes are.
        found: String,
        /// What to do.
        hint: String,
    },
    /// Text that is not UTF-8.
    #[error("{place}:{column}: not valid UTF-8. Convert the file, for example with `iconv -t UTF-8`")]
    NotUtf8 {
        /// File and line.
        place: Place,
        /// First bad byte in the line, the first is 1.
        column: usize,
    },
    /// A NUL character, which no text has.
    #[error("{place}:{column}: a NUL character: the file is damaged or not text")]
    NulCharacter {
        /// File and line.
        place: Place,
        /// The byte in the line, the first is 1.
        column: usize,
    },
    /// A record that is larger than memory should be asked to hold.
    #[error("{place}: one record is larger than {} MiB. {hint}", super::MAX_RECORD_BYTES >> 20)]
    RecordTooLarge {
        /// File and line where it begins.
        place: Place,
        /// What to do.
        hint: &'static str,
    },
    /// A record of so many values that they would need far more memory than the file.
    #[error(
        "{place}: one record holds more than {} million values. Cut it into several",
        super::MAX_RECORD_VALUES / 1_000_000
    )]
    TooManyValues {
        /// File and line where it begins.
        place: Place,
    },
    /// Text that is not JSON.
    #[error("{place}:{column}: not valid JSON: {reason}. {hint}")]
    BadJson {
        /// File and line.
        place: Place,
        /// Byte in the line, the first is 1.
        column: usize,
        /// What the parser said.
        reason: String,
        /// What the format expects.
        hint: &'static str,
    },
    /// A row that is not an object.
    #[error("{place}: a row must be a JSON object like {{\"text\": \"...\"}}, found {found}")]
    NotAnObject {
        /// File and line.
        place: Place,
        /// What is there instead, and what to do about it.
        found: String,
    },
    /// A JSON document in which the list of rows cannot be found.
    #[error("{place}: cannot tell where the rows are: {reason}. Name the key that holds them with field = \"...\"")]
    NoRows {
        /// File and line.
        place: Place,
        /// What was found.
        reason: String,
    },
    /// A CSV file that is not one table.
    #[error("{place}: not a valid CSV row: {reason}")]
    BadCsv {
        /// File and line.
        place: Place,
        /// What is wrong.
        reason: String,
    },
    /// A Parquet or Arrow file that cannot be decoded.
    #[error("{}: cannot decode this {format} file at row {row}: {reason}", path.display())]
    BadColumns {
        /// The file.
        path: PathBuf,
        /// Its format.
        format: &'static str,
        /// The first row that could not be read, from 1.
        row: usize,
        /// What the decoder said.
        reason: String,
    },
    /// A column of a type that has no JSON form.
    #[error(
        "{}: column {column:?} has the type {found}, which is no text, number, list or struct. Leave it out: name the \
         wanted ones with columns = [...]", path.display()
    )]
    ColumnType {
        /// The file.
        path: PathBuf,
        /// The column, with the path inside it.
        column: String,
        /// Its type.
        found: String,
    },
    /// A column that was asked for is not there.
    #[error("{}: no column {column:?}; there are {found}", path.display())]
    NoColumn {
        /// The file.
        path: PathBuf,
        /// What was asked for.
        column: String,
        /// The columns of the file.
        found: String,
    },
    /// A split or configuration that the source does not have, or one that must be chosen.
    #[error("{place} has no {what} {asked:?}: {hint}")]
    NoSuchPart {
        /// The folder or dataset.
        place: String,
        /// "split" or "config".
        what: &'static str,
        /// What was asked for.
        asked: String,
        /// What there is.
        hint: String,
    },
    /// Keys of a source that contradict each other or mean nothing.
    #[error("{key}: {reason}")]
    BadSpec {
        /// The key.
        key: &'static str,
        /// What is wrong and what to do.
        reason: String,
    },
    /// The Hub does not show a dataset.
    #[error("{endpoint} has no dataset {id:?} for you: {hint}")]
    HubRefused {
        /// Address of the Hub.
        endpoint: String,
        /// `owner/name`, with the revision if one was asked for.
        id: String,
        /// What to do.
        hint: String,
    },
    /// Offline, and not in the cache.
    #[error("{what} is not in the cache {} and the Hub is off (HF_HUB_OFFLINE): {hint}", cache.display())]
    HubOffline {
        /// The dataset or file.
        what: String,
        /// The cache folder.
        cache: PathBuf,
        /// What to do.
        hint: String,
    },
    /// The network or the Hub failed.
    #[error("cannot get {url}: {reason}. {hint}")]
    HubFailed {
        /// What was asked for.
        url: String,
        /// What happened.
        reason: String,
        /// What to do.
        hint: String,
    },
    /// The cache folder cannot be written, or holds what it should not.
    #[error("cannot use the Hub cache at {}: {reason}", path.display())]
    HubCache {
        /// The file or folder.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
}
