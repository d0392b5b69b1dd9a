//! Passes over the values that adapters read on CUDA: how their blocks divide columns and tokens, and what they sum.
//!
//! The engine launches them by this, and the memory estimate counts by it, whether or not the cargo feature `cuda` is on.
//! Trade-off: the figures that divide the work were measured on an H100.

/// Warps of a block of a pass over what adapters read, as `cuda/linear/adapters/low_rank.cu` has them.
pub(in crate::backends) const LOW_RANK_WARPS: usize = 8;
/// Columns of a warp's piece there.
const PIECE_COLUMNS: usize = 32;
/// Blocks of such a pass that one multiprocessor gets at most, one after the other.
const WAVES: usize = 3;
/// What a block costs besides its tokens, in tokens: filling the pipeline, and writing its sums.
const BLOCK_OVERHEAD: usize = 128;
/// Part of the multiprocessors that is enough to have as many bytes under way as the memory takes.
const BUSY: f64 = 0.8;
/// The rank that the passes over gated activations are compiled for.
pub(in crate::backends) const GATED_TILE: usize = 16;
/// Bytes of sums over columns that those passes leave at a time: more tokens go in several rounds. An 8B has 42 MiB with 12,288 tokens.
const GATED_PARTS_BYTES: usize = 48 << 20;

/// Tokens of a tile there.
pub(in crate::backends) const TILE_TOKENS: usize = 16;
/// Tiles that passes over gated activations have under way.
pub(in crate::backends) const GATED_STAGES: usize = 2;
/// Pieces of columns of their warps, where the shared memory of a block is enough.
const GATED_PIECES: usize = 2;
/// Tiles under way: more of them hold no more of a step's bytes than the device can have under way.
const MAX_STAGES: usize = 3;

/// What a pass over the values that adapters read loads and sums; `Walk` in `cuda/linear/adapters/low_rank.cu`.
#[derive(Clone, Copy, Debug)]
pub(in crate::backends) struct LowRankPass {
    /// Matrices that are loaded.
    pub inputs: usize,
    /// Pieces of columns of a warp.
    pub pieces: usize,
    /// Matrices that are summed over tokens.
    pub over_tokens: usize,
    /// Matrices that are summed over columns.
    pub over_columns: usize,
}

impl LowRankPass {
    /// Over the gradient of a group's outputs: sums over tokens fill 64 registers.
    pub(in crate::backends) const fn output_gradient(tile: usize) -> Self {
        Self { inputs: 1, pieces: 64 / tile, over_tokens: 1, over_columns: 1 }
    }

    /// Over the input of a group, which is copied.
    pub(in crate::backends) const INPUT: Self = Self { inputs: 1, pieces: 2, over_tokens: 0, over_columns: 1 };

    /// Over gate and up, making activated values.
    pub(in crate::backends) const fn gated(pieces: usize) -> Self {
        Self { inputs: 2, pieces: 2 * pieces, over_tokens: 0, over_columns: 1 }
    }

    /// Over gate, up and the gradient of the activated values, making the gradients of gate and up.
    pub(in crate::backends) const fn gated_backward(pieces: usize) -> Self {
        Self { inputs: 3, pieces, over_tokens: 3, over_columns: 2 }
    }

    /// Columns of a block.
    pub(in crate::backends) const fn block_columns(self) -> usize {
        LOW_RANK_WARPS * self.pieces * PIECE_COLUMNS
    }

    /// Values that it sums over columns and over tokens, for each rank: of `chunks` blocks along all columns that it sums over, and of `parts` of
    /// the tokens.
    pub(in crate::backends) const fn sums(
        self,
        [chunks, tokens]: [usize; 2],
        [parts, columns]: [usize; 2],
    ) -> [usize; 2] {
        [chunks * tokens, if self.over_tokens > 0 { parts * columns } else { 0 }]
    }

    /// Blocks along `width` columns.
    pub(in crate::backends) const fn chunks(self, width: usize) -> usize {
        width.div_ceil(self.block_columns())
    }

    /// Shared memory of a block: tiles under way, and what its warps have of the sums over columns.
    pub(in crate::backends) const fn block_bytes(self, tile: usize, stages: usize) -> usize {
        let inputs = TILE_TOKENS * self.inputs * self.block_columns();
        let low = TILE_TOKENS * (self.over_tokens * tile + 8);
        stages * (inputs + low) * 2 + 2 * LOW_RANK_WARPS * TILE_TOKENS * self.over_columns * tile * 4
    }
}

