//! What was found in the records of a source, as a sentence.
//!
//! Trade-off: names are text, because reports are only shown.

use std::fmt::{self, Display};

use firebrick_data::Diagnosis;

/// A source and what its records contained.
#[derive(Debug, Clone, PartialEq)]
pub struct SourceReport {
    /// Its path as the recipe writes it.
    pub name: String,
    /// Its file format.
    pub file_format: String,
    /// What its records are.
    pub record_format: String,
    /// What was found in them.
    pub diagnosis: Diagnosis,
    /// Sentences about how it was read.
    pub remarks: Vec<String>,
}

impl Display for SourceReport {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} ({}, {}): {}", self.name, self.file_format, self.record_format, self.diagnosis)?;
        self.remarks.iter().try_for_each(|remark| write!(formatter, "\n  note: {remark}"))
    }
}
