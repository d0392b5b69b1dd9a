//! The errors of this crate. Each is caused by the caller's data.
//!
//! Trade-off: errors do not name the tensor. A codec sees only numbers, so the caller that read the tensor adds its name.

use thiserror::Error as ThisError;

/// Result of this crate's fallible functions.
pub type Result<T> = std::result::Result<T, Error>;

/// A tensor that cannot be quantized, buffers that do not belong together, or an unknown name.
#[derive(Debug, Clone, PartialEq, ThisError)]
pub enum Error {
    /// A NaN or an infinity would make the scale of its whole block useless.
    #[error(
        "value {index} is {value}, but only finite numbers can be quantized: the weights are damaged or come from a run \
         that diverged; fetch the file again, or go back to an earlier checkpoint"
    )]
    NonFinite {
        /// Flat, row-major index of the first such value.
        index: usize,
        /// The value itself.
        value: f32,
    },
    /// A tensor without values has no scale.
    #[error(
        "the tensor of shape {shape:?} has no values, so there is nothing to quantize: leave it out, or correct its \
         shape"
    )]
    Empty {
        /// The shape as given.
        shape: Vec<usize>,
    },
    /// Shape and data do not match.
    #[error(
        "shape {shape:?} needs {expected} {unit}, got {got}: the shape and the data come from different tensors, or the \
         file is cut short"
    )]
    ShapeMismatch {
        /// The shape as given.
        shape: Vec<usize>,
        /// Number that the shape requires.
        expected: usize,
        /// Number that was given.
        got: usize,
        /// The counted unit: values or bytes.
        unit: &'static str,
    },
    /// The mean of the block scales leaves the range of f32.
    #[error(
        "the block scales are so large that their mean is not a finite f32: such weights are damaged; or switch double \
         quantization off (bnb_4bit.double_quant = false)"
    )]
    OffsetOverflow,
    /// A row does not consist of whole blocks.
    #[error(
        "rows of {columns} values are not whole blocks of {block_size}, which {format} needs: store this weight in nf4 or fp8, \
         which take rows of any length"
    )]
    PartialBlocks {
        /// The name of the format.
        format: &'static str,
        /// Values of a row.
        columns: usize,
        /// Values of a block.
        block_size: usize,
    },
    /// A name that no format has.
    #[error("unknown format `{got}`, expected one of: {}", expected.join(", "))]
    UnknownFormat {
        /// The name as given.
        got: String,
        /// The names that exist.
        expected: &'static [&'static str],
    },
}
