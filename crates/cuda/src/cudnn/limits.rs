//! The version of cuDNN, and the attention calls that it is known not to support on a device, or to compute wrongly.
//!
//! Trade-off: only known cases are listed, of versions from 9.1 on; older ones are rejected. cuDNN itself reports the rest when a plan is built.

use std::fmt;
use std::sync::Once;

use super::shape::{AttentionShape, Pass};
use crate::error::CudaError;

/// Major, minor, patch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Version(pub(super) u32, pub(super) u32, pub(super) u32);

impl Version {
    /// Converts the result of `cudnnGetVersion`: `10000 * major + 100 * minor + patch` from 9 on, thousands before.
    pub(super) fn unpack(version: usize) -> Self {
        let version = u32::try_from(version).unwrap_or(0);
        if version < 10_000 {
            return Self(version / 1000, version % 1000 / 100, version % 100);
        }
        Self(version / 10_000, version % 10_000 / 100, version % 100)
    }

    /// Returns the value of masked scores. Before 9.10, softmax needed a finite number.
    pub(super) fn masked(self) -> f32 {
        if self < Self(9, 10, 0) { f32::MIN } else { f32::NEG_INFINITY }
    }

    /// Returns whether, as before 9.10, the backward pass needs the padding mask again after the statistics are subtracted.
    pub(super) fn masks_padding_twice(self) -> bool {
        self < Self(9, 10, 0)
    }

    /// Returns whether uniform documents need an explicit padding mask in the backward: up to 9.15.0, if the length is not a multiple of 128.
    pub(super) fn needs_lengths_for(self, length: usize) -> bool {
        self <= Self(9, 15, 0) && !length.is_multiple_of(128)
    }

    /// Returns whether, as before 9.6, the caller must clear the accumulator of the query gradient.
    pub(super) fn needs_cleared_accumulator(self) -> bool {
        self < Self(9, 6, 0)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}.{}.{}", self.0, self.1, self.2)
    }
}

/// The first version that is used for packed documents. On Hopper, earlier versions read workspace that they have not written in
/// the backward pass and return NaN (<https://github.com/NVIDIA/TransformerEngine/issues/2186>), and 9.14 was wrong for wide
/// heads.
const PACKED_SINCE: Version = Version(9, 18, 0);

/// A wrong backward pass is rejected with one warning per process, because the replacement is slower than the forward pass suggests.
static WRONG: Once = Once::new();

/// Number of elements of the output's gradient from which on the backward pass is rejected.
const MAX_GRADIENT_ELEMENTS: usize = 1 << 31;

/// Returns whether a version supports packed documents on a device of major compute capability `major`.
pub(super) fn takes_packed(version: Version, major: u32) -> bool {
    version >= PACKED_SINCE && (9..=10).contains(&major)
}

