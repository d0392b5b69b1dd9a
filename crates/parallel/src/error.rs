//! What can go wrong between ranks.
//!
//! Trade-off: a lost rank ends the run on every rank; nothing is repaired here.

use firebrick_kernels::CommError;

/// An exchange between ranks failed. The step must not be taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParallelError {
    /// A rank is gone, or ranks disagree about what they exchange.
    #[error(transparent)]
    Comm(#[from] CommError),
}
