//! Errors of data sources, worded so that the user can fix the cause.
//!
//! A variant says what an error is about; the text says the rest. Trade-off: no error chaining, as in [`DataError`](crate::DataError). Each message
//! is complete.

use std::path::{Path, PathBuf};

use thiserror::Error;

use super::record::{MAX_RECORD_BYTES, RecordPlace};

pub(super) type SourceResult<T> = Result<T, SourceError>;

/// An error between a path or Hub id and its records.
#[derive(Debug, Error)]
#[expect(missing_docs, reason = "messages say what variants and their fields are")]
pub enum SourceError {
    #[error("cannot open {}: {reason}", path.display())]
    Open { path: PathBuf, reason: std::io::Error },

    /// A path or Hub id without files to read, or several possible choices among its files.
    #[error("{0}")]
    NotFound(String),

    /// Keys of a source that contradict each other or have no effect.
    #[error("{key}: {reason}")]
    BadSpec { key: &'static str, reason: String },

    /// A file that is not what it is read as, is damaged, or lacks a column.
    #[error("{}: {problem}", path.display())]
    BadFile { path: PathBuf, problem: String },

    #[error("{place}:{} {problem}", column.map(|column| format!("{column}:")).unwrap_or_default())]
    BadRecord {
        place: RecordPlace,
        /// Byte offset in the line, counted from 1, if known.
        column: Option<usize>,
        problem: String,
        /// Whether the records after it can still be read.
        can_continue: bool,
        /// Index of its source in the mixture, and of its file in the source.
        origin: (u32, u32),
    },

    /// The Hub or its cache: the network, access, or the disk.
    #[error(transparent)]
    Hub(#[from] firebrick_hub::HubError),
}

impl SourceError {
    /// Creates an error about a record, after which nothing can be read.
    pub(super) fn record(place: RecordPlace, column: Option<usize>, problem: impl Into<String>) -> Self {
        Self::BadRecord { place, column, problem: problem.into(), can_continue: false, origin: (0, 0) }
    }

    pub(super) fn too_large(place: RecordPlace, hint: &str) -> Self {
        Self::record(place, None, format!("one record is larger than {} MiB. {hint}", MAX_RECORD_BYTES >> 20))
    }

    pub(super) fn not_json(place: RecordPlace, column: usize, reason: &str, hint: &str) -> Self {
        Self::record(place, Some(column), format!("not valid JSON: {reason}. {hint}"))
    }

    pub(super) fn file(path: &Path, problem: impl Into<String>) -> Self {
        Self::BadFile { path: path.to_owned(), problem: problem.into() }
    }

    pub(super) fn wrong_format(path: &Path, expected: &str, (found, hint): (&str, &str)) -> Self {
        Self::file(path, format!("read as {expected}, but it is {found}. {hint}"))
    }

    /// Creates the error for a folder or dataset without readable files.
    pub(super) fn no_data(place: &str, hint: &str) -> Self {
        Self::NotFound(format!("no data files in {place}: {hint}"))
    }

    /// Creates the error for a split or configuration ("split" or "config") that does not exist or must be chosen.
    pub(super) fn no_such_part(place: &str, what: &str, requested: &str, hint: &str) -> Self {
        Self::NotFound(format!("{place} has no {what} {requested:?}: {hint}"))
    }

    /// Creates the error for a row of a Parquet or Arrow file (by index) that cannot be decoded.
    pub(super) fn bad_row(path: &Path, format: &str, row: usize, reason: &str) -> Self {
        Self::file(path, format!("cannot decode this {format} file at row {}: {reason}", row + 1))
    }

    /// Returns whether this is about one record, and the records after it can still be read.
    pub fn can_continue(&self) -> bool {
        matches!(self, Self::BadRecord { can_continue: true, .. })
    }

    /// Marks the error as one after which records can still be read.
    pub(super) fn recoverable(mut self) -> Self {
        if let Self::BadRecord { can_continue, .. } = &mut self {
            *can_continue = true;
        }
        self
    }
}
