//! Groups of linear modules with GEMMs in 8-bit floats: the recipe, and its launches. Kernels: `fp8.cu`.
//!
//! A GEMM in FP8 takes a little more than half the time of one in bf16. Operands are E4M3 (3 bits of mantissa, so a
//! rounding step is 6 to 12 % of a value) in both passes, and sums are f32. Four rules keep that harmless:
//!
//! - **One scale per row, from its current values** (`codes.rs` lists how each generation of cards applies it). Each token of an activation or
//!   gradient, and each output feature of a weight, is first divided by its largest magnitude. No state is kept between steps, so a resumed
//!   run computes the same.
//! - **Weights are converted directly from their storage format** (any quantized format, or dense) and rounded once; the backward multiplies
//!   by the same codes, transposed. There the scales of a weight's rows cannot be factored out of the sum, so they are multiplied into the
//!   gradient before it is quantized.
//! - **Adapters are never merged into codes**: a change of a thousandth of a weight is far below a rounding step. Their ranks are part of the
//!   inner dimension as in bf16 (`adapters`), in its leading columns (`fp8.cu` explains why). A power of two per group and pass balances the
//!   two factors, which share scales with activations and weights. `x Aᵀ`, `dy B`, and the gradients of A and B are computed in bf16.
//! - **Everything else is unchanged**: norms, attention, activations, residuals, the head, the loss, and gradients of weights that train.
//!
//! Widths must be multiples of 16 ([`crate::fp8_refusal`] checks this before a run starts), and inner widths are zero-padded to multiples of 128 for
//! the matrix units, or of 32 without adapters and for the kernel of experts. Rows of activations and gradients are quantized by the operation that
//! writes them (`rows.rs`). A stack has the codes, scales and balances of its experts one after the other, each written by one launch for all
//! experts, and `moe/grouped.rs` multiplies them.

pub(crate) mod codes;
pub(crate) mod rows;

use std::ops::Range;

use burn_tensor::DType;
use firebrick_cuda::{Arguments, LaunchShape};

use crate::backends::cuda::device::Device;
use crate::backends::cuda::engine::{
    BlockArguments, Cuda, DeviceBlock, Gemm, Launch, MatrixView, OfExperts, ScratchSlot, Source, arguments, grid,
    grid_of,
};
use crate::backends::cuda::linear::adapters::Adapters;
use crate::backends::cuda::linear::modules::{ModulesArgument, PART_ALIGNMENT, Routed};
use crate::backends::cuda::linear::operands::GroupSources;
use crate::backends::cuda::linear::operands::quantize::kernels_of;
use crate::backends::cuda::memory::planned::{Held, Pass};
use crate::backends::planning::route::WeightRoute;
use crate::backends::planning::rows::{fp8_lead, fp8_stride};
use crate::{ExpertRows, Group, Weight};
use codes::{Codes, RowLayout, RowsByExpert};

/// Partial maxima of a group's adapters: blocks that read them. An expert of a stack has fewer.
const MAXIMA_PARTS: usize = 256;
const MAXIMA_PARTS_OF_EXPERT: usize = 8;

/// The weight of a group in codes, as one pass reads it; of a stack, that of the first expert, and the others follow each other at its distance.
struct Fp8Weight {
    codes: Codes,
    /// Number of experts; 1 if the group is no stack.
    count: usize,
    /// Addresses of the row scales of W, of the factor of low-rank values, and of the adapters' maxima.
    row_scales: u64,
    factor: u64,
    maxima: u64,
    /// Addresses of all A and of all `s B` in the compute format, and bytes from one expert's to the next.
    a: u64,
    b: u64,
    adapter_bytes: usize,
    /// Leading columns of the adapters.
    lead: usize,
}

impl Fp8Weight {
    /// Returns the blocks that compute the maxima of the adapters, of one expert.
    fn parts(&self) -> usize {
        maxima_parts(self.count)
    }
}

fn maxima_parts(count: usize) -> usize {
    if count == 1 { MAXIMA_PARTS } else { MAXIMA_PARTS_OF_EXPERT }
}

