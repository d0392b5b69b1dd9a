//! The errors of this crate. Each is caused by the caller's data.
//!
//! Trade-off: errors do not name the tensor. A codec sees only numbers, so the caller that read the tensor adds its name.

use thiserror::Error as ThisError;

/// Result of this crate's fallible functions.
pub type Result<T> = std::result::Result<T, Error>;

/// A tensor that cannot be quantized, buffers that do not belong together, or an unknown name: text, because no caller
/// distinguishes them.
#[derive(Debug, Clone, PartialEq, Eq, ThisError)]
#[error("{0}")]
pub struct Error(pub(crate) String);

impl Error {
    /// A NaN or an infinity would make the scale of its whole block useless. `index` is that of the first one.
    pub(crate) fn non_finite(index: usize, value: f32) -> Self {
        Self(format!(
            "value {index} is {value}, but only finite numbers can be quantized: the weights are damaged or come from a run \
             that diverged; fetch the file again, or go back to an earlier checkpoint"
        ))
    }

    /// Shape and data do not match. `unit` is what is counted, values or bytes.
    pub(crate) fn mismatch(shape: &[usize], expected: usize, unit: &str, got: usize) -> Self {
        Self(format!(
            "shape {shape:?} needs {expected} {unit}, got {got}: the shape and the data come from different tensors, or the \
             file is cut short"
        ))
    }
}
