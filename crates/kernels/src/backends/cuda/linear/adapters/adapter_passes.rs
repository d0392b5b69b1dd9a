//! Passes over the input and over the gradient of the outputs of a group with adapters: a copy to rows with room for `x Aᵀ` that has it, and
//! `dy s B` with `dB = dyᵀ x Aᵀ`. Kernels: `adapter_passes.cu`.
//! Trade-off: ranks up to 32, and `x Aᵀ` has to be there for the gradients; otherwise these are GEMMs (`adapters`).

use firebrick_cuda::Arguments;

use super::Adapters;
use super::low_rank::{AdapterArgument, AdaptersArgument, LowRankKernel, are_vectors};
use crate::Group;
use crate::backends::cuda::engine::{BlockArguments, Cuda, DeviceBlock, Engine, MAX_MODULES, MatrixView, Source, at};
use crate::backends::cuda::linear::modules::appended_columns;
use crate::backends::planning::passes::{LowRankPass, low_rank_tile, stages};

impl Engine {
    /// `dy s B` to `d_low`, and returns `dB` of each adapter in f32, from `low`, which is `x Aᵀ`; `None`, with nothing written, where that
    /// has to be done by GEMMs.
    pub(super) fn output_gradient_pass(
        &self,
        dy: DeviceBlock,
        low: DeviceBlock,
        d_low: DeviceBlock,
        adapters: &Adapters,
    ) -> Option<Vec<MatrixView>> {
        let ranks: Vec<usize> = adapters.places.iter().map(|place| place.ranks[1]).collect();
        let tile = low_rank_tile(&ranks)?;
        let kernel = self.adapter_kernel(LowRankPass::output_gradient(tile), tile)?;
        let widths = adapters.places.iter().all(|place| place.columns.iter().all(|columns| columns.is_multiple_of(8)));
        if ranks.len() > MAX_MODULES || !widths || !are_vectors(&[dy]) || !low.begins_on_vectors() {
            return None;
        }
        let (of_adapters, d_b) = self.output_adapters(adapters, low, kernel.pass);
        let mut of_adapters = AdaptersArgument::new(&of_adapters);
        let chunks = of_adapters.chunks();
        let sums = self.sums(&kernel, &mut of_adapters, chunks, dy.rows);
        let launch = kernel.launch("output_gradient_pass", dy.dtype, &sums, dy.bytes());
        let arguments = Arguments::new()
            .pointer(at(sums.over_columns))
            .pointer(at(sums.over_tokens))
            .value(&of_adapters)
            .rows(&dy)
            .i64(dy.stride as i64)
            .i32(dy.rows as i32);
        // SAFETY: dy and low are rows at their strides, on 16 bytes, that have the columns and ranks of all modules; each B is [width, rank]
        // at its strides; the scratch memory has room for both kinds of sums.
        unsafe { self.launch(launch, &arguments) };
        self.add_over_columns(&kernel, d_low, &of_adapters, &sums);
        self.add_over_tokens(&kernel, dy.dtype, &of_adapters, &sums, false);
        Some(d_b)
    }

    /// A copy of `x` in scratch rows with room for the one adapter of a group, and `x Aᵀ` in it; `None`, with nothing written, where that
    /// takes a copy and a GEMM.
    pub(crate) fn copy_low_rank(&self, x: DeviceBlock, group: &Group<Cuda>) -> Option<DeviceBlock> {
        let (adapters, tile) = self.input_adapter(x, group)?;
        let kernel = self.adapter_kernel(LowRankPass::INPUT, tile)?;
        let room = appended_columns(group);
        let copy = self.scratch_rows([x.rows, x.width], room, x.dtype);
        let mut of_adapters = AdaptersArgument::new(&[AdapterArgument::of_input(&adapters, kernel.pass)]);
        let chunks = of_adapters.chunks();
        let sums = self.sums(&kernel, &mut of_adapters, chunks, x.rows);
        let launch = kernel.launch("copy_low_rank", x.dtype, &sums, 2 * x.bytes());
        let arguments = Arguments::new()
            .rows(&copy)
            .i64(copy.stride as i64)
            .rows(&x)
            .i64(x.stride as i64)
            .pointer(at(sums.over_columns))
            .value(&of_adapters)
            .i32(x.rows as i32);
        // SAFETY: both are rows of this width at their strides, on 16 bytes; A has a row of that width for each rank; the scratch memory has
        // room for the sums.
        unsafe { self.launch(launch, &arguments) };
        self.add_over_columns(&kernel, copy.columns_after(room), &of_adapters, &sums);
        Some(copy)
    }

    fn adapter_kernel(&self, pass: LowRankPass, tile: usize) -> Option<LowRankKernel> {
        let stages = stages(tile, self.shared_bytes())?;
        Some(LowRankKernel { pass, source: Source::LowRank { ranks: tile, stages }, tile, stages })
    }
}
