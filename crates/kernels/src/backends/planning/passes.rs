//! Adapter passes on CUDA: how their blocks divide columns and tokens, and which partial sums they write.
//!
//! Both the engine's launches and the memory estimate use this file, with or without the cargo feature `cuda`.
//! Trade-off: the constants that divide the work were measured on an H100.

/// Warps per block of an adapter pass, as in `cuda/linear/adapters/low_rank.cu`.
pub(in crate::backends) const LOW_RANK_WARPS: usize = 8;
/// Columns of one warp piece, as in that file.
const PIECE_COLUMNS: usize = 32;
/// Maximum number of consecutive blocks of such a pass per multiprocessor.
const WAVES: usize = 3;
/// Fixed cost of a block, in tokens: filling the pipeline, and writing its sums.
const BLOCK_OVERHEAD: usize = 128;
/// Fraction of multiprocessors that saturates memory bandwidth.
const BUSY: f64 = 0.8;
/// The rank for which the passes over gated activations are compiled.
pub(in crate::backends) const GATED_TILE: usize = 16;
/// Maximum bytes of their sums over columns at a time; more tokens take several rounds. An 8B has 42 MiB with 12,288 tokens.
const GATED_PARTS_BYTES: usize = 48 << 20;

/// Tokens of a tile in these passes.
pub(in crate::backends) const TILE_TOKENS: usize = 16;
/// Tiles in flight in passes over gated activations.
pub(in crate::backends) const GATED_STAGES: usize = 2;
/// Column pieces per warp in those passes, if the shared memory of a block is sufficient.
const GATED_PIECES: usize = 2;
/// Maximum number of tiles in flight; the device cannot have more bytes of a step in flight.
const MAX_STAGES: usize = 3;

/// Ranks and rows of a block that computes `x Aᵀ` of few rows, as in `cuda/linear/adapters/low_rank_rows.cu`.
pub(in crate::backends) const ROWS_TILE: [usize; 2] = [16, 8];
/// Maximum number of such blocks per multiprocessor that share a tile's columns.
pub(in crate::backends) const BLOCKS_OF_ROWS: usize = 2;

/// Inputs and sums of an adapter pass: `Walk` in `cuda/linear/adapters/low_rank.cu`.
#[derive(Clone, Copy, Debug)]
pub(in crate::backends) struct LowRankPass {
    /// Number of loaded matrices.
    pub inputs: usize,
    /// Column pieces per warp.
    pub pieces: usize,
    /// Number of matrices that are summed over tokens.
    pub over_tokens: usize,
    /// Number of matrices that are summed over columns.
    pub over_columns: usize,
}

impl LowRankPass {
    /// Describes the pass over a group's output gradient; sums over tokens fill 64 registers.
    pub(in crate::backends) const fn output_gradient(tile: usize) -> Self {
        Self { inputs: 1, pieces: 64 / tile, over_tokens: 1, over_columns: 1 }
    }

    /// The pass over a group's input, which is copied.
    pub(in crate::backends) const INPUT: Self = Self { inputs: 1, pieces: 2, over_tokens: 0, over_columns: 1 };

    /// Describes the pass over gate and up that computes the gated activation.
    pub(in crate::backends) const fn gated(pieces: usize) -> Self {
        Self { inputs: 2, pieces: 2 * pieces, over_tokens: 0, over_columns: 1 }
    }

    /// Describes the pass over gate, up and the gradient of the gated activation that computes the gradients of gate and up.
    pub(in crate::backends) const fn gated_backward(pieces: usize) -> Self {
        Self { inputs: 3, pieces, over_tokens: 3, over_columns: 2 }
    }

    pub(in crate::backends) const fn block_columns(self) -> usize {
        LOW_RANK_WARPS * self.pieces * PIECE_COLUMNS
    }

    /// Returns the number of partial sums over columns and over tokens, per rank: with `chunks` blocks along the summed
    /// columns, and `parts` parts of the tokens.
    pub(in crate::backends) const fn sums(
        self,
        [chunks, tokens]: [usize; 2],
        [parts, columns]: [usize; 2],
    ) -> [usize; 2] {
        [chunks * tokens, if self.over_tokens > 0 { parts * columns } else { 0 }]
    }

    /// Returns the blocks along `width` columns.
    pub(in crate::backends) const fn chunks(self, width: usize) -> usize {
        width.div_ceil(self.block_columns())
    }

