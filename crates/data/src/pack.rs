//! Packs documents into sequences so that few tokens are padding, and builds batches from sequences.
//!
//! A packed row contains several documents, and all packed rows have one length. Without packing each document is a row, padded to the longest of its
//! batch: shapes differ from batch to batch, and the loader groups rows of similar length. Both are decided from the index alone; tokens are read
//! when a batch is built. Documents are never cut and never cross a row; the encoder handles documents that are too long. Trade-off: documents do not
//! move between windows of a few thousand.
//!
//! A pair of answers is packed as one unit: both its documents are in the same row, one after the other.

use xxhash_rust::xxh3::Xxh3;

use crate::batch::Batch;
use crate::cache::DocumentSet;

mod best_fit;
mod report;

use best_fit::RowTable;
pub use report::{LengthHistogram, LengthStep, PackReport};

/// Unpacked rows have a multiple of this many tokens, which suits matrix units.
const ROW_MULTIPLE: usize = 16;
/// Number of rows shown together if rows have different lengths: several micro-batches of common sizes.
const LENGTH_GROUP: usize = 64;

/// Options that determine how documents become rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackOptions {
    /// Maximum number of tokens of a document and of a packed row.
    pub max_seq_len: usize,
    /// Whether a row holds several documents.
    pub pack: bool,
    /// The token that fills rows, 0 if absent. It has no loss and no other document attends to it.
    pub pad_token_id: Option<u32>,
    /// Rows have a multiple of this many tokens, even beyond `max_seq_len`; a packed row then contains that many tokens of documents. If absent,
    /// packed rows have `max_seq_len` tokens and unpacked rows a multiple of 16 up to it.
    pub pad_to_multiple_of: Option<usize>,
    /// Whether documents come in pairs (chosen and rejected, in this order), which share a row.
    pub pairs: Option<PairRows>,
    /// Number of unpacked rows of similar length that a shuffled loader shows in succession (see `Loader`); `None` shuffles rows individually. At
    /// least the rows of a micro-batch, preferably several times that.
    pub length_group: Option<usize>,
}

/// Options of rows with pairs of answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PairRows {
    /// Whether the prompt of the chosen answer counts in the loss too; what follows the answer does not.
    pub prompt_loss: bool,
}

impl PackOptions {
    /// Creates the defaults: packed, padded with 0, rows of exactly `max_seq_len` tokens; without packing, groups of 64 rows.
    pub fn new(max_seq_len: usize) -> Self {
        let length_group = Some(LENGTH_GROUP);
        Self { max_seq_len, pack: true, pad_token_id: None, pad_to_multiple_of: None, pairs: None, length_group }
    }
}

/// All rows of a set of documents. The assignment of documents to rows is fixed.
#[derive(Debug)]
pub struct PackedDataset {
    documents: DocumentSet,
    options: PackOptions,
    row_len: usize,
    /// `None` if each document, or pair, is a row.
    table: Option<RowTable>,
}

/// Returns the number of consecutive documents that stay together.
fn documents_per_unit(options: &PackOptions) -> usize {
    if options.pairs.is_some() { 2 } else { 1 }
}

impl PackedDataset {
    /// Assigns documents to rows. Panics if a document, or a pair, is longer than `max_seq_len` (encode with the same limit), there is no document,
    /// the options require pairs but the documents are not pairs, or an option is 0.
    pub fn new(documents: DocumentSet, options: PackOptions) -> Self {
        let per_unit = documents_per_unit(&options);
        assert!(documents.len().is_multiple_of(per_unit), "{} documents are no pairs", documents.len());
        let length = |unit: usize| {
            let of_unit = unit * per_unit..(unit + 1) * per_unit;
            of_unit.map(|document| documents.entry(document).tokens as usize).sum::<usize>()
        };
        let units = documents.len() / per_unit;
        let longest = (0..units).map(length).max().expect("packing needs at least one example");
        let max_seq_len = options.max_seq_len;
        assert!(
            longest <= max_seq_len,
            "a document has {longest} tokens, a row {max_seq_len}: encode with the same max_seq_len"
        );
        assert!(options.pad_to_multiple_of != Some(0), "pad_to_multiple_of must be at least 1");
        assert!(options.length_group != Some(0), "length_group must be at least 1");
        let row_len = row_len(if options.pack { max_seq_len } else { longest }, &options);
        let table = options.pack.then(|| RowTable::pack(units, length, row_len));
        Self { documents, options, row_len, table }
    }

