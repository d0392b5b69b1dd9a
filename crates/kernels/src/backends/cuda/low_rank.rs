//! Both products of a group's adapters with the gradient of its outputs in one pass over it: `dy s B`, and `dB = dyᵀ x Aᵀ`. Kernels:
//! `source/low_rank.cu`.
//!
//! As GEMMs each of them reads all of `dy` for a handful of columns, which is what they take their time for.
//! Trade-off: small ranks only ([`low_rank_tile`]), and `x Aᵀ` has to be there already; otherwise they are GEMMs (`adapters`).

use burn_tensor::DType;
use bytemuck::{NoUninit, Pod, Zeroable};
use firebrick_cuda::{Arguments, LaunchShape};

use super::adapters::Adapters;
use super::engine::Engine;
use super::launch::{Launch, MAX_MODULES, at, grid};
use super::matrix::{DeviceBlock, MatrixView};
use super::program::Source;
use super::scratch::ScratchSlot;
use crate::backends::cuda_rows::{LOW_RANK_BLOCK_VALUES, low_rank_chunks, low_rank_tile};

/// As `source/low_rank.cu` has them.
const WARPS: usize = 8;
const TOKENS: usize = 16;
const MAX_STAGES: usize = 4;
/// Blocks that one multiprocessor gets at most, one after the other.
const WAVES: usize = 3;
/// What a block costs besides its tokens, in tokens: filling the pipeline, and writing its sums.
const BLOCK_OVERHEAD: usize = 4 * TOKENS;

/// An adapted module as the kernels take it.
#[repr(C)]
#[derive(Clone, Copy, Default, Pod, Zeroable)]
struct ModuleArgument {
    b: u64,
    db: u64,
    b_stride: i64,
    first_column: i32,
    width: i32,
    first_rank: i32,
    rank: i32,
    first_chunk: i32,
    scale: f32,
}

/// The adapted modules of a group as the kernels take them.
#[repr(C)]
#[derive(Clone, Copy, Default, NoUninit)]
struct ModulesArgument {
    of: [ModuleArgument; MAX_MODULES],
    count: i32,
    chunks: i32,
}

impl Engine {
    /// `dy s B` to `d_low`, and returns `dB` of each adapter in f32, from `low`, which is `x Aᵀ`; `None`, with nothing written, where that
    /// has to be done by GEMMs.
    pub(super) fn low_rank_pass(
        &self,
        dy: DeviceBlock,
        low: DeviceBlock,
        d_low: DeviceBlock,
        adapters: &Adapters,
    ) -> Option<Vec<MatrixView>> {
        let ranks: Vec<usize> = adapters.places.iter().map(|place| place.ranks[1]).collect();
        let tile = low_rank_tile(&ranks)?;
        let stages = stages(tile, self.shared_bytes())?;
        let widths = adapters.places.iter().all(|place| place.columns.iter().all(|columns| columns.is_multiple_of(8)));
        if dy.dtype == DType::F32
            || ranks.len() > MAX_MODULES
            || !widths
            || ![dy, low].iter().all(DeviceBlock::begins_on_vectors)
        {
            return None;
        }
        let (modules, d_b) = self.adapted_modules(adapters, tile);
        let chunks = modules.chunks as usize;
        let parts = parts_of_tokens(dy.rows, chunks, self.multiprocessors());
        let tokens_per_block = dy.rows.div_ceil(parts).next_multiple_of(TOKENS);
        let low_bytes = chunks * dy.rows * tile * 4;
        let low_parts =
            self.scratch.take(ScratchSlot::LowRankParts, low_bytes + parts * chunks * LOW_RANK_BLOCK_VALUES * 4);
        let b_parts = low_parts + low_bytes as u64;
        let [shared, values] = [bytes_of_block(tile, stages), chunks * LOW_RANK_BLOCK_VALUES];
        let source = Source::LowRank { ranks: tile, stages };
        let launch = |name, shape, bytes| Launch { source, dtype: dy.dtype, name, shape, bytes };

        let shape =
            LaunchShape { grid: [chunks as u32, parts as u32, 1], block: [256, 1, 1], shared_bytes: shared as u32 };
        let arguments = Arguments::new()
            .pointer(at(low_parts))
            .pointer(at(b_parts))
            .value(&modules)
            .pointer(at(dy.address))
            .i64(dy.stride as i64)
            .pointer(at(low.address))
            .i64(low.stride as i64)
            .i32(dy.rows as i32)
            .i32(tokens_per_block as i32);
        // SAFETY: dy and low are rows at their strides, on 16 bytes, that have the columns and ranks of all modules; each B is [width, rank]
        // at its stride; the scratch memory has room for both kinds of parts.
        unsafe { self.launch(launch("output_gradient_pass", shape, dy.bytes()), &arguments) };

        let shape = grid((dy.rows * tile * ranks.len()).div_ceil(256), 256);
        let arguments = Arguments::new()
            .pointer(at(d_low.address))
            .i64(d_low.stride as i64)
            .pointer(at(low_parts))
            .value(&modules)
            .i32(dy.rows as i32);
        // SAFETY: d_low has these rows at its stride and a column for each rank; all parts were written before.
        unsafe { self.launch(launch("add_low_parts", shape, low_bytes), &arguments) };

        let arguments = Arguments::new().pointer(at(b_parts)).value(&modules).i32(parts as i32);
        // SAFETY: each dB is a dense [width, rank] f32; all parts were written before.
        unsafe { self.launch(launch("add_b_parts", grid(values.div_ceil(256), 256), parts * values * 4), &arguments) };
        Some(d_b)
    }

