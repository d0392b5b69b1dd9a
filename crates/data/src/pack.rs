//! Documents into rows, so that few tokens are padding, and rows into batches.
//!
//! Packing is best-fit decreasing: the longest document first, each into the row with the least room that still holds
//! it. It works on windows of the file (at least 4096 documents and 256 rows' worth of tokens), so that rows keep the
//! file's order roughly and the cost stays linear. Documents are never cut and never cross a row.
//!
//! Without packing each document is a row, padded to the longest of its batch (rounded up to 16, at most
//! `max_seq_len`): shapes differ from batch to batch. Gives up laziness: all tokens are in memory.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::fmt::{Display, Formatter, Result as FormatResult};

use crate::batch::Batch;
use crate::dataset::Dataset;
use crate::stable_hash::StableHash;

const WINDOW_DOCUMENTS: usize = 4096;
const WINDOW_ROWS: usize = 256;
/// Unpacked rows have a multiple of this many tokens, which suits matrix units.
const ROW_MULTIPLE: usize = 16;

/// How well documents fill rows.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PackReport {
    /// Documents, all of them.
    pub documents: usize,
    /// Rows they went into.
    pub rows: usize,
    /// Tokens of the documents.
    pub tokens: usize,
    /// Tokens that are targets.
    pub trained_tokens: usize,
    /// Tokens over the places in the rows, 0 to 1. Without packing a lower bound: every row counted as long as the
    /// longest.
    pub efficiency: f64,
}

impl Display for PackReport {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> FormatResult {
        let percent = 100.0 * self.efficiency;
        let Self { documents, rows, tokens, trained_tokens, .. } = self;
        write!(
            formatter,
            "{documents} documents in {rows} rows, {tokens} tokens ({trained_tokens} trained), {percent:.1} % full"
        )
    }
}

/// All rows of a dataset; which documents are in each is decided once.
#[derive(Debug)]
pub struct PackedDataset {
    row_len: usize,
    packed: bool,
    pad_token_id: u32,
    tokens: Vec<u32>,
    trained: Vec<bool>,
    /// Where each document begins in `tokens`, and the end.
    document_starts: Vec<usize>,
    /// Documents of each row, rising.
    rows: Vec<Vec<u32>>,
}

impl PackedDataset {
    /// Puts documents into rows of `max_seq_len` tokens (`pack`), or each into a row of its own.
    ///
    /// Padding has `pad_token_id`, or 0 without one: no loss and no other document sees it.
    ///
    /// # Panics
    /// If an example is longer than `max_seq_len` (read the dataset with the same number) or there is none.
    pub fn pack(dataset: &Dataset, max_seq_len: usize, pack: bool, pad_token_id: Option<u32>) -> Self {
        let lengths: Vec<usize> = dataset.examples.iter().map(|example| example.tokens.len()).collect();
        let longest = lengths.iter().copied().max().unwrap_or(0);
        assert!(longest > 0, "packing needs at least one example");
        assert!(
            longest <= max_seq_len,
            "an example has {longest} tokens, a row {max_seq_len}: read with the same max_seq_len"
        );

        let total: usize = lengths.iter().sum();
        let (mut tokens, mut trained) = (Vec::with_capacity(total), Vec::with_capacity(total));
        let mut document_starts = vec![0];
        for example in &dataset.examples {
            tokens.extend_from_slice(&example.tokens);
            trained.extend_from_slice(&example.trained);
            document_starts.push(tokens.len());
        }
        let rows = if pack {
            pack_rows(&lengths, max_seq_len)
        } else {
            (0..lengths.len() as u32).map(|one| vec![one]).collect()
        };
        let row_len = if pack { max_seq_len } else { longest.next_multiple_of(ROW_MULTIPLE).min(max_seq_len) };
        Self { row_len, packed: pack, pad_token_id: pad_token_id.unwrap_or(0), tokens, trained, document_starts, rows }
    }

    /// Number of rows; an epoch shows each once.
    pub fn rows(&self) -> usize {
        self.rows.len()
    }

    /// Tokens of a row with its padding; without packing, of the longest.
    pub fn row_len(&self) -> usize {
        self.row_len
    }

    /// How well the rows are filled.
    pub fn report(&self) -> PackReport {
        PackReport {
            documents: self.document_starts.len() - 1,
            rows: self.rows.len(),
            tokens: self.tokens.len(),
            trained_tokens: self.trained.iter().filter(|&&trained| trained).count(),
            efficiency: self.tokens.len() as f64 / (self.rows.len() * self.row_len) as f64,
        }
    }