    /// Returns how documents are assigned to rows.
    pub fn options(&self) -> &PackOptions {
        &self.options
    }

    /// Returns the number of rows; an epoch shows each of them once.
    pub fn rows(&self) -> usize {
        self.table.as_ref().map_or(self.documents.len() / documents_per_unit(&self.options), RowTable::rows)
    }

    /// Returns the tokens per row, padding included; without packing, those of the longest row.
    pub fn row_len(&self) -> usize {
        self.row_len
    }

    /// Returns the number of tokens in a row, padding excluded. Panics if there is no such row.
    pub fn row_tokens(&self, row: usize) -> usize {
        self.row_documents(row).map(|document| self.documents.entry(document).tokens as usize).sum()
    }

    /// Returns the documents of a row, as indices into [`PackedDataset::documents`]. Panics if there is no such row.
    pub fn row_documents(&self, row: usize) -> impl Iterator<Item = usize> + '_ {
        let (packed, single) = match &self.table {
            Some(table) => (table.row(row), None),
            None => (&[][..], Some(row)),
        };
        let per_unit = documents_per_unit(&self.options);
        let units = packed.iter().map(|&unit| unit as usize).chain(single);
        units.flat_map(move |unit| unit * per_unit..(unit + 1) * per_unit)
    }

    /// Returns the number of pairs of answers in the set; 0 for single documents.
    pub fn pairs(&self) -> usize {
        if self.options.pairs.is_some() { self.documents.len() / 2 } else { 0 }
    }

    /// Returns the documents in the rows.
    pub fn documents(&self) -> &DocumentSet {
        &self.documents
    }

    /// Returns how many rows of similar length are shown together; `None` if all rows have one length.
    pub fn length_group(&self) -> Option<usize> {
        self.options.length_group.filter(|_| self.table.is_none())
    }

    /// Returns how well the rows are filled. Reads the index, not the tokens.
    pub fn report(&self) -> PackReport {
        let mut lengths = LengthHistogram::default();
        let (mut tokens, mut loss_tokens) = (0, 0);
        for document in 0..self.documents.len() {
            let len = self.documents.entry(document).tokens as usize;
            lengths.add(len);
            tokens += len;
            loss_tokens += self.documents.entry(document).loss_tokens as usize;
        }
        PackReport {
            documents: self.documents.len(),
            rows: self.rows(),
            tokens,
            loss_tokens,
            efficiency: tokens as f64 / self.slots() as f64,
            lengths,
        }
    }

    /// Returns the token slots in all rows; an estimate if they depend on the batches.
    fn slots(&self) -> usize {
        let Some(group) = self.length_group() else { return self.rows() * self.row_len };
        let mut slots = 0;
        let rows: Vec<usize> = (0..self.rows()).collect();
        for window in rows.chunks(LENGTH_GROUP * group) {
            let mut lengths: Vec<usize> = window.iter().map(|&row| self.row_tokens(row)).collect();
            lengths.sort_unstable();
            let longest = |group: &[usize]| group.len() * row_len(group[group.len() - 1], &self.options);
            slots += lengths.chunks(group).map(longest).sum::<usize>();
        }
        slots
    }

    /// Returns a number that is equal exactly when rows, tokens, masks and the order of epochs are equal (up to hash collisions): a cursor is valid
    /// only for a dataset with the same fingerprint. It is the same on every machine. Reads the index, not the tokens.
    pub fn fingerprint(&self) -> u64 {
        let mut hash = Xxh3::new();
        let mut add = |value: u64| hash.update(&value.to_le_bytes());
        add(self.row_len as u64);
        add(u64::from(self.options.pack));
        if let Some(PairRows { prompt_loss }) = self.options.pairs {
            add(if prompt_loss { 4 } else { 2 });
        }
        add(self.length_group().unwrap_or(0) as u64);
        for row in 0..self.rows() {
            for document in self.row_documents(row) {
                add(self.documents.entry(document).hash);
            }
            // Marks the end of a row.
            add(u64::MAX);
        }
        hash.digest()
    }

    /// Builds a batch of the given rows, in that order. Without rows: one row of padding, so that a rank without data can take part in the step.
    /// Panics if a row does not exist.
    pub fn batch(&self, rows: &[usize]) -> Batch {
        let row_len = match self.table {
            Some(_) => self.row_len,
            None => row_len(rows.iter().map(|&row| self.row_tokens(row)).max().unwrap_or(1), &self.options),
        };
        let pad_token_id = self.options.pad_token_id.unwrap_or(0);
        let mut batch = Batch::with_capacity(rows.len().max(1), row_len);
        for &row in rows {
            self.push_documents(row, &mut batch);
            batch.pad_row(pad_token_id);
        }
        if rows.is_empty() {
            batch.pad_row(pad_token_id);
        }
        batch
    }

    fn push_documents(&self, row: usize, batch: &mut Batch) {
        let mut documents = self.row_documents(row);
        while let Some(number) = documents.next() {
            let document = self.documents.document(number);
            match self.options.pairs {
                Some(PairRows { prompt_loss }) => {
                    let rejected = documents.next().expect("a row has whole pairs");
                    let pair = [&document, &self.documents.document(rejected)];
                    batch.push_pair(pair, [number as u32, rejected as u32], prompt_loss);
                }
                None => batch.push_document(&document),
            }
        }
    }
}

