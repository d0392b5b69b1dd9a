//! A tensor in a quantized format, and conversions to and from every such format. `format.rs` defines the formats; the
//! arithmetic of each is in a separate file, such as `nf4.rs`.
//!
//! Trade-off: everything is on the host. Backends quantize on the device if that is faster, and are tested against this.

use half::{bf16, f16};

use crate::error::{Error, Result};
use crate::format::{FloatType, QuantFormat, columns, count};
use crate::scales::HostScales;

/// A tensor in packed codes with its scales.
#[derive(Debug, Clone, PartialEq)]
pub struct QuantizedTensor {
    /// The format of codes and scales.
    pub format: QuantFormat,
    /// The packed codes, row-major over the flat tensor; the format's module defines their layout in a byte.
    pub codes: Vec<u8>,
    /// The scales, in the order of the blocks. Blocks of NF4 run across rows; those of the other formats are parts of a row.
    pub scales: HostScales,
    /// Shape of the values, `[out, in]` for a linear weight.
    pub shape: Vec<usize>,
}

impl QuantFormat {
    /// Quantizes the f32 values of a row-major tensor of `shape`.
    ///
    /// # Errors
    /// [`Error::NonFinite`], [`Error::ShapeMismatch`], [`Error::Empty`], [`Error::PartialBlocks`] where blocks end with the
    /// row, and [`Error::OffsetOverflow`] with double quantization.
    pub fn quantize(self, values: &[f32], shape: &[usize]) -> Result<QuantizedTensor> {
        self.quantize_with(values, |value| value, shape)
    }

    /// Quantizes a tensor of `shape` from its little-endian bytes at any alignment, such as those of a mapped safetensors
    /// file. Values are widened to f32 exactly, one block at a time.
    pub fn quantize_bytes(self, bytes: &[u8], stored: FloatType, shape: &[usize]) -> Result<QuantizedTensor> {
        match stored {
            FloatType::F32 => self.quantize_with(in_groups(bytes, shape)?, f32::from_le_bytes, shape),
            FloatType::F16 => {
                self.quantize_with(in_groups(bytes, shape)?, |bytes| f16::from_le_bytes(bytes).to_f32(), shape)
            }
            FloatType::Bf16 => {
                self.quantize_with(in_groups(bytes, shape)?, |bytes| widen(bf16::from_le_bytes(bytes)), shape)
            }
        }
    }

    fn quantize_with<T: Copy + Sync>(
        self,
        values: &[T],
        widen: impl Fn(T) -> f32 + Copy + Send + Sync,
        shape: &[usize],
    ) -> Result<QuantizedTensor> {
        let expected = count(shape);
        if values.len() != expected {
            return Err(Error::ShapeMismatch { shape: shape.to_vec(), expected, got: values.len(), unit: "values" });
        }
        if expected == 0 {
            return Err(Error::Empty { shape: shape.to_vec() });
        }
        self.check_columns(columns(shape))?;
        let (codes, block) = self.encode(values, widen, columns(shape))?;
        Ok(QuantizedTensor { format: self, codes, scales: HostScales { block }, shape: shape.to_vec() })
    }
}

impl QuantizedTensor {
    /// Returns the number of values.
    pub fn count(&self) -> usize {
        count(&self.shape)
    }

    /// Returns the total bytes of codes and scales.
    pub fn bytes(&self) -> usize {
        self.codes.len() + self.scales.block.bytes()
    }

    /// Decodes the values in f32, row-major.
    ///
    /// # Panics
    /// If the fields were taken from different tensors.
    pub fn dequantize(&self) -> Vec<f32> {
        self.format.decoder(columns(&self.shape)).all(&self.codes, &self.scales.block.values(), self.count())
    }
}

/// Splits the bytes into one group of `WIDTH` per value, if their number matches `shape`.
fn in_groups<'a, const WIDTH: usize>(bytes: &'a [u8], shape: &[usize]) -> Result<&'a [[u8; WIDTH]]> {
    let (groups, rest) = bytes.as_chunks();
    let expected = count(shape).saturating_mul(WIDTH);
    if !rest.is_empty() || bytes.len() != expected {
        return Err(Error::ShapeMismatch { shape: shape.to_vec(), expected, got: bytes.len(), unit: "bytes" });
    }
    Ok(groups)
}

