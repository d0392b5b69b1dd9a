//! Dropout on the adapters' input, as a function of a key and a value's position: no mask is stored, so a recomputed
//! layer, a backward and a resumed run use the mask of the first forward.
//!
//! Two bytes of a 32-bit hash decide whether a value is dropped. The hash applies the finalizer "lowbias32" (Wellons, Prospecting for
//! Hash Functions, 2018) twice, to a counter and both halves of the key: 32-bit arithmetic, which every device has.
//! Trade-off: probabilities are multiples of 1/65,536. Modules that share an input share its mask, so that it is read once.

/// A dropout mask, determined by its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dropout {
    /// Values whose 16 bits are below this are dropped.
    threshold: u32,
    /// Key of the mask; equal keys give equal masks.
    key: u64,
    /// Index of the first value in the mask: that of a row in the middle of a matrix.
    first: u64,
}

/// Number of values of 16 bits.
const OUTCOMES: u32 = 1 << 16;

impl Dropout {
    /// Creates a mask that drops values with this probability; `None` if that rounds to 0.
    ///
    /// # Panics
    /// If the probability is not in `[0, 1)`; recipes are checked.
    pub fn new(probability: f64, key: u64) -> Option<Self> {
        assert!((0.0..1.0).contains(&probability), "values cannot be dropped with probability {probability}");
        let threshold = ((probability * f64::from(OUTCOMES)).round() as u32).min(OUTCOMES - 1);
        (threshold > 0).then_some(Self { threshold, key, first: 0 })
    }

    /// Returns the same mask for the values from this one on: rows in the middle of a matrix.
    #[must_use]
    pub fn from_value(self, index: usize) -> Self {
        Self { first: self.first + index as u64, ..self }
    }

    /// Returns the index of the first value in the mask.
    pub fn first(&self) -> u64 {
        self.first
    }

    /// Returns the factor of kept values: one over the probability of being kept.
    pub fn scale(&self) -> f32 {
        OUTCOMES as f32 / (OUTCOMES - self.threshold) as f32
    }

    /// Returns the threshold: values whose 16 bits are below it are dropped.
    pub fn threshold(&self) -> u32 {
        self.threshold
    }

    /// Returns the key of the mask.
    pub fn key(&self) -> u64 {
        self.key
    }

    /// Returns whether the value at `index` of the row-major matrix is kept.
    pub fn keeps(&self, index: u64) -> bool {
        let index = self.first + index;
        let bits = self.bits(index / 2) >> (16 * (index % 2));
        bits % OUTCOMES >= self.threshold
    }

    /// Returns the hash bits for a pair of adjacent values.
    fn bits(&self, pair: u64) -> u32 {
        let halves = |value: u64| (value as u32, (value >> 32) as u32);
        let ((low, high), (key_low, key_high)) = (halves(pair), halves(self.key));
        mixed(mixed(low ^ key_low) ^ key_high ^ high.wrapping_mul(0x9e37_79b9))
    }

    /// Returns the factors of all values of a matrix, row by row: 0 or [`Dropout::scale`].
    pub fn factors(&self, values: usize) -> Vec<f32> {
        let scale = self.scale();
        (0..values as u64).map(|index| if self.keeps(index) { scale } else { 0.0 }).collect()
    }
}

fn mixed(mut value: u32) -> u32 {
    value ^= value >> 16;
    value = value.wrapping_mul(0x7feb_352d);
    value ^= value >> 15;
    value = value.wrapping_mul(0x846c_a68b);
    value ^ (value >> 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    const VALUES: u64 = 1 << 18;

    fn dropout(key: u64) -> Dropout {
        Dropout::new(0.1, key).unwrap()
    }

    #[test]
    fn as_many_values_are_dropped_as_the_probability_says_and_the_mean_stays() {
        for key in [0, 1, u64::MAX] {
            let factors = dropout(key).factors(VALUES as usize);
            let dropped = factors.iter().filter(|&&factor| factor == 0.0).count() as f64 / VALUES as f64;
            assert!((dropped - 0.1).abs() < 0.003, "{dropped}");
            let mean = factors.iter().map(|&factor| f64::from(factor)).sum::<f64>() / VALUES as f64;
            assert!((mean - 1.0).abs() < 0.004, "{mean}");
        }
        assert_eq!(Dropout::new(0.0, 7), None);
    }

    #[test]
    fn masks_of_different_keys_and_neighboring_values_are_independent() {
        let both = |other: &dyn Fn(u64) -> bool| {
            let both_dropped = (0..VALUES).filter(|&index| !dropout(3).keeps(index) && !other(index)).count();
            both_dropped as f64 / VALUES as f64
        };
        for key in [4, 3 << 32, 3 ^ (1 << 63)] {
            assert!((both(&|index| dropout(key).keeps(index)) - 0.01).abs() < 0.001, "key {key}");
        }
        for distance in [1, 2, 64, 4096, 1 << 33] {
            let shared = both(&|index| dropout(3).keeps(index + distance));
            assert!((shared - 0.01).abs() < 0.001, "{shared} at distance {distance}");
        }
    }

    #[test]
    fn a_mask_follows_from_its_key_and_is_the_same_in_every_version() {
        let dropped: Vec<u64> = (0..64).filter(|&index| !Dropout::new(0.25, 42).unwrap().keeps(index)).collect();
        assert_eq!(dropout(5).factors(100), dropout(5).factors(100));
        assert_eq!(dropped, EXPECTED);
        let rest = dropout(5).from_value(30).from_value(7);
        assert_eq!(dropout(5).factors(100)[37..], rest.factors(63));
    }

    /// Indices of the dropped values among the first 64, computed in Python from the definition at the top of this file.
    const EXPECTED: [u64; 11] = [9, 12, 15, 17, 18, 20, 23, 42, 47, 51, 56];
}
