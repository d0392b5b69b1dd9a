//! Decides how a group of linear modules is computed on CUDA; no other code does.
//!
//! [`Route::new`] reads a plain description of the group and of the computation. The engine in `backends/cuda/linear`
//! builds the description from its tensors, the plan from the recipe ([`Route::planned`]), and both use the same
//! decisions: how weights reach the GEMM, how the adapters' GEMMs run, and which passes replace them.
//!
//! A pass also needs rows that begin at multiples of 16 bytes. That depends on a single tensor, so the engine checks it when it launches the pass.
//! Trade-off: the plan assumes the card with the least shared memory that supports all passes, because its sums are the largest; only cards with
//! less are planned for as they are ([`TrainingShape::shared_bytes`]).

use std::ops::Range;

use firebrick_arch::{GroupKind, GroupSpec, ModelSpec, ModuleSpec};
use firebrick_precision::{FloatType, Format, QuantFormat};

use super::passes::{GATED_TILE, gated_pieces, low_rank_tile, stages};
use super::rows::appended_ranks;
use crate::GemmFormat;
use crate::memory::training_shape::TrainingShape;

/// Maximum number of modules of a group in launches over its adapters.
pub(in crate::backends) const MAX_MODULES: usize = 4;
const MAX_FEW_ROWS: usize = 64;
/// The same limit for weights in the compute format without adapters; with more rows the library's GEMM is as fast.
const MAX_FEW_DENSE_ROWS: usize = 8;
/// The same if the weights are on the device in the compute format as well.
const MAX_FEW_KEPT_ROWS: usize = 16;
/// Maximum rows without a backward whose adapters' `x Aᵀ` is computed in the launch that makes them.
const MAX_LOW_RANK_ROWS: usize = 256;
/// Inner columns that a lane of those kernels loads at once, as in `weight_values.cu`.
const FEW_ROWS_CHUNK: usize = 32;
/// What widths and ranks of experts must be multiples of, so that all rows lie on the 16-byte grid; and their widths in 8-bit codes.
const EXPERT_MULTIPLE: usize = 8;
const EXPERT_CODES_MULTIPLE: usize = 16;
/// Shared memory of a block, in bytes, on the smallest cards that support all passes: RTX 30, 40 and 50.
pub const PLANNED_SHARED_BYTES: usize = 101_376;

/// Properties of a group of linear modules that determine its route.
#[derive(Clone, Debug)]
pub(in crate::backends) struct GroupShape {
    /// Width of the shared input.
    pub in_features: usize,
    /// The modules, in column order.
    pub modules: Vec<ModuleShape>,
    /// Whether dropout is applied between the input and the adapters.
    pub has_dropout: bool,
    /// Whether the modules are stacks of experts' matrices.
    pub is_stack: bool,
}

/// A module of a [`GroupShape`].
#[derive(Clone, Debug)]
pub(in crate::backends) struct ModuleShape {
    /// The columns of the group's output that this module computes.
    pub columns: Range<usize>,
    /// Storage format of its weight.
    pub storage: Format,
    /// Whether the gradient of its weight is needed.
    pub trains: bool,
    /// Rank of its adapter; 0 without one.
    pub rank: usize,
    /// Whether the adapter has magnitudes (DoRA).
    pub has_magnitudes: bool,
}

/// Formats and hardware limits of the computation.
#[derive(Clone, Copy, Debug)]
pub(in crate::backends) struct RouteContext {
    /// Format of activations: f32, f16 or bf16.
    pub compute: FloatType,
    /// Operand format of the weight GEMMs.
    pub gemms: GemmFormat,
    /// Maximum shared memory of a block on the card.
    pub shared_bytes: usize,
    /// Whether the card has Hopper's own products, which multiply experts in 8-bit floats.
    pub has_wgmma: bool,
    /// Rows of a forward without a backward; 0 if a backward follows.
    pub forward_rows: usize,
    /// Whether weights in the compute format stay on the device.
    pub keeps_weights: bool,
}