fn row_len(tokens: usize, options: &PackOptions) -> usize {
    match options.pad_to_multiple_of {
        Some(multiple) => tokens.next_multiple_of(multiple),
        None => tokens.next_multiple_of(ROW_MULTIPLE).min(options.max_seq_len),
    }
}

#[cfg(test)]
mod tests {
    use super::best_fit::tests::random;
    use super::*;
    use crate::batch::IGNORE_INDEX;
    use crate::cache::Example;

    /// Returns documents of pseudo-random lengths from 1 to `longest`, each with distinct tokens.
    fn examples(documents: usize, longest: usize) -> Vec<Example> {
        let mut random = random();
        let mut next = || random.next().unwrap();
        let example = |document: usize| {
            let len = 1 + next() % longest;
            let tokens = (0..len).map(|index| (1000 * document + index) as u32).collect();
            Example { tokens, loss_mask: (0..len).map(|index| index > 0 && next() % 2 == 0).collect() }
        };
        (0..documents).map(example).collect()
    }

    fn packed(examples: &[Example], max_seq_len: usize, pack: bool, pad_token_id: Option<u32>) -> PackedDataset {
        let options = PackOptions { pack, pad_token_id, ..PackOptions::new(max_seq_len) };
        PackedDataset::new(DocumentSet::from_examples(examples), options)
    }

    /// Checks the invariants of a batch and returns its documents, without padding.
    fn documents_of(batch: &Batch) -> Vec<Example> {
        let tokens = batch.rows * batch.row_len;
        assert_eq!((batch.input_ids.len(), batch.targets.len(), batch.positions.len()), (tokens, tokens, tokens));
        assert_eq!((batch.cu_seqlens[0], *batch.cu_seqlens.last().unwrap()), (0, tokens as u32));
        let mut documents = Vec::new();
        let mut padding = 0;
        for bounds in batch.cu_seqlens.windows(2) {
            let range = bounds[0] as usize..bounds[1] as usize;
            assert!(range.start < range.end, "boundaries ascend strictly");
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
            let counts = targets.iter().zip(&ids[1..]).map(|(&target, &next)| {
                assert!(target == IGNORE_INDEX || target == i64::from(next));
                target != IGNORE_INDEX
            });
            documents.push(Example { tokens: ids.to_vec(), loss_mask: [false].into_iter().chain(counts).collect() });
        }
        assert_eq!((padding, batch.tokens()), (batch.padding, tokens - padding));
        assert_eq!(batch.loss_tokens(), documents.iter().map(Example::loss_tokens).sum::<usize>());
        documents
    }

