//! Tensors in the number formats of GGUF, in the bytes that ggml's own quantization writes.
//!
//! ```text
//! q8_0   32 values: f16 scale, 32 signed bytes                         scale = largest |value| / 127
//! q4_0   32 values: f16 scale, 16 bytes of two codes, low half first   scale = the value of largest |value| / -8
//! q5_0   32 values: f16 scale, 4 bytes of fifth bits, 16 of two codes  scale = the value of largest |value| / -16
//! q5_1   32 values: f16 scale, f16 minimum, and as q5_0                scale = (largest - least) / 31
//! mxfp4  32 values: E8M0 scale, 16 bytes of two codes, low half first  codes and scale as stored
//! ```
//! The k-quants, whose bytes are our own choice of scales, are in [`super::k_quants`].

use firebrick_precision::{BlockScales, QuantizedTensor};
use half::{bf16, f16};
use rayon::prelude::*;

use super::k_quants::{SUPER, inverse, largest_of, q4_k, q5_k, q6_k};

pub(super) const BLOCK: usize = 32;

/// The storage type of a tensor, under ggml's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GgmlType {
    F32,
    F16,
    Bf16,
    Q8_0,
    Q4_0,
    Q5_0,
    Q5_1,
    Q4K,
    Q5K,
    Q6K,
    Mxfp4,
}

impl GgmlType {
    /// Returns ggml's number of the type, and the values and bytes of a block.
    const fn layout(self) -> (u32, usize, usize) {
        match self {
            Self::F32 => (0, 1, 4),
            Self::F16 => (1, 1, 2),
            Self::Q4_0 => (2, BLOCK, 18),
            Self::Q5_0 => (6, BLOCK, 22),
            Self::Q5_1 => (7, BLOCK, 24),
            Self::Q8_0 => (8, BLOCK, 34),
            Self::Q4K => (12, SUPER, 144),
            Self::Q5K => (13, SUPER, 176),
            Self::Q6K => (14, SUPER, 210),
            Self::Bf16 => (30, 1, 2),
            Self::Mxfp4 => (39, BLOCK, 17),
        }
    }

    /// Returns ggml's number of the type.
    pub(super) fn number(self) -> u32 {
        self.layout().0
    }

    /// Returns the number of values of a block, which a row has to be a multiple of.
    pub(super) const fn block(self) -> usize {
        self.layout().1
    }

    pub(super) fn bytes_of(self, values: usize) -> usize {
        let (_, count, bytes) = self.layout();
        values / count * bytes
    }

    /// Encodes values in this type, which is none that only stored codes have ([`mxfp4`]).
    pub(super) fn encode(self, values: &[f32]) -> Vec<u8> {
        match self {
            Self::F32 => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
            Self::F16 => values.iter().flat_map(|&value| f16::from_f32(value).to_le_bytes()).collect(),
            Self::Bf16 => values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes()).collect(),
            Self::Q4_0 => values.chunks(BLOCK).flat_map(q4_0).collect(),
            Self::Q5_0 => values.chunks(BLOCK).flat_map(q5_0).collect(),
            Self::Q5_1 => values.chunks(BLOCK).flat_map(q5_1).collect(),
            Self::Q8_0 => values.chunks(BLOCK).flat_map(q8_0).collect(),
            Self::Q4K => values.par_chunks(SUPER).flat_map_iter(q4_k).collect(),
            Self::Q5K => values.par_chunks(SUPER).flat_map_iter(q5_k).collect(),
            Self::Q6K => values.par_chunks(SUPER).flat_map_iter(q6_k).collect(),
            Self::Mxfp4 => unreachable!("experts in MXFP4 are not encoded again"),
        }
    }

    /// Finds the first value that these encoded bytes hold as infinity or NaN, or as a part of a block with such a scale.
    pub(super) fn first_not_finite(self, bytes: &[u8]) -> Option<usize> {
        let (_, values, size) = self.layout();
        let (numbers, exponent) = match self {
            Self::F32 => return bytes.as_chunks().0.iter().position(|value| !f32::from_le_bytes(*value).is_finite()),
            // Stored scales were checked when they were read.
            Self::Mxfp4 => return None,
            Self::Bf16 => (0..2, 0x7F80),
            Self::F16 | Self::Q8_0 | Self::Q4_0 | Self::Q5_0 => (0..2, 0x7C00),
            Self::Q5_1 | Self::Q4K | Self::Q5K => (0..4, 0x7C00),
            Self::Q6K => (size - 2..size, 0x7C00),
        };
        let is_bad = |half: &[u8; 2]| u16::from_le_bytes(*half) & exponent == exponent;
        let block = bytes.chunks(size).position(|block| block[numbers.clone()].as_chunks().0.iter().any(is_bad));
        block.map(|block| block * values)
    }
}

