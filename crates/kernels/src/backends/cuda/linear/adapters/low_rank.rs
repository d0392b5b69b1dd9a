//! Shared parts of the adapter passes: argument structs, the division into blocks of columns and tokens, and the reduction of partial
//! sums. Sums over tokens are adapter gradients; sums over columns are low-rank values. Kernels: `low_rank.cu`.
//!
//! As GEMMs, these operations would multiply all values by a handful of columns, and would be limited by reading the values.
//! Trade-off: small ranks only (`low_rank_tile`); others are GEMMs (`adapters`).

use burn_tensor::DType;
use bytemuck::{NoUninit, Pod, Zeroable};
use firebrick_arch::Activation;
use firebrick_cuda::LaunchShape;

use super::{AdapterSlot, Adapters};
use crate::backends::cuda::device::Device;
use crate::backends::cuda::engine::{
    BlockArguments, DeviceBlock, Launch, MatrixView, ScratchSlot, Source, arguments, grid_of,
};
use crate::backends::cuda::linear::modules::Routed;
use crate::backends::planning::passes::{
    GATED_STAGES, LOW_RANK_WARPS, LowRankPass, TILE_TOKENS, gated_pieces, parts_of_tokens, stages,
};
use crate::backends::planning::route::MAX_MODULES;

/// Most common rank of adapters in runs and in the self-test.
const USUAL_RANKS: usize = 16;

#[repr(C)]
#[derive(Clone, Copy, Default, Pod, Zeroable)]
pub(crate) struct AdapterArgument {
    /// `[n, rank]`, for sums over tokens.
    pub low: u64,
    /// `[width, rank]`, for sums over columns.
    pub b: u64,
    pub gradient: u64,
    pub low_stride: i64,
    pub b_column: i64,
    pub b_rank: i64,
    pub gradient_column: i64,
    pub gradient_rank: i64,
    pub first_column: i32,
    pub width: i32,
    pub first_rank: i32,
    pub rank: i32,
    pub first_chunk: i32,
    /// Scale of the gradient.
    pub scale: f32,
}

#[repr(C)]
#[derive(Clone, Copy, Default, NoUninit)]
pub(crate) struct AdaptersArgument {
    of: [AdapterArgument; MAX_MODULES],
    count: i32,
    /// Blocks along the columns of all adapters.
    chunks: i32,
    /// Columns of one part of the sums over tokens.
    columns: i32,
    tokens_per_block: i32,
}

/// A pass, with the compile-time parameters of its kernel.
pub(crate) struct LowRankKernel {
    pub pass: LowRankPass,
    pub source: Source,
    /// Maximum rank of an adapter.
    pub tile: usize,
    /// Tiles in flight.
    pub stages: usize,
}

/// Division and partial sums of a pass's blocks.
pub(crate) struct Sums {
    /// Number of blocks along the columns.
    chunks: usize,
    /// Number of parts of the tokens, each with its own blocks.
    parts: usize,
    /// Address of the sums over columns, `[chunks of all adapters, n, tile]`.
    pub over_columns: u64,
    /// Address of the sums over tokens, `[parts, tile, columns]`.
    pub over_tokens: u64,
}

impl AdapterArgument {
    /// Returns the one adapter of a group whose low-rank values are computed from its input, and its blocks along the input.
    pub(super) fn of_input(adapters: &Adapters, pass: LowRankPass) -> (Self, usize) {
        let width = adapters.a.width;
        let adapter = Self {
            b: adapters.a.address,
            b_column: 1,
            b_rank: adapters.a.stride as i64,
            width: width as i32,
            rank: adapters.places[0].ranks[1] as i32,
            ..Self::default()
        };
        (adapter, pass.chunks(width))
    }

    /// Returns an adapter whose `dB` and low-rank gradient are computed from its output gradient; `low` is `x Aᵀ` of all adapters.
    pub(super) fn of_outputs(place: &AdapterSlot, low: DeviceBlock, gradient: &MatrixView) -> Self {
        let [first_column, width] = place.columns;
        let rank = place.ranks[1];
        let low = place.ranks_of(low);
        Self {
            low: low.address,
            b: place.b.address,
            gradient: gradient.address,
            low_stride: low.stride as i64,
            b_column: place.b.stride as i64,
            b_rank: 1,
            gradient_column: rank as i64,
            gradient_rank: 1,
            first_column: first_column as i32,
            width: width as i32,
            first_rank: place.ranks[0] as i32,
            rank: rank as i32,
            first_chunk: 0,
            scale: place.scale as f32,
        }
    }
}

impl AdaptersArgument {
    /// Combines adapters whose sums over columns take `chunks` blocks each.
    pub(crate) fn new(adapters: &[(AdapterArgument, usize)]) -> Self {
        let mut argument = Self::default();
        for (to, (adapter, chunks)) in argument.of.iter_mut().zip(adapters) {
            *to = AdapterArgument { first_chunk: argument.chunks, ..*adapter };
            argument.chunks += *chunks as i32;
            argument.columns = argument.columns.max(adapter.first_column + adapter.width);
        }
        argument.count = adapters.len() as i32;
        argument
    }

    pub(crate) fn ranks(&self) -> usize {
        self.of[..self.count as usize].iter().map(|adapter| adapter.rank as usize).sum()
    }

    pub(crate) fn chunks(&self) -> usize {
        self.chunks as usize
    }

