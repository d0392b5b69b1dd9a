//! Batches in a fixed, resumable order, built ahead of time on worker threads.
//!
//! All ranks walk one sequence of rows, epoch after epoch. A micro-batch takes the next `rows_per_batch * world_size` of them, rank 0 the first
//! `rows_per_batch`, rank 1 the next, and so on. It continues across the end of an epoch, so every micro-batch has the same number of rows except the
//! last of the run, whose remaining rows are divided evenly; a rank that gets none of them receives one row of padding, so that all ranks see the
//! same number of micro-batches.
//!
//! The order of an epoch depends only on seed and epoch (`order.rs`), so resuming needs only a cursor (epoch, row), with any number of rows, ranks or
//! workers. Micro-batch `n` is built by worker `n % workers` and taken from it, so the output never depends on timing. Trade-off: ranks do unequal
//! work if rows have different lengths.

use std::any::Any;
use std::panic::resume_unwind;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use crate::batch::Batch;
use crate::pack::PackedDataset;

mod batch_iter;
mod order;

use batch_iter::BatchIter;
pub use batch_iter::{Cursor, LoaderConfig};
use order::EpochOrders;

/// A micro-batch that takes longer is reported.
const PATIENCE: Duration = Duration::from_secs(10);

/// Returns batches that its threads build; they end when it is dropped.
#[derive(Debug)]
pub struct Loader {
    /// The worker that has the next batch.
    next: usize,
    /// Empty once the epochs are over.
    workers: Vec<Worker>,
    /// The file that rows are read from; `None` in memory.
    file: Option<PathBuf>,
}

#[derive(Debug)]
struct Worker {
    batches: Receiver<(Batch, Cursor)>,
    thread: JoinHandle<()>,
}

/// Rows in the order in which a [`Loader`] shows them, for callers that need their numbers.
pub struct RowOrder(EpochOrders);

impl RowOrder {
    /// Creates the order that a loader of these rows has with this seed.
    pub fn new(dataset: Arc<PackedDataset>, seed: u64, shuffle: bool) -> Self {
        Self(EpochOrders::new(dataset, seed, shuffle))
    }

    /// Returns the `count` rows from a cursor on, over the ends of epochs, and the cursor after them.
    pub fn take(&self, start: Cursor, count: usize) -> (Vec<usize>, Cursor) {
        let rows = self.0.dataset.rows() as u64;
        let first = start.epoch * rows + start.row;
        let row = |position: u64| self.0.get(position / rows)[(position % rows) as usize] as usize;
        let after = first + count as u64;
        ((first..after).map(row).collect(), Cursor { epoch: after / rows, row: after % rows })
    }
}

impl Loader {
    /// Starts at `start`; `Cursor::default()` for a new run. Panics if the configuration has no rows or no workers, the rank does not exist, or the
    /// cursor is outside the epoch: compare [`PackedDataset::fingerprint`] before resuming.
    pub fn new(dataset: Arc<PackedDataset>, config: LoaderConfig, start: Cursor) -> Self {
        let rows = dataset.rows() as u64;
        assert!(config.rows_per_batch > 0, "rows_per_batch must be at least 1");
        assert!(config.rank < config.world_size, "rank {} of {} ranks", config.rank, config.world_size);
        assert!(
            start.row < rows,
            "the cursor is at row {}, but an epoch has {rows} rows: it belongs to another dataset",
            start.row
        );
        let workers = config.workers;
        assert!(workers > 0, "a loader needs a worker");
        let file = dataset.documents().store().path().map(PathBuf::from);
        let orders = Arc::new(EpochOrders::new(dataset, config.seed, config.shuffle));
        let depth = config.prefetch.div_ceil(workers).max(1);
        let start = start.epoch * rows + start.row;
        let batches = |worker: usize| BatchIter {
            position: start + worker as u64 * config.rows_of_all_ranks(),
            stride: workers as u64,
            end: config.epochs.map(|epochs| epochs * rows),
            order: None,
            orders: orders.clone(),
            config: config.clone(),
        };
        let workers = (0..workers).map(|worker| Worker::spawn(batches(worker), depth)).collect();
        Self { next: 0, workers, file }
    }

