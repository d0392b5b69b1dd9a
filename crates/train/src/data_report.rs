//! What was found in the rows of a source, under the names that recipes give to formats and shapes.

use std::fmt::{self, Display};

use firebrick_data::{Diagnosis, Shape};

/// A source and what its rows held.
#[derive(Debug, Clone, PartialEq)]
pub struct SourceReport {
    /// Its path as the recipe writes it.
    pub name: String,
    /// Its file format.
    pub format: String,
    /// What its rows are.
    pub shape: String,
    /// What was found in them.
    pub diagnosis: Diagnosis,
}

impl Display for SourceReport {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} ({}, {}): {}", self.name, self.format, self.shape, self.diagnosis)
    }
}

/// The name of a shape as recipes write it.
pub(crate) fn shape_name(shape: Shape) -> String {
    match shape {
        Shape::Messages => "chat",
        Shape::Auto => "auto",
        Shape::Sharegpt => "sharegpt",
        Shape::Alpaca => "alpaca",
        Shape::Text => "text",
        Shape::PromptCompletion => "prompt_completion",
        Shape::Pretokenized => "pretokenized",
    }
    .to_owned()
}
