//! Which rows each micro-batch has: the sequence that all ranks share, cut into batches, ranks and workers.
//!
//! Everything is computed from the position, so skipping to any batch costs nothing but the order of its epoch. Gives up
//! keeping the rows of an epoch's end out of the batch that the next epoch begins with.

use std::sync::Arc;

use crate::batch::Batch;

use super::order::Orders;
use super::{Cursor, LoaderConfig};

/// The micro-batches of one rank that one worker makes: every `stride`-th.
pub(super) struct Walk {
    pub(super) orders: Arc<Orders>,
    pub(super) config: LoaderConfig,
    /// Rows before the next batch, over all epochs and ranks.
    pub(super) position: u64,
    pub(super) stride: u64,
    pub(super) end: Option<u64>,
    /// The epoch at hand and its rows.
    pub(super) order: Option<(u64, Arc<[u32]>)>,
}

impl Walk {
    pub(super) fn next_batch(&mut self) -> Option<(Batch, Cursor)> {
        let full = self.config.rows_of_all_ranks();
        let left = self.end.map_or(full, |end| end.saturating_sub(self.position));
        if left == 0 {
            return None;
        }
        let taken = left.min(full);
        let (rank, ranks) = (self.config.rank as u64, self.config.world_size as u64);
        let mine = self.position + taken * rank / ranks..self.position + taken * (rank + 1) / ranks;
        let rows: Vec<usize> = mine.map(|position| self.row_at(position)).collect();
        let after = self.position + taken;
        self.position += full * self.stride;
        let dataset = self.orders.dataset();
        let rows_per_epoch = dataset.rows() as u64;
        let cursor = Cursor { epoch: after / rows_per_epoch, row: after % rows_per_epoch };
        Some((dataset.batch(&rows), cursor))
    }

    fn row_at(&mut self, position: u64) -> usize {
        let rows = self.orders.dataset().rows() as u64;
        let epoch = position / rows;
        let order = match &self.order {
            Some((of, order)) if *of == epoch => order,
            _ => &self.order.insert((epoch, self.orders.of(epoch))).1,
        };
        order[(position % rows) as usize] as usize
    }
}
