//! Tensors in the number formats of GGUF, in the bytes that ggml's own quantization writes.
//!
//! ```text
//! q8_0   32 values: f16 scale, 32 signed bytes                         scale = largest |value| / 127
//! q4_0   32 values: f16 scale, 16 bytes of two codes, low half first   scale = the value of largest |value| / -8
//! ```
//! Trade-off: simple formats only; the K-quants that llama-quantize makes from these files are smaller and as exact.

use half::{bf16, f16};

/// Values of a block.
pub(super) const BLOCK: usize = 32;

/// The storage type of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GgmlType {
    /// float32.
    F32,
    /// float16.
    F16,
    /// bfloat16.
    Bf16,
    /// 8 bits and a scale per 32 values.
    Q8_0,
    /// 4 bits and a scale per 32 values.
    Q4_0,
}

impl GgmlType {
    /// Returns ggml's number of the type.
    pub(super) fn number(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q4_0 => 2,
            Self::Q8_0 => 8,
            Self::Bf16 => 30,
        }
    }

    /// Returns the size of this many values in bytes.
    pub(super) fn bytes_of(self, values: usize) -> usize {
        match self {
            Self::F32 => values * 4,
            Self::F16 | Self::Bf16 => values * 2,
            Self::Q4_0 => values / BLOCK * 18,
            Self::Q8_0 => values / BLOCK * 34,
        }
    }

    /// Encodes values in this type.
    pub(super) fn encode(self, values: &[f32]) -> Vec<u8> {
        match self {
            Self::F32 => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
            Self::F16 => values.iter().flat_map(|&value| f16::from_f32(value).to_le_bytes()).collect(),
            Self::Bf16 => values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes()).collect(),
            Self::Q4_0 => values.chunks(BLOCK).flat_map(q4_0).collect(),
            Self::Q8_0 => values.chunks(BLOCK).flat_map(q8_0).collect(),
        }
    }
}

fn q8_0(block: &[f32]) -> [u8; 34] {
    let scale = block.iter().fold(0.0_f32, |largest, value| largest.max(value.abs())) / 127.0;
    let factor = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    let mut bytes = [0; 34];
    bytes[..2].copy_from_slice(&f16::from_f32(scale).to_le_bytes());
    for (code, value) in bytes[2..].iter_mut().zip(block) {
        // Half away from zero.
        *code = (value * factor).round() as i8 as u8;
    }
    bytes
}

fn q4_0(block: &[f32]) -> [u8; 18] {
    // The first of several largest ones.
    let largest =
        block.iter().fold(0.0_f32, |largest, &value| if value.abs() > largest.abs() { value } else { largest });
    let scale = largest / -8.0;
    let factor = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    let code = |value: f32| ((value * factor + 8.5) as u8).min(15);
    let mut bytes = [0; 18];
    bytes[..2].copy_from_slice(&f16::from_f32(scale).to_le_bytes());
    let (low, high) = block.split_at(BLOCK / 2);
    for (byte, (low, high)) in bytes[2..].iter_mut().zip(low.iter().zip(high)) {
        *byte = code(*low) | code(*high) << 4;
    }
    bytes
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
        let kinds =
            [("f16", GgmlType::F16), ("bf16", GgmlType::Bf16), ("q8_0", GgmlType::Q8_0), ("q4_0", GgmlType::Q4_0)];
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
