//! Values to NF4 codes: on the path of loading a model, so one pass, many threads, no copy of the tensor.
//!
//! A code is the number of decision points below the scaled value. Decision points are more than 1/16 apart, so
//! rounding the value to a multiple of 1/16 leaves one of them to compare with: two lookups and no branch.

use half::{bf16, f16};

use super::{Absmax, BLOCK_SIZE, LEVELS, Nf4Quantized, count};
use crate::bf16::widen;
use crate::dynamic_map::midpoints;
use crate::error::{Error, Result};
use crate::format::{DoubleQuant, Format};
use crate::workers;

/// A value gets the number of decision points below it as its code; on a decision point it gets the lower code.
const DECISIONS: [f32; 15] = midpoints(&LEVELS);

/// Cells of width 1/16 around the multiples of 1/16: cell 0 lies around -1, cell 32 around 1.
const CELLS_PER_UNIT: f32 = 16.0;
/// Room for 33 cells, rounded up so that six bits always index it.
const CELLS: usize = 64;
/// Added to a small number, leaves it rounded to an integer in the lowest bits of the sum: 1.5 · 2^23, and the index
/// of cell 0.
const ROUNDER: f32 = 12_582_912.0 + CELLS_PER_UNIT;

/// Decision points below each cell, and the one inside it (or one that no value exceeds).
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

/// Scales below this are taken as this when dividing, so that a block of zeros divides by something.
const SMALLEST_DIVISOR: f32 = 1e-38;

/// Quantises f32 values of a row-major tensor.
///
/// # Errors
/// [`Error::NonFinite`], [`Error::ShapeMismatch`], [`Error::Empty`], and [`Error::OffsetOverflow`] with double
/// quantisation.
pub fn quantize(values: &[f32], shape: &[usize], double_quant: DoubleQuant) -> Result<Nf4Quantized> {
    quantize_with(values, |value| value, shape, double_quant)
}

/// Quantises bf16 values of a row-major tensor, widened exactly, a block at a time.
///
/// # Errors
/// As [`quantize`].
pub fn quantize_bf16(values: &[bf16], shape: &[usize], double_quant: DoubleQuant) -> Result<Nf4Quantized> {
    quantize_with(values, widen, shape, double_quant)
}

/// Quantises a tensor from its little-endian bytes at any alignment: what a mapped safetensors file holds.
///
/// # Errors
/// As [`quantize`], and [`Error::UnsupportedSource`] unless `stored` is f32, f16 or bf16.
pub fn quantize_bytes(
    bytes: &[u8],
    stored: Format,
    shape: &[usize],
    double_quant: DoubleQuant,
) -> Result<Nf4Quantized> {
    match stored {
        Format::F32 => quantize_with(whole(bytes, shape)?, f32::from_le_bytes, shape, double_quant),
        Format::F16 => {
            quantize_with(whole(bytes, shape)?, |bytes| f16::from_le_bytes(bytes).to_f32(), shape, double_quant)
        }
        Format::Bf16 => {
            quantize_with(whole(bytes, shape)?, |bytes| widen(bf16::from_le_bytes(bytes)), shape, double_quant)
        }
        Format::Nf4(_) | Format::Int8Blockwise => Err(Error::UnsupportedSource { format: stored }),
    }
}

/// The bytes as groups of `WIDTH`, if they are exactly those of `shape`.
fn whole<'a, const WIDTH: usize>(bytes: &'a [u8], shape: &[usize]) -> Result<&'a [[u8; WIDTH]]> {
    let (groups, rest) = bytes.as_chunks();
    let expected = count(shape).saturating_mul(WIDTH);
    if !rest.is_empty() || bytes.len() != expected {
        return Err(Error::ShapeMismatch { shape: shape.to_vec(), expected, got: bytes.len(), unit: "bytes" });
    }
    Ok(groups)
}

fn quantize_with<T: Copy + Sync>(
    values: &[T],
    widen: impl Fn(T) -> f32 + Copy + Send,
    shape: &[usize],
    double_quant: DoubleQuant,
) -> Result<Nf4Quantized> {
    let count = count(shape);
    if values.len() != count {
        return Err(Error::ShapeMismatch { shape: shape.to_vec(), expected: count, got: values.len(), unit: "values" });
    }
    if count == 0 {
        return Err(Error::Empty { shape: shape.to_vec() });
    }
    let mut packed = vec![0; count.div_ceil(2)];
    let mut scales = vec![0.0; count.div_ceil(BLOCK_SIZE)];
    let span = workers::blocks_per_worker(scales.len(), BLOCK_SIZE);
    let spans =
        values.chunks(span * BLOCK_SIZE).zip(packed.chunks_mut(span * BLOCK_SIZE / 2)).zip(scales.chunks_mut(span));
    let outcomes =
        workers::run(spans.map(|((values, packed), scales)| move || quantize_span(values, widen, packed, scales)));
    for (worker, outcome) in outcomes.into_iter().enumerate() {
        outcome.map_err(|(index, value)| Error::NonFinite { index: worker * span * BLOCK_SIZE + index, value })?;
    }
    let absmax = match double_quant {
        DoubleQuant::Off => Absmax::Float(scales),
        DoubleQuant::On => Absmax::nested(scales)?,
    };
    Ok(Nf4Quantized { packed, absmax, shape: shape.to_vec(), block_size: BLOCK_SIZE })
}

