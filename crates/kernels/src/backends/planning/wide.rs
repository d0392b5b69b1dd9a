//! Tiles of queries whose scores are in memory at once: attention of heads that are too wide for any fused kernel.
//!
//! Both the engine's launches and the plan use this file. A tile's scores are two GEMMs and a softmax away from its outputs, in memory that all tiles
//! share. Larger tiles compute more scores that the causal mask hides, smaller ones leave GEMMs that do not fill a card.
//! Trade-off: each score goes through memory, in f32 and rounded, in the forward and, with its gradient, in the backward.

use firebrick_arch::{AttentionSpec, ModelSpec};

use crate::memory::training_shape::TrainingShape;

/// Heads up to this width have fused kernels.
pub(in crate::backends) const FUSED_HEAD_DIM: usize = 256;
/// Bytes of the scores of a tile in f32, unless its smallest number of queries needs more.
const SCORE_BYTES: usize = 128 << 20;
/// Most and fewest tokens of a tile.
const TOKENS: [usize; 2] = [512, 16];
/// The number of a tile's keys is a multiple of this where there are as many, so that few GEMMs differ.
pub(in crate::backends) const KEY_STEP: usize = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::backends) struct WideTiles {
    /// Tokens of a tile; each has a query for every head that shares a key.
    pub(in crate::backends) tokens: usize,
    /// Most keys of a tile, and values from one row of scores to the next.
    pub(in crate::backends) keys: usize,
    /// Query heads per key head.
    pub(in crate::backends) group: usize,
}

impl WideTiles {
    /// Chooses the tiles of `tokens` tokens in documents of up to `longest`, of which a query sees up to `seen` keys.
    pub(in crate::backends) fn new(group: usize, [tokens, longest, seen]: [usize; 3]) -> Self {
        // A tile may begin inside a document.
        let keys = |of_tile: usize| (longest.min(seen) + of_tile + KEY_STEP).min(tokens).next_multiple_of(KEY_STEP);
        let fits = SCORE_BYTES / (4 * group * keys(TOKENS[0]));
        let of_tile =
            (fits.clamp(TOKENS[1], TOKENS[0]) / TOKENS[1] * TOKENS[1]).min(tokens.next_multiple_of(TOKENS[1]));
        Self { tokens: of_tile, keys: keys(of_tile), group }
    }

    pub(in crate::backends) fn scores(&self) -> usize {
        self.tokens * self.group * self.keys
    }

    /// Returns the bytes of the scores with what is computed from them, for values of `element` bytes.
    pub(in crate::backends) fn bytes(&self, element: usize, backward: bool) -> usize {
        self.scores() * (4 + element) * if backward { 2 } else { 1 }
    }
}

/// Returns the bytes of a pass of the widest attention of a model besides its inputs and outputs; 0 if fused kernels take all.
pub(super) fn wide_bytes(model: &ModelSpec, training: &TrainingShape, backward: bool) -> u64 {
    let wide = model.attentions().filter(|attention| attention.head_dim > FUSED_HEAD_DIM);
    let element = training.activation_bytes();
    let of = |attention: &AttentionSpec| {
        let (tokens, group) = (training.tokens() as usize, attention.heads / attention.kv_heads);
        let seen = attention.window.unwrap_or(usize::MAX);
        let tiles = WideTiles::new(group, [tokens, training.longest_document, seen]);
        // Queries of a key head and what belongs to them; and sums of gradients of keys and values in f32.
        let (queries, sums) = if backward { (3, 2 * 4) } else { (2, 0) };
        let rows = tokens * attention.head_dim;
        (tiles.bytes(element as usize, backward) + rows * sums) as u64 + (rows * group * queries) as u64 * element
    };
    wide.map(of).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_take_what_scores_may_take() {
        let tiles = |group, sizes| WideTiles::new(group, sizes);
        assert_eq!(tiles(4, [16_384, 4096, usize::MAX]), WideTiles { tokens: 512, keys: 4672, group: 4 });
        // One row of 131,072 tokens.
        let long = tiles(8, [131_072, 131_072, usize::MAX]);
        assert_eq!((long.tokens, long.keys), (32, 131_072));
        assert!(4 * long.scores() <= SCORE_BYTES);
        assert_eq!(tiles(2, [20, 20, usize::MAX]), WideTiles { tokens: 32, keys: 64, group: 2 });
        assert_eq!(tiles(2, [16_384, 16_384, 1024]).keys, 1600);
    }
}