/// The form in which a group's weights reach its GEMMs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::backends) enum WeightRoute {
    /// One weight in the compute format, read in place.
    Stored,
    /// Materialized side by side in the compute format, including appended adapters: one GEMM per direction.
    WrittenOut,
    /// One GEMM per module, after a conversion if necessary.
    OneByOne,
    /// Materialized side by side in 8-bit codes: one GEMM per direction.
    Codes,
    /// Read in their storage format, with biases, adapters and residual in the same launch: few rows and no backward.
    FewRows,
}

/// The way in which a group's adapter GEMMs run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::backends) enum AdapterRoute {
    /// The group has no adapters.
    None,
    /// Appended to the inner dimension: the input and the output gradient have additional columns.
    Appended {
        /// All ranks, padded to a multiple of 8.
        columns: usize,
    },
    /// Separate GEMMs.
    Separate,
    /// In the leading columns of the codes' inner dimension.
    InCodes,
    /// In the few-row kernels, with the weights.
    FewRows,
}

/// Compile-time parameters of an adapter pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::backends) struct Tile {
    /// Maximum rank of an adapter.
    pub ranks: usize,
    /// Token tiles in flight.
    pub stages: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::backends) struct Route {
    /// Whether all experts of a stack are multiplied in one launch; otherwise they run one after the other.
    pub is_grouped: bool,
    /// The form in which weights reach the GEMMs.
    pub weight: WeightRoute,
    /// Whether all weights are quantized, so that their converted form never changes and may stay on the device.
    pub is_quantized: bool,
    /// The way in which adapter GEMMs run.
    pub adapters: AdapterRoute,
    /// Sum of all adapters' ranks.
    pub ranks: usize,
    /// Whether adapters read the input through dropout, so that their part of its gradient is a separate GEMM.
    pub is_masked: bool,
    /// Whether outputs are scaled by magnitudes.
    pub has_magnitudes: bool,
    /// The pass over the output gradient that computes the low-rank gradients and all `dB`. It needs `x Aᵀ`.
    pub output_pass: Option<Tile>,
    /// Whether a pass over the input may compute `x Aᵀ`. The weight is materialized before that pass, because it contains A.
    pub may_pass_input: bool,
    /// Whether rows are so few that `x Aᵀ` is computed in the launch that makes `x`, or in one like it. No other pass is over the input then.
    pub takes_low_rank_rows: bool,
    /// The pass over an input that is copied; it computes the copy and `x Aᵀ`.
    pub copy_pass: Option<Tile>,
    /// The pass over the gate and up that the group reads, as column pieces per warp; it computes the gated activation and `x Aᵀ`.
    pub gated_pass: Option<usize>,
    /// The pass over gate, up and the gradient of their gated activation, as column pieces per warp; it computes the
    /// gradients of gate and up, and the group's `dA`. [`Self::gated_backward`] extends it.
    pub d_a_pass: Option<usize>,
    /// Whether the group computes gate and up, and that pass can also compute their low-rank gradients and `dB`.
    is_gate_up: bool,
    /// Whether `dA` after a norm is computed from the norm's input and low-rank gradients that are scaled by the norm's rows.
    pub scales_low_rank: bool,
}