    /// Returns the shared memory of a block: tiles in flight, and its warps' sums over columns.
    pub(in crate::backends) const fn block_bytes(self, tile: usize, stages: usize) -> usize {
        let inputs = TILE_TOKENS * self.inputs * self.block_columns();
        let low = TILE_TOKENS * (self.over_tokens * tile + 8);
        stages * (inputs + low) * 2 + 2 * LOW_RANK_WARPS * TILE_TOKENS * self.over_columns * tile * 4
    }
}

/// Returns the tiles in flight for the passes over inputs and output gradients, given the shared memory of a block;
/// `None` if it is too small for any.
pub(in crate::backends) fn stages(tile: usize, shared_bytes: usize) -> Option<usize> {
    let passes = [LowRankPass::INPUT, LowRankPass::output_gradient(tile)];
    let fits = |stages: &usize| passes.iter().all(|pass| pass.block_bytes(tile, *stages) <= shared_bytes);
    (2..=MAX_STAGES).rev().find(fits)
}

/// Returns the column pieces per warp for the passes over gated activations, in the same way.
pub(in crate::backends) fn gated_pieces(shared_bytes: usize) -> Option<usize> {
    let passes = |pieces: &usize| [LowRankPass::gated(*pieces), LowRankPass::gated_backward(*pieces)];
    let fits = |pass: &LowRankPass| pass.block_bytes(GATED_TILE, GATED_STAGES) <= shared_bytes;
    (1..=GATED_PIECES).rev().find(|pieces| passes(pieces).iter().all(fits))
}

/// Returns how many of `tokens` a pass over gated activations of this width processes at a time: all, or equal shares.
pub(in crate::backends) fn gated_tokens(pass: LowRankPass, tokens: usize, width: usize) -> usize {
    let each = pass.over_columns * pass.chunks(width) * GATED_TILE * 4;
    let rounds = (tokens * each).div_ceil(GATED_PARTS_BYTES).max(1);
    tokens.div_ceil(rounds).next_multiple_of(16)
}

/// Returns the number of parts of the tokens for which `chunks` blocks per part keep `multiprocessors` busy to the end.
pub(in crate::backends) fn parts_of_tokens(tokens: usize, chunks: usize, multiprocessors: usize) -> usize {
    // Fewer parts write less. Memory bandwidth is the limit once most multiprocessors have a block.
    let at_memory_rate = (chunks * tokens) as f64 / (BUSY * multiprocessors as f64);
    let time = |parts: &usize| {
        let waves = (chunks * parts).div_ceil(multiprocessors);
        ((waves * (tokens.div_ceil(*parts) + BLOCK_OVERHEAD)) as f64).max(at_memory_rate)
    };
    let most = (WAVES * multiprocessors / chunks).max(1);
    (1..=most).min_by(|a, b| time(a).total_cmp(&time(b))).unwrap_or(1)
}

/// Returns the bytes of such blocks' sums at most: every block has a tile, and blocks of all columns have none.
pub(in crate::backends) const fn part_bytes(multiprocessors: usize) -> usize {
    BLOCKS_OF_ROWS * multiprocessors * ROWS_TILE[0] * ROWS_TILE[1] * 4
}

/// Returns the rank for which the pass over an output's gradient is compiled, from the ranks of a group's adapters;
/// `None` if both GEMMs with that gradient are separate.
pub(in crate::backends) fn low_rank_tile(ranks: &[usize]) -> Option<usize> {
    let most = *ranks.iter().max()?;
    let fits = ranks.iter().all(|rank| *rank > 0 && rank.is_multiple_of(8)) && most <= 32;
    fits.then(|| most.next_multiple_of(16))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passes_fit_the_blocks_of_their_card_or_there_are_none() {
        // H100 and B200, A100, and cards of compute capability 8.6, 8.9 and 12.0; those of 7.5, whose adapters run as separate GEMMs; older ones.
        for (shared, expected) in [
            (232_448, [Some(3), Some(3), Some(2)]),
            (166_912, [Some(3), Some(3), Some(2)]),
            (101_376, [Some(2), Some(3), Some(1)]),
            (65_536, [None, None, None]),
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
        // One block for every second multiprocessor would be too few, and two for some of them too unbalanced.
        assert_eq!(parts_of_tokens(12_288, 70, 132), 5);
        assert_eq!(parts_of_tokens(12_288, 300, 132), 1);
        assert!(parts_of_tokens(16, 4, 132) <= 33);
    }
}
