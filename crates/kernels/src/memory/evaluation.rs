//! What a run computes between its steps, as far as memory depends on it: held-out rows, and answers to prompts.
//!
//! Trade-off: prompts that are answered together count as equally long.

/// What is evaluated and answered; the default is nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EvaluationShape {
    /// Rows of a forward pass over held-out data.
    pub rows: EvaluatedRows,
    /// Prompts that are answered at the same time; of several groups the most demanding counts.
    pub answers: Vec<Answers>,
}

/// Rows of a forward pass over held-out data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EvaluatedRows {
    /// There is no held-out data.
    #[default]
    None,
    /// As many as a micro-batch of training has.
    LikeTraining,
    /// This many.
    Fixed(usize),
}

/// A group of prompts that are answered at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answers {
    /// How many.
    pub prompts: usize,
    /// Tokens of all prompts and their answers together.
    pub tokens: usize,
    /// Tokens of the longest prompt and its answer.
    pub longest: usize,
}
