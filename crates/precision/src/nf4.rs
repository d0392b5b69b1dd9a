//! NF4 ("4-bit NormalFloat", QLoRA, arXiv 2305.14314): sixteen levels at the quantiles of a normal distribution, and
//! blocks of 64 values with one scale each. `scales.rs` quantizes the scales (double quantization). The bytes are those
//! of bitsandbytes.
//!
//! Two codes per byte, row-major, the earlier one in the HIGH nibble. An odd count leaves code 7 (zero) in the last
//! nibble.
//!
//! Where the code paths of bitsandbytes differ from each other, this crate makes the following choices (all measured in tests/goldens.rs):
//! - Packed codes and plain scales: those of its CPU path. The CUDA path agrees, with three exceptions. A scaled value
//!   within a rounding error of a decision point may get the neighboring code there (it uses an approximate reciprocal,
//!   and four of its fifteen decision points are one f32 away). Blocks of zeros get code 0 there and 7 here (7 is exactly
//!   zero; code 0 becomes about -0.0085 once double quantization has moved the scale away from zero). And it treats
//!   subnormal numbers as zero.
//! - Offset: PyTorch's mean on one CPU thread. Other thread counts and CUDA add in another order, so last bits differ.
//! - Codes of the scales: nearest level, as on CUDA ([`crate::blockwise`]). The CPU path of bitsandbytes 0.50 uses a
//!   coarser table and differs by one code for about 1 scale in 400.
//!
//! Not supported: other block sizes than 64.

use rayon::prelude::*;

use crate::dynamic_map::midpoints;
use crate::error::{Error, Result};
use crate::packing::{Decoder, Packing};
use crate::workers::blocks_at_once;

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

pub(crate) const DECODER: Decoder =
    Decoder { levels: &LEVELS, packing: Packing::HighNibbleFirst, block_size: BLOCK_SIZE };

/// The code of a value is the number of decision points below it. A value on a decision point gets the lower code.
const DECISIONS: [f32; 15] = midpoints(&LEVELS);

/// Values are looked up in cells of width 1/16, centered on the multiples of 1/16: cell 0 is around -1, cell 32 around 1.
const CELLS_PER_UNIT: f32 = 16.0;
/// Space for 33 cells, rounded up so that six bits always index it.
const CELLS: usize = 64;
/// Adding this to a small number leaves the number, rounded to an integer, in the lowest bits of the sum: 1.5 · 2^23,
/// plus the index of cell 0.
const ROUNDER: f32 = 12_582_912.0 + CELLS_PER_UNIT;

/// For each cell, the number of decision points below it and the one inside it (infinity if there is none).
const CELL_TABLE: [(u8, f32); CELLS] = cell_table();

const fn cell_table() -> [(u8, f32); CELLS] {
    let mut table = [(0, f32::INFINITY); CELLS];
    let mut cell = 0;
    while cell < CELLS {
        let center = cell as f32 / CELLS_PER_UNIT - 1.0;
        let (low, high) = (center - 0.5 / CELLS_PER_UNIT, center + 0.5 / CELLS_PER_UNIT);
        let mut decision = 0;
        while decision < DECISIONS.len() {
            if DECISIONS[decision] < low {
                table[cell].0 += 1;
            } else if DECISIONS[decision] < high {
                assert!(table[cell].1 == f32::INFINITY, "one decision point per cell");
                table[cell].1 = DECISIONS[decision];
            }
            decision += 1;
        }
        cell += 1;
    }
    table
}

/// Smallest divisor, which replaces smaller scales, so that a block of zeros does not divide by zero.
const SMALLEST_DIVISOR: f32 = 1e-38;

/// Encodes values to packed codes and the scale of each block (its largest magnitude).
pub(crate) fn encode<T: Copy + Sync>(
    values: &[T],
    widen: impl Fn(T) -> f32 + Copy + Send + Sync,
) -> Result<(Vec<u8>, Vec<f32>)> {
    encode_with(values, widen, code)
}

