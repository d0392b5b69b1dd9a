//! The rows that GEMMs with adapters read on CUDA: how many columns the ranks add, and where the next row begins.
//!
//! The engine lays memory out by this, and the memory estimate counts by it, whether or not the cargo feature `cuda` is on.
//! Trade-off: one divisor decides between appended and separate ranks for every shape; it was measured on Llama-3.1-8B.

use firebrick_arch::{GroupSpec, ModelSpec, ModuleSpec};
use firebrick_precision::Format;

use crate::memory::estimate::TrainingShape;

/// Ranks are appended to the inner dimension of a group's GEMM while they are at most this part of it; more are separate GEMMs, which
/// read and write the outputs once more but multiply with no zeros.
const MAX_APPENDED_DIVISOR: usize = 8;
/// Rows with appended columns begin on multiples of this many values, as matrix units like them.
pub(super) const ROW_MULTIPLE: usize = 64;

/// Columns that the adapters of a group add to its input of `in_features`, from the rank of each module: all ranks, filled up to a
/// multiple of 8 for the matrix units; 0 where their GEMMs are separate.
pub(super) fn appended_ranks(in_features: usize, ranks: &[usize]) -> usize {
    let all = ranks.iter().sum::<usize>().next_multiple_of(8);
    if all * MAX_APPENDED_DIVISOR <= in_features { all } else { 0 }
}

/// Values from the start of one row to the next.
pub(super) fn row_stride(width: usize, appended: usize) -> usize {
    if appended == 0 { width } else { (width + appended).next_multiple_of(ROW_MULTIPLE) }
}

/// Columns that the adapters of a run add to the input of a group; see [`appended_ranks`].
pub(super) fn appended_to(group: &GroupSpec, training: &TrainingShape) -> usize {
    let Some(lora) = training.lora.as_ref().filter(|_| matches!(training.stored_format(), Format::Quantized(_))) else {
        return 0;
    };
    let rank = |module: &ModuleSpec| if lora.target_modules.matches(&module.path) { lora.r } else { 0 };
    appended_ranks(group.in_features, &group.modules.iter().map(rank).collect::<Vec<_>>())
}

/// In words: the groups of a layer whose adapters are appended, and those whose GEMMs are separate; `None` without adapters.
pub(super) fn adapter_gemms(model: &ModelSpec, training: &TrainingShape) -> Option<String> {
    let lora = training.lora.as_ref()?;
    let is_adapted = |group: &GroupSpec| group.modules.iter().any(|module| lora.target_modules.matches(&module.path));
    let groups: Vec<GroupSpec> = model.groups(0).into_iter().filter(is_adapted).collect();
    let (appended, separate): (Vec<_>, Vec<_>) = groups.iter().partition(|group| appended_to(group, training) > 0);
    let named = |way: &str, groups: Vec<&GroupSpec>| {
        let names: Vec<_> = groups
            .iter()
            .flat_map(|group| &group.modules)
            .filter_map(|module| module.path.rsplit('.').next())
            .collect();
        (!names.is_empty()).then(|| format!("{way}: {}", names.join(", ")))
    };
    let ways: Vec<_> = [named("appended", appended), named("separate", separate)].into_iter().flatten().collect();
    Some(ways.join("; "))
}

#[cfg(test)]
mod tests {
    use firebrick_arch::LoraConfig;
    use firebrick_arch::shapes::llama_3_1_8b;

    use super::*;
    use crate::memory::estimate::Recompute;
    use crate::memory::estimate::tests::{full, qlora};

    #[test]
    fn modules_are_named_under_the_way_that_their_adapters_go() {
        let of_rank = |r: usize| {
            let mut training = qlora(1, Recompute::Full);
            training.lora = training.lora.map(|lora| LoraConfig { r, ..lora });
            adapter_gemms(&llama_3_1_8b(), &training).expect("it has adapters")
        };
        assert_eq!(of_rank(16), "appended: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj");
        assert_eq!(of_rank(256), "appended: o_proj, gate_proj, up_proj, down_proj; separate: q_proj, k_proj, v_proj");
        assert_eq!(adapter_gemms(&llama_3_1_8b(), &full(Format::Bf16)), None);
    }

    #[test]
    fn ranks_are_appended_while_they_are_few() {
        assert_eq!(appended_ranks(4096, &[16, 16, 16]), 48);
        assert_eq!(appended_ranks(4096, &[3, 0, 3]), 8, "filled up to a multiple of 8");
        assert_eq!(appended_ranks(4096, &[256, 256, 256]), 0, "separate GEMMs");
        assert_eq!(appended_ranks(14_336, &[256]), 256);
        assert_eq!([row_stride(4096, 48), row_stride(4096, 65), row_stride(4100, 0)], [4160, 4224, 4100]);
    }
}
