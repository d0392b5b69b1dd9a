//! The errors of this crate. Each is caused by the caller's data.
//!
//! Trade-off: errors do not name the tensor. A codec sees only numbers, so the caller that read the tensor adds its name.

use thiserror::Error as ThisError;

/// Result of this crate's fallible functions.
pub type Result<T> = std::result::Result<T, Error>;

/// A tensor that cannot be quantized, buffers that do not belong together, or an unknown name.
#[derive(Debug, Clone, PartialEq, ThisError)]
#[expect(missing_docs, reason = "messages say what variants and their fields are")]
pub enum Error {
    /// A NaN or an infinity would make the scale of its whole block useless.
    #[error(
        "value {index} is {value}, but only finite numbers can be quantized: the weights are damaged or come from a run \
         that diverged; fetch the file again, or go back to an earlier checkpoint"
    )]
    NonFinite {
        /// Flat, row-major index of the first such value.
        index: usize,
        value: f32,
    },

    #[error(
        "the tensor of shape {shape:?} has no values, so there is nothing to quantize: leave it out, or correct its \
         shape"
    )]
    Empty { shape: Vec<usize> },

    #[error(
        "shape {shape:?} needs {expected} {unit}, got {got}: the shape and the data come from different tensors, or the \
         file is cut short"
    )]
    ShapeMismatch {
        shape: Vec<usize>,
        expected: usize,
        got: usize,
        /// The counted unit: values or bytes.
        unit: &'static str,
    },

    #[error(
        "the block scales are so large that their mean is not a finite f32: such weights are damaged; or switch double \
         quantization off (bnb_4bit.double_quant = false)"
    )]
    OffsetOverflow,

    #[error(
        "rows of {columns} values are not whole blocks of {block_size}, which {format} needs: store this weight in nf4 or fp8, \
         which take rows of any length"
    )]
    PartialBlocks { format: &'static str, columns: usize, block_size: usize },

    #[error("unknown format `{got}`, expected one of: {}", expected.join(", "))]
    UnknownFormat { got: String, expected: &'static [&'static str] },
}
