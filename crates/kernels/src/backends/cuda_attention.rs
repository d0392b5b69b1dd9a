//! Which heads the hand-written attention kernels of CUDA take. Host arithmetic: the plan reads it without the cargo feature `cuda` too.
//!
//! Trade-off: which kernel runs follows from the shape of each micro-batch where cuDNN may take it; the plan names only what is sure
//! beforehand.

use firebrick_arch::ModelSpec;
use firebrick_precision::Format;

use super::kind::BackendKind;

/// Whether the flash kernels take heads of this width, in f32 or in a 16-bit format.
pub(super) fn flash_takes(is_f32: bool, head_dim: usize) -> bool {
    if is_f32 { head_dim.is_multiple_of(32) && head_dim <= 256 } else { matches!(head_dim, 64 | 96 | 128 | 256) }
}

impl BackendKind {
    /// The kernels that compute attention with a soft cap of the scores, and why; `None` for models without one, and for backends that
    /// have one implementation for all models.
    pub fn capped_attention(self, model: &ModelSpec, compute: Format) -> Option<[String; 2]> {
        let mut capped =
            model.layers.iter().map(|layer| &layer.attention).filter(|attention| attention.soft_cap.is_some());
        let attention = capped.next().filter(|_| self == Self::Cuda)?;
        let head_dim = attention.head_dim;
        let (kernels, why) = if flash_takes(compute == Format::F32, head_dim) {
            ("hand-written", "cuDNN is not given scores with a soft cap; slower than it")
        } else {
            (
                "reference",
                "no kernel takes a soft cap with heads of this width; in memory, quadratic in the longest document",
            )
        };
        Some([kernels.to_owned(), format!("{why} (heads of {head_dim})")])
    }
}
