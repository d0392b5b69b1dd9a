//! Where a document came from: source, record, file and line.
//!
//! Trade-off: numbers instead of names, so that a token file does not depend on where the data lies.

/// Where a document came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Origin {
    /// Index of its source in the mixture.
    pub source: u32,
    /// Hash of its record ([`Encoded::record`](crate::Encoded::record)); the pieces of a split record have the same.
    pub record: u64,
    /// Index of the record's file in the source.
    pub file: u32,
    /// Line where the record begins (Parquet and Arrow: its row), counted from 1. Larger numbers than 32 bits hold are
    /// stored as the largest.
    pub line: u32,
}
