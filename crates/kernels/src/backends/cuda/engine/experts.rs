//! The rows of experts, as GEMMs over them take them. `cuda/moe/grouped.rs` launches those GEMMs.

/// Shared memory of a block, in bytes, that three stages of a product of experts need.
const EXPERTS_SHARED_BYTES: usize = 3 * 32_768 + 1024;
/// Stages of tiles in shared memory of the Hopper kernel.
pub(in crate::backends::cuda) const WIDE_STAGES: usize = 4;

/// The rows of experts, and the matrices that they are multiplied with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OfExperts {
    /// Number of experts.
    pub count: usize,
    /// Address of the first row of each, and of the end, i32.
    pub starts: u64,
    /// Address and number of the tiles of rows.
    pub tiles: [u64; 2],
    /// Values from one expert's matrix to the next.
    pub matrix_stride: usize,
}

impl OfExperts {
    /// Returns the same rows for matrices at another distance.
    pub(crate) fn with_matrices(self, matrix_stride: usize) -> Self {
        Self { matrix_stride, ..self }
    }
}

/// Returns the stages of tiles in shared memory: fewer on cards that have little of it.
pub(in crate::backends::cuda) fn expert_stages(shared_bytes: usize) -> usize {
    if shared_bytes >= EXPERTS_SHARED_BYTES { 3 } else { 2 }
}