    /// A number that is equal exactly when rows, tokens and masks are (up to chance): a cursor means the same place
    /// only in a dataset with the same fingerprint. Same on every machine.
    pub fn fingerprint(&self) -> u64 {
        let mut hash = StableHash::new();
        hash.add(self.row_len as u64);
        hash.add(u64::from(self.packed));
        for row in &self.rows {
            hash.add(row.len() as u64);
            for &document in row {
                let (tokens, trained) = self.document(document);
                hash.add_document(tokens, trained);
            }
        }
        hash.finish()
    }

    /// A batch of the given rows, in that order. Of no rows at all: one row of padding, so that a rank without data can
    /// still take part in the step.
    ///
    /// # Panics
    /// If a row does not exist.
    pub fn batch(&self, rows: &[usize]) -> Batch {
        let row_len = if self.packed { self.row_len } else { self.longest_of(rows) };
        let mut batch = Batch::with_capacity(rows.len().max(1), row_len);
        for &row in rows {
            for &document in &self.rows[row] {
                let (tokens, trained) = self.document(document);
                batch.push_document(tokens, trained);
            }
            batch.pad_row(self.pad_token_id);
        }
        if rows.is_empty() {
            batch.pad_row(self.pad_token_id);
        }
        batch
    }

    /// Row length of an unpacked batch.
    fn longest_of(&self, rows: &[usize]) -> usize {
        let lengths = rows.iter().flat_map(|&row| &self.rows[row]).map(|&document| self.document(document).0.len());
        lengths.max().unwrap_or(1).next_multiple_of(ROW_MULTIPLE).min(self.row_len)
    }

    fn document(&self, index: u32) -> (&[u32], &[bool]) {
        let range = self.document_starts[index as usize]..self.document_starts[index as usize + 1];
        (&self.tokens[range.clone()], &self.trained[range])
    }
}

/// The documents of each row, window by window.
fn pack_rows(lengths: &[usize], row_len: usize) -> Vec<Vec<u32>> {
    let mut rows = Vec::new();
    let (mut start, mut tokens) = (0, 0);
    for (index, &len) in lengths.iter().enumerate() {
        tokens += len;
        let is_full = index + 1 - start >= WINDOW_DOCUMENTS && tokens >= WINDOW_ROWS * row_len;
        if is_full || index + 1 == lengths.len() {
            rows.extend(pack_window(lengths, start, index + 1, row_len));
            (start, tokens) = (index + 1, 0);
        }
    }
    rows
}

