//! Names and sizes of the storage formats, with the overhead of their blocks: what memory models count with.
//!
//! Gives up layout: how a tensor is padded or aligned on a device is that device's business.

use std::fmt;

use crate::{blockwise, nf4};

/// Whether the block scales of NF4 are themselves quantised (`bnb_4bit_use_double_quant` of Hugging Face configs).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DoubleQuant {
    /// One f32 scale for each block: 4.5 bits per value.
    Off,
    /// One 8-bit code for each block, one f32 for each 256 blocks, one f32 offset: 4.127 bits per value.
    On,
}

impl From<bool> for DoubleQuant {
    fn from(on: bool) -> Self {
        if on { Self::On } else { Self::Off }
    }
}

/// How the values of a tensor are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Format {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// The upper half of an f32.
    Bf16,
    /// 4-bit NormalFloat in blocks of 64 ([`crate::nf4`]).
    Nf4(DoubleQuant),
    /// 8-bit dynamic codes in blocks of 256 with one f32 scale each ([`crate::blockwise`]).
    Int8Blockwise,
}

impl Format {
    /// Bits per value with the share of the block scales, for a tensor long enough that partial blocks do not show.
    pub fn bits_per_value(self) -> f64 {
        const F32_BITS: f64 = 32.0;
        const CODE_BITS: f64 = 8.0;
        let (block, nested_block) = (nf4::BLOCK_SIZE as f64, blockwise::BLOCK_SIZE as f64);
        match self {
            Self::F32 => 32.0,
            Self::F16 | Self::Bf16 => 16.0,
            Self::Nf4(DoubleQuant::Off) => 4.0 + F32_BITS / block,
            Self::Nf4(DoubleQuant::On) => 4.0 + CODE_BITS / block + F32_BITS / (block * nested_block),
            Self::Int8Blockwise => CODE_BITS + F32_BITS / nested_block,
        }
    }

    /// Exact bytes of `count` values with all block scales, partial blocks counted whole.
    pub fn bytes(self, count: usize) -> usize {
        const F32_BYTES: usize = size_of::<f32>();
        let blocks = count.div_ceil(nf4::BLOCK_SIZE);
        match self {
            Self::F32 => count * F32_BYTES,
            Self::F16 | Self::Bf16 => count * 2,
            Self::Nf4(DoubleQuant::Off) => count.div_ceil(2) + blocks * F32_BYTES,
            Self::Nf4(DoubleQuant::On) => {
                let offset = if count == 0 { 0 } else { F32_BYTES };
                count.div_ceil(2) + blocks + blocks.div_ceil(blockwise::BLOCK_SIZE) * F32_BYTES + offset
            }
            Self::Int8Blockwise => count + count.div_ceil(blockwise::BLOCK_SIZE) * F32_BYTES,
        }
    }

    /// Short name, as plans and messages print it.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Nf4(DoubleQuant::Off) => "nf4",
            Self::Nf4(DoubleQuant::On) => "nf4 (double quantised)",
            Self::Int8Blockwise => "int8 (block-wise)",
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Format; 6] = [
        Format::F32,
        Format::F16,
        Format::Bf16,
        Format::Nf4(DoubleQuant::Off),
        Format::Nf4(DoubleQuant::On),
        Format::Int8Blockwise,
    ];

    #[test]
    fn bits_per_value_are_the_published_ones() {
        let bits = ALL.map(Format::bits_per_value);
        assert_eq!(bits, [32.0, 16.0, 16.0, 4.5, 4.126953125, 8.125]);
    }

    #[test]
    fn bytes_of_a_long_tensor_tend_to_bits_per_value() {
        let count = 64 * 256 * 1000;
        for format in ALL {
            let ideal = format.bits_per_value() * count as f64 / 8.0;
            let exact = format.bytes(count) as f64;
            assert!((exact - ideal).abs() <= 4.0, "{format}: {exact} bytes, ideal {ideal}");
        }
    }

    #[test]
    fn no_values_need_no_bytes() {
        assert_eq!(ALL.map(|format| format.bytes(0)), [0; 6]);
    }

    #[test]
    fn names_are_distinct() {
        let mut names = ALL.map(Format::name).to_vec();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), ALL.len());
    }
}