fn matrices(group: &Group<Cuda>) -> usize {
    group.rows.as_ref().map_or(1, ExpertRows::experts)
}

impl Device {
    /// Writes all outputs of a group to `out`, plus bias and residual. Returns `x Aᵀ` of its adapters, in scratch memory.
    pub(crate) fn fp8_forward(
        &self,
        x: DeviceBlock,
        group: &Routed<'_>,
        residual: Option<DeviceBlock>,
        out: DeviceBlock,
    ) -> Option<DeviceBlock> {
        let weight = self.fp8_weight(group, x.dtype);
        let experts = self.rows_of_experts(group, x);
        let adapters = self.fp8_adapters(group, &weight, x.dtype, experts);
        let low = adapters.map(|adapters| self.low_rank(self.adapter_input(x, group), &adapters));
        let input = self.fp8_operand(group, x, None, low, &weight);
        let bias = self.biases(group, x.dtype).map(|biases| biases.address);
        let experts = experts.map(|experts| experts.with_matrices(weight.codes.block.count()));
        let gemm = Gemm::forward("linear fp8", input.block, weight.codes.block);
        self.fp8_gemm(Gemm { c: residual, bias, experts, ..gemm }, [&input, &weight.codes], out);
        low
    }

    /// Writes `dy W + dy s B A`, plus the given addend, to `out`.
    pub(crate) fn fp8_input_gradient(
        &self,
        group: &Routed<'_>,
        dy: DeviceBlock,
        d_low: Option<DeviceBlock>,
        plus: Option<DeviceBlock>,
        out: DeviceBlock,
    ) {
        let weight = self.fp8_transposed(group, dy.dtype);
        let input = self.fp8_operand(group, dy, Some(weight.row_scales), d_low, &weight);
        let experts = self.rows_of_experts(group, dy);
        let experts = experts.map(|experts| experts.with_matrices(weight.codes.block.count()));
        let gemm = Gemm::forward("linear fp8", input.block, weight.codes.block);
        self.fp8_gemm(Gemm { c: plus, experts, ..gemm }, [&input, &weight.codes], out);
    }

    /// Returns the adapters of a group in the compute format, as their GEMMs with `dy` read them.
    pub(crate) fn fp8_backward_adapters(
        &self,
        group: &Routed<'_>,
        dtype: DType,
        experts: Option<OfExperts>,
    ) -> Option<Adapters> {
        self.fp8_adapters(group, &self.fp8_transposed(group, dtype), dtype, experts)
    }

    fn fp8_adapters(
        &self,
        group: &Routed<'_>,
        weight: &Fp8Weight,
        dtype: DType,
        experts: Option<OfExperts>,
    ) -> Option<Adapters> {
        let experts = experts.map(|experts| experts.with_matrices(weight.adapter_bytes / dtype.size()));
        let adapters = || self.adapters_at(group, [weight.a, weight.b], dtype);
        (group.route.ranks > 0).then(|| Adapters { experts, ..adapters() })
    }

    /// Describes the rows of a stack in codes; `None` if the group is none.
    fn rows_by_expert(&self, group: &Routed<'_>) -> Option<RowsByExpert> {
        let rows = group.rows.as_ref()?;
        let starts = self.address(&rows.starts.clone().into_primitive());
        Some(RowsByExpert { starts, count: rows.experts(), columns: group.out_features() })
    }

    /// Returns the operand of a GEMM with such a weight: rows, multiplied by column scales if given, with low-rank values in the leading columns.
    fn fp8_operand(
        &self,
        group: &Routed<'_>,
        x: DeviceBlock,
        column_scales: Option<u64>,
        low: Option<DeviceBlock>,
        weight: &Fp8Weight,
    ) -> Codes {
        let (stride, experts) = (weight.codes.block.stride, self.rows_by_expert(group));
        let layout = RowLayout { lead: weight.lead, stride, column_scales, experts };
        let codes = self.rows_in_codes(x, layout);
        self.low_columns(&codes, layout, x.width, low.map(|low| (low, weight.factor)), x.dtype);
        codes
    }