/// Best-fit decreasing over the documents `start..end`; rows in the order of their first document.
fn pack_window(lengths: &[usize], start: usize, end: usize, row_len: usize) -> Vec<Vec<u32>> {
    let mut order: Vec<usize> = (start..end).collect();
    order.sort_unstable_by_key(|&document| (Reverse(lengths[document]), document));
    let mut rows: Vec<Vec<u32>> = Vec::new();
    // Room that is left and the row that has it.
    let mut open = BTreeSet::new();
    for document in order {
        let len = lengths[document];
        let tightest = open.range((len, 0)..).next().copied();
        let (room, row) = tightest.unwrap_or_else(|| {
            rows.push(Vec::new());
            (row_len, rows.len() - 1)
        });
        open.remove(&(room, row));
        open.insert((room - len, row));
        rows[row].push(document as u32);
    }
    rows.iter_mut().for_each(|row| row.sort_unstable());
    rows.sort_unstable_by_key(|row| row[0]);
    rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::IGNORE_INDEX;
    use crate::dataset::{Example, ReadReport};

    /// Documents of pseudo-random lengths from 1 to `longest`, each with tokens of its own.
    fn dataset(documents: usize, longest: usize) -> Dataset {
        let mut state = 12_345_u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) as usize
        };
        let example = |document: usize| {
            let len = 1 + next() % longest;
            let tokens = (0..len).map(|index| (1000 * document + index) as u32).collect();
            Example { tokens, trained: (0..len).map(|index| index > 0 && next() % 2 == 0).collect() }
        };
        Dataset { examples: (0..documents).map(example).collect(), report: ReadReport::default() }
    }

    /// Checks the laws of a batch and gives its documents, without padding.
    fn documents_of(batch: &Batch) -> Vec<Example> {
        let tokens = batch.rows * batch.row_len;
        assert_eq!((batch.input_ids.len(), batch.targets.len(), batch.positions.len()), (tokens, tokens, tokens));
        assert_eq!((batch.cu_seqlens[0], *batch.cu_seqlens.last().unwrap()), (0, tokens as u32));
        let mut documents = Vec::new();
        let mut padding = 0;
        for bounds in batch.cu_seqlens.windows(2) {
            let range = bounds[0] as usize..bounds[1] as usize;
            assert!(range.start < range.end, "boundaries rise strictly");
            assert_eq!(range.start / batch.row_len, (range.end - 1) / batch.row_len, "no document crosses rows");
            assert!(batch.positions[range.clone()].iter().copied().eq(0..range.len() as u32));
            assert_eq!(batch.targets[range.end - 1], IGNORE_INDEX, "no document predicts the next one's first token");
            let ids = &batch.input_ids[range.clone()];
            if ids[0] == PAD {
                assert_eq!(range.end % batch.row_len, 0, "padding is at a row's end");
                assert!(ids.iter().all(|&id| id == PAD));
                assert!(batch.targets[range.clone()].iter().all(|&target| target == IGNORE_INDEX));
                padding += range.len();
                continue;
            }
            let targets = &batch.targets[range.start..range.end - 1];
            let trained = targets.iter().zip(&ids[1..]).map(|(&target, &next)| {
                assert!(target == IGNORE_INDEX || target == i64::from(next));
                target != IGNORE_INDEX
            });
            documents.push(Example { tokens: ids.to_vec(), trained: [false].into_iter().chain(trained).collect() });
        }
        assert_eq!((padding, batch.tokens()), (batch.padding, tokens - padding));
        assert_eq!(batch.trained_tokens(), documents.iter().map(Example::trained_tokens).sum::<usize>());
        documents
    }

    const PAD: u32 = u32::MAX;

    #[test]
    fn packing_preserves_every_document_exactly_once() {
        for (documents, longest, row_len, pack) in
            [(1, 1, 8, true), (300, 40, 64, true), (300, 40, 64, false), (9000, 7, 16, true)]
        {
            let dataset = dataset(documents, longest);
            let packed = PackedDataset::pack(&dataset, row_len, pack, Some(PAD));
            let rows: Vec<usize> = (0..packed.rows()).collect();
            let mut found: Vec<Example> = rows.chunks(3).flat_map(|rows| documents_of(&packed.batch(rows))).collect();
            found.sort_by_key(|document| document.tokens[0]);
            assert!(found == dataset.examples);
        }
    }

    #[test]
    fn packing_fills_rows() {
        let packed = PackedDataset::pack(&dataset(10_000, 100), 256, true, None);
        let report = packed.report();
        assert!(report.efficiency > 0.99, "{report}");
        assert_eq!((report.documents, report.rows), (10_000, packed.rows()));
    }

    #[test]
    fn windows_keep_the_order_of_the_file_roughly() {
        let dataset = dataset(20_000, 15);
        let packed = PackedDataset::pack(&dataset, 16, true, None);
        let distance = packed.rows.iter().map(|row| row[row.len() - 1] - row[0]).max().unwrap();
        assert!((distance as usize) < WINDOW_DOCUMENTS, "{distance}");
    }

    #[test]
    fn unpacked_rows_are_padded_to_the_longest_of_the_batch() {
        let example = |len: u32| Example { tokens: (0..len).collect(), trained: vec![false; len as usize] };
        let dataset = Dataset { examples: [3, 17, 40].map(example).into(), report: ReadReport::default() };
        let packed = PackedDataset::pack(&dataset, 44, false, None);
        let row_lens = [&[0][..], &[0, 1], &[0, 1, 2], &[]].map(|rows| packed.batch(rows).row_len);
        assert_eq!(row_lens, [16, 32, 44, 16]);
        assert_eq!(packed.row_len(), 44);
    }

    #[test]
    fn batch_of_no_rows_is_one_row_of_padding() {
        let batch = PackedDataset::pack(&dataset(3, 4), 8, true, Some(PAD)).batch(&[]);
        assert_eq!((batch.rows, batch.tokens(), batch.trained_tokens()), (1, 0, 0));
        assert_eq!(batch.cu_seqlens, [0, 8]);
        documents_of(&batch);
    }

    #[test]
    fn fingerprint_sees_every_change() {
        let original = dataset(50, 9);
        let fingerprint = |dataset: &Dataset, row_len| PackedDataset::pack(dataset, row_len, true, None).fingerprint();
        let mut token = original.clone();
        token.examples[7].tokens[0] += 1;
        let mut mask = original.clone();
        mask.examples[7].trained[0] ^= true;
        let first = fingerprint(&original, 16);
        assert_eq!(first, fingerprint(&dataset(50, 9), 16));
        for changed in [fingerprint(&token, 16), fingerprint(&mask, 16), fingerprint(&original, 32)] {
            assert_ne!(first, changed);
        }
    }
}