    /// Moves the low-rank values to token `start`.
    pub(super) fn move_to(&mut self, start: usize) {
        for adapter in &mut self.of[..self.count as usize] {
            adapter.low += start as u64 * adapter.low_stride as u64 * 2;
        }
    }

    pub(crate) fn first(&self, count: usize) -> Self {
        let chunks = if count < self.count as usize { self.of[count].first_chunk } else { self.chunks };
        Self { count: count as i32, chunks, ..*self }
    }
}

impl Device {
    /// Returns the sources of the passes that most runs launch; empty if blocks have too little shared memory.
    pub(crate) fn usual_low_rank(&self) -> Vec<Source> {
        let (ranks, shared) = (USUAL_RANKS, self.shared_bytes());
        let output = stages(ranks, shared);
        let (activation, stages) = (Activation::Silu, GATED_STAGES);
        let gated = gated_pieces(shared).map(|pieces| Source::GatedLowRank { activation, pieces, stages });
        output.map(|stages| Source::LowRank { ranks, stages }).into_iter().chain(gated).collect()
    }

    /// Returns the adapters of a group if a pass over its input may compute `x Aᵀ`. The group's weight, which contains them, is materialized first.
    pub(super) fn input_adapters(&self, x: DeviceBlock, group: &Routed<'_>) -> Option<Adapters> {
        if !group.route.may_pass_input || !x.begins_on_vectors() {
            return None;
        }
        let weight = self.group_weight(group, x.dtype);
        self.adapters(group, x.dtype, weight.as_ref(), None)
    }

    /// Returns the adapters of a group for a pass over its output gradient, with their blocks, and allocates each dB.
    pub(super) fn output_adapters(
        &self,
        adapters: &Adapters,
        low: DeviceBlock,
        pass: LowRankPass,
    ) -> (Vec<(AdapterArgument, usize)>, Vec<MatrixView>) {
        let argument = |place: &AdapterSlot| {
            let [width, rank] = [place.columns[1], place.ranks[1]];
            let gradient = self.empty_matrix(width, rank, DType::F32);
            ((AdapterArgument::of_outputs(place, low, &gradient), pass.chunks(width)), gradient)
        };
        adapters.places.iter().map(argument).unzip()
    }

    /// Divides the tokens of a pass that has `chunks` blocks along the columns, and allocates its partial sums.
    pub(crate) fn sums(
        &self,
        kernel: &LowRankKernel,
        adapters: &mut AdaptersArgument,
        chunks: usize,
        tokens: usize,
    ) -> Sums {
        let parts = parts_of_tokens(tokens, chunks, self.multiprocessors);
        adapters.tokens_per_block = tokens.div_ceil(parts).next_multiple_of(TILE_TOKENS) as i32;
        let [low, over_tokens] =
            kernel.pass.sums([adapters.chunks as usize, tokens], [parts, adapters.columns as usize]);
        let [low, over_tokens] = [low, over_tokens].map(|values| values * kernel.tile * 4);
        let over_columns = self.scratch.take(ScratchSlot::LowRankParts, low + over_tokens);
        Sums { chunks, parts, over_columns, over_tokens: over_columns + low as u64 }
    }

    /// Reduces the blocks' sums over columns to `low`, `[n, ranks of the adapters]`.
    pub(super) fn add_over_columns(
        &self,
        kernel: &LowRankKernel,
        low: DeviceBlock,
        adapters: &AdaptersArgument,
        sums: &Sums,
    ) {
        let shape = grid_of([(low.rows * kernel.tile).div_ceil(256), adapters.count as usize, 1], 256);
        let bytes = adapters.chunks as usize * low.rows * kernel.tile * 4;
        let launch = kernel.source.launch(low.dtype, "add_over_columns", shape, bytes);
        let arguments = arguments! {
            low: rows(&low), stride: long(low.stride), low_parts: address(sums.over_columns), adapters: value(adapters),
            n: int(low.rows),
        };
        // SAFETY: low has these rows at its stride and a column for each rank; all parts were written before.
        unsafe { self.launch(launch, &arguments) };
    }

    /// Reduces the blocks' sums over tokens to the adapters' gradients; with `is_continued`, adds to them.
    pub(super) fn add_over_tokens(
        &self,
        kernel: &LowRankKernel,
        dtype: DType,
        adapters: &AdaptersArgument,
        sums: &Sums,
        is_continued: bool,
    ) {
        let widest = adapters.of.iter().map(|adapter| adapter.width).max().unwrap_or(0) as usize;
        let shape = grid_of([widest.div_ceil(256), kernel.tile, adapters.count as usize], 256);
        let bytes = sums.parts * kernel.tile * adapters.columns as usize * 4;
        let launch = kernel.source.launch(dtype, "add_over_tokens", shape, bytes);
        let arguments = arguments! {
            parts: address(sums.over_tokens), adapters: value(adapters), count: int(sums.parts),
            is_continued: i32(i32::from(is_continued)),
        };
        // SAFETY: each gradient has the width and rank of its adapter, f32 at its strides; all parts were written before.
        unsafe { self.launch(launch, &arguments) };
    }
}

impl LowRankKernel {
    pub(crate) fn launch(&self, name: &'static str, dtype: DType, sums: &Sums, bytes: usize) -> Launch {
        let shared_bytes = self.pass.block_bytes(self.tile, self.stages) as u32;
        let shape = LaunchShape { shared_bytes, ..grid_of([sums.chunks, sums.parts, 1], 32 * LOW_RANK_WARPS as u32) };
        self.source.launch(dtype, name, shape, bytes)
    }
}
