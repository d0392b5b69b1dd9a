//! The storage formats: their names and their exact sizes, scales included.
//!
//! Trade-off: no layout. How a tensor is padded or aligned on a device is decided by that device's backend.

use crate::error::Result;
use crate::{blockwise, nf4};

/// How the values of a tensor are stored. Its name ([`Format::name`]) is also its serde representation, a plain string.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Format {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// bfloat16: the upper half of an f32.
    Bf16,
    /// Codes of a weight format with scales.
    Quantized(QuantFormat),
    /// 8-bit codes of a [`DynamicMap`](crate::DynamicMap) in blocks of 256 with one f32 scale each
    /// ([`crate::blockwise`]): optimizer state.
    Int8Blockwise,
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
}

impl QuantFormat {
    /// All quantized formats.
    pub const ALL: [Self; 2] = [Self::Nf4 { double_quant: false }, Self::Nf4 { double_quant: true }];

    /// The name, as recipes, plans and messages write it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Nf4 { double_quant: false } => "nf4",
            Self::Nf4 { double_quant: true } => "nf4_double_quant",
        }
    }

    pub(crate) const fn aliases(self) -> &'static [&'static str] {
        &[]
    }

    /// Values that share one block scale.
    pub const fn block_size(self) -> usize {
        match self {
            Self::Nf4 { .. } => nf4::BLOCK_SIZE,
        }
    }

    /// Whether the block scales are quantized as well.
    pub const fn double_quant(self) -> bool {
        match self {
            Self::Nf4 { double_quant } => double_quant,
        }
    }

    /// The values of its sixteen codes, relative to the scale of a block. Two codes per byte, the earlier one in the high nibble.
    pub const fn levels(self) -> &'static [f32; 16] {
        match self {
            Self::Nf4 { .. } => &nf4::LEVELS,
        }
    }

    /// Packed codes, and the scale of each block.
    pub(crate) fn encode_blocks<T: Copy + Sync>(
        self,
        values: &[T],
        widen: impl Fn(T) -> f32 + Copy + Send,
    ) -> Result<(Vec<u8>, Vec<f32>)> {
        match self {
            Self::Nf4 { .. } => nf4::encode(values, widen),
        }
    }

    /// Bits per value including its share of the scales, for a tensor so long that partial blocks do not matter.
    pub fn bits_per_value(self) -> f64 {
        let block = self.block_size() as f64;
        if self.double_quant() {
            4.0 + CODE_BITS / block + F32_BITS / (block * NESTED_BLOCK)
        } else {
            4.0 + F32_BITS / block
        }
    }

    /// Exact bytes of `count` values with all scales. A partial block takes a whole scale.
    pub const fn bytes(self, count: usize) -> usize {
        let blocks = count.div_ceil(self.block_size());
        if self.double_quant() {
            let offset = if count == 0 { 0 } else { F32_BYTES };
            count.div_ceil(2) + blocks + blocks.div_ceil(blockwise::BLOCK_SIZE) * F32_BYTES + offset
        } else {
            count.div_ceil(2) + blocks * F32_BYTES
        }
    }
}

const F32_BITS: f64 = 32.0;
const F32_BYTES: usize = size_of::<f32>();
const CODE_BITS: f64 = 8.0;
const NESTED_BLOCK: f64 = blockwise::BLOCK_SIZE as f64;

impl Format {
    /// All formats.
    pub const ALL: [Self; 6] = [
        Self::F32,
        Self::F16,
        Self::Bf16,
        Self::Quantized(QuantFormat::ALL[0]),
        Self::Quantized(QuantFormat::ALL[1]),
        Self::Int8Blockwise,
    ];

    /// The name, as recipes, plans and messages write it: `float32`, `float16`, `bfloat16`, the name of a
    /// [`QuantFormat`], or `int8_blockwise`. When it is read, `f32`, `fp32`, `f16`, `fp16` and `bf16` are accepted too.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::F16 => "float16",
            Self::Bf16 => "bfloat16",
            Self::Quantized(format) => format.name(),
            Self::Int8Blockwise => "int8_blockwise",
        }
    }

    pub(crate) const fn aliases(self) -> &'static [&'static str] {
        match self {
            Self::F32 => &["f32", "fp32"],
            Self::F16 => &["f16", "fp16"],
            Self::Bf16 => &["bf16"],
            Self::Quantized(format) => format.aliases(),
            Self::Int8Blockwise => &[],
        }
    }

    /// Bits per value including its share of the scales, for a tensor so long that partial blocks do not matter.
    pub fn bits_per_value(self) -> f64 {
        match self {
            Self::F32 => F32_BITS,
            Self::F16 | Self::Bf16 => 16.0,
            Self::Quantized(format) => format.bits_per_value(),
            Self::Int8Blockwise => CODE_BITS + F32_BITS / NESTED_BLOCK,
        }
    }

    /// Exact bytes of `count` values with all scales. A partial block takes a whole scale.
    pub const fn bytes(self, count: usize) -> usize {
        match self {
            Self::F32 => count * F32_BYTES,
            Self::F16 | Self::Bf16 => count * 2,
            Self::Quantized(format) => format.bytes(count),
            Self::Int8Blockwise => count + count.div_ceil(blockwise::BLOCK_SIZE) * F32_BYTES,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_per_value_are_the_published_ones() {
        let bits = Format::ALL.map(Format::bits_per_value);
        assert_eq!(bits, [32.0, 16.0, 16.0, 4.5, 4.126953125, 8.125]);
    }

    #[test]
    fn bytes_of_a_long_tensor_tend_to_bits_per_value() {
        let count = 64 * 256 * 1000;
        for format in Format::ALL {
            let ideal = format.bits_per_value() * count as f64 / 8.0;
            let exact = format.bytes(count) as f64;
            assert!((exact - ideal).abs() <= 4.0, "{format}: {exact} bytes, ideal {ideal}");
        }
    }

    #[test]
    fn no_values_need_no_bytes() {
        assert_eq!(Format::ALL.map(|format| format.bytes(0)), [0; 6]);
    }
}