    /// Returns the layout of a group's quantized input; `None` if its GEMMs are in the compute format.
    pub(crate) fn fp8_input_layout(&self, group: &Routed<'_>) -> Option<RowLayout> {
        let is_fp8 = group.route.weight == WeightRoute::Codes;
        is_fp8.then(|| RowLayout::new(group.in_features(), group.route.ranks, None, self.rows_by_expert(group)))
    }

    /// Returns the layout of a group's quantized output gradient; `None` if its GEMMs are in the compute format.
    pub(crate) fn fp8_gradient_layout(&self, group: &Routed<'_>, dtype: DType) -> Option<RowLayout> {
        let is_fp8 = group.route.weight == WeightRoute::Codes;
        is_fp8.then(|| {
            let scales = self.fp8_row_scales(group, self.group_sources(group, false).weights, dtype);
            RowLayout::new(group.out_features(), group.route.ranks, Some(scales), self.rows_by_expert(group))
        })
    }

    fn fp8_row_scales(&self, group: &Routed<'_>, weights: Vec<u64>, dtype: DType) -> u64 {
        match self.known_row_scales(group, weights) {
            Some((address, true)) => address,
            // Dense weights may train, and then get new scales in every step.
            _ => self.fp8_weight(group, dtype).row_scales,
        }
    }

    /// Converts `[W | s B]` of a group to codes, `[o, stride]`.
    fn fp8_weight(&self, group: &Routed<'_>, dtype: DType) -> Fp8Weight {
        let (outputs, inputs) = (group.out_features(), group.in_features());
        assert!(outputs.is_multiple_of(16) && inputs.is_multiple_of(16), "FP8 weights [{outputs}, {inputs}]");
        let (modules, _held) = self.modules_argument(group);
        let stride = fp8_stride(inputs, modules.ranks(), group.route.is_grouped);
        let sources = self.group_sources(group, true);
        let (mut weight, held) = self.fp8_buffer(group, &sources, Pass::Forward, [outputs, stride], &modules);
        let known = self.known_row_scales(group, sources.weights);
        if let Some((address, _)) = known {
            (weight.codes.scales, weight.row_scales) = (address, address);
        }
        if !held.weight {
            let is_known = known.is_some_and(|(_, is_known)| is_known);
            for module in &group.modules {
                self.weight_rows(&module.weight, &module.columns, &weight, is_known);
            }
        }
        if !held.adapter && stride > inputs {
            if modules.ranks() > 0 {
                self.adapter_values(&modules, &weight, [outputs, inputs], dtype);
            }
            self.write_columns_b(&modules, &weight, inputs);
        }
        weight
    }

    /// Converts `[Wᵀ | Aᵀ]` of a group to codes, `[i, stride]`, with scales of 1.
    fn fp8_transposed(&self, group: &Routed<'_>, dtype: DType) -> Fp8Weight {
        let (outputs, inputs) = (group.out_features(), group.in_features());
        let (modules, _held) = self.modules_argument(group);
        let stride = fp8_stride(outputs, modules.ranks(), group.route.is_grouped);
        let sources = self.group_sources(group, true);
        let row_scales = self.fp8_row_scales(group, sources.weights.clone(), dtype);
        let (weight, held) = self.fp8_buffer(group, &sources, Pass::Backward, [inputs, stride], &modules);
        let weight = Fp8Weight { row_scales, ..weight };
        if !held.weight {
            for module in &group.modules {
                self.weight_columns(&module.weight, &module.columns, outputs, &weight);
            }
        }
        if !held.adapter {
            if modules.ranks() > 0 {
                self.adapter_values(&modules, &weight, [outputs, inputs], dtype);
            }
            self.write_columns_a(&modules, &weight, [outputs, inputs]);
        }
        weight
    }

