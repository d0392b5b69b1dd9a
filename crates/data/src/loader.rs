//! Batches in a fixed, resumable order, made ahead of time on a thread of their own.
//!
//! All ranks walk one sequence of rows, epoch after epoch. A micro-batch takes the next `rows_per_batch * world_size`
//! of them, rank 0 the first `rows_per_batch`, rank 1 the next, and so on. It runs over the end of an epoch into the
//! next, so every micro-batch has the same number of rows but the very last, which has what is left, dealt out evenly;
//! a rank that gets none of it receives one row of padding, so that all ranks see equally many micro-batches.
//!
//! The order of an epoch is a permutation drawn from seed and epoch alone, so a cursor (epoch, row) is all that
//! resuming needs. Gives up reordering within memory limits: rows are all in memory.

use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::{Builder, JoinHandle};

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use serde::{Deserialize, Serialize};

use crate::batch::Batch;
use crate::pack::PackedDataset;

/// The place of the next row in the sequence that all ranks share. Saved in checkpoints.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cursor {
    /// Epochs that are behind.
    pub epoch: u64,
    /// Rows of this epoch that are behind, over all ranks; below the rows of an epoch.
    pub row: u64,
}

/// How rows become micro-batches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoaderConfig {
    /// Rows of a micro-batch of one rank.
    pub rows_per_batch: usize,
    /// Decides the order of each epoch.
    pub seed: u64,
    /// Whether epochs are shuffled; otherwise rows come in the order of the file.
    pub shuffle: bool,
    /// How often each row is seen; without end if absent.
    pub epochs: Option<u64>,
    /// Which of the ranks this is.
    pub rank: usize,
    /// How many ranks there are.
    pub world_size: usize,
    /// Batches made ahead, at least 1.
    pub prefetch: usize,
}

impl LoaderConfig {
    /// Micro-batches (each over all ranks) that `epochs` epochs of `rows` rows make.
    pub fn micro_batches(&self, rows: u64, epochs: u64) -> u64 {
        (rows * epochs).div_ceil(self.rows_of_all_ranks())
    }

    fn rows_of_all_ranks(&self) -> u64 {
        (self.rows_per_batch * self.world_size) as u64
    }
}

/// Hands out batches; the thread that makes them ends when this is dropped.
#[derive(Debug)]
pub struct Loader {
    rows: u64,
    config: LoaderConfig,
    /// Always there, but while dropping.
    receiver: Option<Receiver<(Batch, Cursor)>>,
    worker: Option<JoinHandle<()>>,
}

impl Loader {
    /// Starts at `start`, `Cursor::default()` for a fresh run.
    ///
    /// # Panics
    /// If the configuration has no rows, a rank that does not exist, or the cursor lies outside the epoch: compare
    /// [`PackedDataset::fingerprint`] before resuming.
    pub fn new(dataset: Arc<PackedDataset>, config: LoaderConfig, start: Cursor) -> Self {
        let rows = dataset.rows() as u64;
        assert!(config.rows_per_batch > 0, "rows_per_batch must be at least 1");
        assert!(config.rank < config.world_size, "rank {} of {} ranks", config.rank, config.world_size);
        assert!(start.row < rows, "the cursor is at row {}, an epoch has {rows}: another dataset", start.row);
        let mut walk = Walk {
            position: start.epoch * rows + start.row,
            end: config.epochs.map(|epochs| epochs * rows),
            order: Vec::new(),
            order_epoch: None,
            dataset,
            config: config.clone(),
        };
        let (sender, receiver) = sync_channel(config.prefetch.max(1));
        let make = move || {
            while let Some(made) = walk.next_batch()
                && sender.send(made).is_ok()
            {}
        };
        // Only a machine out of threads refuses one; nothing could be loaded there.
        let worker = Builder::new().name("data-loader".to_owned()).spawn(make).expect("the system refused a thread");
        Self { rows, config, receiver: Some(receiver), worker: Some(worker) }
    }

    /// The next micro-batch of this rank, and the cursor behind it. `None` when the epochs are over.
    pub fn next_batch(&mut self) -> Option<(Batch, Cursor)> {
        let made = self.receiver.as_ref().and_then(|receiver| receiver.recv().ok());
        if made.is_none() {
            self.join();
        }
        made
    }

    /// Rows of an epoch, over all ranks.
    pub fn rows_per_epoch(&self) -> u64 {
        self.rows
    }

    /// Micro-batches that one epoch alone makes; the last may be smaller.
    pub fn micro_batches_per_epoch(&self) -> u64 {
        self.config.micro_batches(self.rows, 1)
    }

