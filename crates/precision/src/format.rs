//! The storage formats: their names, their exact sizes including scales, and their codecs.
//!
//! Trade-off: no layout. Each device's backend decides how a tensor is padded or aligned there.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::packing::{Decoder, Packing};
use crate::scales::BlockScales;
use crate::scaling::Scaling;
use crate::{blockwise, nf4};

/// A type in which values are computed, and stored if they are not quantized. Its name ([`FloatType::name`]) is also its serde representation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FloatType {
    /// IEEE 754 binary32.
    F32,
    /// bfloat16: the upper half of an f32.
    Bf16,
    /// IEEE 754 binary16.
    F16,
}

/// Storage format of a tensor's values. Its serde representation is the name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(untagged, expecting = "expected the name of a floating-point type or of a quantized format")]
pub enum Format {
    /// Unquantized values.
    Float(FloatType),
    /// Codes with scales.
    Quantized(QuantFormat),
}

/// A format in which weights are quantized. Its name ([`QuantFormat::name`]) is also its serde representation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum QuantFormat {
    /// 4-bit NormalFloat in blocks of 64 ([`crate::nf4`]).
    Nf4 {
        /// Whether the block scales are quantized as well (`bnb_4bit_use_double_quant` of Hugging Face configs).
        ///
        /// Without it, each block has one f32 scale: 4.5 bits per value. With it, each block has one 8-bit code, each
        /// 256 blocks one f32, and the tensor one f32 offset: 4.127 bits per value.
        double_quant: bool,
    },
    /// E2M1 in blocks of 16 of a row with one UE4M3 scale each, and one f32 for the tensor (`scaling.rs`): 4.5 bits
    /// per value.
    Nvfp4,
    /// E2M1 in blocks of 32 of a row with one E8M0 scale each: 4.25 bits per value.
    Mxfp4,
    /// E4M3 with one f32 scale per row: 8 bits per value.
    Fp8,
}

impl QuantFormat {
    /// All quantized formats.
    pub const ALL: [Self; 5] =
        [Self::Nf4 { double_quant: false }, Self::Nf4 { double_quant: true }, Self::Nvfp4, Self::Mxfp4, Self::Fp8];

    /// Returns the name, as recipes, plans and messages write it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Nf4 { double_quant: false } => "nf4",
            Self::Nf4 { double_quant: true } => "nf4_double_quant",
            Self::Nvfp4 => "nvfp4",
            Self::Mxfp4 => "mxfp4",
            Self::Fp8 => "fp8",
        }
    }

    pub(crate) const fn aliases(self) -> &'static [&'static str] {
        &[]
    }

    /// Returns the scaling of a format of floating-point codes; `None` for NF4, whose blocks run across rows.
    pub(crate) const fn scaling(self) -> Option<Scaling> {
        match self {
            Self::Nf4 { .. } => None,
            Self::Nvfp4 => Some(Scaling::Nvfp4),
            Self::Mxfp4 => Some(Scaling::Mx),
            Self::Fp8 => Some(Scaling::PerRow),
        }
    }

    /// Returns the number of values that share one scale, in a matrix of `columns` columns.
    pub const fn block_size(self, columns: usize) -> usize {
        match self.scaling() {
            None => nf4::BLOCK_SIZE,
            Some(scaling) => scaling.group(columns),
        }
    }

    /// Returns the number of blocks of a matrix with this many columns. A partial block counts; only NF4 has any.
    pub const fn blocks(self, count: usize, columns: usize) -> usize {
        count.div_ceil(self.block_size(columns))
    }

    /// Rejects a matrix whose rows are not whole blocks, unless blocks run across rows.
    pub fn check_columns(self, columns: usize) -> Result<()> {
        let block_size = self.block_size(usize::MAX);
        let takes_any = self.scaling().is_none() || block_size == usize::MAX;
        if takes_any || columns.is_multiple_of(block_size) {
            return Ok(());
        }
        Err(Error::PartialBlocks { format: self.name(), columns, block_size })
    }

    /// Returns whether the block scales are also quantized, to 8 bits around their mean.
    pub const fn double_quant(self) -> bool {
        matches!(self, Self::Nf4 { double_quant: true })
    }

    /// Returns the values of its codes relative to the scale of a block: 16 of them, or 256 if a code is a byte.
    pub const fn levels(self) -> &'static [f32] {
        match self.scaling() {
            None => &nf4::LEVELS,
            Some(scaling) => scaling.element().levels(),
        }
    }

    /// Returns the layout of codes in bytes.
    pub const fn packing(self) -> Packing {
        match self.scaling() {
            None => Packing::HighNibbleFirst,
            Some(Scaling::Mx | Scaling::Nvfp4) => Packing::LowNibbleFirst,
            Some(Scaling::PerRow) => Packing::Bytes,
        }
    }

    /// Encodes at least one value, in rows of `columns`, to packed codes and scales.
    pub(crate) fn encode<T: Copy + Sync>(
        self,
        values: &[T],
        widen: impl Fn(T) -> f32 + Copy + Send + Sync,
        columns: usize,
    ) -> Result<(Vec<u8>, BlockScales)> {
        let Some(scaling) = self.scaling() else {
            let (codes, scales) = nf4::encode(values, widen)?;
            let block = if self.double_quant() { BlockScales::nested(scales)? } else { BlockScales::Float(scales) };
            return Ok((codes, block));
        };
        let (codes, scales) = scaling.quantize(values, widen, columns);
        if scales.values().iter().any(|scale| !scale.is_finite()) {
            let mut values = values.iter().map(|&value| widen(value)).enumerate();
            let (index, value) =
                values.find(|(_, value)| !value.is_finite()).expect("a scale that is not finite has a cause");
            return Err(Error::NonFinite { index, value });
        }
        Ok((codes, scales))
    }

    /// Decodes whole blocks, one after the other, of a matrix with `columns` columns; the last block may be partial.
    pub fn decode_blocks(self, columns: usize, values: &mut [f32], codes: &[u8], scales: &[f32]) {
        self.decoder(columns).blocks(values, codes, scales);
    }

    pub(crate) const fn decoder(self, columns: usize) -> Decoder {
        Decoder { levels: self.levels(), packing: self.packing(), block_size: self.block_size(columns) }
    }

    /// Returns the bits per value including its share of the scales, for rows so long that partial blocks and scales of rows do not matter.
    pub fn bits_per_value(self) -> f64 {
        let codes = 8.0 / self.packing().codes_per_byte() as f64;
        let block = self.block_size(usize::MAX) as f64;
        codes
            + match self.scaling() {
                Some(scaling) => 8.0 * scaling.scale_bytes()[0] as f64 / block,
                None if self.double_quant() => CODE_BITS / block + F32_BITS / (block * NESTED_BLOCK),
                None => F32_BITS / block,
            }
    }

    /// Returns the exact bytes of a tensor of this shape with all scales. A partial block takes a whole scale.
    pub const fn bytes(self, shape: &[usize]) -> usize {
        let (count, columns) = (count(shape), columns(shape));
        if count == 0 {
            return 0;
        }
        let blocks = self.blocks(count, columns);
        count.div_ceil(self.packing().codes_per_byte())
            + match self.scaling() {
                Some(scaling) => {
                    let [of_block, of_tensor] = scaling.scale_bytes();
                    blocks * of_block + of_tensor
                }
                None if self.double_quant() => blocks + blocks.div_ceil(blockwise::BLOCK_SIZE) * F32_BYTES + F32_BYTES,
                None => blocks * F32_BYTES,
            }
    }
}

