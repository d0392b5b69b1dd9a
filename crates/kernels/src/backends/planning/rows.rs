//! The rows that GEMMs with adapters read on CUDA: how many columns the ranks add, and where the next row begins.
//!
//! The engine lays memory out by this, and the memory estimate counts by it, whether or not the cargo feature `cuda` is on.
//! Trade-off: one divisor decides between appended and separate ranks for every shape; it was measured on Llama-3.1-8B.

use firebrick_arch::{GroupSpec, ModelSpec, ModuleSpec};

use crate::GemmFormat;
use crate::memory::training_shape::TrainingShape;

/// Ranks are appended to the inner dimension of a group's GEMM while they are at most this part of it; more are separate GEMMs, which
/// read and write the outputs once more but multiply with no zeros.
const MAX_APPENDED_DIVISOR: usize = 8;
/// Rows with appended columns begin on multiples of this many values: matrix units read aligned rows fastest.
pub(in crate::backends) const ROW_MULTIPLE: usize = 64;
/// Inner widths of GEMMs in 8-bit floats are multiples of this: one tile.
const FP8_MULTIPLE: usize = 128;
/// The same where there are no ranks: one block of scales.
const FP8_BLOCK: usize = 32;

/// Columns that the adapters of a group add to its input of `in_features`, from the rank of each module: all ranks, filled up to a
/// multiple of 8 for the matrix units; 0 where their GEMMs are separate.
pub(in crate::backends) fn appended_ranks(in_features: usize, ranks: &[usize]) -> usize {
    let all = ranks.iter().sum::<usize>().next_multiple_of(8);
    if all * MAX_APPENDED_DIVISOR <= in_features { all } else { 0 }
}

/// Values from the start of one row to the next.
pub(in crate::backends) fn row_stride(width: usize, appended: usize) -> usize {
    if appended == 0 { width } else { (width + appended).next_multiple_of(ROW_MULTIPLE) }
}

/// Bytes from the start of one row of 8-bit codes to the next: inner width and ranks, filled up to whole tiles of the matrix units. Where
/// there are no ranks, whole blocks are enough.
pub(in crate::backends) fn fp8_stride(width: usize, ranks: usize) -> usize {
    (fp8_lead(ranks) + width).next_multiple_of(if ranks == 0 { FP8_BLOCK } else { FP8_MULTIPLE })
}

/// Columns of 8-bit codes that the ranks of adapters take in front: whole steps of the matrix units.
pub(in crate::backends) fn fp8_lead(ranks: usize) -> usize {
    ranks.next_multiple_of(32)
}

/// Ranks of `x Aᵀ` that share an allocation until the backward: on small models one for each would cost more than the copy.
pub(in crate::backends) const SAVED_RANKS: usize = 256;
/// Bytes of `x Aᵀ` that the forward keeps for the backward, in whole allocations, and of a layer that runs again.
pub(super) fn saved_low_rank_bytes(model: &ModelSpec, training: &TrainingShape) -> u64 {
    if training.lora.as_ref().is_none_or(|lora| lora.use_dora) {
        return 0;
    }
    let mut saved = SavedRanks::default();
    for layer in 0..model.layers.len() {
        let norms = model.layers[layer].norms.names();
        for group in model.groups(layer).iter().filter(|group| !training.recompute.repeats(group.kind, &norms)) {
            let ranks = ranks_in(group, training);
            let bare = ranks.iter().sum();
            saved.add(match training.gemms {
                GemmFormat::Compute => appended_ranks(group.in_features, &ranks).max(bare),
                GemmFormat::Fp8 => bare,
            });
        }
    }
    let recomputed = if training.recompute.repeats_gemms() { SAVED_RANKS } else { 0 };
    training.tokens() * (saved.allocated + recomputed) as u64 * training.activation_bytes()
}

/// The allocations of `x Aᵀ`: a group goes into the last one, or into a new one if it does not fit.
#[derive(Default)]
struct SavedRanks {
    /// Of all allocations.
    allocated: usize,
    /// Free in the last one.
    free: usize,
}

impl SavedRanks {
    fn add(&mut self, ranks: usize) {
        if ranks > self.free {
            self.free = ranks.max(SAVED_RANKS);
            self.allocated += self.free;
        }
        self.free -= ranks;
    }
}

/// Ranks of the adapters of a run in a group.
pub(super) fn ranks_in(group: &GroupSpec, training: &TrainingShape) -> Vec<usize> {
    let rank = |module: &ModuleSpec| match &training.lora {
        Some(lora) if lora.adapts(&module.path) => lora.rank_of(&module.path),
        _ => 0,
    };
    group.modules.iter().map(rank).collect()
}

/// Bytes of a group's weight in 8-bit codes with their scales: for the forward, and transposed.
pub(super) fn fp8_weight_bytes(group: &GroupSpec, training: &TrainingShape) -> [usize; 2] {
    let ranks: usize = ranks_in(group, training).iter().sum();
    let (outputs, inputs) = (group.out_features(), group.in_features);
    // With the adapters in the compute format, at most all of B for each of its modules, and the maxima.
    let around = 4 * ranks * (inputs + outputs) + 4096;
    [outputs * (fp8_stride(inputs, ranks) + 4) + around, inputs * (fp8_stride(outputs, ranks) + 4) + around]
}

