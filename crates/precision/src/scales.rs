//! Scales of a quantized tensor: f32, narrow floats, or (the "double" in double quantization of NF4) themselves quantized around their mean.
//!
//! Trade-off: the mean of the scales is summed in the order of PyTorch's CPU sum, because it is stored and must be the
//! same number. A sum in f64 would be a little more accurate and differ in the last bit.

use std::mem;

use crate::blockwise::{self, BlockwiseQuantized};
use crate::dynamic_map::DynamicMap;
use crate::error::{Error, Result};
use crate::float::NarrowFloat;

/// All scales of one tensor.
#[derive(Debug, Clone, PartialEq)]
pub struct HostScales {
    /// The scales of all blocks.
    pub block: BlockScales,
}

/// Factors of the levels in each block: in NF4 the block's largest magnitude.
#[derive(Debug, Clone, PartialEq)]
pub enum BlockScales {
    /// One f32 per block.
    Float(Vec<f32>),
    /// Codes of a narrow float, times one f32.
    Narrow {
        /// One code per block.
        codes: Vec<u8>,
        /// The format of the codes: E8M0 or UE4M3.
        format: NarrowFloat,
        /// The scale of the whole tensor; `None` in formats without one.
        tensor: Option<f32>,
    },
    /// Differences from their mean, in 8-bit codes of [`DynamicMap::signed`] with one f32 per 256 blocks.
    Nested {
        /// One code per block.
        codes: Vec<u8>,
        /// Largest magnitude of each 256 differences.
        absmax: Vec<f32>,
        /// The mean of the scales.
        offset: f32,
    },
}

impl BlockScales {
    /// Quantizes scales, at least one.
    ///
    /// # Errors
    /// [`Error::OffsetOverflow`] if their mean is not a finite f32.
    pub(crate) fn nested(scales: Vec<f32>) -> Result<Self> {
        let offset = sum_in_torch_order(&scales) / scales.len() as f32;
        if !offset.is_finite() {
            return Err(Error::OffsetOverflow);
        }
        let mut differences = scales;
        differences.iter_mut().for_each(|scale| *scale -= offset);
        let BlockwiseQuantized { codes, absmax, .. } = blockwise::quantize(&differences, DynamicMap::signed())?;
        Ok(Self::Nested { codes, absmax, offset })
    }

    /// Returns one f32 per block, as used by dequantization.
    ///
    /// # Panics
    /// If there is not one nested scale per 256 codes, because the fields were taken from different tensors.
    pub fn values(&self) -> Vec<f32> {
        match self {
            Self::Float(scales) => scales.clone(),
            Self::Narrow { codes, format, tensor } => {
                let map = narrow_map(*format, *tensor);
                codes.iter().map(|&code| map[usize::from(code)]).collect()
            }
            Self::Nested { codes, absmax, offset } => {
                assert_eq!(absmax.len(), codes.len().div_ceil(blockwise::BLOCK_SIZE), "one nested scale per 256 codes");
                let levels = DynamicMap::signed().values();
                let scale = |(index, &code): (usize, &u8)| {
                    levels[usize::from(code)] * absmax[index / blockwise::BLOCK_SIZE] + offset
                };
                codes.iter().enumerate().map(scale).collect()
            }
        }
    }

    /// Returns the bytes of the scales.
    pub fn bytes(&self) -> usize {
        match self {
            Self::Float(scales) => mem::size_of_val(scales.as_slice()),
            Self::Narrow { codes, tensor, .. } => codes.len() + tensor.map_or(0, |tensor| mem::size_of_val(&tensor)),
            Self::Nested { codes, absmax, offset } => {
                codes.len() + mem::size_of_val(absmax.as_slice()) + mem::size_of_val(offset)
            }
        }
    }
}

/// Returns the scale of each narrow-float code, with the scale of the whole tensor multiplied in: one f32 operation that rounds.
pub fn narrow_map(format: NarrowFloat, tensor: Option<f32>) -> [f32; 256] {
    format.table().map(|value| tensor.map_or(value, |tensor| value * tensor))
}

/// Lanes of one vector in PyTorch's sum, and the number of vectors with separate sums.
const LANES: usize = 8;
const VECTORS: usize = 4;
const GROUP: usize = LANES * VECTORS;
/// Levels of partial sums, so that no running sum grows large compared with what is added to it.
const LEVELS: usize = 4;

/// Sums as PyTorch does on one CPU thread (`cascade_sum` of aten/src/ATen/native/cpu/SumKernel.cpp, 256-bit vectors): 32 interleaved running sums,
/// each in a cascade of four levels; then the remaining vectors, the four vectors, the remaining values, and the eight lanes.
fn sum_in_torch_order(values: &[f32]) -> f32 {
    let (groups, rest) = values.as_chunks::<GROUP>();
    let sums = cascade(groups);
    let (vectors, sums) = (rest.as_chunks::<LANES>(), sums.as_chunks::<LANES>().0);
    let mut lanes = sums[0];
    for vector in vectors.0.iter().chain(&sums[1..]) {
        add(&mut lanes, vector);
    }
    vectors.1.iter().chain(&lanes).fold(0.0, |sum, value| sum + value)
}

/// Adds whole groups, lane by lane. Level 0 sums `step` groups and is then added to level 1 and cleared, and so on
/// upwards whenever a level has summed `step` sums of the level below it.
fn cascade(groups: &[[f32; GROUP]]) -> [f32; GROUP] {
    let length_bits = groups.len().next_power_of_two().trailing_zeros() as usize;
    let step_bits = (length_bits / LEVELS).max(4);
    let step = 1 << step_bits;
    let mut levels = [[0.0; GROUP]; LEVELS];
    let mut taken = 0;
    let (steps, rest) = groups.split_at(groups.len() / step * step);
    for groups in steps.chunks(step) {
        groups.iter().for_each(|group| add(&mut levels[0], group));
        taken += step;
        for level in 1..LEVELS {
            let below = std::mem::replace(&mut levels[level - 1], [0.0; GROUP]);
            add(&mut levels[level], &below);
            if !(taken >> (level * step_bits)).is_multiple_of(step) {
                break;
            }
        }
    }
    let [mut sum, upper @ ..] = levels;
    rest.iter().chain(&upper).for_each(|group| add(&mut sum, group));
    sum
}

fn add<const N: usize>(sum: &mut [f32; N], values: &[f32; N]) {
    for (sum, value) in sum.iter_mut().zip(values) {
        *sum += value;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_sum_exactly_so_no_value_is_lost_or_counted_twice() {
        for length in [1, 31, 32, 33, 63, 512, 513, 8191, 8192, 8193, 16_385, 300_007] {
            let values: Vec<f32> = (0..length).map(|index| (index % 13) as f32).collect();
            let exact: u32 = (0..length).map(|index| index % 13).sum();
            assert_eq!(sum_in_torch_order(&values), exact as f32, "{length} values");
        }
    }

    #[test]
    fn scales_whose_sum_overflows_are_refused() {
        assert_eq!(BlockScales::nested(vec![f32::MAX; 2]).unwrap_err(), Error::OffsetOverflow);
    }
}
