//! The random bits of stochastic rounding: a function of a seed and the index of the value, and of nothing else.
//!
//! So the result depends neither on threads nor on the order of the work, a resumed run draws what it would have drawn,
//! and a device computes the same bits. It is SplitMix64 (Steele, Lea and Flood, 2014) entered at `index`.
//!
//! Trade-off: not for cryptography, and 64-bit multiplications on the device.

/// 32 uniform bits for the value at `index`.
#[inline(always)] // in the loops over tensors
pub const fn random_bits(seed: u64, index: u64) -> u32 {
    let mut z = seed.wrapping_add(index.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    ((z ^ (z >> 31)) >> 32) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_are_those_of_the_published_generator() {
        // The first outputs of SplitMix64 from seed 1234567, as its authors publish them; the upper halves.
        let published = [6_457_827_717_110_365_317_u64, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423];
        for (index, output) in published.into_iter().enumerate() {
            assert_eq!(random_bits(1_234_567, index as u64), (output >> 32) as u32);
        }
    }

    #[test]
    fn bits_are_uniform_and_neighbors_independent() {
        let draws: Vec<u32> = (0..1 << 16).map(|index| random_bits(9, index)).collect();
        for bit in 0..32 {
            let ones = draws.iter().filter(|draw| **draw >> bit & 1 == 1).count() as i64;
            // Six standard deviations.
            assert!((ones - (1 << 15)).abs() < 768, "bit {bit}: {ones}");
            let equal = draws.windows(2).filter(|pair| (pair[0] ^ pair[1]) >> bit & 1 == 0).count() as i64;
            assert!((equal - (1 << 15)).abs() < 768, "bit {bit}: {equal} equal neighbors");
        }
    }
}
