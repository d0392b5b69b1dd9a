//! What can be wrong with a record's shape, and with a whole set of records.
//!
//! Gives up error chaining, as `DataError` does: each message is whole by itself.

use thiserror::Error;

use crate::error::Place;

/// A record that is not what its shape asks for, or too many records that teach nothing.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ShapeError {
    /// The keys of the first record fit no shape.
    #[error(
        "{place}: found {found}, which is no known shape. Known are {known}. Rename the keys, name the shape, or say which \
         key is which with `fields`{hint}"
    )]
    Unrecognised {
        /// File and line.
        place: Place,
        /// The keys that are there.
        found: String,
        /// The shapes and their keys.
        known: String,
        /// More advice, beginning with a space, or nothing.
        hint: String,
    },
    /// A key that the shape needs is not in the record.
    #[error("{place}: expected the key {expected}, found {found}. {hint}")]
    MissingKey {
        /// File and line.
        place: Place,
        /// The key or keys that would do.
        expected: String,
        /// The keys that are there.
        found: String,
        /// What to do.
        hint: String,
    },
    /// A value of the wrong type.
    #[error("{place}: {key} must be {expected}, found {found}")]
    WrongType {
        /// File and line.
        place: Place,
        /// Path of the value inside the record.
        key: String,
        /// The type that is needed.
        expected: &'static str,
        /// What is there.
        found: String,
    },
    /// A value of the right type that makes no sense.
    #[error("{place}: {key} {problem}. {hint}")]
    BadValue {
        /// File and line.
        place: Place,
        /// Path of the value inside the record.
        key: String,
        /// What is wrong with it.
        problem: String,
        /// What to do.
        hint: &'static str,
    },
    /// A NUL character, which no text has: a binary or damaged file.
    #[error("{place}: a NUL character in {key}: the file is damaged or not text")]
    NulCharacter {
        /// File and line.
        place: Place,
        /// Path of the value inside the record.
        key: String,
    },
    /// More records than allowed were dropped.
    #[error(
        "{bad} of {rows} rows ({percent:.1} %) cannot be trained on; at most {allowed:.1} % may (max_bad_share).\n{report}"
    )]
    TooManyBadRows {
        /// Rows dropped for a reason of their own.
        bad: u64,
        /// Rows read.
        rows: u64,
        /// `bad` in percent of `rows`.
        percent: Percent,
        /// What was allowed.
        allowed: Percent,
        /// The reasons, with counts, places and advice.
        report: String,
    },
    /// Conversations were trained on, but never the token that ends a turn.
    #[error(
        "none of the {chats} conversations trains the token that ends the assistant's turn, so the model would never \
         learn to stop: {why}"
    )]
    EndNeverTrained {
        /// Conversations that were kept.
        chats: u64,
        /// The likely cause, with what to do.
        why: String,
    },
}

/// A share in percent. Compares by its bits, so that the error can be compared in tests.
#[derive(Debug, Clone, Copy)]
pub struct Percent(pub f64);

impl PartialEq for Percent {
    fn eq(&self, other: &Self) -> bool {
        self.0.to_bits() == other.0.to_bits()
    }
}

impl Eq for Percent {}

impl std::fmt::Display for Percent {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(formatter)
    }
}
