//! One row of a data file, its place, and the limits of its size.
//!
//! Trade-off: rows over the limits are refused, so that memory is bounded without reading the whole file first. A place has no column; errors that
//! know one name it themselves.

use std::fmt::{Display, Formatter, Result as FormatResult};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value as Json};

/// Maximum bytes of one record: a line, an element of a JSON list, a CSV row, a text document.
pub const MAX_RECORD_BYTES: usize = 64 << 20;

/// Maximum values (numbers, strings, lists, objects) of one record: each takes far more space in memory than in the file.
pub(crate) const MAX_RECORD_VALUES: usize = 4_000_000;

/// One row of a data file, not yet interpreted.
#[derive(Debug, Clone, PartialEq)]
pub struct Record {
    /// The row's keys in the file's order. A column without a value in this row is null. Numbers that JSON cannot hold, and lone
    /// surrogates, are marked ([`firebrick_arch::python_json`]).
    pub fields: Map<String, Json>,
    /// The file and the line where the row begins (Parquet and Arrow: its number in the file, counted from 1).
    pub place: RecordPlace,
    /// Index of its source in the mixture; 0 if there is only one.
    pub source: u32,
    /// Index of its file in the source.
    pub file: u32,
}

impl Record {
    /// Creates a record of the only source.
    pub fn new(fields: Map<String, Json>, place: RecordPlace) -> Self {
        Self { fields, place, source: 0, file: 0 }
    }
}

/// A line of a data file, shown as `path:line`; in Parquet and Arrow files, which have no lines, a row.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordPlace {
    /// The data file.
    pub path: PathBuf,
    /// Line number (or row number), counted from 1.
    pub line: usize,
}

impl Display for RecordPlace {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> FormatResult {
        write!(formatter, "{}:{}", self.path.display(), self.line)
    }
}