/// Quantises whole blocks and, at the tensor's end, a partial one. Fails with the place and value of the first NaN or
/// infinity.
fn quantize_span<T: Copy>(
    values: &[T],
    widen: impl Fn(T) -> f32 + Copy,
    packed: &mut [u8],
    scales: &mut [f32],
) -> std::result::Result<(), (usize, f32)> {
    let blocks = values.chunks(BLOCK_SIZE).zip(packed.chunks_mut(BLOCK_SIZE / 2)).zip(scales);
    let mut wide = [0.0; BLOCK_SIZE];
    for (index, ((block, packed), scale)) in blocks.enumerate() {
        wide[block.len()..].fill(0.0);
        for (wide, &value) in wide.iter_mut().zip(block) {
            *wide = widen(value);
        }
        let largest = largest_magnitude(&wide).map_err(|within| (index * BLOCK_SIZE + within, wide[within]))?;
        let divisor = largest.max(SMALLEST_DIVISOR);
        // As in bitsandbytes' CPU path, a partial block divides and stores a scale that is kept off zero.
        if block.len() == BLOCK_SIZE {
            *scale = largest;
            let reciprocal = 1.0 / divisor;
            wide.iter_mut().for_each(|value| *value *= reciprocal);
        } else {
            *scale = divisor;
            wide.iter_mut().for_each(|value| *value /= divisor);
        }
        pack(&wide, packed);
    }
    Ok(())
}

/// Largest magnitude of a block, or the place of its first NaN or infinity.
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

/// Codes of a block scaled to [-1, 1], two per byte, the earlier one in the high nibble; as many bytes as `packed`
/// has.
fn pack(scaled: &[f32; BLOCK_SIZE], packed: &mut [u8]) {
    for (byte, [first, second]) in packed.iter_mut().zip(scaled.as_chunks().0) {
        *byte = code(*first) << 4 | code(*second);
    }
}

