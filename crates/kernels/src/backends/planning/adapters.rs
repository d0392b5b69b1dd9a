//! Memory of a run's adapters on CUDA besides their parameters: `x Aᵀ`, saved until the backward, and the partial sums
//! of the adapter passes. The [`Route`](super::route::Route) of a group determines its passes.
//!
//! Trade-off: the estimate assumes an H100's multiprocessors; other cards divide tokens differently.

use firebrick_arch::{GroupKind, LoraConfig, ModelSpec};

use super::passes::{GATED_TILE, LowRankPass, gated_tokens, part_bytes, parts_of_tokens};
use super::route::{AdapterRoute, Planned, all_planned, planned_groups};
use super::rows::SAVED_RANKS;
use crate::memory::training_shape::TrainingShape;

/// Multiprocessors of an H100.
const MULTIPROCESSORS: usize = 132;

/// Returns the bytes of `x Aᵀ` that the forward saves for the backward, in whole allocations, including those of a recomputed layer.
pub(super) fn saved_low_rank_bytes(model: &ModelSpec, training: &TrainingShape) -> u64 {
    if training.lora.as_ref().is_none_or(|lora| lora.use_dora) {
        return 0;
    }
    let (mut saved, mut most_of_experts) = (SavedRanks::default(), 0);
    for layer in 0..model.layers.len() {
        let (groups, norms) = (planned_groups(model, training, layer), model.layers[layer].norms.names());
        let (stacks, others): (Vec<_>, Vec<_>) = groups.iter().partition(|planned| planned.group.experts.is_some());
        let stacks = stacks.iter().map(|planned| (planned, planned.group.rows * planned.route.saved_ranks()));
        most_of_experts = most_of_experts.max(stacks.clone().map(|(_, ranks)| ranks).sum());
        let is_saved = |planned: &Planned| !training.recompute.repeats(planned.group.kind, &norms);
        others.iter().filter(|planned| is_saved(planned)).for_each(|planned| saved.add(planned.route.saved_ranks()));
        saved.allocated += stacks.filter(|(planned, _)| is_saved(planned)).map(|(_, ranks)| ranks).sum::<usize>();
    }
    let recomputed = if training.recompute.repeats_gemms() { SAVED_RANKS + most_of_experts } else { 0 };
    training.tokens() * (saved.allocated + recomputed) as u64 * training.activation_bytes()
}

/// The allocations of `x Aᵀ`: a group is placed in the last one, or in a new one if it does not fit.
#[derive(Default)]
struct SavedRanks {
    /// Ranks in all allocations.
    allocated: usize,
    /// Free ranks in the last one.
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

/// Returns scratch bytes for the adapter passes: the maximum of partial sums over all groups, plus low-rank gradients scaled by a norm.
pub(super) fn low_rank_sums_bytes(model: &ModelSpec, training: &TrainingShape) -> u64 {
    let (groups, tokens) = (all_planned(model, training), training.tokens() as usize);
    let scaled = groups.iter().filter(|group| group.route.scales_low_rank).map(|group| group.route.ranks as u64);
    let scaled = scaled.max().unwrap_or(0);
    let of_group = |group| output_sums(group, tokens).max(input_sums(group, tokens));
    let of_groups = groups.iter().map(of_group).max().unwrap_or(0);
    let sums = of_groups.max(most_gated_sums(&groups, tokens));
    4 * sums as u64 + training.tokens() * scaled * training.activation_bytes()
}

/// Returns scratch bytes for the adapter passes of a forward pass alone, without dropout.
pub(super) fn forward_sums_bytes(model: &ModelSpec, pass: &TrainingShape) -> u64 {
    let lora = pass.lora.clone().map(|lora| LoraConfig { lora_dropout: 0.0, ..lora });
    let groups = all_planned(model, &TrainingShape { lora, ..pass.clone() });
    let of_group = |group: &Planned| {
        let of_few_rows = if group.route.may_pass_input { part_bytes(MULTIPROCESSORS) } else { 0 };
        of_few_rows.max(4 * input_sums(group, pass.tokens() as usize))
    };
    groups.iter().map(of_group).max().unwrap_or(0) as u64
}

/// Counts the partial sums of the pass over a group's output gradient.
fn output_sums(Planned { shape, route, .. }: &Planned, tokens: usize) -> usize {
    let Some(tile) = route.output_pass else { return 0 };
    let pass = LowRankPass::output_gradient(tile.ranks);
    let chunks: usize = shape.adapted().map(|module| pass.chunks(module.columns.len())).sum();
    let columns = shape.adapted().map(|module| module.columns.end).max().unwrap_or(0);
    let parts = parts_of_tokens(tokens, chunks, MULTIPROCESSORS);
    tile.ranks * pass.sums([chunks, tokens], [parts, columns]).iter().sum::<usize>()
}

/// Counts the partial sums of the passes over gate, up and their gradients: the maximum over all groups.
fn most_gated_sums(groups: &[Planned], tokens: usize) -> usize {
    let sums = |pair: &[Planned]| {
        let [Planned { group, shape, route, .. }, down] = pair else { return 0 };
        let is_gate_up = matches!(group.kind, GroupKind::GateUp | GroupKind::ExpertGateUp | GroupKind::SharedGateUp);
        let pieces = route.gated_backward(&down.route).filter(|_| is_gate_up);
        pieces.map_or(0, |pieces| gated_sums(shape.out_features() / 2, pieces, tokens))
    };
    groups.windows(2).map(sums).max().unwrap_or(0)
}

fn gated_sums(width: usize, pieces: usize, tokens: usize) -> usize {
    let pass = LowRankPass::gated_backward(pieces);
    let tokens = gated_tokens(pass, tokens, width);
    let chunks = pass.chunks(width);
    let parts = parts_of_tokens(tokens, chunks, MULTIPROCESSORS);
    GATED_TILE
        * pass.sums([pass.over_columns * chunks, tokens], [parts, pass.over_tokens * width]).iter().sum::<usize>()
}

/// Counts the partial sums of the pass over a group's input: a copy of it, or a gated activation.
fn input_sums(Planned { group, shape, route, .. }: &Planned, tokens: usize) -> usize {
    let width = shape.in_features;
    let (pass, tile, tokens) = match (group.kind, route.copy_pass, route.gated_pass) {
        (GroupKind::MixerOutput | GroupKind::PerLayerGate, Some(tile), _) => (LowRankPass::INPUT, tile.ranks, tokens),
        (
            GroupKind::Down | GroupKind::ExpertDown | GroupKind::SharedDown | GroupKind::PerLayerProjection,
            _,
            Some(pieces),
        ) => {
            let pass = LowRankPass::gated(pieces);
            (pass, GATED_TILE, gated_tokens(pass, tokens, width))
        }
        _ => return 0,
    };
    tile * pass.sums([pass.chunks(width), tokens], [0, 0]).iter().sum::<usize>()
}

/// Describes which groups of a layer have appended adapters and which have separate GEMMs; `None` without adapters.
pub(super) fn adapter_gemms(model: &ModelSpec, training: &TrainingShape) -> Option<String> {
    training.lora.as_ref()?;
    let [mut appended, mut separate] = [Vec::new(), Vec::new()];
    for planned in planned_groups(model, training, 0) {
        let names: &mut Vec<String> = match planned.route.adapters {
            AdapterRoute::None | AdapterRoute::FewRows => continue,
            AdapterRoute::Appended { .. } | AdapterRoute::InCodes => &mut appended,
            AdapterRoute::Separate => &mut separate,
        };
        names.extend(planned.group.modules.iter().map(|module| module.name().to_owned()));
    }
    let named = |way: &str, names: Vec<String>| (!names.is_empty()).then(|| format!("{way}: {}", names.join(", ")));
    let ways: Vec<_> = [named("appended", appended), named("separate", separate)].into_iter().flatten().collect();
    Some(ways.join("; "))
}

#[cfg(test)]
mod tests {
    use firebrick_arch::TargetModules;
    use firebrick_arch::shapes::llama_3_1_8b;
    use firebrick_precision::FloatType;