    const PAD: u32 = u32::MAX;

    #[test]
    fn packing_preserves_every_document_exactly_once() {
        for (documents, longest, row_len, pack) in
            [(1, 1, 8, true), (300, 40, 64, true), (300, 40, 64, false), (9000, 7, 16, true)]
        {
            let examples = examples(documents, longest);
            let packed = packed(&examples, row_len, pack, Some(PAD));
            let rows: Vec<usize> = (0..packed.rows()).collect();
            let mut found: Vec<Example> = rows.chunks(3).flat_map(|rows| documents_of(&packed.batch(rows))).collect();
            found.sort_by_key(|document| document.tokens[0]);
            assert!(found == examples);
        }
    }

    #[test]
    fn unpacked_rows_are_padded_to_the_longest_of_the_batch() {
        let example = |len: u32| Example { tokens: (0..len).collect(), loss_mask: vec![false; len as usize] };
        let packed = packed(&[3, 17, 40].map(example), 44, false, None);
        let row_lens = [&[0][..], &[0, 1], &[0, 1, 2], &[]].map(|rows| packed.batch(rows).row_len);
        assert_eq!(row_lens, [16, 32, 44, 16]);
        assert_eq!(packed.row_len(), 44);
    }

    #[test]
    fn rows_have_the_requested_multiple() {
        for (pack, row_lens) in [(true, [128, 128]), (false, [128, 64])] {
            let options =
                PackOptions { pack, pad_to_multiple_of: Some(64), pad_token_id: Some(PAD), ..PackOptions::new(100) };
            let packed = PackedDataset::new(DocumentSet::from_examples(&examples(500, 100)), options);
            let longest = (0..packed.rows()).max_by_key(|&row| packed.row_tokens(row)).unwrap();
            let shortest = (0..packed.rows()).min_by_key(|&row| packed.row_tokens(row)).unwrap();
            let batches = [longest, shortest].map(|row| packed.batch(&[row]));
            assert_eq!(batches.each_ref().map(|batch| batch.row_len), row_lens);
            assert_eq!(packed.row_len(), 128);
            batches.iter().for_each(|batch| assert!(!documents_of(batch).is_empty()));
        }
    }

    #[test]
    fn report_counts_lengths_and_targets_as_batches_have_them() {
        let packed = packed(&examples(900, 70), 128, true, Some(PAD));
        let report = packed.report();
        let batch = packed.batch(&(0..packed.rows()).collect::<Vec<_>>());
        assert_eq!((report.documents, report.rows), (900, packed.rows()));
        assert_eq!((report.tokens, report.loss_tokens), (batch.tokens(), batch.loss_tokens()));
        assert_eq!(report.lengths.steps.iter().map(|step| step.documents).sum::<usize>(), 900);
        assert_eq!(report.efficiency, batch.tokens() as f64 / batch.input_ids.len() as f64);
        assert!((0.45..0.55).contains(&report.loss_share()), "{}", report.loss_share());
    }

    #[test]
    fn batch_of_no_rows_is_one_row_of_padding() {
        let batch = packed(&examples(3, 4), 8, true, Some(PAD)).batch(&[]);
        assert_eq!((batch.rows, batch.tokens(), batch.loss_tokens()), (1, 0, 0));
        assert_eq!(batch.cu_seqlens, [0, 8]);
        documents_of(&batch);
    }

    #[test]
    fn fingerprint_sees_every_change() {
        let original = examples(50, 9);
        let fingerprint = |examples: &[Example], row_len| packed(examples, row_len, true, None).fingerprint();
        let mut token = original.clone();
        token[7].tokens[0] += 1;
        let mut mask = original.clone();
        mask[7].loss_mask[0] ^= true;
        let first = fingerprint(&original, 16);
        assert_eq!(first, fingerprint(&examples(50, 9), 16));
        for changed in [
            fingerprint(&token, 16),
            fingerprint(&mask, 16),
            fingerprint(&original, 32),
            fingerprint(&examples(49, 9), 16),
        ] {
            assert_ne!(first, changed);
        }
    }
}
