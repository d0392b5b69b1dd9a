//! What can be wrong with an optimizer state that is read back.

/// A saved optimizer state that does not fit the run.
#[derive(Debug, thiserror::Error)]
pub enum OptimError {
    /// A tensor of the state is not there.
    #[error(
        "the optimizer state lacks `{name}`: the checkpoint was written by another recipe (LoRA targets or optimizer)"
    )]
    Missing {
        /// Name inside the state file.
        name: String,
    },
    /// A tensor of the state has another size or format.
    #[error("the optimizer state's `{name}` is {got}, expected {expected}: resume with the recipe that wrote it")]
    Mismatch {
        /// Name inside the state file.
        name: String,
        /// What the run needs.
        expected: String,
        /// What the file holds.
        got: String,
    },
}
