//! Micro-batches of random tokens, where every next token counts in the loss: the work of real ones without their meaning.
//!
//! Trade-off: the loss stays that of guessing, so it is no measure of training.

use firebrick_data::{Batch, IGNORE_INDEX};

/// Builds micro-batches, each of different tokens, the same ones for the same seed.
pub(super) struct Synthetic {
    /// Rows per micro-batch.
    pub rows: usize,
    /// Tokens per row.
    pub row_len: usize,
    /// Documents per row.
    pub documents: usize,
    /// Tokens are less than this.
    pub vocab_size: usize,
    /// State of the generator.
    pub seed: u64,
}

impl Synthetic {
    /// The next micro-batch.
    pub(super) fn next_batch(&mut self) -> Batch {
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
        for _ in 0..self.rows {
            for document in 0..self.documents {
                // The first ones take the remainder.
                let length = self.row_len / self.documents + usize::from(document < self.row_len % self.documents);
                let start = batch.targets.len();
                batch.targets.extend(batch.input_ids[start + 1..start + length].iter().map(|&id| i64::from(id)));
                batch.targets.push(IGNORE_INDEX);
                batch.positions.extend(0..length as u32);
                batch.cu_seqlens.push((start + length) as u32);
            }
        }
        batch
    }

    /// SplitMix64 (Steele, Lea and Flood, Fast splittable pseudorandom number generators, 2014).
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

    fn synthetic(documents: usize) -> Synthetic {
        Synthetic { rows: 2, row_len: 10, documents, vocab_size: 7, seed: 1 }
    }

    #[test]
    fn every_next_token_inside_a_document_is_in_the_loss() {
        for documents in [1, 3, 5] {
            let batch = synthetic(documents).next_batch();
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
        }
    }

    #[test]
    fn batches_differ_and_a_seed_repeats_them() {
        let (mut one, mut other) = (synthetic(1), synthetic(1));
        let (first, second) = (one.next_batch(), one.next_batch());
        assert_ne!(first.input_ids, second.input_ids);
        assert_eq!((first.input_ids, second.input_ids), (other.next_batch().input_ids, other.next_batch().input_ids));
    }
}
