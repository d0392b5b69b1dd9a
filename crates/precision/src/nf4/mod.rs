//! NF4 ("4-bit NormalFloat", QLoRA, arXiv 2305.14314): sixteen levels at the quantiles of a normal distribution,
//! blocks of 64 values with one scale each, and the scales themselves quantised to 8 bits (double quantisation). Bytes
//! are bitsandbytes'.
//!
//! Three files: this one holds the levels and the types, `quantize.rs` makes the codes, `absmax.rs` the scales.
//!
//! What "bitsandbytes' bytes" means where its own paths differ (all measured, tests/goldens.rs):
//! - Packed codes and plain scales: those of its CPU path. The CUDA path agrees, except that a scaled value within a
//!   rounding error of a decision point may fall on the other side (it takes an approximate reciprocal, and four of
//!   its fifteen decision points are one f32 away), that blocks of zeros get code 0 there and 7 here (7 is exactly
//!   zero; code 0 becomes -0.0085 or so once double quantisation has moved the scale away from zero), and that it
//!   takes subnormal numbers for zero.
//! - Offset: PyTorch's mean on one CPU thread. Other thread counts and CUDA add in another order: last bits differ.
//! - Codes of the scales: nearest level, as on CUDA ([`crate::blockwise`]). The CPU path of bitsandbytes 0.50 looks
//!   them up in a coarser table and differs by one code in about 1 of 400.
//!
//! Gives up other block sizes when quantising, and FP4.

use std::mem;

use crate::workers;

mod absmax;
mod quantize;

pub use absmax::Absmax;
pub use quantize::{quantize, quantize_bf16, quantize_bytes};

/// Values that share one scale.
pub const BLOCK_SIZE: usize = 64;

/// The sixteen levels, `get_4bit_type("nf4")` of bitsandbytes/functional.py.
pub const LEVELS: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// A tensor as packed 4-bit codes with the scales of its blocks.
#[derive(Debug, Clone, PartialEq)]
pub struct Nf4Quantized {
    /// Two codes per byte, row-major, the earlier one in the HIGH nibble; an odd count leaves code 7 (zero) in the
    /// last nibble.
    pub packed: Vec<u8>,
    /// Scale of each block.
    pub absmax: Absmax,
    /// Shape of the tensor as stored, `[out, in]` for a linear weight. Blocks run over the flat tensor, across rows.
    pub shape: Vec<usize>,
    /// Values per block.
    pub block_size: usize,
}

impl Nf4Quantized {
    /// Number of values.
    pub fn count(&self) -> usize {
        count(&self.shape)
    }

    /// Bytes of codes and scales together.
    pub fn bytes(&self) -> usize {
        self.packed.len() + self.absmax.bytes()
    }

    /// The values that the codes stand for: level times scale, in f32.
    ///
    /// # Panics
    /// When the fields do not fit together: they were taken from different tensors.
    pub fn dequantize(&self) -> Vec<f32> {
        let (count, scales) = (self.count(), self.absmax.values());
        assert!(self.block_size > 0 && self.block_size.is_multiple_of(2), "blocks hold whole bytes");
        assert_eq!(self.packed.len(), count.div_ceil(2), "two codes per byte");
        assert_eq!(scales.len(), count.div_ceil(self.block_size), "one scale per block");
        let mut values = vec![0.0; count];
        let span = workers::blocks_per_worker(scales.len(), self.block_size);
        let length = span * self.block_size;
        let spans = values.chunks_mut(length).zip(self.packed.chunks(length / 2)).zip(scales.chunks(span));
        workers::run(spans.map(|((values, packed), scales)| {
            move || {
                let blocks = values.chunks_mut(self.block_size).zip(packed.chunks(self.block_size / 2)).zip(scales);
                for ((values, packed), &scale) in blocks {
                    dequantize_block(values, packed, scale);
                }
            }
        }));
        values
    }
}

/// Values in a tensor of `shape`; a shape too large for any memory gives a count that matches no data.
fn count(shape: &[usize]) -> usize {
    shape.iter().fold(1, |count: usize, &size| count.saturating_mul(size))
}

/// `packed` holds one byte per two values, the last one half used when their count is odd.
fn dequantize_block(values: &mut [f32], packed: &[u8], scale: f32) {
    let scaled = LEVELS.map(|level| level * scale);
    for (pair, byte) in values.chunks_mut(2).zip(packed) {
        pair[0] = scaled[usize::from(byte >> 4)];
        if let Some(second) = pair.get_mut(1) {
            *second = scaled[usize::from(byte & 0xF)];
        }
    }
}

impl Absmax {
    /// Bytes that the scales take.
    pub fn bytes(&self) -> usize {
        match self {
            Self::Float(scales) => mem::size_of_val(scales.as_slice()),
            Self::Nested { codes, absmax, offset } => {
                codes.len() + mem::size_of_val(absmax.as_slice()) + mem::size_of_val(offset)
            }
        }
    }
}
