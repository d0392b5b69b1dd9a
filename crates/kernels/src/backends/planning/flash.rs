//! Tiles of the flash attention kernels for 16-bit values, the shared memory that they need, and the heads that the kernels support.
//!
//! Both the engine's launches and the plan use this file, with or without the cargo feature `cuda`. Cards of compute capability 7.5 have blocks of
//! 64 KiB, into which smaller tiles fit; heads of 256 have none that fit, and are computed in f32 there.
//! Trade-off: the tiles were chosen by measurements on an H100, the smaller ones by what fits and does not spill registers, without a measurement.

/// Tile sizes of the flash kernels for 16-bit values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::backends) struct FlashTiles {
    /// Queries per block of the forward pass, keys per step, warps.
    pub(in crate::backends) forward: [usize; 3],
    /// Keys per block, queries per step, steps in flight, warps.
    pub(in crate::backends) keys: [usize; 4],
    /// Queries per block, keys per step, steps in flight, warps.
    pub(in crate::backends) queries: [usize; 4],
}

impl FlashTiles {
    /// Returns the largest tiles for heads of this width that fit a block with so many bytes of shared memory; `None` if there are none.
    pub(in crate::backends) fn of(head_dim: usize, shared_bytes: usize) -> Option<Self> {
        let needs = |tiles: &Self| {
            let passes = [tiles.forward_shared(head_dim), tiles.keys_shared(head_dim), tiles.queries_shared(head_dim)];
            passes.into_iter().max().unwrap_or(0)
        };
        Self::choices(head_dim).iter().copied().find(|tiles| needs(tiles) <= shared_bytes)
    }

    /// Lists the tiles for heads of this width, the largest first; none if the kernels do not support them.
    fn choices(head_dim: usize) -> &'static [Self] {
        match head_dim {
            64 => &[
                Self { forward: [128, 64, 4], keys: [64, 64, 2, 4], queries: [128, 64, 2, 4] },
                Self { forward: [128, 64, 4], keys: [64, 64, 2, 4], queries: [64, 64, 2, 4] },
            ],
            96 => &[
                Self { forward: [128, 64, 4], keys: [64, 64, 2, 4], queries: [64, 64, 2, 4] },
                Self { forward: [128, 64, 4], keys: [64, 32, 2, 4], queries: [64, 32, 2, 4] },
            ],
            128 => &[
                Self { forward: [128, 64, 4], keys: [64, 64, 2, 4], queries: [64, 64, 2, 4] },
                Self { forward: [64, 64, 4], keys: [64, 32, 1, 4], queries: [64, 32, 1, 4] },
            ],
            256 => &[Self { forward: [64, 64, 4], keys: [64, 32, 1, 4], queries: [64, 32, 1, 4] }],
            _ => &[],
        }
    }

    /// Returns the shared memory, in bytes, of a block of the forward pass.
    pub(in crate::backends) fn forward_shared(&self, head_dim: usize) -> usize {
        let [queries, keys, _] = self.forward;
        2 * head_dim * (queries + 2 * keys) + 4 * queries
    }

    /// Returns the shared memory, in bytes, of a block of the backward pass over keys.
    pub(in crate::backends) fn keys_shared(&self, head_dim: usize) -> usize {
        let [own, step, stages, _] = self.keys;
        4 * head_dim * (own + stages * step) + 8 * stages * step + 4 * own
    }

    /// Returns the shared memory, in bytes, of a block of the backward pass over queries.
    pub(in crate::backends) fn queries_shared(&self, head_dim: usize) -> usize {
        let [own, step, stages, _] = self.queries;
        4 * head_dim * (own + stages * step) + 4 * own
    }
}

/// Returns whether the f32 flash kernels support heads of this width, on every card.
pub(in crate::backends) fn flash_takes_f32(head_dim: usize) -> bool {
    head_dim.is_multiple_of(32) && head_dim <= 256
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the shared memory of all three passes, with the tiles for such a block.
    fn bytes(head_dim: usize, shared_bytes: usize) -> Option<[usize; 3]> {
        let of = FlashTiles::of(head_dim, shared_bytes)?;
        Some([of.forward_shared(head_dim), of.keys_shared(head_dim), of.queries_shared(head_dim)])
    }

    #[test]
    fn shared_memory_is_what_the_sources_say() {
        for shared_bytes in [101_376, 166_912, 232_448] {
            let bytes = |head_dim| bytes(head_dim, shared_bytes).expect("a width with tiles");
            assert_eq!(bytes(64), [33_280, 50_432, 66_048]);
            assert_eq!(bytes(96), [49_664, 75_008, 73_984]);
            assert_eq!(bytes(128), [66_048, 99_584, 98_560]);
            assert_eq!(bytes(256), [98_560, 98_816, 98_560]);
        }
    }

    #[test]
    fn a_block_of_a_t4_has_smaller_tiles_and_none_for_the_widest_heads() {
        let on_t4 = |head_dim| bytes(head_dim, 65_536);
        assert_eq!(on_t4(64), Some([33_280, 50_432, 49_408]));
        assert_eq!(on_t4(96), Some([49_664, 49_920, 49_408]));
        assert_eq!(on_t4(128), Some([49_408, 49_664, 49_408]));
        assert_eq!(on_t4(256), None);
        assert_eq!(bytes(64, 49_152), None, "a block that did not ask for more than the usual 48 KiB");
    }
}
