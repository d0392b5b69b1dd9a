//! Rows from documents, so that few tokens are padding, and batches from rows.
//!
//! Packed rows hold several documents and all have one length. Without packing each document is a row, padded to the
//! longest of its batch: shapes differ from batch to batch, and the loader brings rows of like length together. Both
//! are decided from the index alone; tokens are read when a batch is made. Documents are never cut and never cross a
//! row: too long ones are the encoder's matter. Gives up moving documents between windows of some thousands.

use crate::batch::Batch;
use crate::cache::DocumentSet;
use crate::dataset::Dataset;
use crate::stable_hash::StableHash;

mod best_fit;
mod report;

use best_fit::RowTable;
pub use report::{LengthHistogram, LengthStep, PackReport};

/// Unpacked rows have a multiple of this many tokens, which suits matrix units.
const ROW_MULTIPLE: usize = 16;
/// Rows that are shown together where rows have different lengths: several micro-batches of common sizes.
const LENGTH_GROUP: usize = 64;

/// How documents become rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackOptions {
    /// The most tokens of a document, and of a packed row.
    pub max_seq_len: usize,
    /// Whether a row holds several documents.
    pub pack: bool,
    /// What fills rows up, 0 if absent: no loss and no other document sees it.
    pub pad_token_id: Option<u32>,
    /// Rows have a multiple of this many tokens, even if that is more than `max_seq_len`; a packed row then holds so many
    /// tokens of documents. Otherwise packed rows have `max_seq_len`, unpacked ones a multiple of 16 up to it.
    pub pad_to_multiple_of: Option<usize>,
    /// How many unpacked rows of like length a shuffled loader shows one after another (see `Loader`); none to shuffle
    /// rows singly. At least the rows of a micro-batch, better several times that.
    pub length_group: Option<usize>,
}

impl PackOptions {
    /// Packed, padded with 0, rows of exactly `max_seq_len`; were it unpacked, in groups of 64.
    pub fn new(max_seq_len: usize) -> Self {
        let length_group = Some(LENGTH_GROUP);
        Self { max_seq_len, pack: true, pad_token_id: None, pad_to_multiple_of: None, length_group }
    }
}

/// All rows of a set of documents; which documents are in each is decided once.
#[derive(Debug)]
pub struct PackedDataset {
    documents: DocumentSet,
    options: PackOptions,
    row_len: usize,
    /// None where each document is a row.
    table: Option<RowTable>,
}

impl PackedDataset {
    /// Puts documents into rows.
    ///
    /// # Panics
    /// If a document is longer than `max_seq_len` (encode with the same number), there is none, or an option is 0.
    pub fn new(documents: DocumentSet, options: PackOptions) -> Self {
        let lengths = || (0..documents.len()).map(|document| documents.document_tokens(document));
        let longest = lengths().max().expect("packing needs at least one example");
        let max_seq_len = options.max_seq_len;
        assert!(
            longest <= max_seq_len,
            "an example has {longest} tokens, a row {max_seq_len}: read with the same max_seq_len"
        );
        assert!(options.pad_to_multiple_of != Some(0), "rows cannot have a multiple of 0 tokens");
        assert!(options.length_group != Some(0), "a group of no rows");
        let row_len = row_len(if options.pack { max_seq_len } else { longest }, &options);
        let table = options
            .pack
            .then(|| RowTable::pack(documents.len(), |document| documents.document_tokens(document), row_len));
        Self { documents, options, row_len, table }
    }

    /// Puts the examples of a dataset into rows of `max_seq_len` tokens (`pack`), or each into a row of its own.
    ///
    /// # Panics
    /// As [`PackedDataset::new`].
    pub fn pack(dataset: &Dataset, max_seq_len: usize, pack: bool, pad_token_id: Option<u32>) -> Self {
        let options = PackOptions { pack, pad_token_id, ..PackOptions::new(max_seq_len) };
        Self::new(DocumentSet::of_dataset(dataset), options)
    }

