//! Converts elements of a safetensors file to the device's number format, and checks that they are finite.
//!
//! Works on blocks that stay in the cache between the read, the conversion and the check, so that each costs little compared with the read. Tensors
//! to be written are converted whole, by all processors.
//! Not supported: big-endian machines. safetensors stores little-endian elements, and most are uploaded as they are.

use std::path::Path;

use burn_tensor::DType;
use firebrick_precision::FloatType;
use half::{bf16, f16};
use rayon::prelude::*;
use safetensors::Dtype;

use crate::error::ModelError;

const _: () =
    assert!(cfg!(target_endian = "little"), "stored elements are uploaded without turning their bytes around");

/// Returns the device's name of a stored format; `None` for formats that are not read as weights.
pub(crate) fn device_dtype(stored: Dtype) -> Option<DType> {
    match stored {
        Dtype::F32 => Some(DType::F32),
        Dtype::BF16 => Some(DType::BF16),
        Dtype::F16 => Some(DType::F16),
        _ => None,
    }
}

pub(crate) fn stored_as(float: FloatType) -> Dtype {
    match float {
        FloatType::F32 => Dtype::F32,
        FloatType::Bf16 => Dtype::BF16,
        FloatType::F16 => Dtype::F16,
    }
}

/// Rounds the values of a tensor to nearest, ties to even, and returns their little-endian bytes.
///
/// # Errors
/// A value that is not finite, or that is too large for the format: nothing is ever written that cannot be read again.
pub(crate) fn bytes_of(name: &str, values: &[f32], float: FloatType) -> Result<Vec<u8>, ModelError> {
    let (bytes, dtype) = match float {
        FloatType::F32 => (from_f32(values, f32::to_le_bytes), DType::F32),
        FloatType::Bf16 => (from_f32(values, |value| bf16::from_f32(value).to_le_bytes()), DType::BF16),
        FloatType::F16 => (from_f32(values, |value| f16::from_f32(value).to_le_bytes()), DType::F16),
    };
    match first_not_finite(&bytes, dtype) {
        None => Ok(bytes),
        Some(index) => Err(not_writable(name, index, values[index], float.name())),
    }
}

/// Builds the error for a value that a file would hold as infinity or NaN.
pub(crate) fn not_writable(name: &str, index: usize, value: f32, format: &str) -> ModelError {
    ModelError::NotWritable { name: name.to_owned(), index, value, format: format.to_owned() }
}

/// Builds the error for a value in a file that is not finite in this format.
pub(crate) fn not_finite(name: &str, path: &Path, index: usize, value: f32, format: &str) -> ModelError {
    let (name, path, format) = (name.to_owned(), path.to_path_buf(), format.to_owned());
    ModelError::NotFiniteWeight { name, path, index, value, format }
}

pub(crate) fn check_finite(name: &str, path: &Path, values: &[f32]) -> Result<(), ModelError> {
    match first_not_finite(bytemuck::cast_slice(values), DType::F32) {
        None => Ok(()),
        Some(index) => Err(not_finite(name, path, index, values[index], "F32")),
    }
}

/// Converts elements, rounded to nearest with ties to even; values that are too large become infinite.
pub(crate) fn convert(stored: DType, bytes: &[u8], requested: DType, out: &mut [u8]) {
    match (stored, requested) {
        (DType::F32, DType::BF16) => each(bytes, out, |word| bf16::from_f32(f32::from_le_bytes(word)).to_le_bytes()),
        (DType::F32, DType::F16) => each(bytes, out, |word| f16::from_f32(f32::from_le_bytes(word)).to_le_bytes()),
        (DType::BF16, DType::F32) => each(bytes, out, |word| widen(word).to_le_bytes()),
        (DType::BF16, DType::F16) => each(bytes, out, |word| f16::from_f32(widen(word)).to_le_bytes()),
        (DType::F16, DType::F32) => each(bytes, out, |word| f16::from_le_bytes(word).to_f32().to_le_bytes()),
        (DType::F16, DType::BF16) => {
            each(bytes, out, |word| bf16::from_f32(f16::from_le_bytes(word).to_f32()).to_le_bytes());
        }
        _ => panic!("no conversion from {stored:?} to {requested:?}"),
    }
}

/// Converts values that are not together in memory.
pub(crate) fn write(values: impl Iterator<Item = f32>, dtype: DType, out: &mut [u8]) {
    let values: Vec<u8> = values.flat_map(f32::to_le_bytes).collect();
    match dtype {
        DType::F32 => out.copy_from_slice(&values),
        _ => convert(DType::F32, &values, dtype, out),
    }
}