impl Route {
    pub(in crate::backends) fn new(group: &GroupShape, context: RouteContext) -> Self {
        let GroupShape { in_features, ref modules, has_dropout, is_stack } = *group;
        let RouteContext { compute, gemms, shared_bytes, forward_rows, .. } = context;
        let has_few_rows = (1..=few_rows(group, context)).contains(&forward_rows);
        let is_grouped = is_grouped(group, context);
        let adapted: Vec<&ModuleShape> = group.adapted().collect();
        let ranks: Vec<usize> = adapted.iter().map(|module| module.rank).collect();
        let columns = if is_grouped { ranks.iter().sum() } else { appended_ranks(in_features, &ranks) };
        let adapters = match gemms {
            _ if ranks.is_empty() => AdapterRoute::None,
            _ if has_few_rows => AdapterRoute::FewRows,
            GemmFormat::Fp8 => AdapterRoute::InCodes,
            GemmFormat::Compute | GemmFormat::F16 if columns == 0 => AdapterRoute::Separate,
            GemmFormat::Compute | GemmFormat::F16 => AdapterRoute::Appended { columns },
        };
        let is_appended = matches!(adapters, AdapterRoute::Appended { .. });
        let has_magnitudes = adapted.iter().any(|module| module.has_magnitudes);
        let only_adapters_train = modules.iter().all(|module| !module.trains);

        let is_half = compute != FloatType::F32;
        let out_features = group.out_features();
        let reads_in_vectors = is_half && in_features.is_multiple_of(8);
        let writes_in_vectors = is_half
            && out_features.is_multiple_of(8)
            && adapted.iter().all(|module| [module.columns.start, module.columns.end].iter().all(|end| end % 8 == 0));
        let reads_whole_input =
            gemms == GemmFormat::Compute && !has_dropout && !has_magnitudes && reads_in_vectors && !ranks.is_empty();

        // The rank for which the kernels are compiled; `None`: separate GEMMs.
        let tile = low_rank_tile(&ranks).filter(|_| !is_stack);
        let is_gated_tile = tile == Some(GATED_TILE);
        let of_tile = tile.and_then(|ranks| Some(Tile { ranks, stages: stages(ranks, shared_bytes)? }));
        let of_gated = gated_pieces(shared_bytes).filter(|_| is_gated_tile);
        let fits_output = writes_in_vectors && !has_magnitudes && adapted.len() <= MAX_MODULES;
        let output_pass = of_tile.filter(|_| fits_output);
        let may_pass_input = is_appended && reads_whole_input && !is_stack;
        let takes_low_rank_rows = may_pass_input && (1..=MAX_LOW_RANK_ROWS).contains(&forward_rows);
        let is_passed = may_pass_input && !takes_low_rank_rows && adapted.len() == 1;
        let passes_d_a = reads_whole_input && adapted.len() == 1 && only_adapters_train && !is_stack;
        let half = out_features / 2;
        let are_halves =
            matches!(&adapted[..], [gate, up] if gate.columns == (0..half) && up.columns == (half..out_features));
        let is_quantized = modules.iter().all(ModuleShape::is_quantized);
        let is_written_out = is_appended || is_grouped;
        let weight = match &modules[..] {
            _ if has_few_rows => WeightRoute::FewRows,
            _ if gemms == GemmFormat::Fp8 => WeightRoute::Codes,
            [module] if module.storage == Format::Float(compute) && (module.rank == 0 || !is_written_out) => {
                WeightRoute::Stored
            }
            _ if is_written_out || is_quantized => WeightRoute::WrittenOut,
            _ => WeightRoute::OneByOne,
        };
        Self {
            is_grouped,
            weight,
            is_quantized,
            adapters,
            ranks: ranks.iter().sum(),
            is_masked: has_dropout && !ranks.is_empty(),
            has_magnitudes,
            output_pass,
            may_pass_input,
            takes_low_rank_rows,
            copy_pass: of_tile.filter(|_| is_passed),
            gated_pass: of_gated.filter(|_| is_passed),
            d_a_pass: of_gated.filter(|_| passes_d_a),
            is_gate_up: is_appended && fits_output && is_gated_tile && are_halves,
            scales_low_rank: output_pass.is_some() && compute == FloatType::Bf16 && !has_dropout && only_adapters_train,
        }
    }

    /// Decides the route of a group in a run.
    pub(in crate::backends) fn planned(model: &ModelSpec, group: &GroupSpec, training: &TrainingShape) -> Self {
        Self::new(
            &GroupShape::planned(model, group, training),
            RouteContext {
                compute: training.compute,
                gemms: if group.kind.decides() { GemmFormat::Compute } else { training.gemms },
                shared_bytes: training.shared_bytes,
                has_wgmma: training.has_wgmma,
                forward_rows: 0,
                keeps_weights: false,
            },
        )
    }

    /// Returns the additional columns in rows of the input and of the output gradient.
    pub(in crate::backends) fn room(&self) -> usize {
        if let AdapterRoute::Appended { columns } = self.adapters { columns } else { 0 }
    }

    /// Returns the ranks of `x Aᵀ` that the forward saves for the backward.
    pub(super) fn saved_ranks(&self) -> usize {
        if self.has_magnitudes { 0 } else { self.room().max(self.ranks) }
    }

