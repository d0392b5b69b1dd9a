//! The order of the rows in an epoch. It depends only on seed and epoch, so resuming needs only a cursor.
//!
//! Rows of different lengths are shuffled first, then sorted by length within windows of 64 groups, and the groups of a window are shuffled again: a
//! batch within a group needs little padding, and lengths do not ascend over a window. The order does not depend on the batch size or the number of
//! ranks, so a run can resume with others. Trade-off: batches may straddle two groups, and an order takes 4 bytes per row, for up to two epochs.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

use crate::pack::PackedDataset;

/// Number of groups that are sorted together.
const WINDOW_GROUPS: usize = 64;
/// Number of orders that are kept: at the end of an epoch batches contain rows of the next one.
const MAX_ORDERS: usize = 2;

/// The orders of the current epochs, shared by the threads that build batches.
pub(super) struct EpochOrders {
    pub(super) dataset: Arc<PackedDataset>,
    seed: u64,
    shuffle: bool,
    kept: Mutex<VecDeque<(u64, Arc<[u32]>)>>,
}

impl EpochOrders {
    pub(super) fn new(dataset: Arc<PackedDataset>, seed: u64, shuffle: bool) -> Self {
        Self { dataset, seed, shuffle, kept: Mutex::default() }
    }

    /// Returns the rows of an epoch in their order. Concurrent callers wait while one of them computes it.
    pub(super) fn get(&self, epoch: u64) -> Arc<[u32]> {
        // A panic in here leaves the list valid.
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, order)) = kept.iter().find(|(of, _)| *of == epoch) {
            return order.clone();
        }
        let order: Arc<[u32]> = self.compute(epoch).into();
        kept.truncate(MAX_ORDERS - 1);
        kept.push_front((epoch, order.clone()));
        order
    }

    fn compute(&self, epoch: u64) -> Vec<u32> {
        let rows = self.dataset.rows();
        if !self.shuffle {
            return (0..rows as u32).collect();
        }
        let mut order = shuffled(rows, self.seed, epoch);
        if let Some(group) = self.dataset.length_group() {
            group_by_length(&mut order, group, |row| self.dataset.row_tokens(row as usize), self.seed, epoch);
        }
        order
    }
}

fn shuffled(rows: usize, seed: u64, epoch: u64) -> Vec<u32> {
    let mut order: Vec<u32> = (0..rows as u32).collect();
    shuffle(&mut order, &mut random(seed, 0, epoch));
    order
}

/// Sorts by length within windows, and shuffles the groups of each window; an incomplete group stays at the end.
fn group_by_length(order: &mut [u32], group: usize, length: impl Fn(u32) -> usize, seed: u64, epoch: u64) {
    let mut random = random(seed, 1, epoch);
    for window in order.chunks_mut(WINDOW_GROUPS * group) {
        // The sort is stable, so equally long rows stay shuffled.
        window.sort_by_cached_key(|&row| length(row));
        let mut places: Vec<u32> = (0..(window.len() / group) as u32).collect();
        shuffle(&mut places, &mut random);
        let sorted = window.to_vec();
        for (place, &from) in places.iter().enumerate() {
            window[place * group..][..group].copy_from_slice(&sorted[from as usize * group..][..group]);
        }
    }
}

/// Returns the generator for one `purpose` in an epoch.
fn random(seed: u64, purpose: u8, epoch: u64) -> ChaCha8Rng {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    key[8] = purpose;
    let mut random = ChaCha8Rng::from_seed(key);
    random.set_stream(epoch);
    random
}

/// Shuffles by Fisher-Yates. Not a library's shuffle, which may change with its version: a run must be resumable after an update.
fn shuffle(order: &mut [u32], random: &mut ChaCha8Rng) {
    for last in (1..order.len()).rev() {
        // The high half of the product is uniform in 0..=last, except for 1 part in 2^32.
        let pick = (u128::from(random.next_u64()) * (last as u128 + 1)) >> 64;
        order.swap(last, pick as usize);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_of_an_epoch_never_changes() {
        // Computed from the definition of ChaCha8 in another language.
        assert_eq!(shuffled(8, 42, 3), [7, 2, 1, 0, 6, 5, 4, 3]);
    }

    #[test]
    fn groups_contain_every_row_once_and_rows_of_similar_length() {
        let lengths: Vec<usize> = (0..10_000).map(|row| row * 7919 % 1000).collect();
        let mut order = shuffled(10_000, 1, 2);
        group_by_length(&mut order, 64, |row| lengths[row as usize], 1, 2);
        let whole_windows = &order[..2 * WINDOW_GROUPS * 64];
        let span = |group: &[u32]| lengths[group[63] as usize] - lengths[group[0] as usize];
        assert!(whole_windows.chunks(64).all(|group| span(group) < 60));
        let firsts: Vec<usize> = whole_windows.chunks(64).map(|group| lengths[group[0] as usize]).collect();
        assert!(!firsts[..64].is_sorted() && firsts[..64] != firsts[64..]);
        order.sort_unstable();
        assert!(order.into_iter().eq(0..10_000));
    }
}
