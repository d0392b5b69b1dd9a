//! Errors of data sources, worded so that the user can fix the cause.
//!
//! Trade-off: no error chaining, as in [`DataError`](crate::DataError). Each message is complete.

use std::path::PathBuf;

use thiserror::Error;

use crate::place::Place;

/// What went wrong between a path or Hub id and its records.
#[derive(Debug, Error)]
pub enum SourceError {
    /// The operating system could not open or inspect a file.
    #[error("cannot open {}: {reason}", path.display())]
    Open {
        /// The file or folder.
        path: PathBuf,
        /// The operating system's error.
        reason: std::io::Error,
    },
    /// Reading or decompressing failed.
    #[error("{place}: cannot continue reading: {reason}")]
    Read {
        /// The file and the line (or row) that was being read.
        place: Place,
        /// The error of the operating system or the decompressor.
        reason: String,
    },
    /// Neither a file, a folder, nor a Hub id.
    #[error("no data at {path:?}: {hint}")]
    NotFound {
        /// The requested path.
        path: String,
        /// Similar paths, or what to do.
        hint: String,
    },
    /// A pattern without a match.
    #[error("nothing matches {pattern:?}: {hint}")]
    NoMatch {
        /// The pattern.
        pattern: String,
        /// What its folder contains.
        hint: String,
    },
    /// A folder or a dataset without readable files.
    #[error("no data files in {place}: {hint}")]
    NoDataFiles {
        /// The folder or dataset.
        place: String,
        /// What it contains, or what to do.
        hint: String,
    },
    /// The name of a file does not imply a format.
    #[error(
        "unknown format of {}: its name ends with none of {}. Set it with file_format = \"...\"",
        path.display(), super::format::known_endings()
    )]
    UnknownFormat {
        /// The file.
        path: PathBuf,
    },
    /// Files of several formats in one source.
    #[error(
        "{place} contains files of several formats ({formats}). Read one of them with a pattern like \"{place}/*.jsonl\" \
         or set file_format = \"...\", or use a separate source for each"
    )]
    MixedFormats {
        /// The folder, pattern or dataset.
        place: String,
        /// The formats with the number of files of each.
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
        /// Byte offset in the line of the first invalid byte, counted from 1.
        column: usize,
    },
    /// A NUL character, which text files do not contain.
    #[error("{place}:{column}: a NUL character: the file is damaged or not text")]
    NulCharacter {
        /// File and line.
        place: Place,
        /// Byte offset in the line, counted from 1.
        column: usize,
    },
    /// A record that exceeds the memory limit of one record.
    #[error("{place}: one record is larger than {} MiB. {hint}", super::record::MAX_RECORD_BYTES >> 20)]
    RecordTooLarge {
        /// File and line where it begins.
        place: Place,
        /// What to do.
        hint: &'static str,
    },
    /// A record with so many values that they would need far more memory than the file.
    #[error(
        "{place}: one record has more than {} million values. Split it into several",
        super::record::MAX_RECORD_VALUES / 1_000_000
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
        /// Byte offset in the line, counted from 1.
        column: usize,
        /// The parser's message.
        reason: String,
        /// What the format expects.
        hint: &'static str,
    },
    /// A row that is not an object.
    #[error("{place}: a row must be a JSON object like {{\"text\": \"...\"}}, found {found}")]
    NotAnObject {
        /// File and line.
        place: Place,
        /// What was found instead, and what to do about it.
        found: String,
    },
    /// A JSON document in which the list of rows cannot be determined.
    #[error("{place}: cannot find the rows: {reason}. Set the key that holds them with field = \"...\"")]
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
        /// The first row that could not be read, counted from 1.
        row: usize,
        /// The decoder's message.
        reason: String,
    },
    /// A column of a type that has no JSON form.
    #[error(
        "{}: column {column:?} has the type {found}, which is not a string, number, list or struct. Omit it: name the \
         columns to read with columns = [...]", path.display()
    )]
    ColumnType {
        /// The file.
        path: PathBuf,
        /// The column with the path within it.
        column: String,
        /// Its type.
        found: String,
    },
    /// A requested column does not exist.
    #[error("{}: no column {column:?}; the columns are {found}", path.display())]
    NoColumn {
        /// The file.
        path: PathBuf,
        /// The requested column.
        column: String,
        /// The columns of the file.
        found: String,
    },
    /// A split or configuration that the source does not have, or that must be chosen.
    #[error("{place} has no {what} {requested:?}: {hint}")]
    NoSuchPart {
        /// The folder or dataset.
        place: String,
        /// "split" or "config".
        what: &'static str,
        /// The requested name.
        requested: String,
        /// What is available.
        hint: String,
    },
    /// Keys of a source that contradict each other or have no effect.
    #[error("{key}: {reason}")]
    BadSpec {
        /// The key.
        key: &'static str,
        /// What is wrong and what to do.
        reason: String,
    },
    /// The Hub does not provide a dataset.
    #[error("{endpoint} has no dataset {id:?} that you can access: {hint}")]
    HubRefused {
        /// Address of the Hub.
        endpoint: String,
        /// `owner/name`, with the revision if one was given.
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
        /// The requested URL.
        url: String,
        /// What happened.
        reason: String,
        /// What to do.
        hint: String,
    },
    /// The cache folder cannot be written, or its content is invalid.
    #[error("cannot use the Hub cache at {}: {reason}", path.display())]
    HubCache {
        /// The file or folder.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
}
