//! Numbers shared by kernels and their launches: constants here, macros of the same names in the sources.
//!
//! Not supported: threads per block of other kernels whose launch bounds state them.

use burn_tensor::DType;
use firebrick_precision::blockwise::BLOCK_SIZE;

use crate::backends::planning::flash::FlashTiles;

/// Defines constants, and a function that defines them for a source.
macro_rules! shared {
    ($source:ident: $($(#[$doc:meta])+ $name:ident = $value:expr;)+) => {
        $($(#[$doc])+ pub(crate) const $name: usize = $value;)+

        pub(super) fn $source() -> String {
            [$((stringify!($name), $name)),+].map(|(name, value)| format!("#define {name} {value}\n")).concat()
        }
    };
}

shared! { columns:
    /// Columns per block of `column_sums`.
    SUMMED_COLUMNS = 256;
}

shared! { cross_entropy:
    /// Threads per block over a row of logits.
    CROSS_ENTROPY_THREADS = 1024;
}

shared! { elementwise:
    /// Rows with fewer bytes share a block of a copy.
    NARROW_BYTES = 256 * 16;
}

shared! { optimizer:
    /// Tensors per launch.
    MAX_TENSORS = 64;
    /// Tensors in bf16 per launch: there are more pointers for each, and all arguments have 4 KiB.
    NARROW_TENSORS = 32;
    /// Values that one block of the norm kernel sums.
    NORM_PIECE = 16_384;
    /// Values that one block adds to its range.
    RANGE_PIECE = 2_048;
    /// Values that one block of AdamW updates.
    ADAMW_PIECE = 2_048;
    /// Values per scale of an 8-bit moment.
    MOMENT_BLOCK = BLOCK_SIZE;
}

shared! { packed_index:
    /// Maximum row strides of the tensors in a pass.
    MAX_STRIDES = 12;
}

shared! { pairs:
    /// Threads of the single block over all pairs.
    PAIR_THREADS = 1024;
}

shared! { routing:
    /// Maximum experts of the kernel that chooses them.
    MAX_EXPERTS = 1024;
    /// Tokens per block, one per warp.
    TOKENS_PER_BLOCK = 8;
    /// Rows that a block copies to experts.
    DISPATCHED_ROWS = 4;
}

/// Returns the heads of one key/value head that a block of the cached attention computes, limited by registers.
pub(crate) fn cached_queries(head_dim: usize) -> usize {
    if head_dim >= 256 { 2 } else { 4 }
}

/// Returns whether the cached attention computes on matrix units: 16 bits, and heads whose columns a warp reads in vectors.
fn is_on_matrix_units(dtype: DType, head_dim: usize) -> bool {
    dtype != DType::F32 && head_dim.is_multiple_of(64) && head_dim <= 128
}

/// Returns the threads of a block of the cached attention. Blocks of 64 sequences with eight key/value heads start at once on a large card.
pub(crate) fn cached_threads(dtype: DType, head_dim: usize) -> usize {
    if is_on_matrix_units(dtype, head_dim) { 128 } else { 256 }
}

/// Defines all of these for the source of the cached attention.
pub(super) fn cached_attention(dtype: DType, head_dim: usize) -> String {
    let (queries, threads) = (cached_queries(head_dim), cached_threads(dtype, head_dim));
    let on_matrix_units = u8::from(is_on_matrix_units(dtype, head_dim));
    format!(
        "#define CACHED_QUERIES {queries}\n#define CACHED_THREADS {threads}\n#define ON_MATRIX_UNITS {on_matrix_units}\n"
    )
}

impl FlashTiles {
    /// Defines the tiles for the sources of the flash kernels.
    pub(super) fn define(&self) -> String {
        let [queries, keys, warps] = self.forward;
        let forward = [("FORWARD_QUERIES", queries), ("FORWARD_KEYS", keys), ("FORWARD_WARPS", warps)];
        let backward = [("KEYS", self.keys), ("QUERIES", self.queries)].map(|(of, [own, step, stages, warps])| {
            format!("#define FLASH_{of}_OWN {own}\n#define FLASH_{of}_STEP {step}\n")
                + &format!("#define FLASH_{of}_STAGES {stages}\n#define FLASH_{of}_WARPS {warps}\n")
        });
        forward.map(|(name, value)| format!("#define FLASH_{name} {value}\n")).concat() + &backward.concat()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_get_each_constant_as_a_macro_of_its_name() {
        assert_eq!(routing(), "#define MAX_EXPERTS 1024\n#define TOKENS_PER_BLOCK 8\n#define DISPATCHED_ROWS 4\n");
        let tiles = FlashTiles::of(64, 101_376).expect("a width with tiles").define();
        assert!(tiles.contains("#define FLASH_FORWARD_KEYS 64\n") && tiles.contains("#define FLASH_QUERIES_OWN 128\n"));
        assert_eq!(tiles.lines().count(), 11);
    }
}