/// Widens to the f32 with the same value by a shift. `half`'s own conversion also quiets NaNs, and is slower in loops.
fn widen(value: bf16) -> f32 {
    f32::from_bits(u32::from(value.to_bits()) << 16)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_values::Draws;

    const PLAIN: QuantFormat = QuantFormat::Nf4 { double_quant: false };
    const DOUBLE: QuantFormat = QuantFormat::Nf4 { double_quant: true };

    #[test]
    fn every_source_of_the_same_values_gives_the_same_bytes() {
        let count = 64 * 5 + 32;
        for format in QuantFormat::ALL {
            let bf16_values: Vec<bf16> = Draws(22).vector(count, 1.0).into_iter().map(bf16::from_f32).collect();
            let values: Vec<f32> = bf16_values.iter().map(|value| value.to_f32()).collect();
            let expected = format.quantize(&values, &[count]).unwrap();
            let from_bytes = |bytes: Vec<u8>, stored| format.quantize_bytes(&bytes, stored, &[count]).unwrap();
            let f32_bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            assert_eq!(from_bytes(f32_bytes, FloatType::F32), expected);
            let bf16_bytes = bf16_values.iter().flat_map(|value| value.to_le_bytes()).collect();
            assert_eq!(from_bytes(bf16_bytes, FloatType::Bf16), expected);
            let f16_bytes = values.iter().flat_map(|&value| f16::from_f32(value).to_le_bytes()).collect();
            let f16_values: Vec<f32> = values.iter().map(|&value| f16::from_f32(value).to_f32()).collect();
            assert_eq!(from_bytes(f16_bytes, FloatType::F16), format.quantize(&f16_values, &[count]).unwrap());
        }
    }

    #[test]
    fn widening_keeps_every_bf16_number_and_every_nan() {
        for value in (0..=u16::MAX).map(bf16::from_bits) {
            assert_eq!(widen(value).is_nan(), value.is_nan(), "{:04x}", value.to_bits());
            if !value.is_nan() {
                assert_eq!(widen(value).to_bits(), value.to_f32().to_bits(), "{:04x}", value.to_bits());
            }
        }
    }

    #[test]
    fn zeros_stay_exactly_zero_even_next_to_other_blocks() {
        for format in QuantFormat::ALL {
            let mut values = Draws(24).vector(64 * 4, 1.0);
            values[64..128].fill(0.0);
            values[192..].fill(0.0);
            let back = format.quantize(&values, &[4, 64]).unwrap().dequantize();
            assert!(back[64..128].iter().chain(&back[192..]).all(|&value| value == 0.0), "{format}");
        }
    }

    #[test]
    fn bytes_are_those_of_the_format() {
        for format in QuantFormat::ALL {
            let rows = [1, 2, 32, 63, 64, 65, 96, 64 * 256, 64 * 256 + 1, 64 * 600];
            for columns in rows.into_iter().filter(|columns| format.check_columns(*columns).is_ok()) {
                for shape in [vec![columns], vec![3, columns]] {
                    let quantized = format.quantize(&vec![1.0; count(&shape)], &shape).unwrap();
                    assert_eq!(quantized.count(), count(&shape));
                    assert_eq!(quantized.bytes(), format.bytes(&shape), "{format}, {shape:?}");
                }
            }
        }
    }

    #[test]
    fn the_error_names_the_first_value_that_is_not_finite() {
        let count = 1 << 18;
        for format in QuantFormat::ALL {
            for (places, expected) in
                [(vec![count - 1], count - 1), (vec![70, 69, count - 9], 69), (vec![200_000, 3], 3)]
            {
                for bad in [f32::NAN, f32::NEG_INFINITY] {
                    let mut values = vec![0.5; count];
                    places.iter().for_each(|&place| values[place] = bad);
                    let error = format.quantize(&values, &[count / 64, 64]).unwrap_err();
                    assert!(matches!(error, Error::NonFinite { index, .. } if index == expected), "{format}: {error}");
                }
            }
        }
    }

    /// Not of NVFP4, whose scales are relative to the largest value of the tensor.
    #[test]
    fn threads_give_what_one_block_at_a_time_gives() {
        let values = Draws(23).vector(1 << 19, 0.1);
        for format in [PLAIN, QuantFormat::Mxfp4, QuantFormat::Fp8] {
            let whole = format.quantize(&values, &[values.len() / 64, 64]).unwrap();
            let scales = whole.scales.block.values();
            for (block, codes) in values.chunks(64).zip(whole.codes.chunks(whole.codes.len() * 64 / values.len())) {
                assert_eq!(format.quantize(block, &[64]).unwrap().codes, codes, "{format}");
            }
            for (block, scale) in values.chunks(format.block_size(64)).zip(scales) {
                assert_eq!(format.quantize(block, &[block.len()]).unwrap().scales.block.values(), [scale], "{format}");
            }
        }
    }

    #[test]
    fn shapes_that_do_not_fit_are_refused() {
        let error = QuantFormat::Mxfp4.quantize(&[1.0; 96], &[2, 48]).unwrap_err();
        assert_eq!(error, Error::PartialBlocks { format: "mxfp4", columns: 48, block_size: 32 });
        let error = PLAIN.quantize(&[1.0; 5], &[2, 3]).unwrap_err();
        assert_eq!(error, Error::ShapeMismatch { shape: vec![2, 3], expected: 6, got: 5, unit: "values" });
        assert_eq!(DOUBLE.quantize(&[], &[0, 4]).unwrap_err(), Error::Empty { shape: vec![0, 4] });
        let error = PLAIN.quantize_bytes(&[0; 7], FloatType::Bf16, &[4]).unwrap_err();
        assert_eq!(error, Error::ShapeMismatch { shape: vec![4], expected: 8, got: 7, unit: "bytes" });
    }
}