    use super::*;
    use crate::memory::training_shape::Recompute;
    use crate::memory::training_shape::tests::{full, qlora};

    fn with(change: impl Fn(&mut LoraConfig)) -> TrainingShape {
        let mut training = qlora(1, Recompute::Full);
        change(training.lora.as_mut().unwrap());
        training
    }

    #[test]
    fn modules_are_named_under_the_way_that_their_adapters_go() {
        let of_rank = |r| adapter_gemms(&llama_3_1_8b(), &with(|lora| lora.r = r)).expect("it has adapters");
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
        // 48, 16, 32 and 16: two layers share an allocation, whose remaining 32 are too few for the next 48.
        assert_eq!(ranks(16, Recompute::Selective, false), 256 * 16);
        // 384, 128, 256 and 128: the last allocation of a layer never has room for the first group of the next.
        assert_eq!(ranks(128, Recompute::Selective, false), 32 * (384 + 256 + 256 + 256));
        // The ranks of o_proj and down_proj, and of a recomputed layer.
        assert_eq!(ranks(16, Recompute::Projections, false), 32 * 32 + 256);
        assert_eq!(ranks(16, Recompute::Full, false), 32 * 16 + 256);
        assert_eq!(ranks(16, Recompute::Projections, true), 0);
    }

    #[test]
    fn sums_are_counted_of_the_passes_that_the_engine_launches_alone() {
        let model = llama_3_1_8b();
        let sums = |training: &TrainingShape| {
            let (groups, tokens) = (all_planned(&model, training), training.tokens() as usize);
            let most =
                |sums: fn(&Planned, usize) -> usize| groups.iter().map(|group| sums(group, tokens)).max().unwrap();
            [most(output_sums), most_gated_sums(&groups, tokens), most(input_sums)]
        };
        let plain = with(|_| {});
        let [output, gated, input] = sums(&plain);
        assert!(output > 0 && gated > 0 && input > 0, "{output} {gated} {input}");
        let dropout = with(|lora| lora.lora_dropout = 0.1);
        assert_eq!(sums(&dropout), [output, 0, 0], "its inputs are dropped before adapters read them");
        assert_eq!(low_rank_sums_bytes(&model, &dropout), 4 * output as u64);
        assert_eq!(
            forward_sums_bytes(&model, &dropout),
            forward_sums_bytes(&model, &plain),
            "evaluation drops nothing"
        );
        let dora = with(|lora| lora.use_dora = true);
        assert_eq!((sums(&dora), low_rank_sums_bytes(&model, &dora)), ([0; 3], 0));
        let in_f32 = TrainingShape { compute: FloatType::F32, ..plain.clone() };
        assert_eq!((sums(&in_f32), low_rank_sums_bytes(&model, &in_f32)), ([0; 3], 0));
        let gate_and_up =
            with(|lora| lora.target_modules = TargetModules::Named(vec!["gate_proj".to_owned(), "up_proj".to_owned()]));
        assert_eq!(sums(&gate_and_up)[1..], [0, 0], "the pass is for all three modules of an MLP");
        let in_f16 = TrainingShape { compute: FloatType::F16, ..plain.clone() };
        let scaled = plain.tokens() * 3 * 16 * 2;
        assert_eq!(low_rank_sums_bytes(&model, &plain) - low_rank_sums_bytes(&model, &in_f16), scaled, "bf16 alone");
    }
}
