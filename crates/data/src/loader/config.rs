//! How rows become micro-batches, and the position in their sequence.
//!
//! Trade-off: a cursor counts rows, not batches, so that a run can resume with other batch sizes.

use serde::{Deserialize, Serialize};

/// The position of the next row in the sequence that all ranks share. Saved in checkpoints.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cursor {
    /// Completed epochs.
    pub epoch: u64,
    /// Completed rows of this epoch, over all ranks; less than the rows of an epoch.
    pub row: u64,
}

/// How rows become micro-batches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoaderConfig {
    /// Rows per micro-batch and rank.
    pub rows_per_batch: usize,
    /// Determines the order of each epoch.
    pub seed: u64,
    /// Whether epochs are shuffled; otherwise rows keep the order of the data.
    pub shuffle: bool,
    /// Number of epochs; unlimited if absent.
    pub epochs: Option<u64>,
    /// Rank of this process.
    pub rank: usize,
    /// Number of ranks.
    pub world_size: usize,
    /// Batches to prefetch, at least 1.
    pub prefetch: usize,
    /// Threads that build batches, at least 1. Their number does not change the output.
    pub workers: usize,
}

impl LoaderConfig {
    /// Micro-batches (each over all ranks) in `epochs` epochs of `rows` rows.
    pub fn micro_batches(&self, rows: u64, epochs: u64) -> u64 {
        (rows * epochs).div_ceil(self.rows_of_all_ranks())
    }

    pub(super) fn rows_of_all_ranks(&self) -> u64 {
        (self.rows_per_batch * self.world_size) as u64
    }
}
