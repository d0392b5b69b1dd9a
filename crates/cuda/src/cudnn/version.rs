//! cuDNN's version, on which several details of the graphs depend.

use std::fmt;

/// Major, minor, patch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Version(pub(super) u32, pub(super) u32, pub(super) u32);

impl Version {
    /// From what `cudnnGetVersion` returns: from 9 on, `10000 * major + 100 * minor + patch`; before, thousands.
    pub(super) fn unpack(version: usize) -> Self {
        let version = u32::try_from(version).unwrap_or(0);
        if version < 10_000 {
            return Self(version / 1000, version % 1000 / 100, version % 100);
        }
        Self(version / 10_000, version % 10_000 / 100, version % 100)
    }

    /// What scores become outside the mask. Before 9.10, softmax wanted a finite number.
    pub(super) fn masked(self) -> f32 {
        if self < Self(9, 10, 0) { f32::MIN } else { f32::NEG_INFINITY }
    }

    /// Between 9.0 and 9.10, the backward pass has to be told of padding again after the statistics are subtracted.
    pub(super) fn masks_padding_twice(self) -> bool {
        self < Self(9, 10, 0)
    }

    /// Up to 9.15.0, the backward pass of unpadded documents whose length is no multiple of 128 needs an explicit padding mask.
    pub(super) fn needs_lengths_for(self, length: usize) -> bool {
        self <= Self(9, 15, 0) && !length.is_multiple_of(128)
    }

    /// Before 9.6, the caller clears the accumulator of the queries' gradient.
    pub(super) fn wants_cleared_accumulator(self) -> bool {
        self < Self(9, 6, 0)
    }

    /// What is done about the known faults of this version, where nothing else is asked for.
    pub(super) fn workarounds(self) -> Workarounds {
        Workarounds { clear_workspace: self < Self(9, 18, 0), ..Workarounds::default() }
    }
}

/// Ways around faults of cuDNN with packed documents. [`super::Cudnn::load`] takes those that its version is known to need.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Workarounds {
    /// The workspace is cleared before each backward pass. Before 9.18, the pass on Hopper reads parts of it that it has not
    /// written, and gives NaN (<https://github.com/NVIDIA/TransformerEngine/issues/2186>). Costs time.
    pub clear_workspace: bool,
    /// Offsets of documents have 64 bits instead of 32, as in all of NVIDIA's own code for 9.5 and newer. The index is then
    /// [`super::AttentionShape::wide_packed_index`].
    pub wide_offsets: bool,
    /// What the backward pass accumulates is laid out padded to the longest document, not by token. Costs memory.
    pub padded_accumulators: bool,
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