    /// The adapters as arguments, and room for their dB.
    fn adapted_modules(&self, adapters: &Adapters, tile: usize) -> (ModulesArgument, Vec<MatrixView>) {
        let (mut modules, mut chunks) = (ModulesArgument::default(), 0);
        let mut d_b = Vec::with_capacity(adapters.places.len());
        for (argument, place) in modules.of.iter_mut().zip(&adapters.places) {
            let ([first_column, width], [first_rank, rank]) = (place.columns, place.ranks);
            let gradient = self.empty_matrix(width, rank, DType::F32);
            *argument = ModuleArgument {
                b: place.b.address,
                db: gradient.address,
                b_stride: place.b.stride as i64,
                first_column: first_column as i32,
                width: width as i32,
                first_rank: first_rank as i32,
                rank: rank as i32,
                first_chunk: chunks as i32,
                scale: place.scale as f32,
            };
            chunks += low_rank_chunks(width, tile);
            d_b.push(gradient);
        }
        (modules.count, modules.chunks) = (d_b.len() as i32, chunks as i32);
        (modules, d_b)
    }
}

/// Into how many parts tokens are cut, so that `chunks` blocks for each keep `multiprocessors` busy to the end.
fn parts_of_tokens(tokens: usize, chunks: usize, multiprocessors: usize) -> usize {
    let longest =
        |parts: &usize| (chunks * parts).div_ceil(multiprocessors) * (tokens.div_ceil(*parts) + BLOCK_OVERHEAD);
    (1..=(WAVES * multiprocessors / chunks).max(1)).min_by_key(longest).unwrap_or(1)
}

/// Tiles under way, where a block may have this much shared memory; `None` if there is too little for any.
pub(super) fn stages(tile: usize, shared_bytes: usize) -> Option<usize> {
    (2..=MAX_STAGES).rev().find(|stages| bytes_of_block(tile, *stages) <= shared_bytes)
}

/// Shared memory of a block: tiles under way, and what its warps have of `d_low`.
fn bytes_of_block(tile: usize, stages: usize) -> usize {
    let columns = LOW_RANK_BLOCK_VALUES / tile / WARPS;
    let stage_values = TOKENS * (columns + 8 + tile + 8);
    WARPS * stages * stage_values * 2 + 2 * WARPS * TOKENS * tile * 4
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_card_has_a_pass_that_fits_its_blocks() {
        // H100 and B200, A100, and cards of 8.6, 8.9 and 12.0; older ones.
        for (shared, expected) in [
            (232_448, [Some(4), Some(4)]),
            (166_912, [Some(3), Some(4)]),
            (101_376, [Some(2), Some(2)]),
            (65_536, [None, None]),
        ] {
            assert_eq!([16, 32].map(|tile| stages(tile, shared)), expected, "{shared} bytes");
        }
    }

    #[test]
    fn blocks_fill_the_device_in_whole_waves_unless_there_are_few_tokens() {
        assert_eq!(parts_of_tokens(12_288, 4, 132), 33);
        assert_eq!(parts_of_tokens(12_288, 6, 132), 22);
        let parts = parts_of_tokens(12_288, 28, 132);
        assert!((28 * parts) as f64 / ((28 * parts).div_ceil(132) * 132) as f64 > 0.94, "{parts}");
        assert_eq!(parts_of_tokens(12_288, 300, 132), 1);
        assert!(parts_of_tokens(16, 4, 132) <= 33);
    }
}
