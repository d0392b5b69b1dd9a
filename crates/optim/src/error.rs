//! What can be wrong with an optimizer state that is read back.
//!
//! Trade-off: the first problem is reported, not all of them.

/// A saved optimizer state that does not fit the run.
#[derive(Debug, thiserror::Error)]
pub enum OptimError {
    /// A tensor of the state is not there.
    #[error(
        "the optimizer state lacks `{name}`: the checkpoint was written with another recipe (LoRA targets or optimizer)"
    )]
    Missing {
        /// Name inside the state file.
        name: String,
    },
    /// A tensor of the state has another size or format.
    #[error("the optimizer state's `{name}` has {got}, expected {expected}: resume with the recipe that wrote it")]
    Mismatch {
        /// Name inside the state file.
        name: String,
        /// What the run needs.
        expected: String,
        /// What the file holds.
        got: String,
    },
    /// A tensor of the state belongs to no parameter of the run.
    #[error(
        "the optimizer state has `{name}`, which no parameter of this run needs: resume with the recipe that wrote it"
    )]
    Unexpected {
        /// Name inside the state file.
        name: String,
    },
}