    /// Number of rows; an epoch shows each once.
    pub fn rows(&self) -> usize {
        self.table.as_ref().map_or(self.documents.len(), RowTable::rows)
    }

    /// Tokens of a row with its padding; without packing, of the longest.
    pub fn row_len(&self) -> usize {
        self.row_len
    }

    /// Tokens of a row without its padding.
    ///
    /// # Panics
    /// If there is no such row.
    pub fn row_tokens(&self, row: usize) -> usize {
        self.row_documents(row).map(|document| self.documents.document_tokens(document)).sum()
    }

    /// The documents in a row, as numbers in [`PackedDataset::documents`].
    ///
    /// # Panics
    /// If there is no such row.
    pub fn row_documents(&self, row: usize) -> impl Iterator<Item = usize> + '_ {
        let (packed, single) = match &self.table {
            Some(table) => (table.row(row), None),
            None => (&[][..], Some(row)),
        };
        packed.iter().map(|&document| document as usize).chain(single)
    }

    /// The documents that are in the rows.
    pub fn documents(&self) -> &DocumentSet {
        &self.documents
    }

    /// How many rows of like length are shown together; none where all rows have one length.
    pub(crate) fn length_group(&self) -> Option<usize> {
        self.options.length_group.filter(|_| self.table.is_none())
    }

    /// How well the rows are filled. Reads the index, not the tokens.
    pub fn report(&self) -> PackReport {
        let mut lengths = LengthHistogram::default();
        let (mut tokens, mut trained_tokens) = (0, 0);
        for document in 0..self.documents.len() {
            let len = self.documents.document_tokens(document);
            lengths.add(len);
            tokens += len;
            trained_tokens += self.documents.document_trained_tokens(document);
        }
        PackReport {
            documents: self.documents.len(),
            rows: self.rows(),
            tokens,
            trained_tokens,
            efficiency: tokens as f64 / self.places() as f64,
            lengths,
        }
    }

    /// Places for tokens in all rows; an estimate where that depends on the batches.
    fn places(&self) -> usize {
        let Some(group) = self.length_group() else { return self.rows() * self.row_len };
        let mut places = 0;
        let rows: Vec<usize> = (0..self.rows()).collect();
        for window in rows.chunks(LENGTH_GROUP * group) {
            let mut lengths: Vec<usize> = window.iter().map(|&row| self.row_tokens(row)).collect();
            lengths.sort_unstable();
            let longest = |group: &[usize]| group.len() * row_len(group[group.len() - 1], &self.options);
            places += lengths.chunks(group).map(longest).sum::<usize>();
        }
        places
    }

    /// A number that is equal exactly when rows, tokens, masks and the order of epochs are (up to chance): a cursor means
    /// the same place only in a dataset with the same fingerprint. Same on every machine. Reads the index, not the tokens.
    pub fn fingerprint(&self) -> u64 {
        let mut hash = StableHash::new();
        hash.add(self.row_len as u64);
        hash.add(u64::from(self.options.pack));
        hash.add(self.length_group().unwrap_or(0) as u64);
        for row in 0..self.rows() {
            for document in self.row_documents(row) {
                hash.add(self.documents.document_hash(document));
            }
            // No document hashes to its row's end but by chance.
            hash.add(u64::MAX);
        }
        hash.finish()
    }

    /// A batch of the given rows, in that order. Of no rows at all: one row of padding, so that a rank without data can
    /// still take part in the step.
    ///
    /// # Panics
    /// If a row does not exist.
    pub fn batch(&self, rows: &[usize]) -> Batch {
        let row_len = match self.table {
            Some(_) => self.row_len,
            None => row_len(rows.iter().map(|&row| self.row_tokens(row)).max().unwrap_or(1), &self.options),
        };
        let pad_token_id = self.options.pad_token_id.unwrap_or(0);
        let mut batch = Batch::with_capacity(rows.len().max(1), row_len);
        for &row in rows {
            for document in self.row_documents(row) {
                batch.push_document(&self.documents.document(document));
            }
            batch.pad_row(pad_token_id);
        }
        if rows.is_empty() {
            batch.pad_row(pad_token_id);
        }
        batch
    }
}

