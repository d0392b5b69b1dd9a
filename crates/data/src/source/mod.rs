//! Where rows come from: files, globs, folders and Hub datasets, in every format people have, as a stream of
//! [`Record`]s.
//!
//! ```text
//! SourceSpec --resolve--> Source (files in order, one format) --records--> Records: Iterator<Record>
//!                          several --------- Mixture ---------records--> MixedRecords: Iterator<Record>
//! ```
//!
//! Nothing here holds a whole file: a record is at most [`MAX_RECORD_BYTES`], a reader a few buffers. Gives up reading
//! two formats as one source (name them as two) and guessing the types of CSV values (all are strings).

mod arrow;
mod batches;
mod column;
mod content;
mod csv;
mod error;
mod files;
mod format;
mod hub;
mod json;
mod jsonl;
mod mixture;
mod open;
mod parquet;
mod records;
mod spec;
mod splits;
#[cfg(test)]
mod tests;
mod text;

use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::{Map, Value as Json};

use crate::error::Place;

pub use content::ContentKeys;
pub use error::SourceError;
pub use format::{Compression, Format, TextUnit};
pub use hub::{Download, Hub, HubSettings};
pub use mixture::{Exhausted, MixOrder, MixedRecords, Mixture};
pub use records::{Records, Source};
pub use spec::SourceSpec;

/// The most bytes that one record may have: a line, an element of a JSON list, a CSV row, a text document.
pub const MAX_RECORD_BYTES: usize = 64 << 20;

/// The most values (numbers, texts, lists, objects) that one record may have: each takes far more room in memory than in
/// the file.
pub(crate) const MAX_RECORD_VALUES: usize = 4_000_000;

/// One row of a data file, not yet understood.
#[derive(Debug, Clone, PartialEq)]
pub struct Record {
    /// The row's keys in the file's order. A column without a value in this row is null.
    pub fields: Map<String, Json>,
    /// The file and the line where the row begins (Parquet and Arrow: its number in the file, from 1).
    pub place: Place,
    /// Which source of the mixture it came from; 0 where there is one.
    pub source: u32,
}

impl Record {
    /// A record of the only source.
    pub fn new(fields: Map<String, Json>, place: Place) -> Self {
        Self { fields, place, source: 0 }
    }
}

/// An ending for a file that is not finished, which no other thread or process gives at the same time.
fn unfinished() -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    format!("{}-{}.half", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed))
}
