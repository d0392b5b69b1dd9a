//! Tiles of the flash attention kernels for 16-bit values, the shared memory that they need, and the heads that the kernels support.
//!
//! Both the engine's launches and the plan use this file, with or without the cargo feature `cuda`.
//! Trade-off: the tiles were chosen by measurements on an H100.

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
    /// Returns the tiles for heads of this width; `None` if the kernels do not support them.
    pub(in crate::backends) fn of(head_dim: usize) -> Option<Self> {
        Some(match head_dim {
            64 => Self { forward: [128, 64, 4], keys: [64, 64, 2, 4], queries: [128, 64, 2, 4] },
            96 | 128 => Self { forward: [128, 64, 4], keys: [64, 64, 2, 4], queries: [64, 64, 2, 4] },
            256 => Self { forward: [64, 64, 4], keys: [64, 32, 1, 4], queries: [64, 32, 1, 4] },
            _ => return None,
        })
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

/// Returns whether the flash kernels support heads of this width, in f32 or in a 16-bit format.
pub(in crate::backends) fn flash_takes(is_f32: bool, head_dim: usize) -> bool {
    if is_f32 { head_dim.is_multiple_of(32) && head_dim <= 256 } else { FlashTiles::of(head_dim).is_some() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_memory_is_what_the_sources_say() {
        let bytes = |head_dim| {
            let of = FlashTiles::of(head_dim).expect("a width with tiles");
            [of.forward_shared(head_dim), of.keys_shared(head_dim), of.queries_shared(head_dim)]
        };
        assert_eq!(bytes(64), [33_280, 50_432, 66_048]);
        assert_eq!(bytes(96), [49_664, 75_008, 73_984]);
        assert_eq!(bytes(128), [66_048, 99_584, 98_560]);
        assert_eq!(bytes(256), [98_560, 98_816, 98_560]);
    }
}
