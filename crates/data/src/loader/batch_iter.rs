//! Assigns rows to micro-batches: the sequence that all ranks share, divided into batches, ranks and workers.
//!
//! A cursor counts rows, not batches, so that a run can resume with other batch sizes. Everything is computed from the position, so skipping to any
//! batch costs only the order of its epoch. Trade-off: a batch at the end of an epoch contains rows of the next one.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::order::EpochOrders;
use crate::batch::Batch;

/// The position of the next row in the sequence that all ranks share. Saved in checkpoints.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cursor {
    /// Completed epochs.
    pub epoch: u64,
    /// Completed rows of this epoch, over all ranks; less than the rows of an epoch.
    pub row: u64,
}

/// Options that determine how rows become micro-batches.
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
    pub(super) fn rows_of_all_ranks(&self) -> u64 {
        (self.rows_per_batch * self.world_size) as u64
    }
}

/// The micro-batches of one rank that one worker builds: every `stride`-th.
pub(super) struct BatchIter {
    pub(super) orders: Arc<EpochOrders>,
    pub(super) config: LoaderConfig,
    /// Rows before the next batch, over all epochs and ranks.
    pub(super) position: u64,
    pub(super) stride: u64,
    pub(super) end: Option<u64>,
    /// The current epoch and its rows.
    pub(super) order: Option<(u64, Arc<[u32]>)>,
}

impl Iterator for BatchIter {
    type Item = (Batch, Cursor);

    fn next(&mut self) -> Option<Self::Item> {
        let full = self.config.rows_of_all_ranks();
        let left = self.end.map_or(full, |end| end.saturating_sub(self.position));
        if left == 0 {
            return None;
        }
        let taken = left.min(full);
        let (rank, ranks) = (self.config.rank as u64, self.config.world_size as u64);
        let own = self.position + taken * rank / ranks..self.position + taken * (rank + 1) / ranks;
        let rows: Vec<usize> = own.map(|position| self.row_at(position)).collect();
        let after = self.position + taken;
        self.position += full * self.stride;
        let dataset = &self.orders.dataset;
        let rows_per_epoch = dataset.rows() as u64;
        let cursor = Cursor { epoch: after / rows_per_epoch, row: after % rows_per_epoch };
        Some((dataset.batch(&rows), cursor))
    }
}

impl BatchIter {
    fn row_at(&mut self, position: u64) -> usize {
        let rows = self.orders.dataset.rows() as u64;
        let epoch = position / rows;
        let order = match &self.order {
            Some((of, order)) if *of == epoch => order,
            _ => &self.order.insert((epoch, self.orders.get(epoch))).1,
        };
        order[(position % rows) as usize] as usize
    }
}