    /// Returns the pass over gate, up and the gradient of their gated activation that computes all adapter gradients around them, as
    /// column pieces per warp: `self` computes gate and up, and `down` reads them. `None`: several passes.
    pub(in crate::backends) fn gated_backward(&self, down: &Self) -> Option<usize> {
        down.d_a_pass.filter(|_| self.is_gate_up)
    }
}

/// A group of a run.
pub(super) struct Planned {
    pub(super) group: GroupSpec,
    pub(super) shape: GroupShape,
    pub(super) route: Route,
}

/// Returns the groups of a layer, in the order of the forward pass.
pub(super) fn planned_groups(model: &ModelSpec, training: &TrainingShape, layer: usize) -> Vec<Planned> {
    let planned = |group: GroupSpec| Planned {
        shape: GroupShape::planned(model, &group, training),
        route: Route::planned(model, &group, training),
        group,
    };
    model.groups(layer).into_iter().map(planned).collect()
}

pub(super) fn all_planned(model: &ModelSpec, training: &TrainingShape) -> Vec<Planned> {
    (0..model.layers.len()).flat_map(|layer| planned_groups(model, training, layer)).collect()
}

impl GroupShape {
    pub(in crate::backends) fn planned(model: &ModelSpec, group: &GroupSpec, training: &TrainingShape) -> Self {
        let (lora, storage) = (training.lora.as_ref(), training.storage());
        let module = |module: &ModuleSpec| {
            let adapter = lora.filter(|lora| group.kind != GroupKind::Router && lora.adapts(module.lora_path()));
            let name = module.weight_name();
            ModuleShape {
                columns: module.columns.clone(),
                storage: storage.storage_of(model, &name, group.kind.weight_role()),
                trains: storage.trains(&name),
                rank: adapter.map_or(0, |lora| lora.rank_of(module.lora_path())),
                has_magnitudes: adapter.is_some_and(|lora| lora.use_dora),
            }
        };
        let modules = group.modules.iter().map(module).collect();
        let has_dropout = lora.is_some_and(|lora| lora.lora_dropout > 0.0);
        Self { in_features: group.in_features, modules, has_dropout, is_stack: group.experts.is_some() }
    }

    pub(super) fn out_features(&self) -> usize {
        self.modules.last().map_or(0, |module| module.columns.end)
    }

    /// Returns whether GEMMs in the compute format read some weight in another format than it is stored in.
    pub(super) fn is_converted(&self, compute: FloatType) -> bool {
        self.modules.iter().any(|module| module.storage != Format::Float(compute))
    }

    pub(super) fn adapted(&self) -> impl Iterator<Item = &ModuleShape> {
        self.modules.iter().filter(|module| module.rank > 0)
    }
}

impl ModuleShape {
    fn is_quantized(&self) -> bool {
        matches!(self.storage, Format::Quantized(_))
    }
}

/// Returns whether one launch computes all experts of a stack: activations in 16 bits, no magnitudes, and more rows than generation has.
fn is_grouped(group: &GroupShape, context: RouteContext) -> bool {
    let (multiple, has_kernel) = match context.gemms {
        GemmFormat::Compute | GemmFormat::F16 => (EXPERT_MULTIPLE, true),
        GemmFormat::Fp8 => (EXPERT_CODES_MULTIPLE, context.has_wgmma),
    };
    let mut modules = group.modules.iter();
    let is_aligned = modules.all(|module| {
        let ends = [module.columns.start, module.columns.end];
        ends.iter().all(|end| end.is_multiple_of(multiple)) && module.rank.is_multiple_of(EXPERT_MULTIPLE)
    });
    group.is_stack
        && is_aligned
        && group.in_features.is_multiple_of(multiple)
        && context.compute != FloatType::F32
        && has_kernel
        && !group.modules.iter().any(|module| module.has_magnitudes)
        && !(1..=MAX_FEW_ROWS).contains(&context.forward_rows)
}

