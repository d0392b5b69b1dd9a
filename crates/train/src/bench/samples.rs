//! Inputs and results of timings: micro-batches of random tokens, where every next token counts in the loss, and the spread of repeated timings.

use std::time::Instant;

use firebrick_data::{Batch, IGNORE_INDEX};
use serde::{Deserialize, Serialize};

/// Seconds of repeated work. The median is reported; the minimum shows what the machine can do undisturbed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// Shortest sample, in seconds.
    pub min: f64,
    /// A quarter of the samples is below this.
    pub p25: f64,
    /// Median; for an even number of samples, the mean of the two in the middle.
    pub median: f64,
    /// A quarter of the samples is above this.
    pub p75: f64,
    /// Longest sample, in seconds.
    pub max: f64,
}

impl Spread {
    /// # Panics
    /// If there is no sample, or one is not a number.
    pub fn of(mut samples: Vec<f64>) -> Self {
        assert!(!samples.is_empty(), "a spread needs at least one sample");
        assert!(samples.iter().all(|sample| !sample.is_nan()), "samples are numbers, got {samples:?}");
        samples.sort_by(f64::total_cmp);
        // Linear interpolation between the two nearest samples, the default of numpy.
        let quantile = |share: f64| {
            let place = share * (samples.len() - 1) as f64;
            let (below, above) = (samples[place.floor() as usize], samples[place.ceil() as usize]);
            below + (above - below) * place.fract()
        };
        let [min, p25, median, p75, max] = [0.0, 0.25, 0.5, 0.75, 1.0].map(quantile);
        Self { min, p25, median, p75, max }
    }

    /// Returns the interquartile range over the median: how much the samples disagree, without the few slowest.
    pub fn relative_spread(&self) -> f64 {
        (self.p75 - self.p25) / self.median
    }
}

/// Returns the seconds that `work` takes, and its result.
pub fn timed<T>(work: impl FnOnce() -> T) -> (f64, T) {
    let started = Instant::now();
    let result = work();
    (started.elapsed().as_secs_f64(), result)
}

/// Builds micro-batches, each of different tokens; the same seed gives the same ones.
#[derive(Clone, Copy, Debug)]
pub struct Synthetic {
    /// Rows per micro-batch.
    pub rows: usize,
    /// Tokens per row.
    pub row_len: usize,
    /// Documents per row.
    pub documents: usize,
    /// Tokens are below this.
    pub vocab_size: usize,
    /// State of the generator.
    pub seed: u64,
}

impl Synthetic {
    /// Returns the next micro-batch.
    pub fn next_batch(&mut self) -> Batch {
        let tokens = self.rows * self.row_len;
        let mut batch = Batch {
            rows: self.rows,
            row_len: self.row_len,
            input_ids: (0..tokens).map(|_| (self.random() % self.vocab_size as u64) as u32).collect(),
            targets: Vec::with_capacity(tokens),
            positions: Vec::with_capacity(tokens),
            cu_seqlens: vec![0],
            padding: 0,
            pairs: None,
        };
        for document in (0..self.rows).flat_map(|_| 0..self.documents) {
            // The first documents of a row take the remainder.
            let length = self.row_len / self.documents + usize::from(document < self.row_len % self.documents);
            let start = batch.targets.len();
            batch.targets.extend(batch.input_ids[start + 1..start + length].iter().map(|&id| i64::from(id)));
            batch.targets.push(IGNORE_INDEX);
            batch.positions.extend(0..length as u32);
            batch.cu_seqlens.push((start + length) as u32);
        }
        batch
    }

    /// Returns the next number of SplitMix64 (Steele, Lea and Flood, Fast splittable pseudorandom number generators, 2014).
    fn random(&mut self) -> u64 {
        self.seed = self.seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.seed ^ (self.seed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spreads_are_those_of_numpy() {
        let spread = Spread::of(vec![2.0, 900.0, 1.0]);
        assert_eq!((spread.min, spread.median, spread.max), (1.0, 2.0, 900.0));
        // numpy.percentile([1, 2, 3, 4, 10], [25, 75]) is [2, 4]; for [1, 2, 3, 4] it is [1.75, 3.25].
        let spread = Spread::of(vec![10.0, 4.0, 3.0, 2.0, 1.0]);
        assert_eq!((spread.p25, spread.p75, spread.relative_spread()), (2.0, 4.0, 2.0 / 3.0));
        let spread = Spread::of(vec![4.0, 1.0, 2.0, 3.0]);
        assert_eq!((spread.p25, spread.median, spread.p75), (1.75, 2.5, 3.25));
        assert_eq!(Spread::of(vec![3.0]).relative_spread(), 0.0);
    }

    #[test]
    fn every_next_token_of_a_document_is_in_the_loss() {
        for documents in [1, 3, 5] {
            let mut one = Synthetic { rows: 2, row_len: 10, documents, vocab_size: 7, seed: 1 };
            let (mut other, batch) = (one, one.next_batch());
            assert_eq!((batch.input_ids.len(), batch.tokens(), batch.cu_seqlens.len()), (20, 20, 2 * documents + 1));
            assert_eq!(batch.loss_tokens(), 20 - 2 * documents);
            for bounds in batch.cu_seqlens.windows(2) {
                let (start, end) = (bounds[0] as usize, bounds[1] as usize);
                assert_eq!(start / 10, (end - 1) / 10, "no document crosses rows");
                assert!(batch.positions[start..end].iter().copied().eq(0..(end - start) as u32));
                let next = batch.input_ids[start + 1..end].iter().map(|&id| i64::from(id));
                assert!(batch.targets[start..end].iter().copied().eq(next.chain([IGNORE_INDEX])));
            }
            assert!(batch.input_ids.iter().all(|&id| id < 7));
            assert_eq!(batch.input_ids, other.next_batch().input_ids);
            assert_ne!(batch.input_ids, one.next_batch().input_ids);
        }
    }
}