/// Converts values to bytes with `to`, on all processors.
fn from_f32<const N: usize>(values: &[f32], to: impl Fn(f32) -> [u8; N] + Sync) -> Vec<u8> {
    let mut bytes = vec![0; N * values.len()];
    let words = bytes.as_chunks_mut::<N>().0;
    words.par_iter_mut().zip(values).with_min_len(1 << 16).for_each(|(word, &value)| *word = to(value));
    bytes
}

fn each<const N: usize, const M: usize>(bytes: &[u8], out: &mut [u8], to: impl Fn([u8; N]) -> [u8; M]) {
    let (from, into) = (bytes.as_chunks::<N>().0, out.as_chunks_mut::<M>().0);
    assert_eq!(from.len(), into.len(), "a block is converted element by element");
    for (out, &word) in into.iter_mut().zip(from) {
        *out = to(word);
    }
}

/// Widens a bf16, which is the upper half of an f32.
fn widen(word: [u8; 2]) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes(word)) << 16)
}

pub(crate) fn first_not_finite(bytes: &[u8], dtype: DType) -> Option<usize> {
    // Ignoring the sign, the bits of floats have the order of the floats, with infinity and NaN on top: so one maximum over signed integers, which
    // every vector extension has, decides for a block.
    match dtype {
        DType::F32 => {
            let bits = |word: &[u8; 4]| i32::from_le_bytes(*word) & 0x7FFF_FFFF;
            let words = bytes.as_chunks().0;
            let largest = words.iter().fold(0, |largest, word| bits(word).max(largest));
            const INFINITY: i32 = 0x7F80_0000;
            (largest >= INFINITY).then(|| words.iter().position(|word| bits(word) >= INFINITY)).flatten()
        }
        _ => {
            let infinity = if dtype == DType::BF16 { 0x7F80 } else { 0x7C00 };
            let bits = |word: &[u8; 2]| i16::from_le_bytes(*word) & 0x7FFF;
            let words = bytes.as_chunks().0;
            let largest = words.iter().fold(0, |largest, word| bits(word).max(largest));
            (largest >= infinity).then(|| words.iter().position(|word| bits(word) >= infinity)).flatten()
        }
    }
}

pub(crate) fn element(bytes: &[u8], dtype: DType, index: usize) -> f32 {
    match dtype {
        DType::F32 => f32::from_le_bytes(bytes.as_chunks().0[index]),
        DType::BF16 => widen(bytes.as_chunks().0[index]),
        _ => f16::from_le_bytes(bytes.as_chunks().0[index]).to_f32(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

    fn encode(values: &[f32], dtype: DType) -> Vec<u8> {
        let f32s: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        if dtype == DType::F32 {
            return f32s;
        }
        let mut out = vec![0; values.len() * 2];
        convert(DType::F32, &f32s, dtype, &mut out);
        out
    }

    #[test]
    fn numbers_that_both_formats_hold_convert_exactly() {
        let values = [0.0, -0.0, 1.5, -0.15625, 448.0, -2.0_f32.powi(-14)];
        for stored in ALL {
            for requested in ALL.into_iter().filter(|&requested| requested != stored) {
                let mut out = vec![0; values.len() * requested.size()];
                convert(stored, &encode(&values, stored), requested, &mut out);
                assert_eq!(out, encode(&values, requested), "{stored:?} to {requested:?}");
                let read: Vec<u32> = (0..values.len()).map(|i| element(&out, requested, i).to_bits()).collect();
                assert_eq!(read, values.map(f32::to_bits), "{stored:?} to {requested:?}");
            }
        }
    }

    #[test]
    fn the_first_nan_or_infinity_is_found() {
        for dtype in ALL {
            let largest = if dtype == DType::F16 { 65504.0 } else { half::bf16::MAX.to_f32() };
            let mut values = vec![-largest; 100];
            assert_eq!(first_not_finite(&encode(&values, dtype), dtype), None);
            for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                for place in [0, 1, 63, 99] {
                    values[place] = bad;
                    values[99] = bad;
                    assert_eq!(first_not_finite(&encode(&values, dtype), dtype), Some(place), "{dtype:?} {bad}");
                    values[place] = largest;
                    values[99] = largest;
                }
            }
        }
    }
}