/// Returns the blocks of a tensor stored in MXFP4: each with its scale first, and in one byte codes half a block apart, where ours are neighbors.
pub(super) fn mxfp4(stored: &QuantizedTensor) -> Vec<u8> {
    let BlockScales::Narrow { codes: scales, .. } = &stored.scales.block else {
        unreachable!("scales of MXFP4 are E8M0")
    };
    let block = |(scale, codes): (&u8, &[u8])| {
        let code = |at: usize| codes[at / 2] >> (4 * (at % 2)) & 15;
        let mut bytes = [*scale; 17];
        (0..BLOCK / 2).for_each(|at| bytes[1 + at] = code(at) | code(at + BLOCK / 2) << 4);
        bytes
    };
    scales.iter().zip(stored.codes.chunks_exact(BLOCK / 2)).flat_map(block).collect()
}

/// Returns the bytes of a block that begin with its scale, and what values are multiplied by before they are rounded.
fn scaled_by<const BYTES: usize>(scale: f32) -> ([u8; BYTES], f32) {
    let mut bytes = [0; BYTES];
    bytes[..2].copy_from_slice(&f16::from_f32(scale).to_le_bytes());
    (bytes, inverse(scale))
}

fn q8_0(block: &[f32]) -> [u8; 34] {
    let (mut bytes, factor) = scaled_by(largest_of(block).abs() / 127.0);
    for (code, value) in bytes[2..].iter_mut().zip(block) {
        // Half away from zero.
        *code = (value * factor).round() as i8 as u8;
    }
    bytes
}

fn q4_0(block: &[f32]) -> [u8; 18] {
    let (mut bytes, factor) = scaled_by(largest_of(block) / -8.0);
    let code = |value: f32| ((value * factor + 8.5) as u8).min(15);
    let (low, high) = block.split_at(BLOCK / 2);
    for (byte, (low, high)) in bytes[2..].iter_mut().zip(low.iter().zip(high)) {
        *byte = code(*low) | code(*high) << 4;
    }
    bytes
}

fn q5_0(block: &[f32]) -> [u8; 22] {
    let (mut bytes, factor) = scaled_by(largest_of(block) / -16.0);
    put_5_bits(&mut bytes[2..], block, |value| ((value * factor + 16.5) as u8).min(31));
    bytes
}

fn q5_1(block: &[f32]) -> [u8; 24] {
    let least = block.iter().fold(f32::INFINITY, |least, &value| least.min(value));
    let most = block.iter().fold(f32::NEG_INFINITY, |most, &value| most.max(value));
    let (mut bytes, factor) = scaled_by((most - least) / 31.0);
    bytes[2..4].copy_from_slice(&f16::from_f32(least).to_le_bytes());
    put_5_bits(&mut bytes[4..], block, |value| (((value - least) * factor + 0.5) as u8).min(31));
    bytes
}

/// Writes codes of 5 bits: 4 bytes of the highest bits, one after the other, then two codes per byte, low half first.
fn put_5_bits(bytes: &mut [u8], block: &[f32], code: impl Fn(f32) -> u8) {
    let (high, low) = bytes.split_at_mut(4);
    for (at, &value) in block.iter().enumerate() {
        let code = code(value);
        high[at / 8] |= (code >> 4) << (at % 8);
        low[at % 16] |= (code & 15) << (4 * (at / 16));
    }
}

#[cfg(test)]
mod tests {
    use std::fs::read;

    use safetensors::SafeTensors;

    use super::*;

    #[test]
    fn blocks_are_the_bytes_of_the_gguf_package() {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/gguf-blocks.safetensors");
        let bytes = read(file).unwrap();
        let golden = SafeTensors::deserialize(&bytes).unwrap();
        let tensor = |name: &str| golden.tensor(name).unwrap().data().to_vec();
        let values: Vec<f32> =
            tensor("values").chunks(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect();
        let kinds = [
            ("f16", GgmlType::F16),
            ("bf16", GgmlType::Bf16),
            ("q8_0", GgmlType::Q8_0),
            ("q4_0", GgmlType::Q4_0),
            ("q5_0", GgmlType::Q5_0),
            ("q5_1", GgmlType::Q5_1),
        ];
        for (name, kind) in kinds {
            let (got, expected) = (kind.encode(&values), tensor(name));
            assert_eq!(got.len(), kind.bytes_of(values.len()), "{name}");
            assert!(
                got == expected,
                "{name}: {} of {} bytes differ",
                got.iter().zip(&expected).filter(|(a, b)| a != b).count(),
                got.len()
            );
        }
    }
}
