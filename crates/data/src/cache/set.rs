//! All documents of a store, or some of them: both sides of a split share one store.

use std::sync::Arc;

use super::CacheError;
use super::document::{Document, Example};
use super::layout::DocumentEntry;
use super::store::TokenStore;

/// Documents to train on or to evaluate on. Takes 4 bytes per document, or none if it is the whole store.
#[derive(Debug, Clone)]
pub struct DocumentSet {
    store: Arc<TokenStore>,
    chosen: Option<Arc<[u32]>>,
}

impl DocumentSet {
    /// Creates the set of all documents of a store.
    pub fn all(store: Arc<TokenStore>) -> Self {
        Self { store, chosen: None }
    }

    /// Copies examples into a new store in memory. Panics under the conditions of [`TokenStore::from_examples`].
    pub fn from_examples(examples: &[Example]) -> Self {
        Self::all(Arc::new(TokenStore::from_examples(examples)))
    }

    /// Splits into documents to train on and documents to hold out, both in the same order.
    ///
    /// Of the distinct records, the share (between 0 and 1; at least one record) with the smallest hashes is held out. `dropped` are the hashes of
    /// the records that gave no document. So the choice depends only on the records, not on the tokenizer, the template, the mask, the length, a seed
    /// or their order. Pieces of one record, and equal records, are never on both sides. Reads only the index. Errors: a side would be empty.
    pub fn split(&self, share: f64, dropped: &[u64]) -> Result<(Self, Self), CacheError> {
        let hash = |document: u32| self.store.entry(document as usize).origin.record;
        let mut hashes: Vec<u64> = self.numbers().map(hash).chain(dropped.iter().copied()).collect();
        hashes.sort_unstable();
        hashes.dedup();
        let records = hashes.len();
        let is_share = share > 0.0 && share < 1.0;
        let count = if is_share { (share * records as f64).round().max(1.0) as usize } else { 0 };
        hashes.truncate(count);
        let (held_out, train) = self
            .numbers()
            .partition::<Vec<u32>, _>(|&document| hashes.last().is_some_and(|&limit| hash(document) <= limit));
        if train.is_empty() || held_out.is_empty() {
            return Err(CacheError::BadSplit(format!(
                "a share of {share} for evaluation: of {records} distinct records {count} were chosen, which leaves {} \
                 documents to train on and {} to evaluate on, and both need at least one",
                train.len(),
                held_out.len()
            )));
        }
        let half = |chosen: Vec<u32>| Self { store: self.store.clone(), chosen: Some(chosen.into()) };
        Ok((half(train), half(held_out)))
    }

    /// Returns the documents of some sources, by their numbers, in the same order. Reads only the index.
    #[must_use]
    pub fn of_sources(&self, is_chosen: impl Fn(u32) -> bool) -> Self {
        let source = |document: u32| self.store.entry(document as usize).origin.source;
        let chosen: Vec<u32> = self.numbers().filter(|&document| is_chosen(source(document))).collect();
        Self { store: self.store.clone(), chosen: Some(chosen.into()) }
    }

    /// Returns the number of documents.
    pub fn len(&self) -> usize {
        self.chosen.as_ref().map_or(self.store.documents(), |chosen| chosen.len())
    }

    /// Returns whether there are no documents.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the store of the documents.
    pub fn store(&self) -> &Arc<TokenStore> {
        &self.store
    }

    /// Returns the index of a document in the store. Panics if the set has no such document.
    fn number(&self, index: usize) -> usize {
        self.chosen.as_ref().map_or(index, |chosen| chosen[index] as usize)
    }

    /// Returns a document. Panics if the set has no such document.
    pub fn document(&self, index: usize) -> Document<'_> {
        self.store.document(self.number(index))
    }

    /// Returns copies of all documents, one after another.
    pub fn examples(&self) -> impl Iterator<Item = Example> + '_ {
        (0..self.len()).map(|index| self.document(index).to_example())
    }

    /// Returns the index entry of a document; its tokens are not read. Panics if the set has no such document.
    pub fn entry(&self, index: usize) -> DocumentEntry {
        self.store.entry(self.number(index))
    }

    fn numbers(&self) -> impl Iterator<Item = u32> + '_ {
        (0..self.len()).map(|index| self.number(index) as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn documents(contents: impl IntoIterator<Item = u32>) -> DocumentSet {
        let example = |content| Example { tokens: vec![content, content + 1, 7], loss_mask: vec![false, true, true] };
        DocumentSet::from_examples(&contents.into_iter().map(example).collect::<Vec<_>>())
    }

    fn contents(documents: &DocumentSet) -> Vec<u32> {
        documents.examples().map(|example| example.tokens[0]).collect()
    }

    #[test]
    fn a_split_keeps_documents_once_whatever_their_order() {
        let (train, eval) = documents(0..1000).split(0.1, &[]).unwrap();
        assert_eq!((train.len(), eval.len()), (900, 100));
        assert!(contents(&eval).is_sorted() && contents(&train).is_sorted());
        let mut all = [contents(&train), contents(&eval)].concat();
        all.sort_unstable();
        assert!(all.into_iter().eq(0..1000));
        let (_, forward) = documents(0..50).split(0.1, &[]).unwrap();
        let (_, backward) = documents((0..50).rev()).split(0.1, &[]).unwrap();
        assert!(contents(&forward).iter().eq(contents(&backward).iter().rev()));
    }

    #[test]
    fn equal_records_are_never_on_both_sides() {
        let (train, eval) = documents((0..60).map(|index| index % 6)).split(0.5, &[]).unwrap();
        assert_eq!((train.len(), eval.len()), (30, 30));
    }

    #[test]
    fn the_choice_is_the_same_where_records_give_no_document() {
        let all = documents(0..100);
        let (_, eval) = all.split(0.2, &[]).unwrap();
        let dropped: Vec<u64> = (60..100).map(|index| all.entry(index).origin.record).collect();
        let (_, fewer) = documents(0..60).split(0.2, &dropped).unwrap();
        let expected: Vec<u32> = contents(&eval).into_iter().filter(|&content| content < 60).collect();
        assert!(!expected.is_empty());
        assert_eq!(contents(&fewer), expected);
    }

    #[test]
    fn split_that_empties_a_side_is_refused() {
        for share in [0.0, 1.0, 0.99, f64::NAN] {
            assert!(matches!(documents(0..9).split(share, &[]), Err(CacheError::BadSplit(_))), "{share}");
        }
        assert!(documents([1, 1, 1]).split(0.5, &[]).is_err());
    }
}