/// Bytes of the longest row of codes that a group's GEMMs read.
pub(super) fn fp8_row_bytes(group: &GroupSpec, training: &TrainingShape) -> usize {
    let ranks = ranks_in(group, training).iter().sum();
    fp8_stride(group.in_features.max(group.out_features()), ranks) + 4
}

/// Columns that the adapters of a run add to the input of a group; see [`appended_ranks`].
pub(super) fn appended_to(group: &GroupSpec, training: &TrainingShape) -> usize {
    match training.gemms {
        GemmFormat::Compute => appended_ranks(group.in_features, &ranks_in(group, training)),
        // Next to codes, not next to the input.
        GemmFormat::Fp8 => 0,
    }
}

/// Why a model's GEMMs cannot multiply 8-bit floats: experts, or a width that is no multiple of 16; `None` if they can.
#[must_use]
pub fn fp8_refusal(model: &ModelSpec) -> Option<String> {
    if model.is_mixture() {
        return Some("experts are multiplied in the compute format only".to_owned());
    }
    let wrong = |group: &GroupSpec| {
        let width = [group.in_features, group.out_features()].into_iter().find(|width| !width.is_multiple_of(16))?;
        let module = &group.modules.first()?.path;
        Some(format!("{module} has a width of {width}, and 8-bit floats need multiples of 16"))
    };
    model.all_groups().find_map(|group| wrong(&group))
}

/// In words: the groups of a layer whose adapters are appended, and those whose GEMMs are separate; `None` without adapters.
pub(super) fn adapter_gemms(model: &ModelSpec, training: &TrainingShape) -> Option<String> {
    let lora = training.lora.as_ref()?;
    let is_adapted = |group: &GroupSpec| group.modules.iter().any(|module| lora.adapts(&module.path));
    let groups: Vec<GroupSpec> = model.groups(0).into_iter().filter(is_adapted).collect();
    let (appended, separate): (Vec<_>, Vec<_>) =
        groups.iter().partition(|group| training.gemms == GemmFormat::Fp8 || appended_to(group, training) > 0);
    let named = |way: &str, groups: Vec<&GroupSpec>| {
        let mut names: Vec<&str> = Vec::new();
        for module in groups.iter().flat_map(|group| &group.modules) {
            // Every expert has modules of these names.
            if !names.contains(&module.name()) {
                names.push(module.name());
            }
        }
        (!names.is_empty()).then(|| format!("{way}: {}", names.join(", ")))
    };
    let ways: Vec<_> = [named("appended", appended), named("separate", separate)].into_iter().flatten().collect();
    Some(ways.join("; "))
}

#[cfg(test)]
mod tests {
    use firebrick_arch::LoraConfig;
    use firebrick_arch::shapes::llama_3_1_8b;
    use firebrick_precision::FloatType;

    use super::*;
    use crate::memory::training_shape::Recompute;
    use crate::memory::training_shape::tests::{full, qlora};

    #[test]
    fn modules_are_named_under_the_way_that_their_adapters_go() {
        let of_rank = |r: usize| {
            let mut training = qlora(1, Recompute::Full);
            training.lora = training.lora.map(|lora| LoraConfig { r, ..lora });
            adapter_gemms(&llama_3_1_8b(), &training).expect("it has adapters")
        };
        assert_eq!(of_rank(16), "appended: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj");
        assert_eq!(of_rank(256), "appended: o_proj, gate_proj, up_proj, down_proj; separate: q_proj, k_proj, v_proj");
        assert_eq!(adapter_gemms(&llama_3_1_8b(), &full(FloatType::Bf16)), None);
    }

    #[test]
    fn low_rank_values_are_counted_in_allocations_that_no_group_is_divided_among() {
        let ranks = |r: usize, recompute, use_dora| {
            let mut training = qlora(1, recompute);
            training.lora = training.lora.map(|lora| LoraConfig { r, use_dora, ..lora });
            saved_low_rank_bytes(&llama_3_1_8b(), &training) / training.tokens() / training.activation_bytes()
        };
        // 48, 16, 32 and 16: two layers share an allocation, whose last 32 have no room for the next 48.
        assert_eq!(ranks(16, Recompute::Selective, false), 256 * 16);
        // 384, 128, 256 and 128: the last of a layer has room for the first of the next in no case.
        assert_eq!(ranks(128, Recompute::Selective, false), 32 * (384 + 256 + 256 + 256));
        // Of o_proj and down_proj, and of a layer that runs again.
        assert_eq!(ranks(16, Recompute::Projections, false), 32 * 32 + 256);
        assert_eq!(ranks(16, Recompute::Full, false), 32 * 16 + 256);
        assert_eq!(ranks(16, Recompute::Projections, true), 0);
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