/// Code of a value in [-1, 1].
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

    const BOTH: [DoubleQuant; 2] = [DoubleQuant::Off, DoubleQuant::On];

    #[test]
    fn levels_are_the_published_ones_to_the_bit() {
        // To the digits that bitsandbytes prints, which name f32 numbers exactly.
        let published = [
            -1.0,
            -0.6961928009986877,
            -0.5250730514526367,
            -0.39491748809814453,
            -0.28444138169288635,
            -0.18477343022823334,
            -0.09105003625154495,
            0.0,
            0.07958029955625534,
            0.16093020141124725,
            0.24611230194568634,
            0.33791524171829224,
            0.44070982933044434,
            0.5626170039176941,
            0.7229568362236023,
            1.0_f64,
        ];
        assert_eq!(LEVELS.map(f64::from), published);
    }

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

    #[test]
    fn levels_times_a_power_of_two_come_back_exactly() {
        for scale in [1.0, 0.25, 64.0, 2.0_f32.powi(-40)] {
            let values: Vec<f32> = (0..640).map(|index| LEVELS[index * 7 % 16] * scale).collect();
            assert_eq!(quantize(&values, &[10, 64], DoubleQuant::Off).unwrap().dequantize(), values);
        }
    }

    #[test]
    fn each_value_takes_the_nearest_level_of_its_block() {
        let mut draws = Draws(20);
        for _ in 0..50 {
            let count = 1 + draws.below(1000);
            let values = draws.vector(count, 0.3);
            let back = quantize(&values, &[count], DoubleQuant::Off).unwrap().dequantize();
            for (block, back) in values.chunks(BLOCK_SIZE).zip(back.chunks(BLOCK_SIZE)) {
                let scale = block.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
                for (value, back) in block.iter().zip(back) {
                    let nearest =
                        LEVELS.iter().map(|level| (level * scale - value).abs()).fold(f32::INFINITY, f32::min);
                    assert!((back - value).abs() <= nearest + scale * 1e-6, "{value} became {back}");
                }
            }
        }
    }

    #[test]
    fn double_quantisation_moves_values_little_and_leaves_the_codes() {
        let values = Draws(21).vector(64 * 1000, 0.02);
        let [plain, nested] = BOTH.map(|double_quant| quantize(&values, &[1000, 64], double_quant).unwrap());
        assert_eq!(plain.packed, nested.packed);
        for (plain, nested) in plain.dequantize().iter().zip(nested.dequantize()) {
            assert!((plain - nested).abs() < 2e-4, "{plain} became {nested}");
        }
    }

    #[test]
    fn every_source_of_the_same_values_gives_the_same_bytes() {
        let count = 64 * 5 + 9;
        for double_quant in BOTH {
            let bf16_values: Vec<bf16> = Draws(22).vector(count, 1.0).into_iter().map(bf16::from_f32).collect();
            let values: Vec<f32> = bf16_values.iter().map(|value| value.to_f32()).collect();
            let expected = quantize(&values, &[count], double_quant).unwrap();
            assert_eq!(quantize_bf16(&bf16_values, &[count], double_quant).unwrap(), expected);
            let as_bytes = |bytes: Vec<u8>, stored| quantize_bytes(&bytes, stored, &[count], double_quant).unwrap();
            assert_eq!(as_bytes(values.iter().flat_map(|value| value.to_le_bytes()).collect(), Format::F32), expected);
            assert_eq!(
                as_bytes(bf16_values.iter().flat_map(|value| value.to_le_bytes()).collect(), Format::Bf16),
                expected
            );
            let f16_bytes = values.iter().flat_map(|&value| f16::from_f32(value).to_le_bytes()).collect();
            let f16_values: Vec<f32> = values.iter().map(|&value| f16::from_f32(value).to_f32()).collect();
            assert_eq!(as_bytes(f16_bytes, Format::F16), quantize(&f16_values, &[count], double_quant).unwrap());
        }
    }

    #[test]
    fn many_threads_give_what_one_block_at_a_time_gives() {
        let count = (1 << 19) + 33;
        let values = Draws(23).vector(count, 0.1);
        let whole = quantize(&values, &[count], DoubleQuant::Off).unwrap();
        let scales = whole.absmax.values();
        for (index, block) in values.chunks(BLOCK_SIZE).enumerate() {
            let alone = quantize(block, &[block.len()], DoubleQuant::Off).unwrap();
            assert_eq!(whole.packed[index * 32..][..alone.packed.len()], alone.packed);
            assert_eq!(scales[index], alone.absmax.values()[0]);
        }
    }

    #[test]
    fn zeros_stay_exactly_zero_even_beside_other_blocks() {
        for double_quant in BOTH {
            let mut values = Draws(24).vector(64 * 3 + 5, 1.0);
            values[64..128].fill(0.0);
            values[192..].fill(0.0);
            let back = quantize(&values, &[values.len()], double_quant).unwrap().dequantize();
            assert!(back[64..128].iter().chain(&back[192..]).all(|&value| value == 0.0));
        }
    }

    #[test]
    fn bytes_are_those_of_the_format() {
        for double_quant in BOTH {
            for count in [1, 2, 63, 64, 65, 64 * 256, 64 * 256 + 1, 64 * 600] {
                let quantized = quantize(&vec![1.0; count], &[count], double_quant).unwrap();
                assert_eq!(quantized.bytes(), Format::Nf4(double_quant).bytes(count), "{count} values");
            }
        }
    }

    #[test]
    fn the_first_value_that_is_not_finite_is_named() {
        let count = (1 << 18) + 11;
        for (places, expected) in [(vec![count - 1], count - 1), (vec![70, 69, count - 9], 69), (vec![200_000, 3], 3)] {
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut values = vec![0.5; count];
                places.iter().for_each(|&place| values[place] = bad);
                match quantize(&values, &[count], DoubleQuant::On).unwrap_err() {
                    Error::NonFinite { index, value } => {
                        assert_eq!((index, value.to_bits()), (expected, bad.to_bits()));
                    }
                    other => panic!("{other}"),
                }
            }
        }
    }

    #[test]
    fn shapes_that_do_not_fit_are_refused() {
        let error = quantize(&[1.0; 5], &[2, 3], DoubleQuant::Off).unwrap_err();
        assert_eq!(error, Error::ShapeMismatch { shape: vec![2, 3], expected: 6, got: 5, unit: "values" });
        assert_eq!(quantize(&[], &[0, 4], DoubleQuant::On).unwrap_err(), Error::Empty { shape: vec![0, 4] });
        let error = quantize_bytes(&[0; 7], Format::Bf16, &[4], DoubleQuant::Off).unwrap_err();
        assert_eq!(error, Error::ShapeMismatch { shape: vec![4], expected: 8, got: 7, unit: "bytes" });
        let error = quantize_bytes(&[0; 8], Format::Int8Blockwise, &[8], DoubleQuant::Off).unwrap_err();
        assert_eq!(error, Error::UnsupportedSource { format: Format::Int8Blockwise });
    }
}