    /// Returns a kept or scratch buffer for the codes of a group's weight with their scales and adapters, and its current contents.
    fn fp8_buffer(
        &self,
        group: &Routed<'_>,
        sources: &GroupSources,
        pass: Pass,
        [rows, stride]: [usize; 2],
        modules: &ModulesArgument,
    ) -> (Fp8Weight, Held) {
        let contents = self.contents(DType::U8, sources.all());
        let count = matrices(group);
        let adapter_bytes = modules.bytes(group.in_features()).next_multiple_of(PART_ALIGNMENT);
        let of_expert = [rows * stride, rows * 4, 16, maxima_parts(count) * 8, adapter_bytes, 0];
        let parts = of_expert.map(|bytes| count * bytes);
        let starts = parts.iter().scan(0, |start, bytes| {
            let this = *start;
            *start += bytes.next_multiple_of(PART_ALIGNMENT);
            Some(this)
        });
        let starts: Vec<usize> = starts.collect();
        let key = || sources.laid_out(stride, count);
        let kept = group.route.is_quantized.then(|| self.kept.of(pass, key(), starts[5], contents.clone()));
        let (address, held) = kept.flatten().unwrap_or_else(|| {
            let slot = match pass {
                Pass::Forward => ScratchSlot::Fp8Weights([count * rows, stride]),
                Pass::Backward => ScratchSlot::Fp8Transposed([count * rows, stride]),
            };
            let (address, is_held) = self.scratch.holding(slot, starts[5], contents);
            (address, Held { weight: is_held, adapter: is_held })
        });
        let at = |part: usize| address + starts[part] as u64;
        let codes = Codes { block: DeviceBlock::dense(address, [rows, stride], DType::U8), scales: at(1) };
        let b = at(4) + (modules.a_values(group.in_features()) * 4).next_multiple_of(PART_ALIGNMENT) as u64;
        let lead = fp8_lead(modules.ranks());
        let (row_scales, factor, maxima, a) = (at(1), at(2), at(3), at(4));
        (Fp8Weight { codes, count, row_scales, factor, maxima, a, b, adapter_bytes, lead }, held)
    }

    /// Returns the address of the row scales of quantized weights, and whether they are computed.
    fn known_row_scales(&self, group: &Routed<'_>, sources: Vec<u64>) -> Option<(u64, bool)> {
        group.route.is_quantized.then(|| self.fp8_scales.of(sources, matrices(group) * group.out_features()))
    }

    /// Converts the adapters to the compute format, and computes the maxima of their values.
    fn adapter_values(
        &self,
        modules: &ModulesArgument,
        weight: &Fp8Weight,
        [outputs, inputs]: [usize; 2],
        dtype: DType,
    ) {
        let arguments = arguments! {
            maxima: address(weight.maxima), a_out: address(weight.a), b_out: address(weight.b), modules: value(modules),
            row_scales: address(weight.row_scales), inputs: int(inputs), outputs: int(outputs),
            matrix: long(weight.adapter_bytes / dtype.size()),
        };
        let shape = of_experts(grid(weight.parts(), 256), weight.count);
        let bytes = weight.count * modules.bytes(inputs);
        let launch = Source::Fp8.launch(dtype, "adapter_values", shape, bytes);
        // SAFETY: the modules name f32 pairs [rank, inputs] and [rows, rank] per expert that the caller holds; there is room for a pair of maxima
        // per block and for all values of A and of B, and a scale for each row that the modules name.
        unsafe { self.launch(launch, &arguments) };
    }

    fn write_columns_b(&self, modules: &ModulesArgument, weight: &Fp8Weight, inputs: usize) {
        let block = weight.codes.block;
        let arguments = arguments! {
            codes: rows(&block), used: address(weight.factor), maxima: address(weight.maxima),
            parts: int(weight.parts()), modules: value(modules), row_scales: address(weight.row_scales), outputs: int(block.rows),
            inputs: int(inputs), lead: int(weight.lead), stride: int(block.stride),
        };
        let values = block.rows * (block.stride - inputs);
        let shape = of_experts(grid(values.div_ceil(4096), 256), weight.count);
        // SAFETY: rows and ranks of the modules are within the weight, which has codes of `stride` bytes and a scale for each row.
        unsafe { self.launch(plain("columns_b", shape, weight.count * values), &arguments) };
    }

