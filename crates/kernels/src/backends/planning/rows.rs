//! Row layout of GEMMs with adapters on CUDA: how many columns the ranks add, and the stride between rows.
//!
//! Both the engine's memory layout and the memory estimate use this file, with or without the cargo feature `cuda`.
//! Trade-off: one divisor, measured on Llama-3.1-8B, decides between appended and separate ranks for every shape.

use firebrick_arch::{GroupSpec, ModelSpec};

/// Ranks are appended to the inner dimension of a group's GEMM up to this fraction of it. More ranks take separate
/// GEMMs, which read and write the outputs once more but do not multiply zeros.
const MAX_APPENDED_DIVISOR: usize = 8;
/// Rows with appended columns begin at multiples of this many values, since matrix units read aligned rows fastest.
pub(in crate::backends) const ROW_MULTIPLE: usize = 64;
/// Inner widths of GEMMs in 8-bit floats are multiples of one tile.
const FP8_MULTIPLE: usize = 128;
/// Without ranks, one block of scales is sufficient.
const FP8_BLOCK: usize = 32;

/// Returns the columns that the adapters of a group add to its input of `in_features`, from the rank of each module:
/// all ranks, padded to a multiple of 8 for the matrix units; 0 if their GEMMs are separate.
pub(in crate::backends) fn appended_ranks(in_features: usize, ranks: &[usize]) -> usize {
    let all = ranks.iter().sum::<usize>().next_multiple_of(8);
    if all * MAX_APPENDED_DIVISOR <= in_features { all } else { 0 }
}

/// Returns the values from the start of one row to the next.
pub(in crate::backends) fn row_stride(width: usize, appended: usize) -> usize {
    if appended == 0 { width } else { (width + appended).next_multiple_of(ROW_MULTIPLE) }
}

/// Returns the bytes from the start of one row of 8-bit codes to the next: inner width and ranks, padded to whole tiles
/// of the matrix units, or without ranks and for the kernel of experts (`is_grouped`) to whole blocks.
pub(in crate::backends) fn fp8_stride(width: usize, ranks: usize, is_grouped: bool) -> usize {
    let multiple = if ranks == 0 || is_grouped { FP8_BLOCK } else { FP8_MULTIPLE };
    (fp8_lead(ranks) + width).next_multiple_of(multiple)
}

/// Returns the leading columns of 8-bit codes for the adapters' ranks: whole steps of the matrix units.
pub(in crate::backends) fn fp8_lead(ranks: usize) -> usize {
    ranks.next_multiple_of(32)
}

/// Ranks of `x Aᵀ` that share an allocation until the backward; on small models separate allocations would cost more than the copy.
pub(in crate::backends) const SAVED_RANKS: usize = 256;

/// Returns why a model's GEMMs cannot use 8-bit floats (a width that is not a multiple of 16); `None` if they can.
pub fn fp8_refusal(model: &ModelSpec) -> Option<String> {
    let wrong = |group: &GroupSpec| {
        let width = [group.in_features, group.out_features()].into_iter().find(|width| !width.is_multiple_of(16))?;
        let module = &group.modules.first()?.path;
        Some(format!("{module} has a width of {width}, and 8-bit floats need multiples of 16"))
    };
    model.all_groups().filter(|group| !group.kind.decides()).find_map(|group| wrong(&group))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_appended_while_they_are_few() {
        assert_eq!(appended_ranks(4096, &[16, 16, 16]), 48);
        assert_eq!(appended_ranks(4096, &[3, 0, 3]), 8, "filled up to a multiple of 8");
        assert_eq!(appended_ranks(4096, &[256, 256, 256]), 0, "separate GEMMs");
        assert_eq!(appended_ranks(14_336, &[256]), 256);
        assert_eq!([row_stride(4096, 48), row_stride(4096, 65), row_stride(4100, 0)], [4160, 4224, 4100]);
    }
}
