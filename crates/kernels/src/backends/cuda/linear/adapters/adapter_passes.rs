//! Passes over the input and the output gradient of a group with adapters: one copies the input to rows with room for
//! `x Aᵀ` and computes it, the other computes `dy s B` and `dB = dyᵀ x Aᵀ`. Kernels: `adapter_passes.cu`.
//! Trade-off: ranks up to 32, and the gradients need `x Aᵀ` to be available; otherwise these are GEMMs (`adapters`).

use super::Adapters;
use super::low_rank::{AdapterArgument, AdaptersArgument, LowRankKernel};
use crate::backends::cuda::device::Device;
use crate::backends::cuda::engine::{BlockArguments, DeviceBlock, MatrixView, Source, arguments};
use crate::backends::cuda::linear::modules::Routed;
use crate::backends::planning::passes::LowRankPass;
use crate::backends::planning::route::Tile;

impl Device {
    /// Writes `dy s B` to `d_low`, and returns `dB` of each adapter in f32, from `low`, which is `x Aᵀ`. Returns `None`
    /// and writes nothing if GEMMs must compute this.
    pub(super) fn output_gradient_pass(
        &self,
        dy: DeviceBlock,
        low: DeviceBlock,
        d_low: DeviceBlock,
        adapters: &Adapters,
        tile: Tile,
    ) -> Option<Vec<MatrixView>> {
        if !dy.begins_on_vectors() || !low.begins_on_vectors() {
            return None;
        }
        let kernel = kernel(LowRankPass::output_gradient(tile.ranks), tile);
        let (of_adapters, d_b) = self.output_adapters(adapters, low, kernel.pass);
        let mut of_adapters = AdaptersArgument::new(&of_adapters);
        let chunks = of_adapters.chunks();
        let sums = self.sums(&kernel, &mut of_adapters, chunks, dy.rows);
        let launch = kernel.launch("output_gradient_pass", dy.dtype, &sums, dy.bytes());
        let arguments = arguments! {
            low_parts: address(sums.over_columns), parts: address(sums.over_tokens), adapters: value(&of_adapters),
            dy: rows(&dy), dy_stride: long(dy.stride), n: int(dy.rows),
        };
        // SAFETY: dy and low are rows at their strides, on 16 bytes, that have the columns and ranks of all modules; each B is [width, rank]
        // at its strides; the scratch memory has room for both kinds of sums.
        unsafe { self.launch(launch, &arguments) };
        self.add_over_columns(&kernel, d_low, &of_adapters, &sums);
        self.add_over_tokens(&kernel, dy.dtype, &of_adapters, &sums, false);
        Some(d_b)
    }

    /// Copies `x` to scratch rows with room for the one adapter of a group, and writes `x Aᵀ` there. Returns `None` and
    /// writes nothing if this takes a copy and a GEMM.
    pub(crate) fn copy_low_rank(&self, x: DeviceBlock, group: &Routed<'_>) -> Option<DeviceBlock> {
        let adapters = self.input_adapters(x, group)?;
        let kernel = kernel(LowRankPass::INPUT, group.route.copy_pass?);
        let room = group.route.room();
        let copy = self.scratch_rows([x.rows, x.width], room, x.dtype);
        let mut of_adapters = AdaptersArgument::new(&[AdapterArgument::of_input(&adapters, kernel.pass)]);
        let chunks = of_adapters.chunks();
        let sums = self.sums(&kernel, &mut of_adapters, chunks, x.rows);
        let launch = kernel.launch("copy_low_rank", x.dtype, &sums, 2 * x.bytes());
        let arguments = arguments! {
            y: rows(&copy), y_stride: long(copy.stride), x: rows(&x), x_stride: long(x.stride),
            low_parts: address(sums.over_columns), adapters: value(&of_adapters), n: int(x.rows),
        };
        // SAFETY: both are rows of this width at their strides, on 16 bytes; A has a row of that width for each rank; the scratch memory has
        // room for the sums.
        unsafe { self.launch(launch, &arguments) };
        self.add_over_columns(&kernel, copy.columns_after(room), &of_adapters, &sums);
        Some(copy)
    }
}

fn kernel(pass: LowRankPass, Tile { ranks, stages }: Tile) -> LowRankKernel {
    LowRankKernel { pass, source: Source::LowRank { ranks, stages }, tile: ranks, stages }
}