/// Returns the maximum rows of a group in the few-row kernels; 0 if they cannot compute it.
fn few_rows(group: &GroupShape, context: RouteContext) -> usize {
    let Some(first) = group.modules.first() else { return 0 };
    // One kernel must be able to read all weights.
    let read_alike = |module: &ModuleShape| match (module.storage, first.storage) {
        (Format::Quantized(QuantFormat::Nf4 { .. }), Format::Quantized(QuantFormat::Nf4 { .. })) => true,
        (storage, first) => storage == first,
    };
    let is_taken = !group.has_dropout
        && !group.is_stack
        && !group.modules.iter().any(|module| module.has_magnitudes)
        && context.compute != FloatType::F32
        && context.gemms == GemmFormat::Compute
        && group.modules.len() <= MAX_MODULES
        && group.in_features.is_multiple_of(FEW_ROWS_CHUNK)
        && (first.is_quantized() || first.storage == Format::Float(context.compute))
        && group.modules.iter().all(read_alike);
    let is_bare = !first.is_quantized() && group.modules.iter().all(|module| module.rank == 0);
    match (is_taken, is_bare) {
        (false, _) => 0,
        (true, true) => MAX_FEW_DENSE_ROWS,
        (true, false) if context.keeps_weights => MAX_FEW_KEPT_ROWS,
        (true, false) => MAX_FEW_ROWS,
    }
}

#[cfg(test)]
mod tests {
    use firebrick_arch::shapes::llama_3_1_8b;

    use super::*;
    use crate::memory::training_shape::Recompute;
    use crate::memory::training_shape::tests::{full, qlora};

    const NF4: Format = Format::Quantized(QuantFormat::Nf4 { double_quant: true });
    /// The configuration of an H100.
    const H100: RouteContext = RouteContext {
        compute: FloatType::Bf16,
        gemms: GemmFormat::Compute,
        shared_bytes: 232_448,
        has_wgmma: true,
        forward_rows: 0,
        keeps_weights: false,
    };
    const IN_FP8: RouteContext = RouteContext { gemms: GemmFormat::Fp8, ..H100 };

    /// Builds a frozen group whose modules have these widths and ranks.
    fn group(in_features: usize, storage: Format, modules: &[(usize, usize)]) -> GroupShape {
        let mut end = 0;
        let module = |&(width, rank): &(usize, usize)| {
            end += width;
            ModuleShape { columns: end - width..end, storage, trains: false, rank, has_magnitudes: false }
        };
        let modules = modules.iter().map(module).collect();
        GroupShape { in_features, modules, has_dropout: false, is_stack: false }
    }

    fn qkv(storage: Format, rank: usize) -> GroupShape {
        group(4096, storage, &[(4096, rank), (1024, rank), (1024, rank)])
    }

    fn gate_up(rank: usize) -> GroupShape {
        group(4096, NF4, &[(14_336, rank); 2])
    }

    fn down(rank: usize) -> GroupShape {
        group(14_336, NF4, &[(4096, rank)])
    }

    fn experts(width: usize, rank: usize) -> GroupShape {
        GroupShape { is_stack: true, ..group(2048, NF4, &[(width, rank); 2]) }
    }

    fn dropped(group: GroupShape) -> GroupShape {
        GroupShape { has_dropout: true, ..group }
    }

    fn with_magnitudes(mut group: GroupShape) -> GroupShape {
        group.modules.iter_mut().for_each(|module| module.has_magnitudes = true);
        group
    }

    fn trained(mut group: GroupShape) -> GroupShape {
        group.modules.iter_mut().for_each(|module| module.trains = true);
        group
    }