/// Returns the number of values in a tensor of `shape`. A shape too large for any memory saturates, and so matches no data.
pub(crate) const fn count(shape: &[usize]) -> usize {
    let (mut count, mut index) = (1_usize, 0);
    while index < shape.len() {
        count = count.saturating_mul(shape[index]);
        index += 1;
    }
    count
}

/// Returns the length of a row: the last dimension.
pub(crate) const fn columns(shape: &[usize]) -> usize {
    match shape {
        [] => 1,
        [.., columns] => *columns,
    }
}

const F32_BITS: f64 = 32.0;
const F32_BYTES: usize = size_of::<f32>();
const CODE_BITS: f64 = 8.0;
const NESTED_BLOCK: f64 = blockwise::BLOCK_SIZE as f64;

impl FloatType {
    /// All types.
    pub const ALL: [Self; 3] = [Self::F32, Self::Bf16, Self::F16];

    /// Returns the name, as recipes, plans, messages and config.json write it: `float32`, `bfloat16` or `float16`.
    /// Parsing also accepts `f32`, `fp32`, `bf16`, `f16` and `fp16`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::Bf16 => "bfloat16",
            Self::F16 => "float16",
        }
    }

    pub(crate) const fn aliases(self) -> &'static [&'static str] {
        match self {
            Self::F32 => &["f32", "fp32"],
            Self::Bf16 => &["bf16"],
            Self::F16 => &["f16", "fp16"],
        }
    }

    /// Returns the bytes of a value.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => F32_BYTES,
            Self::Bf16 | Self::F16 => 2,
        }
    }
}

impl Format {
    /// Returns the bits per value including its share of the scales, for a tensor so long that partial blocks do not matter.
    pub fn bits_per_value(self) -> f64 {
        match self {
            Self::Float(float) => 8.0 * float.bytes() as f64,
            Self::Quantized(format) => format.bits_per_value(),
        }
    }

    /// Returns the exact bytes of a tensor of this shape with all scales. A partial block takes a whole scale.
    pub const fn bytes(self, shape: &[usize]) -> usize {
        match self {
            Self::Float(float) => count(shape) * float.bytes(),
            Self::Quantized(format) => format.bytes(shape),
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(match self {
            Self::Float(float) => float.name(),
            Self::Quantized(format) => format.name(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_per_value_are_the_published_ones() {
        let bits = QuantFormat::ALL.map(QuantFormat::bits_per_value);
        assert_eq!(bits, [4.5, 4.126953125, 4.5, 4.25, 8.0]);
        assert_eq!(FloatType::ALL.map(|float| Format::Float(float).bits_per_value()), [32.0, 16.0, 16.0]);
    }

    #[test]
    fn bytes_of_a_long_row_tend_to_bits_per_value() {
        let count = 64 * 256 * 1000;
        let floats = FloatType::ALL.map(Format::Float).into_iter();
        for format in floats.chain(QuantFormat::ALL.map(Format::Quantized)) {
            let ideal = format.bits_per_value() * count as f64 / 8.0;
            let exact = format.bytes(&[1, count]) as f64;
            assert!((exact - ideal).abs() <= 4.0, "{format}: {exact} bytes, ideal {ideal}");
        }
    }

    #[test]
    fn no_values_need_no_bytes() {
        assert_eq!(QuantFormat::ALL.map(|format| format.bytes(&[0, 64])), [0; 5]);
        assert_eq!(Format::Float(FloatType::F32).bytes(&[0, 64]), 0);
    }

    #[test]
    fn partial_blocks_are_refused_where_rows_end_blocks() {
        let refused = |columns: usize| QuantFormat::ALL.map(|format| format.check_columns(columns).is_err());
        assert_eq!(refused(96), [false; 5]);
        assert_eq!(refused(48), [false, false, false, true, false]);
        assert_eq!(refused(33), [false, false, true, true, false]);
    }
}