/// Tiles under way of the passes over inputs and gradients of outputs, where a block may have this much shared memory; `None` if there is
/// too little for any.
pub(in crate::backends) fn stages(tile: usize, shared_bytes: usize) -> Option<usize> {
    let passes = [LowRankPass::INPUT, LowRankPass::output_gradient(tile)];
    let fits = |stages: &usize| passes.iter().all(|pass| pass.block_bytes(tile, *stages) <= shared_bytes);
    (2..=MAX_STAGES).rev().find(fits)
}

/// The same of pieces of columns of the warps of passes over gated activations.
pub(in crate::backends) fn gated_pieces(shared_bytes: usize) -> Option<usize> {
    let passes = |pieces: &usize| [LowRankPass::gated(*pieces), LowRankPass::gated_backward(*pieces)];
    let fits = |pass: &LowRankPass| pass.block_bytes(GATED_TILE, GATED_STAGES) <= shared_bytes;
    (1..=GATED_PIECES).rev().find(|pieces| passes(pieces).iter().all(fits))
}

/// Of `tokens`, how many a pass over gated activations of this width takes at a time: all, or equal shares.
pub(in crate::backends) fn gated_tokens(pass: LowRankPass, tokens: usize, width: usize) -> usize {
    let each = pass.over_columns * pass.chunks(width) * GATED_TILE * 4;
    let rounds = (tokens * each).div_ceil(GATED_PARTS_BYTES).max(1);
    tokens.div_ceil(rounds).next_multiple_of(16)
}

/// Into how many parts tokens are cut, so that `chunks` blocks for each keep `multiprocessors` busy to the end.
pub(in crate::backends) fn parts_of_tokens(tokens: usize, chunks: usize, multiprocessors: usize) -> usize {
    // Fewer parts have less to write. Memory is the limit where most of the multiprocessors have a block.
    let at_memory_rate = (chunks * tokens) as f64 / (BUSY * multiprocessors as f64);
    let time = |parts: &usize| {
        let waves = (chunks * parts).div_ceil(multiprocessors);
        ((waves * (tokens.div_ceil(*parts) + BLOCK_OVERHEAD)) as f64).max(at_memory_rate)
    };
    let most = (WAVES * multiprocessors / chunks).max(1);
    (1..=most).min_by(|a, b| time(a).total_cmp(&time(b))).unwrap_or(1)
}

/// The rank that the pass over an output's gradient is compiled for, from those of a group's adapters; `None` where both products
/// with it are GEMMs.
pub(in crate::backends) fn low_rank_tile(ranks: &[usize]) -> Option<usize> {
    let most = *ranks.iter().max()?;
    let fits = ranks.iter().all(|rank| *rank > 0 && rank.is_multiple_of(8)) && most <= 32;
    fits.then(|| most.next_multiple_of(16))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_card_has_passes_that_fit_its_blocks() {
        // H100 and B200, A100, and cards of 8.6, 8.9 and 12.0; older ones.
        for (shared, expected) in [
            (232_448, [Some(3), Some(3), Some(2)]),
            (166_912, [Some(3), Some(3), Some(2)]),
            (101_376, [Some(2), Some(3), Some(1)]),
            (49_152, [None, None, None]),
        ] {
            assert_eq!([stages(16, shared), stages(32, shared), gated_pieces(shared)], expected, "{shared} bytes");
        }
    }

    #[test]
    fn blocks_fill_the_device_once_where_they_can() {
        assert_eq!(parts_of_tokens(12_288, 4, 132), 33);
        assert_eq!(parts_of_tokens(12_288, 6, 132), 22);
        assert_eq!(parts_of_tokens(12_288, 56, 132), 2);
        assert_eq!(parts_of_tokens(512, 32, 132), 4);
        // One block for every second multiprocessor would be too few, and two for some of them too uneven.
        assert_eq!(parts_of_tokens(12_288, 70, 132), 5);
        assert_eq!(parts_of_tokens(12_288, 300, 132), 1);
        assert!(parts_of_tokens(16, 4, 132) <= 33);
    }
}