    /// Returns the next micro-batch of this rank and the cursor after it; `None` when the epochs are over. Warns where it has to wait long.
    pub fn next_batch(&mut self) -> Option<(Batch, Cursor)> {
        let batches = &self.workers.get(self.next)?.batches;
        let received = match batches.recv_timeout(PATIENCE) {
            Err(RecvTimeoutError::Timeout) => {
                let (number, all, seconds) = (self.next + 1, self.workers.len(), PATIENCE.as_secs());
                let file = self.file.as_ref().map_or_else(|| "memory".to_owned(), |file| file.display().to_string());
                tracing::warn!(
                    "loader thread {number} of {all}, which reads rows from {file}, has returned none for {seconds} s: is the disk slow or \
                     gone? It is waited for"
                );
                batches.recv().ok()
            }
            received => received.ok(),
        };
        self.next = (self.next + 1) % self.workers.len();
        // The threads have ended. If one panicked, which is our bug, the caller panics with the same payload.
        if received.is_none()
            && let Some(panic) = end(&mut self.workers).pop()
        {
            resume_unwind(panic);
        }
        received
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        // A panic of a thread is not repeated while dropping: that would abort the process.
        drop(end(&mut self.workers));
    }
}

/// Ends threads and returns their panics. Without a receiver a thread's next send fails and it ends.
fn end(workers: &mut Vec<Worker>) -> Vec<Box<dyn Any + Send>> {
    let threads: Vec<_> = workers.drain(..).map(|worker| worker.thread).collect();
    threads.into_iter().filter_map(|thread| thread.join().err()).collect()
}

