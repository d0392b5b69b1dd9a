//! Decides which documents share a row, only from their lengths.
//!
//! Best-fit decreasing: the longest document first, each into the fullest row that still has room for it. It works on windows of the data (at least
//! 4096 documents and 256 rows' worth of tokens), so that rows keep the approximate order of the data and time is linear. Trade-off: memory for one
//! window and the table, 4 bytes per document and 4 per row.

use std::cmp::Reverse;
use std::collections::BTreeSet;

pub(super) const WINDOW_DOCUMENTS: usize = 4096;
const WINDOW_ROWS: usize = 256;

/// The documents of each row: four bytes per document and four per row.
#[derive(Debug, Default)]
pub(super) struct RowTable {
    /// Documents of the first row, ascending, then those of the second, and so on.
    documents: Vec<u32>,
    /// The end of each row in `documents`.
    ends: Vec<u32>,
}

impl RowTable {
    /// Packs documents `0..documents` into rows of `row_len` tokens. No document is longer than a row.
    pub(super) fn pack(documents: usize, length: impl Fn(usize) -> usize, row_len: usize) -> Self {
        let mut table = Self { documents: Vec::with_capacity(documents), ends: Vec::new() };
        let mut window: Vec<(u32, u32)> = Vec::new();
        let mut tokens = 0;
        for document in 0..documents {
            let len = length(document);
            window.push((len as u32, document as u32));
            tokens += len;
            let is_full = window.len() >= WINDOW_DOCUMENTS && tokens >= WINDOW_ROWS * row_len;
            if is_full || document + 1 == documents {
                table.push_window(&mut window, row_len);
                tokens = 0;
            }
        }
        table
    }

    /// Adds the rows of a window of (length, document), in the order of their first documents, and empties it.
    fn push_window(&mut self, window: &mut Vec<(u32, u32)>, row_len: usize) {
        window.sort_unstable_by_key(|&(len, document)| (Reverse(len), document));
        let mut rows: Vec<Vec<u32>> = Vec::new();
        // The remaining space, and the row that has it.
        let mut open = BTreeSet::new();
        for (len, document) in window.drain(..) {
            let tightest = open.range((len, 0)..).next().copied();
            let (room, row) = tightest.unwrap_or_else(|| {
                rows.push(Vec::new());
                (row_len as u32, rows.len() - 1)
            });
            open.remove(&(room, row));
            // A full row has no room for another document.
            if room > len {
                open.insert((room - len, row));
            }
            rows[row].push(document);
        }
        rows.iter_mut().for_each(|row| row.sort_unstable());
        rows.sort_unstable_by_key(|row| row[0]);
        for row in rows {
            self.documents.extend(row);
            self.ends.push(self.documents.len() as u32);
        }
    }

    pub(super) fn rows(&self) -> usize {
        self.ends.len()
    }

    pub(super) fn row(&self, row: usize) -> &[u32] {
        let start = row.checked_sub(1).map_or(0, |before| self.ends[before] as usize);
        &self.documents[start..self.ends[row] as usize]
    }
}

#[cfg(test)]
pub(super) mod tests {
    use rand_chacha::ChaCha8Rng;
    use rand_chacha::rand_core::{RngCore, SeedableRng};

    use super::*;

    /// Returns pseudo-random numbers below 2^31, the same on every machine.
    pub(in super::super) fn random() -> impl Iterator<Item = usize> {
        let mut random = ChaCha8Rng::seed_from_u64(12_345);
        std::iter::repeat_with(move || (random.next_u64() >> 33) as usize)
    }

    fn lengths_up_to(longest: usize, count: usize) -> Vec<usize> {
        random().map(|number| 1 + number % longest).take(count).collect()
    }

    /// Returns lengths like those of conversations: their logarithms are normally distributed (Box-Muller method).
    fn log_normal(median: f64, sigma: f64) -> impl Iterator<Item = usize> {
        let mut uniform = random().map(|number| (number as f64 + 0.5) / f64::from(1_u32 << 31));
        std::iter::from_fn(move || {
            let (radius, angle) = (uniform.next()?, uniform.next()?);
            let normal = (-2.0 * radius.ln()).sqrt() * (std::f64::consts::TAU * angle).cos();
            Some((median * (sigma * normal).exp()).ceil().max(1.0) as usize)
        })
    }

    fn efficiency(lengths: &[usize], row_len: usize) -> f64 {
        let table = RowTable::pack(lengths.len(), |document| lengths[document], row_len);
        lengths.iter().sum::<usize>() as f64 / (table.rows() * row_len) as f64
    }

    #[test]
    fn every_document_is_in_one_row_and_no_row_overflows() {
        for row_len in [100, 128, 5000] {
            let lengths = lengths_up_to(100, 20_000);
            let table = RowTable::pack(lengths.len(), |document| lengths[document], row_len);
            let mut seen: Vec<u32> = (0..table.rows()).flat_map(|row| table.row(row)).copied().collect();
            let tokens = |row: usize| table.row(row).iter().map(|&document| lengths[document as usize]).sum::<usize>();
            assert!((0..table.rows()).all(|row| (1..=row_len).contains(&tokens(row)) && table.row(row).is_sorted()));
            seen.sort_unstable();
            assert!(seen.into_iter().eq(0..20_000));
        }
    }

    #[test]
    fn log_normal_lengths_fill_rows_of_4096_to_99_percent() {
        for (median, sigma) in [(200.0, 0.6), (400.0, 1.0), (700.0, 1.0), (600.0, 1.4)] {
            let lengths: Vec<usize> = log_normal(median, sigma).take(60_000).map(|len| len.min(4096)).collect();
            let efficiency = efficiency(&lengths, 4096);
            assert!(efficiency >= 0.99, "median {median}, sigma {sigma}: {efficiency}");
        }
    }

    #[test]
    fn windows_keep_the_order_of_the_data_roughly() {
        let lengths = lengths_up_to(15, 20_000);
        let table = RowTable::pack(lengths.len(), |document| lengths[document], 16);
        let distance = |row| table.row(row).last().unwrap() - table.row(row)[0];
        assert!((0..table.rows()).all(|row| (distance(row) as usize) < WINDOW_DOCUMENTS));
    }
}
