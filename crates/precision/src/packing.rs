//! Layout of codes in bytes, and the loops that decode codes and block scales to values: one path for every weight format.

use rayon::prelude::*;

use crate::workers::blocks_at_once;

/// Layout of codes in a byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Packing {
    /// Two codes, the earlier one in the high nibble: NF4 and FP4 of bitsandbytes.
    HighNibbleFirst,
    /// Two codes, the earlier one in the low nibble: E2M1, as the hardware reads it.
    LowNibbleFirst,
    /// One code: E4M3.
    Bytes,
}

impl Packing {
    /// Returns the number of codes per byte: 2 or 1.
    pub const fn codes_per_byte(self) -> usize {
        match self {
            Self::HighNibbleFirst | Self::LowNibbleFirst => 2,
            Self::Bytes => 1,
        }
    }

    /// Returns the codes of a byte in order. A single code is returned twice.
    #[inline(always)]
    pub const fn codes(self, byte: u8) -> [usize; 2] {
        let [low, high] = [(byte & 0xF) as usize, (byte >> 4) as usize];
        match self {
            Self::HighNibbleFirst => [high, low],
            Self::LowNibbleFirst => [low, high],
            Self::Bytes => [byte as usize; 2],
        }
    }

    /// Returns a byte whose codes are all `code`.
    pub const fn repeated(self, code: u8) -> u8 {
        match self {
            Self::HighNibbleFirst | Self::LowNibbleFirst => code << 4 | code,
            Self::Bytes => code,
        }
    }
}

/// Levels of codes relative to the scale of a block, and the layout of codes in bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Decoder {
    /// The level of each code: 16, or 256 if a code is a byte.
    pub(crate) levels: &'static [f32],
    pub(crate) packing: Packing,
    /// Values that share a scale. Each block begins at a whole byte.
    pub(crate) block_size: usize,
}

impl Decoder {
    /// Decodes `count` values of packed codes: level times scale.
    ///
    /// # Panics
    /// If codes, scales and count belong to different tensors.
    pub(crate) fn all(self, codes: &[u8], scales: &[f32], count: usize) -> Vec<f32> {
        let Self { packing, block_size, .. } = self;
        assert_eq!(codes.len(), count.div_ceil(packing.codes_per_byte()), "the codes of all values");
        assert_eq!(scales.len(), count.div_ceil(block_size), "one scale per block");
        let mut values = vec![0.0; count];
        let bytes = block_size / packing.codes_per_byte();
        let blocks = values.par_chunks_mut(block_size).zip(codes.par_chunks(bytes)).zip(scales);
        let blocks = blocks.with_min_len(blocks_at_once(block_size));
        blocks.for_each(|((values, codes), &scale)| self.block(values, codes, scale));
        values
    }

    /// Decodes consecutive blocks; the last one may be partial.
    pub(crate) fn blocks(self, values: &mut [f32], codes: &[u8], scales: &[f32]) {
        let bytes = self.block_size / self.packing.codes_per_byte();
        for ((values, codes), &scale) in values.chunks_mut(self.block_size).zip(codes.chunks(bytes)).zip(scales) {
            self.block(values, codes, scale);
        }
    }

    /// Decodes a block or its beginning. The last byte is half used if the number of values is odd.
    fn block(self, values: &mut [f32], codes: &[u8], scale: f32) {
        if self.packing == Packing::Bytes {
            for (value, &code) in values.iter_mut().zip(codes) {
                *value = self.levels[usize::from(code)] * scale;
            }
            return;
        }
        let mut scaled = [0.0; 16];
        scaled.iter_mut().zip(self.levels).for_each(|(scaled, level)| *scaled = level * scale);
        for (pair, &byte) in values.chunks_mut(2).zip(codes) {
            let [first, second] = self.packing.codes(byte);
            pair[0] = scaled[first];
            if let Some(value) = pair.get_mut(1) {
                *value = scaled[second];
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_of_a_byte_come_in_the_order_of_the_packing() {
        assert_eq!(Packing::HighNibbleFirst.codes(0x72), [7, 2]);
        assert_eq!(Packing::LowNibbleFirst.codes(0x72), [2, 7]);
        assert_eq!(Packing::Bytes.codes(0x72), [0x72; 2]);
        for packing in [Packing::HighNibbleFirst, Packing::LowNibbleFirst, Packing::Bytes] {
            assert_eq!(packing.codes(packing.repeated(7)), [7; 2]);
        }
    }
}
