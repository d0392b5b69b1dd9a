//! Seeded random numbers for the unit tests, the same on every machine.

/// SplitMix64 (Steele, Lea and Flood, 2014).
pub(crate) struct Draws(pub(crate) u64);

impl Draws {
    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Returns a number that is uniform in [-1, 1).
    pub(crate) fn uniform(&mut self) -> f32 {
        ((self.bits() >> 40) as i64 - (1 << 23)) as f32 / (1 << 23) as f32
    }

    /// Returns a nearly normal number: the sum of four uniform draws, halved.
    pub(crate) fn bell(&mut self) -> f32 {
        (0..4).map(|_| self.uniform()).sum::<f32>() / 2.0
    }

    pub(crate) fn vector(&mut self, count: usize, scale: f32) -> Vec<f32> {
        (0..count).map(|_| self.bell() * scale).collect()
    }

    /// Returns an integer below `limit`. `limit` is small, so the bias does not matter.
    pub(crate) fn below(&mut self, limit: usize) -> usize {
        (self.bits() % limit as u64) as usize
    }
}
