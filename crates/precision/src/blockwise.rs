//! Block-wise 8-bit codes: each block of values shares one f32 scale, its largest magnitude, and each value is the
//! nearest entry of a [`DynamicMap`].
//!
//! Follows `kQuantizeBlockwise` and `kDequantizeBlockwise` (General8bit) of csrc/kernels.cu in bitsandbytes: multiply by
//! the reciprocal of the largest magnitude, take the nearest entry, and on a tie the even code. All codes of a block of
//! zeros are 0. The kernel uses an approximate reciprocal, so a value within one part in ten million of a decision point
//! may get the neighboring code there. The CPU path of bitsandbytes is coarser: it rounds the scaled value to one of
//! 65,536 steps before the lookup, and so gives another code for about one value in 400 (3 of the 1,159 golden ones;
//! tests/goldens.rs shows exactly which).
//!
//! Not supported: stochastic rounding, and other block sizes than 256.

use rayon::prelude::*;

use crate::dynamic_map::DynamicMap;
use crate::error::{Error, Result};
use crate::workers::blocks_at_once;

/// Values per block, in optimizer state and in the block scales of NF4 with double quantization.
pub const BLOCK_SIZE: usize = 256;

/// Values in 8-bit codes with one scale per block.
#[derive(Debug, Clone, PartialEq)]
pub struct BlockwiseQuantized {
    /// One code per value: an index into the map.
    pub codes: Vec<u8>,
    /// Largest magnitude of each block; the last block may be partial.
    pub absmax: Vec<f32>,
}

/// Quantizes `values` in blocks of [`BLOCK_SIZE`].
///
/// # Errors
/// [`Error::NonFinite`] for a NaN or an infinity.
pub fn quantize(values: &[f32], map: &DynamicMap) -> Result<BlockwiseQuantized> {
    if let Some(index) = values.iter().position(|value| !value.is_finite()) {
        return Err(Error::NonFinite { index, value: values[index] });
    }
    let mut codes = vec![0; values.len()];
    let mut absmax = vec![0.0; values.len().div_ceil(BLOCK_SIZE)];
    let blocks = values.par_chunks(BLOCK_SIZE).zip(codes.par_chunks_mut(BLOCK_SIZE)).zip(&mut absmax);
    blocks.with_min_len(blocks_at_once(BLOCK_SIZE)).for_each(|((values, codes), absmax)| {
        *absmax = largest_magnitude(values);
        // The reciprocal of a zero block is infinite; times 0 it is NaN, whose code is 0.
        let reciprocal = 1.0 / *absmax;
        for (value, code) in values.iter().zip(codes) {
            *code = map.nearest(value * reciprocal);
        }
    });
    Ok(BlockwiseQuantized { codes, absmax })
}

/// Returns the largest magnitude of finite values.
pub(crate) fn largest_magnitude(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |largest, value| largest.max(value.abs()))
}

impl BlockwiseQuantized {
    /// Decodes the values, given the map with which they were quantized.
    ///
    /// # Panics
    /// If there is not one scale per block, because the fields were taken from different tensors.
    pub fn dequantize(&self, map: &DynamicMap) -> Vec<f32> {
        assert_eq!(self.absmax.len(), self.codes.len().div_ceil(BLOCK_SIZE), "one scale per block");
        let mut values = vec![0.0; self.codes.len()];
        let blocks = values.par_chunks_mut(BLOCK_SIZE).zip(self.codes.par_chunks(BLOCK_SIZE)).zip(&self.absmax);
        blocks.with_min_len(blocks_at_once(BLOCK_SIZE)).for_each(|((values, codes), &scale)| {
            for (value, &code) in values.iter_mut().zip(codes) {
                *value = map.values()[usize::from(code)] * scale;
            }
        });
        values
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_values::Draws;

    #[test]
    fn quantizing_twice_changes_nothing() {
        let mut draws = Draws(5);
        let map = DynamicMap::unsigned();
        for _ in 0..50 {
            let (length, exponent) = (1 + draws.below(3000), draws.below(12) as i32);
            let values = draws.vector(length, 10_f32.powi(exponent - 6));
            let values: Vec<f32> = values.iter().map(|value| value.abs()).collect();
            let once = quantize(&values, map).unwrap();
            assert_eq!(quantize(&once.dequantize(map), map).unwrap(), once);
        }
    }

    #[test]
    fn the_error_names_the_value_that_is_not_finite() {
        let map = DynamicMap::signed();
        let error = quantize(&[1.0, 2.0, f32::NEG_INFINITY], map).unwrap_err();
        assert_eq!(error, Error::NonFinite { index: 2, value: f32::NEG_INFINITY });
    }
}
