//! Which heads the hand-written attention kernels of CUDA take. Host arithmetic: the plan reads it without the cargo feature `cuda` too.
//!
//! Trade-off: which kernel runs follows from the shape of each micro-batch where cuDNN may take it; the plan names only what is sure
//! beforehand.

use firebrick_arch::ModelSpec;
use firebrick_precision::Format;

use crate::backends::BackendKind;

/// Whether the flash kernels take heads of this width, in f32 or in a 16-bit format.
pub(in crate::backends) fn flash_takes(is_f32: bool, head_dim: usize) -> bool {
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
        let (kernels, why) = if [compute == Format::F32, true].into_iter().any(|is_f32| flash_takes(is_f32, head_dim)) {
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

#[cfg(test)]
mod tests {
    use firebrick_arch::shapes::llama_3_1_8b;

    use super::*;

    #[test]
    fn a_soft_cap_goes_to_the_flash_kernels_where_they_take_the_heads() {
        let mut model = llama_3_1_8b();
        assert_eq!(BackendKind::Cuda.capped_attention(&model, Format::Bf16), None);
        for (head_dim, compute, expected) in [
            (256, Format::Bf16, "hand-written"),
            (128, Format::F32, "hand-written"),
            (32, Format::F32, "hand-written"),
            (32, Format::Bf16, "hand-written"),
            (24, Format::Bf16, "reference"),
        ] {
            for layer in &mut model.layers {
                (layer.attention.head_dim, layer.attention.soft_cap) = (head_dim, Some(50.0));
            }
            let [kernels, why] = BackendKind::Cuda.capped_attention(&model, compute).unwrap();
            assert_eq!(kernels, expected);
            assert!(why.contains(&head_dim.to_string()), "{why}");
            assert_eq!(BackendKind::Flex.capped_attention(&model, compute), None);
        }
    }
}
