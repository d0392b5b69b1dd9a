//! A position in a data file, for error messages and reports.
//!
//! Trade-off: no column. Errors that know a column name it themselves.

use std::fmt::{Display, Formatter, Result as FormatResult};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// A line of a data file, shown as `path:line`. In Parquet and Arrow files, which have no lines, a row.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// The data file.
    pub path: PathBuf,
    /// Line number (or row number), counted from 1.
    pub line: usize,
}

impl Display for Place {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> FormatResult {
        write!(formatter, "{}:{}", self.path.display(), self.line)
    }
}