    fn write_columns_a(&self, modules: &ModulesArgument, weight: &Fp8Weight, [outputs, inputs]: [usize; 2]) {
        let block = weight.codes.block;
        let arguments = arguments! {
            codes: rows(&block), scales: address(weight.codes.scales), used: address(weight.factor),
            maxima: address(weight.maxima), parts: int(weight.parts()), modules: value(modules), outputs: int(outputs),
            inputs: int(inputs), lead: int(weight.lead), stride: int(block.stride),
        };
        let values = inputs * (block.stride - outputs).max(16);
        let shape = of_experts(grid(values.div_ceil(4096), 256), weight.count);
        // SAFETY: as for the columns of B; without adapters only the scales are written.
        unsafe { self.launch(plain("columns_a", shape, weight.count * values), &arguments) };
    }

    fn weight_rows(&self, weight: &Weight<Cuda>, rows: &Range<usize>, to: &Fp8Weight, is_known: bool) {
        let [_, inputs] = weight.shape();
        let block = to.codes.block.rows(rows.start, rows.len()).columns(to.lead, inputs);
        let arguments = arguments! {
            out: rows(&block), row_scales: address(to.row_scales + (rows.start * 4) as u64), inputs: int(inputs),
            outputs: int(to.codes.block.rows), stride: int(block.stride), is_known: i32(i32::from(is_known)),
            powers_of_two: i32(i32::from(self.row_scaling.get().has_powers_of_two())),
        };
        let (arguments, _held, bytes) = self.stored(weight, arguments);
        let mut shape = grid(rows.len(), 256);
        shape.grid[2] = to.count as u32;
        let [_, fp8_rows, _] = kernels_of(weight);
        let launch = plain(fp8_rows, shape, to.count * rows.len() * inputs + bytes);
        // SAFETY: `block` has these rows at its stride and a scale for each, of each expert; what is read is a weight of this shape.
        unsafe { self.launch(launch, &arguments) };
    }

    /// Converts one weight to transposed codes, in its columns of the group's weight.
    fn weight_columns(&self, weight: &Weight<Cuda>, columns: &Range<usize>, all_outputs: usize, to: &Fp8Weight) {
        let ([_, inputs], outputs) = (weight.shape(), columns.len());
        let block = to.codes.block.columns(to.lead + columns.start, outputs);
        let arguments = arguments! {
            out: rows(&block), row_scales: address(to.row_scales + (columns.start * 4) as u64), outputs: int(outputs),
            all_outputs: int(all_outputs), inputs: int(inputs), stride: long(block.stride),
        };
        let (arguments, _held, bytes) = self.stored(weight, arguments);
        let tiles = grid_of([inputs.div_ceil(128), outputs.div_ceil(128), to.count], 256);
        let [.., fp8_columns] = kernels_of(weight);
        let launch = plain(fp8_columns, tiles, to.count * outputs * inputs + bytes);
        // SAFETY: `block` has a row for each input feature and a column for each output feature, which has a scale, of each expert.
        unsafe { self.launch(launch, &arguments) };
    }

    /// Appends the argument that locates a stored weight; also returns the owners to hold until the launch, and its bytes.
    fn stored(&self, weight: &Weight<Cuda>, arguments: Arguments) -> (Arguments, Vec<MatrixView>, usize) {
        let mut held = Vec::new();
        let (arguments, bytes) = self.weight_argument(weight, arguments, &mut held);
        let is_aligned = held.first().is_some_and(|values| values.address.is_multiple_of(16));
        assert!(is_aligned, "a weight that does not begin on 16 bytes");
        (arguments, held, bytes)
    }
}

/// Returns a launch shape with a row of blocks for each expert.
fn of_experts(shape: LaunchShape, count: usize) -> LaunchShape {
    LaunchShape { grid: [shape.grid[0], count as u32, 1], ..shape }
}

/// Describes a launch that does not depend on the format of activations.
fn plain(name: &'static str, shape: LaunchShape, bytes: usize) -> Launch {
    Source::Fp8.launch(DType::F32, name, shape, bytes)
}
