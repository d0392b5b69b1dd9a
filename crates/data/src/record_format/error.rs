//! Errors about the format of one record or about a whole set of records.
//!
//! Trade-off: no error chaining, as in `DataError`. Each message is complete.

use thiserror::Error;

use crate::place::Place;

/// A record that does not match its format, or too many records that cannot be trained on.
#[derive(Debug, Clone, PartialEq, Error)]
pub enum RecordFormatError {
    /// The keys of the first record match no format.
    #[error(
        "{place}: found {found}, which matches no known format. The formats are {known}. Rename the keys, name the format, or map \
         the keys with `fields`{hint}"
    )]
    Unrecognized {
        /// File and line.
        place: Place,
        /// The keys found.
        found: String,
        /// The formats and their keys.
        known: String,
        /// More advice, beginning with a space, or empty.
        hint: String,
    },
    /// The records are for preference training.
    #[error(
        "{place}: the key {key:?} shows a set for preference training ({method}), which is not supported yet: its bad answers \
         would be trained like the good ones. {hint}"
    )]
    Preference {
        /// File and line.
        place: Place,
        /// The training method, such as "DPO".
        method: &'static str,
        /// The key that shows it.
        key: String,
        /// How to train on the good answers.
        hint: String,
    },
    /// The record lacks a key that its format needs.
    #[error("{place}: expected the key {expected}, found {found}. {hint}")]
    MissingKey {
        /// File and line.
        place: Place,
        /// The key or keys that would be accepted.
        expected: String,
        /// The keys found.
        found: String,
        /// What to do.
        hint: String,
    },
    /// A value of the wrong type.
    #[error("{place}: {key} must be {expected}, found {found}")]
    WrongType {
        /// File and line.
        place: Place,
        /// Path of the value within the record.
        key: String,
        /// The expected type.
        expected: &'static str,
        /// The type or value found.
        found: String,
    },
    /// A value of the right type that is invalid.
    #[error("{place}: {key} {problem}. {hint}")]
    BadValue {
        /// File and line.
        place: Place,
        /// Path of the value within the record.
        key: String,
        /// What is wrong with the value.
        problem: String,
        /// What to do.
        hint: &'static str,
    },
    /// A NUL character: the file is binary or damaged.
    #[error("{place}: a NUL character in {key}: the file is damaged or not text")]
    NulCharacter {
        /// File and line.
        place: Place,
        /// Path of the value within the record.
        key: String,
    },
    /// More records were dropped than allowed.
    #[error(
        "{bad} of {rows} records ({percent:.1} %) cannot be trained on, or not without losing a part; the limit is {allowed:.1} % \
         (max_bad_share).\n{report}"
    )]
    TooManyBadRows {
        /// Records that count as bad.
        bad: u64,
        /// Records read.
        rows: u64,
        /// `bad` in percent of `rows`.
        percent: f64,
        /// The limit.
        allowed: f64,
        /// The reasons, with counts, places and advice.
        report: String,
    },
    /// Conversations were kept, but the loss never includes an end-of-turn token.
    #[error(
        "none of the {chats} conversations has the token that ends the assistant's turn in its loss, so the model would never \
         learn to stop: {why}"
    )]
    EndNeverTrained {
        /// Conversations that were kept.
        chats: u64,
        /// The likely cause and what to do.
        why: String,
    },
}