    fn passes(route: &Route) -> String {
        let passes = [
            ("grouped", route.is_grouped),
            ("output", route.output_pass.is_some()),
            ("copy", route.copy_pass.is_some()),
            ("gated", route.gated_pass.is_some()),
            ("d_a", route.d_a_pass.is_some()),
            ("gate_up", route.is_gate_up),
            ("scaled", route.scales_low_rank),
        ];
        passes.iter().filter(|(_, is_there)| *is_there).map(|(name, _)| *name).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn groups_go_these_ways() {
        use AdapterRoute::{Appended, InCodes, None, Separate};
        use WeightRoute::{Codes, OneByOne, Stored, WrittenOut};
        let columns = |columns| Appended { columns };
        let [bf16, f32] = [FloatType::Bf16, FloatType::F32].map(Format::Float);
        let [in_f16, in_f32] = [FloatType::F16, FloatType::F32].map(|compute| RouteContext { compute, ..H100 });
        let codes_in_f32 = RouteContext { compute: FloatType::F32, ..IN_FP8 };
        let old_card = RouteContext { shared_bytes: 49_152, ..H100 };
        let ada = RouteContext { has_wgmma: false, ..IN_FP8 };
        let half = group(4096, NF4, &[(64, 16), (64, 0)]);
        for (name, group, context, weight, adapters, few_rows, expected) in [
            ("qkv", qkv(NF4, 16), H100, WrittenOut, columns(48), 64, "output scaled"),
            ("gate, up", gate_up(16), H100, WrittenOut, columns(32), 64, "output gate_up scaled"),
            ("down", down(16), H100, WrittenOut, columns(16), 64, "output copy gated d_a scaled"),
            ("rank 8", down(8), H100, WrittenOut, columns(8), 64, "output copy gated d_a scaled"),
            ("rank 32", down(32), H100, WrittenOut, columns(32), 64, "output copy scaled"),
            ("rank 4", down(4), H100, WrittenOut, columns(8), 64, ""),
            ("rank 64", qkv(NF4, 64), H100, WrittenOut, columns(192), 64, ""),
            ("rank 256", qkv(NF4, 256), H100, WrittenOut, Separate, 64, ""),
            ("few inputs", group(64, NF4, &[(64, 16)]), H100, WrittenOut, Separate, 64, "output d_a scaled"),
            ("half", half, H100, WrittenOut, columns(16), 64, "output copy gated d_a scaled"),
            ("odd columns", group(4096, NF4, &[(44, 16), (44, 16)]), H100, WrittenOut, columns(32), 64, ""),
            ("odd inputs", group(4100, NF4, &[(64, 16)]), H100, WrittenOut, columns(16), 0, "output scaled"),
            ("dropout", dropped(down(16)), H100, WrittenOut, columns(16), 0, "output"),
            ("dora", with_magnitudes(down(16)), H100, WrittenOut, columns(16), 0, ""),
            ("trained", trained(qkv(f32, 16)), H100, WrittenOut, columns(48), 0, "output"),
            ("fp8", down(16), IN_FP8, Codes, InCodes, 0, "output scaled"),
            ("fp8, bare", qkv(bf16, 0), IN_FP8, Codes, None, 0, ""),
            ("nf4, bare", qkv(NF4, 0), H100, WrittenOut, None, 64, ""),
            ("bf16, bare", qkv(bf16, 0), H100, OneByOne, None, 8, ""),
            ("bf16, bare, one", group(64, bf16, &[(64, 0)]), H100, Stored, None, 8, ""),
            ("bf16", qkv(bf16, 16), H100, WrittenOut, columns(48), 64, "output scaled"),
            ("bf16, rank 256", qkv(bf16, 256), H100, OneByOne, Separate, 64, ""),
            ("f32, bare, one", trained(group(64, f32, &[(64, 0)])), H100, OneByOne, None, 0, ""),
            ("f16", down(16), in_f16, WrittenOut, columns(16), 64, "output copy gated d_a"),
            ("f32", down(16), in_f32, WrittenOut, columns(16), 0, ""),
            ("small blocks", down(16), old_card, WrittenOut, columns(16), 64, ""),
            ("experts", experts(768, 16), H100, WrittenOut, columns(32), 0, "grouped"),
            ("experts, 776", experts(776, 16), H100, WrittenOut, columns(32), 0, "grouped"),
            ("experts, fp8", experts(768, 16), IN_FP8, Codes, InCodes, 0, "grouped"),
            // Expert by expert.
            ("experts, fp8, 776", experts(776, 16), IN_FP8, Codes, InCodes, 0, ""),
            ("experts, fp8, rank 12", experts(768, 12), IN_FP8, Codes, InCodes, 0, ""),
            ("experts, fp8, f32", experts(768, 16), codes_in_f32, Codes, InCodes, 0, ""),
            ("experts, fp8, Ada", experts(768, 16), ada, Codes, InCodes, 0, ""),
        ] {
            let route = Route::new(&group, context);
            let got = (route.weight, route.adapters, super::few_rows(&group, context), passes(&route));
            assert_eq!(got, (weight, adapters, few_rows, expected.to_owned()), "{name}");
        }
    }

    #[test]
    fn few_rows_without_a_backward_read_weights_as_they_are_stored() {
        let route = |forward_rows| Route::new(&down(16), RouteContext { forward_rows, ..H100 });
        for rows in [1, 64] {
            let route = route(rows);
            assert_eq!((route.weight, route.adapters), (WeightRoute::FewRows, AdapterRoute::FewRows), "{rows} rows");
            assert_eq!((route.room(), route.may_pass_input), (0, false), "{rows} rows");
        }
        let next = route(65);
        assert_eq!((next.takes_low_rank_rows, next.room(), passes(&next)), (true, 16, "output d_a scaled".to_owned()));
        assert_eq!(route(257), route(0));
        let kept = RouteContext { keeps_weights: true, forward_rows: 17, ..H100 };
        let takes_rows = |group, context| Route::new(&group, context).takes_low_rank_rows;
        assert!(takes_rows(down(16), kept) && takes_rows(qkv(NF4, 3), kept) && takes_rows(gate_up(64), kept));
        assert!(!takes_rows(down(16), RouteContext { forward_rows: 16, ..kept }));
        assert!(!takes_rows(qkv(NF4, 256), kept) && !takes_rows(with_magnitudes(down(16)), kept));
        let bare = Route::new(&qkv(NF4, 0), RouteContext { forward_rows: 1, ..H100 });
        assert_eq!((bare.weight, bare.adapters), (WeightRoute::FewRows, AdapterRoute::None));
        let in_fp8 = |forward_rows| Route::new(&down(16), RouteContext { forward_rows, ..IN_FP8 });
        assert_eq!(in_fp8(1), in_fp8(0), "8-bit floats at any number of rows");
    }

    #[test]
    fn gate_up_and_down_go_back_in_one_pass_where_both_fit_it() {
        let route = |group: &GroupShape| Route::new(group, H100);
        let pieces = |gate_up: &GroupShape, down: &GroupShape| route(gate_up).gated_backward(&route(down));
        assert_eq!(pieces(&gate_up(16), &down(16)), Some(2));
        assert_eq!(pieces(&gate_up(8), &down(16)), Some(2));
        for (gate_up, down) in [
            (gate_up(16), down(32)),
            (gate_up(32), down(16)),
            (gate_up(16), down(0)),
            (gate_up(0), down(16)),
            (group(4096, NF4, &[(14_336, 16), (14_336, 0)]), down(16)),
            (gate_up(16), dropped(down(16))),
            (with_magnitudes(gate_up(16)), with_magnitudes(down(16))),
            (gate_up(16), trained(down(16))),
        ] {
            assert_eq!(pieces(&gate_up, &down), None, "{gate_up:?} {down:?}");
        }
    }

    #[test]
    fn the_plan_reads_the_decisions_about_the_groups_of_a_run() {
        let planned = |training: &TrainingShape| {
            let model = &llama_3_1_8b();
            let groups = model.groups(0);
            groups.iter().map(|group| Route::planned(model, group, training)).collect::<Vec<_>>()
        };
        let smallest = RouteContext { shared_bytes: PLANNED_SHARED_BYTES, ..H100 };
        let expected = [qkv(NF4, 16), group(4096, NF4, &[(4096, 16)]), gate_up(16), down(16)];
        let expected: Vec<_> = expected.iter().map(|group| Route::new(group, smallest)).collect();
        assert_eq!(planned(&qlora(1, Recompute::Full)), expected);
        assert_eq!(expected[2].gated_backward(&expected[3]), Some(1));
        assert!(planned(&full(FloatType::Bf16)).iter().all(|route| route.weight == WeightRoute::OneByOne));
    }
}