impl Worker {
    fn spawn(batches: BatchIter, depth: usize) -> Self {
        let (sender, receiver) = sync_channel(depth);
        let build = move || {
            for batch in batches {
                if sender.send(batch).is_err() {
                    return;
                }
            }
        };
        // A system refuses a thread only if it has none free; then nothing could be loaded.
        let thread = Builder::new().name("data-loader".to_owned()).spawn(build).expect("the system refused a thread");
        Self { batches: receiver, thread }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::cache::{DocumentSet, Example};
    use crate::pack::PackOptions;

    fn packed(examples: Vec<Example>, max_seq_len: usize, pack: bool) -> Arc<PackedDataset> {
        let options = PackOptions { pack, ..PackOptions::new(max_seq_len) };
        Arc::new(PackedDataset::new(DocumentSet::from_examples(&examples), options))
    }

    /// Returns rows of one document with two equal tokens: the row's number.
    fn dataset(rows: u32) -> Arc<PackedDataset> {
        let example = |row| Example { tokens: vec![row, row], loss_mask: vec![false, true] };
        packed((0..rows).map(example).collect(), 2, true)
    }

    fn config() -> LoaderConfig {
        LoaderConfig {
            rows_per_batch: 3,
            seed: 7,
            shuffle: true,
            epochs: Some(2),
            rank: 0,
            world_size: 1,
            prefetch: 2,
            workers: 1,
        }
    }

    fn all_of(dataset: Arc<PackedDataset>, config: LoaderConfig, start: Cursor) -> Vec<(Batch, Cursor)> {
        let mut loader = Loader::new(dataset, config, start);
        std::iter::from_fn(move || loader.next_batch()).collect()
    }

    fn all(rows: u32, config: LoaderConfig, start: Cursor) -> Vec<(Batch, Cursor)> {
        all_of(dataset(rows), config, start)
    }

    /// Returns the first token of each row.
    fn firsts(batches: &[(Batch, Cursor)]) -> Vec<u32> {
        batches.iter().flat_map(|(batch, _)| batch.input_ids.chunks(batch.row_len).map(|row| row[0])).collect()
    }

    /// Returns the row numbers of a batch; none for a row of padding.
    fn rows_of(batch: &Batch) -> Vec<u32> {
        let rows = batch.input_ids.chunks(2).zip(batch.targets.chunks(2));
        rows.filter(|(_, targets)| targets[0] >= 0).map(|(ids, _)| ids[0]).collect()
    }

    #[test]
    fn every_epoch_shows_each_row_once_in_another_order() {
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
    fn batches_cross_epochs_and_only_the_last_is_smaller() {
        let batches = all(10, config(), Cursor::default());
        assert_eq!(batches.iter().map(|(batch, _)| batch.rows).collect::<Vec<_>>(), [3, 3, 3, 3, 3, 3, 2]);
        assert_eq!(batches[3].1, Cursor { epoch: 1, row: 2 });
        assert_eq!(batches[6].1, Cursor { epoch: 2, row: 0 });
        assert!(all(10, config(), batches[6].1).is_empty());
    }

    #[test]
    fn the_seed_determines_the_batches() {
        let first = all(10, config(), Cursor::default());
        assert!(first == all(10, LoaderConfig { prefetch: 9, ..config() }, Cursor::default()));
        assert!(first != all(10, LoaderConfig { seed: 8, ..config() }, Cursor::default()));
    }

    /// Returns documents of many lengths; each repeats one token, its number from 1.
    fn of_many_lengths(pack: bool) -> Arc<PackedDataset> {
        let example = |number: u32| {
            let len = 1 + number as usize * 37 % 90;
            Example { tokens: vec![number; len], loss_mask: (0..len).map(|index| index % 2 == 1).collect() }
        };
        packed((1..=500).map(example).collect(), 96, pack)
    }

    #[test]
    fn resuming_is_exact_for_workers_ranks_and_lengths() {
        for (pack, world_size, rows_per_batch) in [(true, 1, 4), (true, 3, 5), (false, 1, 4), (false, 2, 8)] {
            for rank in 0..world_size {
                let config = LoaderConfig { rows_per_batch, rank, world_size, ..config() };
                let documents = of_many_lengths(pack);
                let all = |workers, start| all_of(documents.clone(), LoaderConfig { workers, ..config.clone() }, start);
                let whole = all(1, Cursor::default());
                for workers in 1..=4 {
                    assert!(all(workers, Cursor::default()) == whole, "{workers} workers");
                    for step in [0, 1, whole.len() / 2, whole.len() - 1] {
                        assert!(all(workers, whole[step].1) == whole[step + 1..], "{workers} workers, step {step}");
                    }
                }
            }
        }
    }

    #[test]
    fn unpacked_epochs_show_documents_once_little_padded() {
        let config = LoaderConfig { rows_per_batch: 8, epochs: Some(1), ..config() };
        let batches = all_of(of_many_lengths(false), config, Cursor::default());
        let mut shown = firsts(&batches);
        shown.sort_unstable();
        assert!(shown.into_iter().eq(1..=500));
        let sum = |count: fn(&Batch) -> usize| batches.iter().map(|(batch, _)| count(batch)).sum::<usize>();
        let (tokens, padding) = (sum(Batch::tokens), sum(|batch| batch.padding));
        // Rows are rounded up to 16 tokens, 45 on average.
        assert!(padding * 4 < tokens, "{padding} of {tokens}");
    }

    #[test]
    fn a_cursor_means_the_same_position_for_other_batch_sizes() {
        let all =
            |rows_per_batch, start| all_of(of_many_lengths(false), LoaderConfig { rows_per_batch, ..config() }, start);
        let by_four = all(4, Cursor::default());
        assert_eq!(firsts(&by_four)[40..], firsts(&all(7, by_four[9].1)));
    }

    #[test]
    #[should_panic(expected = "another dataset")]
    fn cursor_outside_the_epoch_is_refused() {
        Loader::new(dataset(3), config(), Cursor { epoch: 0, row: 3 });
    }

    #[test]
    fn any_cursor_gives_exactly_the_remaining_batches() {
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
    fn disjoint_ranks_cover_all_in_as_many_batches() {
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
    fn dropping_the_loader_ends_its_threads() {
        let rows = dataset(10);
        let config = LoaderConfig { epochs: None, workers: 3, ..config() };
        let mut loader = Loader::new(rows.clone(), config, Cursor::default());
        assert!(loader.next_batch().is_some());
        drop(loader);
        assert_eq!(Arc::strong_count(&rows), 1, "the threads hold references");
    }
}