/// Encodes to any format of sixteen levels in the same way; `code` takes a value in [-1, 1].
pub(crate) fn encode_with<T: Copy + Sync>(
    values: &[T],
    widen: impl Fn(T) -> f32 + Copy + Send + Sync,
    code: impl Fn(f32) -> u8 + Copy + Send + Sync,
) -> Result<(Vec<u8>, Vec<f32>)> {
    let mut codes = vec![0; values.len().div_ceil(2)];
    let mut scales = vec![0.0; values.len().div_ceil(BLOCK_SIZE)];
    let blocks = values.par_chunks(BLOCK_SIZE).zip(codes.par_chunks_mut(BLOCK_SIZE / 2)).zip(&mut scales).enumerate();
    let first_error = blocks.with_min_len(blocks_at_once(BLOCK_SIZE)).find_map_first(|(index, block)| {
        let ((values, codes), scale) = block;
        let (within, value) = encode_block(values, widen, code, codes, scale).err()?;
        Some(Error::NonFinite { index: index * BLOCK_SIZE + within, value })
    });
    first_error.map_or(Ok((codes, scales)), Err)
}

/// Encodes a block, which may be partial at the end of the tensor. Fails with the place and value of the first NaN or infinity.
fn encode_block<T: Copy>(
    values: &[T],
    widen: impl Fn(T) -> f32,
    code: impl Fn(f32) -> u8,
    codes: &mut [u8],
    scale: &mut f32,
) -> std::result::Result<(), (usize, f32)> {
    let mut wide = [0.0; BLOCK_SIZE];
    for (wide, &value) in wide.iter_mut().zip(values) {
        *wide = widen(value);
    }
    let largest = largest_magnitude(&wide).map_err(|within| (within, wide[within]))?;
    let divisor = largest.max(SMALLEST_DIVISOR);
    // As in the CPU path of bitsandbytes, a partial block divides, and stores a scale that is never zero.
    if values.len() == BLOCK_SIZE {
        *scale = largest;
        let reciprocal = 1.0 / divisor;
        wide.iter_mut().for_each(|value| *value *= reciprocal);
    } else {
        *scale = divisor;
        wide.iter_mut().for_each(|value| *value /= divisor);
    }
    pack(&wide, code, codes);
    Ok(())
}

/// Returns the largest magnitude of a block, or the index of its first NaN or infinity.
fn largest_magnitude(values: &[f32; BLOCK_SIZE]) -> std::result::Result<f32, usize> {
    // Without their sign, the bits of floats are ordered as the floats are, with infinity and NaN on top.
    let largest = values.iter().fold(0, |largest, value| value.abs().to_bits().max(largest));
    let largest = f32::from_bits(largest);
    if largest.is_finite() {
        Ok(largest)
    } else {
        Err(values.iter().position(|value| !value.is_finite()).expect("the largest magnitude is one of the values"))
    }
}

/// Packs the codes of a block scaled to [-1, 1], two per byte, the earlier one in the high nibble; writes as many bytes as `codes` has.
#[inline(always)] // with the code of one format in its loop
fn pack(scaled: &[f32; BLOCK_SIZE], code: impl Fn(f32) -> u8, codes: &mut [u8]) {
    for (byte, [first, second]) in codes.iter_mut().zip(scaled.as_chunks().0) {
        *byte = code(*first) << 4 | code(*second);
    }
}

/// Returns the code of a value in [-1, 1].
#[inline(always)] // also at opt-level 1, where development builds load models
fn code(scaled: f32) -> u8 {
    let cell = (scaled * CELLS_PER_UNIT + ROUNDER).to_bits() as usize % CELLS;
    let (below, decision) = CELL_TABLE[cell];
    below + u8::from(scaled > decision)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_values::Draws;

    #[test]
    fn code_is_the_number_of_decision_points_below() {
        let counted = |value: f32| DECISIONS.iter().filter(|&&decision| value > decision).count() as u8;
        let mut draws = Draws(19);
        let drawn = (0..100_000).map(|_| draws.uniform());
        let cell_edges = (-32..=32).map(|edge| edge as f32 / 32.0);
        let points: Vec<f32> = cell_edges.chain(DECISIONS).chain([0.0, -0.0, f32::MIN_POSITIVE]).collect();
        // A scaled value exceeds 1 by at most a rounding.
        let near = points.iter().flat_map(|point| [point.next_down(), *point, point.next_up()]);
        for value in drawn.chain(near) {
            assert_eq!(code(value), counted(value), "{value:e}");
        }
    }
}