/// Tokens of rows that hold `tokens`.
fn row_len(tokens: usize, options: &PackOptions) -> usize {
    match options.pad_to_multiple_of {
        Some(multiple) => tokens.next_multiple_of(multiple),
        None => tokens.next_multiple_of(ROW_MULTIPLE).min(options.max_seq_len),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::batch::IGNORE_INDEX;
    use crate::dataset::{Example, ReadReport};

    /// Numbers that look random and are the same on every machine, below 2^31.
    fn random() -> impl Iterator<Item = usize> {
        let step = |state: &u64| Some(state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1));
        std::iter::successors(Some(12_345_u64), step).skip(1).map(|state| (state >> 33) as usize)
    }

    pub(crate) fn lengths_up_to(longest: usize, count: usize) -> Vec<usize> {
        random().map(|number| 1 + number % longest).take(count).collect()
    }

    /// Lengths as conversations have them: their logarithms are normally distributed (by Box and Muller's method).
    pub(crate) fn log_normal(median: f64, sigma: f64) -> impl Iterator<Item = usize> {
        let mut uniform = random().map(|number| (number as f64 + 0.5) / f64::from(1_u32 << 31));
        std::iter::from_fn(move || {
            let (radius, angle) = (uniform.next()?, uniform.next()?);
            let normal = (-2.0 * radius.ln()).sqrt() * (std::f64::consts::TAU * angle).cos();
            Some((median * (sigma * normal).exp()).ceil().max(1.0) as usize)
        })
    }

    /// Documents of pseudo-random lengths from 1 to `longest`, each with tokens of its own.
    fn dataset(documents: usize, longest: usize) -> Dataset {
        let mut random = random();
        let mut next = || random.next().unwrap();
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
    fn unpacked_rows_are_padded_to_the_longest_of_the_batch() {
        let example = |len: u32| Example { tokens: (0..len).collect(), trained: vec![false; len as usize] };
        let dataset = Dataset { examples: [3, 17, 40].map(example).into(), report: ReadReport::default() };
        let packed = PackedDataset::pack(&dataset, 44, false, None);
        let row_lens = [&[0][..], &[0, 1], &[0, 1, 2], &[]].map(|rows| packed.batch(rows).row_len);
        assert_eq!(row_lens, [16, 32, 44, 16]);
        assert_eq!(packed.row_len(), 44);
    }

    #[test]
    fn rows_have_the_multiple_that_was_asked_for() {
        for (pack, row_lens) in [(true, [128, 128]), (false, [128, 64])] {
            let options =
                PackOptions { pack, pad_to_multiple_of: Some(64), pad_token_id: Some(PAD), ..PackOptions::new(100) };
            let packed = PackedDataset::new(DocumentSet::of_dataset(&dataset(500, 100)), options);
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
        let packed = PackedDataset::pack(&dataset(900, 70), 128, true, Some(PAD));
        let report = packed.report();
        let batch = packed.batch(&(0..packed.rows()).collect::<Vec<_>>());
        assert_eq!((report.tokens, report.trained_tokens), (batch.tokens(), batch.trained_tokens()));
        assert_eq!(report.lengths.steps.iter().map(|step| step.documents).sum::<usize>(), 900);
        assert_eq!(report.efficiency, batch.tokens() as f64 / batch.input_ids.len() as f64);
        assert!((0.45..0.55).contains(&report.trained_share()), "{}", report.trained_share());
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
        for changed in [
            fingerprint(&token, 16),
            fingerprint(&mask, 16),
            fingerprint(&original, 32),
            fingerprint(&dataset(49, 9), 16),
        ] {
            assert_ne!(first, changed);
        }
    }
}
