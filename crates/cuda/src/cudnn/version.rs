//! The version of cuDNN, on which several details of the graphs depend.
//!
//! Trade-off: only versions from 9.1 on are known; older ones are refused (`limits.rs`).

use std::fmt;

/// Major, minor, patch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Version(pub(super) u32, pub(super) u32, pub(super) u32);

impl Version {
    /// From the result of `cudnnGetVersion`: `10000 * major + 100 * minor + patch` from 9 on, thousands before.
    pub(super) fn unpack(version: usize) -> Self {
        let version = u32::try_from(version).unwrap_or(0);
        if version < 10_000 {
            return Self(version / 1000, version % 1000 / 100, version % 100);
        }
        Self(version / 10_000, version % 10_000 / 100, version % 100)
    }

    /// The value of masked scores. Before 9.10, softmax needed a finite number.
    pub(super) fn masked(self) -> f32 {
        if self < Self(9, 10, 0) { f32::MIN } else { f32::NEG_INFINITY }
    }

    /// Before 9.10, the backward pass needs the padding mask again after the statistics are subtracted.
    pub(super) fn masks_padding_twice(self) -> bool {
        self < Self(9, 10, 0)
    }

    /// Up to 9.15.0, the backward pass of uniform documents whose length is not a multiple of 128 needs an explicit padding mask.
    pub(super) fn needs_lengths_for(self, length: usize) -> bool {
        self <= Self(9, 15, 0) && !length.is_multiple_of(128)
    }

    /// Before 9.6, the caller must clear the accumulator of the query gradient.
    pub(super) fn needs_cleared_accumulator(self) -> bool {
        self < Self(9, 6, 0)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}.{}.{}", self.0, self.1, self.2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_unpack_and_order() {
        assert_eq!(Version::unpack(91_400), Version(9, 14, 0));
        assert_eq!(Version::unpack(8_907), Version(8, 9, 7));
        assert!(Version(9, 6, 0) > Version(9, 5, 1) && Version(9, 10, 0) > Version(9, 9, 9));
        assert_eq!(Version(9, 14, 0).to_string(), "9.14.0");
    }
}