    /// Micro-batches from the first to the last; `None` when there is no last.
    pub fn total_micro_batches(&self) -> Option<u64> {
        self.config.epochs.map(|epochs| self.config.micro_batches(self.rows, epochs))
    }

    /// Waits for the thread; its panic, a bug of ours, becomes the caller's.
    fn join(&mut self) {
        if let Some(Err(panic)) = self.worker.take().map(JoinHandle::join) {
            resume_unwind(panic);
        }
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        // Without a receiver the thread's next send fails and it ends.
        self.receiver = None;
        if let Some(worker) = self.worker.take() {
            // A panic of the thread is not repeated while dropping: that would end the process.
            drop(worker.join());
        }
    }
}

/// The sequence of micro-batches of one rank.
struct Walk {
    dataset: Arc<PackedDataset>,
    config: LoaderConfig,
    /// Rows behind, over all epochs and ranks.
    position: u64,
    end: Option<u64>,
    /// The rows of `order_epoch` in the order in which they are shown.
    order: Vec<u32>,
    order_epoch: Option<u64>,
}

impl Walk {
    fn next_batch(&mut self) -> Option<(Batch, Cursor)> {
        let full = self.config.rows_of_all_ranks();
        let left = self.end.map_or(full, |end| end.saturating_sub(self.position));
        if left == 0 {
            return None;
        }
        let taken = left.min(full);
        let (rank, ranks) = (self.config.rank as u64, self.config.world_size as u64);
        let mine = self.position + taken * rank / ranks..self.position + taken * (rank + 1) / ranks;
        let rows: Vec<usize> = mine.map(|position| self.row_at(position)).collect();
        self.position += taken;
        let rows_per_epoch = self.dataset.rows() as u64;
        let cursor = Cursor { epoch: self.position / rows_per_epoch, row: self.position % rows_per_epoch };
        Some((self.dataset.batch(&rows), cursor))
    }

    fn row_at(&mut self, position: u64) -> usize {
        let rows = self.dataset.rows();
        let epoch = position / rows as u64;
        if self.order_epoch != Some(epoch) {
            self.order =
                if self.config.shuffle { shuffled(rows, self.config.seed, epoch) } else { (0..rows as u32).collect() };
            self.order_epoch = Some(epoch);
        }
        self.order[(position % rows as u64) as usize] as usize
    }
}

