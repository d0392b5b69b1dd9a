//! What can go wrong in this crate: always the caller's data, never a guess that is carried on with.
//!
//! Gives up naming the tensor: a codec sees numbers, so the caller that read the tensor adds its name.

use thiserror::Error as ThisError;

use crate::format::Format;

/// Result of this crate's fallible functions.
pub type Result<T> = std::result::Result<T, Error>;

/// A tensor that cannot be quantised, or buffers that do not fit together.
#[derive(Debug, Clone, PartialEq, ThisError)]
pub enum Error {
    /// A NaN or an infinity would poison the scale of its whole block.
    #[error(
        "value {index} is {value}, but only finite numbers can be quantised: the weights are damaged or come from a run \
         that diverged; fetch the file again, or go back to an earlier checkpoint"
    )]
    NonFinite {
        /// Flat, row-major index of the first such value.
        index: usize,
        /// The value itself.
        value: f32,
    },
    /// A tensor without values has no scale.
    #[error("the tensor of shape {shape:?} has no values, and nothing to quantise: leave it out, or correct its shape")]
    Empty {
        /// The shape as given.
        shape: Vec<usize>,
    },
    /// Shape and data disagree.
    #[error(
        "shape {shape:?} needs {expected} {unit}, got {got}: the shape and the data come from different tensors, or the \
         file is cut short"
    )]
    ShapeMismatch {
        /// The shape as given.
        shape: Vec<usize>,
        /// What the shape asks for.
        expected: usize,
        /// What was handed over.
        got: usize,
        /// What is counted: values or bytes.
        unit: &'static str,
    },
    /// Two buffers that belong together differ in length.
    #[error("{what} holds {got} entries, expected {expected}: it belongs to a tensor of another size")]
    LengthMismatch {
        /// Which buffer.
        what: &'static str,
        /// Entries expected.
        expected: usize,
        /// Entries found.
        got: usize,
    },
    /// A block needs at least one value.
    #[error("block size 0: a block holds at least one value; bitsandbytes uses 64 for NF4 and 256 for 8-bit state")]
    ZeroBlockSize,
    /// Only plain floating-point bytes can be read as a source.
    #[error("cannot quantise from stored {format}: the source must be f32, f16 or bf16; dequantise it first")]
    UnsupportedSource {
        /// The format of the source.
        format: Format,
    },
    /// The mean of the block scales leaves the range of f32.
    #[error(
        "the block scales are so large that their mean is not a finite f32: such weights are damaged; or switch double \
         quantisation off (bnb_4bit.double_quant = false)"
    )]
    OffsetOverflow,
    /// Optimizer steps are counted from 1.
    #[error("optimizer step 0: steps are counted from 1, since the bias correction of step 0 divides by zero")]
    StepZero,
}