impl AttentionShape {
    /// Rejects calls that `version` is known not to support, or to compute wrongly, on a device of major compute capability `major`. Unless a comment
    /// states otherwise, the rules are those of NVIDIA's cudnn-frontend 1.23 (`sdpa_support_surface.h` and `scaled_dot_product_flash_attention.h`).
    pub(super) fn check_known_limits(&self, pass: Pass, version: Version, major: u32) -> Result<(), CudaError> {
        let no = |reason: String| Err(CudaError::CudnnUnsupported { case: self.describe(pass), reason });
        if version < Version(9, 1, 0) || [Version(9, 10, 0), Version(9, 10, 1)].contains(&version) {
            return no(format!("cuDNN {version} is too old or known to be faulty: install 9.18 or newer"));
        }
        if major < 8 {
            return no("it needs an Ampere GPU or newer".to_string());
        }
        if pass == Pass::Backward && self.in_order {
            // Blackwell has a kernel for this, too, which is selected by knobs of an engine that are not set here.
            if major > 9 {
                return no("gradients in a fixed order are not requested on Blackwell".to_string());
            }
            if self.is_packed() {
                return no("gradients of packed documents in a fixed order were not tried".to_string());
            }
        }
        if self.is_packed() && !takes_packed(version, major) {
            let needed = format!("cuDNN {PACKED_SINCE} or newer and a Hopper or Blackwell data center GPU");
            return no(format!("packed documents need {needed}, got cuDNN {version}"));
        }
        let widest = if major == 9 || (pass == Pass::Forward && version > Version(9, 9, 0)) { 256 } else { 128 };
        if self.head_dim > widest {
            return no(format!("heads are {} wide, and at most {widest} are supported here", self.head_dim));
        }
        if pass == Pass::Backward && self.longest() == 1 {
            return no("documents of a single token have no backward pass: round the longest up".to_string());
        }
        // Not in NVIDIA's rules, but observed on Hopper with 9.19: from there on the gradient of the last queries is
        // wrong, without an error. Offsets into the output's gradient are kept in 32 bits.
        if pass == Pass::Backward && self.tokens() * self.query_width() >= MAX_GRADIENT_ELEMENTS {
            WRONG.call_once(|| {
                let found = self.tokens();
                tracing::warn!("cuDNN's backward is wrong for {found} tokens: slower attention kernels run; shorter rows avoid that");
            });
            let found = format!("{} tokens in rows of {}", self.tokens(), self.query_width());
            return no(format!(
                "the backward pass of 2^31 elements or more is wrong in cuDNN, got {found}: use shorter rows"
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::shape::{Element, Layout};
    use super::*;

    #[test]
    fn known_limits_are_reported_as_unsupported() {
        let shape = AttentionShape {
            element: Element::Bf16,
            layout: Layout::Packed { documents: 2, longest: 8, tokens: 10 },
            query_heads: 4,
            key_value_heads: 2,
            head_dim: 8,
            in_order: false,
        };
        let unsupported = |shape: &AttentionShape, version, major| {
            let error = shape.check_known_limits(Pass::Backward, version, major);
            matches!(error, Err(CudaError::CudnnUnsupported { .. }))
        };
        let new = Version(9, 19, 0);
        assert!(!unsupported(&shape, new, 9) && !unsupported(&shape, new, 10));
        assert!(unsupported(&shape, Version(9, 14, 0), 9) && unsupported(&shape, Version(9, 10, 0), 9));
        assert!(unsupported(&shape, new, 8) && unsupported(&shape, new, 12));
        let uniform = AttentionShape { layout: Layout::Uniform { documents: 2, length: 8 }, ..shape };
        assert!(!unsupported(&uniform, Version(9, 14, 0), 9) && unsupported(&uniform, Version(9, 10, 0), 9));
        let in_order = AttentionShape { in_order: true, ..uniform };
        assert!(!unsupported(&in_order, new, 9) && unsupported(&in_order, new, 10));
        assert!(unsupported(&AttentionShape { in_order: true, ..shape }, new, 9));
        assert!(in_order.check_known_limits(Pass::Forward, new, 10).is_ok(), "a forward pass repeats");
        let long = |length| {
            let layout = Layout::Uniform { documents: 1, length };
            AttentionShape { layout, query_heads: 32, key_value_heads: 8, head_dim: 128, ..shape }
        };
        assert!(!unsupported(&long((1 << 19) - 1), new, 9) && unsupported(&long(1 << 19), new, 9));
        assert!(long(1 << 19).check_known_limits(Pass::Forward, new, 9).is_ok(), "the forward pass is right");
    }

    #[test]
    fn versions_unpack_and_order() {
        assert_eq!(Version::unpack(91_400), Version(9, 14, 0));
        assert_eq!(Version::unpack(8_907), Version(8, 9, 7));
        assert!(Version(9, 6, 0) > Version(9, 5, 1) && Version(9, 10, 0) > Version(9, 9, 9));
        assert_eq!(Version(9, 14, 0).to_string(), "9.14.0");
    }
}