/// A permutation of `0..rows` from seed and epoch. Written out, because a library's shuffle may change with its version
/// and a run must resume after an update.
fn shuffled(rows: usize, seed: u64, epoch: u64) -> Vec<u32> {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    let mut random = ChaCha8Rng::from_seed(key);
    random.set_stream(epoch);
    let mut order: Vec<u32> = (0..rows as u32).collect();
    for last in (1..rows).rev() {
        // The high half of the product is uniform in 0..=last, but for 1 part in 2^32.
        let pick = (u128::from(random.next_u64()) * (last as u128 + 1)) >> 64;
        order.swap(last, pick as usize);
    }
    order
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::dataset::{Dataset, Example, ReadReport};

    /// One document of two equal tokens a row: the row's number.
    fn dataset(rows: u32) -> Arc<PackedDataset> {
        let example = |row| Example { tokens: vec![row, row], trained: vec![false, true] };
        let dataset = Dataset { examples: (0..rows).map(example).collect(), report: ReadReport::default() };
        Arc::new(PackedDataset::pack(&dataset, 2, true, None))
    }

    fn config() -> LoaderConfig {
        LoaderConfig { rows_per_batch: 3, seed: 7, shuffle: true, epochs: Some(2), rank: 0, world_size: 1, prefetch: 2 }
    }

    fn all(rows: u32, config: LoaderConfig, start: Cursor) -> Vec<(Batch, Cursor)> {
        let mut loader = Loader::new(dataset(rows), config, start);
        std::iter::from_fn(move || loader.next_batch()).collect()
    }

    /// Row numbers of a batch, none for a row of padding.
    fn rows_of(batch: &Batch) -> Vec<u32> {
        let rows = batch.input_ids.chunks(2).zip(batch.targets.chunks(2));
        rows.filter(|(_, targets)| targets[0] >= 0).map(|(ids, _)| ids[0]).collect()
    }

    #[test]
    fn every_epoch_shows_each_row_once_in_an_order_of_its_own() {
        let shown: Vec<u32> =
            all(10, config(), Cursor::default()).iter().flat_map(|(batch, _)| rows_of(batch)).collect();
        let (first, second) = shown.split_at(10);
        assert_ne!(first, second);
        for epoch in [first, second] {
            let mut sorted = epoch.to_vec();
            sorted.sort_unstable();
            assert!(sorted.into_iter().eq(0..10));
        }
    }

    #[test]
    fn batches_run_over_the_end_of_an_epoch_and_only_the_last_is_smaller() {
        let batches = all(10, config(), Cursor::default());
        assert_eq!(batches.iter().map(|(batch, _)| batch.rows).collect::<Vec<_>>(), [3, 3, 3, 3, 3, 3, 2]);
        assert_eq!(batches[3].1, Cursor { epoch: 1, row: 2 });
        assert_eq!(batches[6].1, Cursor { epoch: 2, row: 0 });
    }

    #[test]
    fn same_seed_gives_same_batches_and_another_seed_others() {
        let first = all(10, config(), Cursor::default());
        assert!(first == all(10, LoaderConfig { prefetch: 9, ..config() }, Cursor::default()));
        assert!(first != all(10, LoaderConfig { seed: 8, ..config() }, Cursor::default()));
    }

    #[test]
    fn resuming_from_any_cursor_gives_exactly_the_batches_that_would_have_come() {
        for rows in [1, 2, 5, 10] {
            let config = LoaderConfig { epochs: Some(7), ..config() };
            let whole = all(rows, config.clone(), Cursor::default());
            for (index, (_, cursor)) in whole.iter().enumerate() {
                assert!(all(rows, config.clone(), *cursor) == whole[index + 1..]);
            }
        }
    }

    #[test]
    fn without_shuffle_rows_come_in_order() {
        let batches = all(4, LoaderConfig { shuffle: false, epochs: Some(1), ..config() }, Cursor::default());
        assert_eq!(batches.iter().map(|(batch, _)| rows_of(batch)).collect::<Vec<_>>(), [vec![0, 1, 2], vec![3]]);
    }

    #[test]
    fn ranks_are_disjoint_cover_everything_and_see_equally_many_batches() {
        for (rows, world_size) in [(10, 2), (10, 4), (1, 3), (13, 3)] {
            let mut shown = BTreeMap::new();
            let mut cursors = Vec::new();
            for rank in 0..world_size {
                let batches = all(rows, LoaderConfig { rank, world_size, ..config() }, Cursor::default());
                assert!(batches.iter().all(|(batch, _)| batch.rows > 0));
                batches
                    .iter()
                    .flat_map(|(batch, _)| rows_of(batch))
                    .for_each(|row| *shown.entry(row).or_insert(0) += 1);
                cursors.push(batches.into_iter().map(|(_, cursor)| cursor).collect::<Vec<_>>());
            }
            assert!(shown.into_iter().eq((0..rows).map(|row| (row, 2))), "{rows} rows, {world_size} ranks");
            assert!(cursors.iter().all(|rank| *rank == cursors[0]));
        }
    }

    #[test]
    fn ranks_together_show_what_one_rank_shows_in_one_larger_batch() {
        let one = all(10, LoaderConfig { rows_per_batch: 6, ..config() }, Cursor::default());
        let ranks = [0, 1].map(|rank| all(10, LoaderConfig { rank, world_size: 2, ..config() }, Cursor::default()));
        for (index, (batch, cursor)) in one.iter().enumerate() {
            let [first, second] = ranks.each_ref().map(|rank| &rank[index]);
            assert_eq!(rows_of(batch), [rows_of(&first.0), rows_of(&second.0)].concat());
            assert_eq!(*cursor, first.1);
        }
    }

    #[test]
    fn counts_agree_with_what_comes() {
        for rows in [1, 9, 10] {
            let loader = Loader::new(dataset(rows), config(), Cursor::default());
            let count = all(rows, config(), Cursor::default()).len() as u64;
            assert_eq!(loader.total_micro_batches(), Some(count));
            assert_eq!(loader.micro_batches_per_epoch(), u64::from(rows).div_ceil(3));
            assert_eq!(loader.rows_per_epoch(), u64::from(rows));
        }
    }

    #[test]
    fn finished_cursor_gives_nothing() {
        assert!(all(10, config(), Cursor { epoch: 2, row: 0 }).is_empty());
    }

    #[test]
    fn dropping_the_loader_ends_its_thread() {
        let rows = dataset(10);
        let mut loader = Loader::new(rows.clone(), LoaderConfig { epochs: None, ..config() }, Cursor::default());
        assert!(loader.next_batch().is_some() && loader.total_micro_batches().is_none());
        drop(loader);
        assert_eq!(Arc::strong_count(&rows), 1, "the thread held the other reference");
    }

    #[test]
    fn order_of_an_epoch_never_changes() {
        // Computed from the definition of ChaCha8 in another language.
        assert_eq!(shuffled(8, 42, 3), [7, 2, 1, 0, 6, 5, 4, 3]);
    }
}
