//! Work between a run's steps, as far as it affects memory: forward passes over held-out rows, and answers to prompts.
//!
//! Trade-off: prompts that are answered together count as equally long.

/// Rows to evaluate and prompts to answer; none by default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EvaluationShape {
    /// Rows of a forward pass over held-out data.
    pub rows: EvaluatedRows,
    /// Groups of prompts that are answered at the same time; the most demanding group determines the memory.
    pub answers: Vec<Answers>,
}

/// Rows of a forward pass over held-out data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EvaluatedRows {
    /// There is no held-out data.
    #[default]
    None,
    /// The number of a training micro-batch.
    LikeTraining,
    /// A fixed number.
    Fixed(usize),
}

/// A group of prompts that are answered at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answers {
    /// Number of prompts.
    pub prompts: usize,
    /// Tokens of all prompts and their answers together.
    pub tokens: usize,
    /// Tokens of the longest prompt and its answer.
    pub longest: usize,
}
