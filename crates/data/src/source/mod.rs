//! Reads records from files, patterns, folders and Hub datasets, in all supported formats, as a stream of [`Record`]s.
//!
//! ```text
//! SourceSpec --resolve--> Source (files in order, one format) --records--> Records: Iterator<Record>
//!                          several --------- Mixture ---------records--> MixedRecords: Iterator<Record>
//! ```
//!
//! No reader holds a whole file: a record has at most [`MAX_RECORD_BYTES`], a reader a few buffers. Not supported: two
//! formats in one source (use two sources) and types of CSV values (all are strings).

mod arrow;
mod column;
mod content;
mod csv;
mod error;
mod files;
mod format;
mod hub_choice;
mod json;
mod lines;
mod mixture;
mod open;
mod parquet;
mod record;
mod records;
mod spec;
mod splits;
#[cfg(test)]
mod tests;

pub use content::ContentKeys;
pub use error::SourceError;
pub use format::{FileFormat, TextDocument};
pub use mixture::{Mix, MixUntil, MixedRecords, Mixture};
pub use record::{MAX_RECORD_BYTES, Record, RecordPlace};
pub use records::{Records, Source};
pub use spec::SourceSpec;
