//! All documents of a store, or some of them: the halves of a split share one store.
//!
//! Gives up order: documents come as the store has them. Shuffling is the loader's.

use std::sync::Arc;

use crate::dataset::{Dataset, Example, Holdout, largest_held_out_hash};
use crate::error::DataError;

use super::document::Document;
use super::store::TokenStore;

/// Documents to train on or to evaluate on. Costs 4 bytes a document where it is not the whole store.
#[derive(Debug, Clone)]
pub struct DocumentSet {
    store: Arc<TokenStore>,
    chosen: Option<Arc<[u32]>>,
}

impl DocumentSet {
    /// All of them.
    pub fn all(store: Arc<TokenStore>) -> Self {
        Self { store, chosen: None }
    }

    /// The examples of a dataset, copied into memory.
    pub fn of_dataset(dataset: &Dataset) -> Self {
        Self::all(Arc::new(TokenStore::of_examples(&dataset.examples)))
    }

    /// Splits into what is trained on and what is held out, by the law of [`Dataset::split`]: both make the same halves
    /// of the same examples. Reads the index only.
    ///
    /// # Errors
    /// A side would be empty.
    pub fn split(&self, holdout: Holdout) -> Result<(Self, Self), DataError> {
        let hash = |document: u32| self.store.document_hash(document as usize);
        let limit = largest_held_out_hash(self.numbers().map(hash).collect(), holdout)?;
        let (held_out, train) = self.numbers().partition::<Vec<u32>, _>(|&document| hash(document) <= limit);
        let half = |chosen: Vec<u32>| Self { store: self.store.clone(), chosen: Some(chosen.into()) };
        Ok((half(train), half(held_out)))
    }

    /// The documents that came from one source of a mixture.
    pub fn of_source(&self, source: u32) -> Self {
        let is_of = |&document: &u32| self.store.document_source(document as usize) == source;
        Self { store: self.store.clone(), chosen: Some(self.numbers().filter(is_of).collect()) }
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.chosen.as_ref().map_or(self.store.documents(), |chosen| chosen.len())
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Where they are stored.
    pub fn store(&self) -> &Arc<TokenStore> {
        &self.store
    }

    /// Number of a document in the store.
    ///
    /// # Panics
    /// If the set has no such document.
    pub fn number(&self, index: usize) -> usize {
        self.chosen.as_ref().map_or(index, |chosen| chosen[index] as usize)
    }

    /// A document.
    ///
    /// # Panics
    /// As [`DocumentSet::number`].
    pub fn document(&self, index: usize) -> Document<'_> {
        self.store.document(self.number(index))
    }

    /// A copy of a document.
    ///
    /// # Panics
    /// As [`DocumentSet::number`].
    pub fn example(&self, index: usize) -> Example {
        self.document(index).to_example()
    }

    /// Copies of all documents, one after another.
    pub fn examples(&self) -> impl Iterator<Item = Example> + '_ {
        (0..self.len()).map(|index| self.example(index))
    }

    /// Tokens of a document, from the index alone.
    ///
    /// # Panics
    /// As [`DocumentSet::number`].
    pub fn document_tokens(&self, index: usize) -> usize {
        self.store.document_tokens(self.number(index))
    }

    /// Trained tokens of a document, from the index alone.
    ///
    /// # Panics
    /// As [`DocumentSet::number`].
    pub fn document_trained_tokens(&self, index: usize) -> usize {
        self.store.document_trained_tokens(self.number(index))
    }

    /// Hash of tokens and mask of a document, from the index alone.
    ///
    /// # Panics
    /// As [`DocumentSet::number`].
    pub fn document_hash(&self, index: usize) -> u64 {
        self.store.document_hash(self.number(index))
    }

    fn numbers(&self) -> impl Iterator<Item = u32> + '_ {
        (0..self.len()).map(|index| self.number(index) as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::StoreWriter;
    use crate::dataset::ReadReport;

    fn dataset() -> Dataset {
        let example = |number: u32| Example { tokens: vec![number % 250, 7, 8], trained: vec![false, true, true] };
        Dataset { examples: (0..300).map(example).collect(), report: ReadReport::default() }
    }

    #[test]
    fn split_of_the_index_makes_the_same_halves_as_split_of_the_examples() {
        for holdout in [Holdout::Fraction(0.1), Holdout::Count(40)] {
            let halves = DocumentSet::of_dataset(&dataset()).split(holdout).unwrap();
            let expected = dataset().split(holdout).unwrap();
            assert!(halves.0.examples().eq(expected.0.examples));
            assert!(halves.1.examples().eq(expected.1.examples));
        }
        assert!(DocumentSet::of_dataset(&dataset()).split(Holdout::Count(300)).is_err());
    }

    #[test]
    fn sources_divide_a_mixture() {
        let mut writer = StoreWriter::in_memory(256);
        for (number, example) in dataset().examples.iter().enumerate() {
            writer.push(example, number as u32 % 3).unwrap();
        }
        let all = DocumentSet::all(Arc::new(writer.into_store(Vec::new())));
        let second = all.of_source(1);
        assert_eq!((second.len(), second.number(1), second.document_tokens(1)), (100, 4, 3));
        assert!(all.of_source(3).is_empty());
    }
}
