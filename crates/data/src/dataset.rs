//! Examples held in memory, and a split that never changes.
//!
//! For examples that are made by hand or by other code; files are read by [`Corpus`](crate::Corpus), whose documents lie
//! in a store. Gives up size: five bytes a token.

use crate::error::DataError;
use crate::stable_hash::StableHash;

/// One document: its tokens, and for each whether it counts as a target of the loss (the first never does).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Example {
    /// Token ids.
    pub tokens: Vec<u32>,
    /// As long as `tokens`.
    pub trained: Vec<bool>,
}

impl Example {
    /// How many tokens are targets.
    pub fn trained_tokens(&self) -> usize {
        self.trained.iter().filter(|&&trained| trained).count()
    }
}

/// How much some examples hold.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ReadReport {
    /// How many there are.
    pub examples: usize,
    /// Tokens of all examples.
    pub tokens: usize,
    /// Tokens that are targets.
    pub trained_tokens: usize,
    /// Tokens of the longest example.
    pub longest: usize,
}

impl ReadReport {
    fn of(examples: &[Example]) -> Self {
        let tokens = |example: &Example| example.tokens.len();
        Self {
            examples: examples.len(),
            tokens: examples.iter().map(tokens).sum(),
            trained_tokens: examples.iter().map(Example::trained_tokens).sum(),
            longest: examples.iter().map(tokens).max().unwrap_or(0),
        }
    }
}

/// How much of a dataset to hold out for evaluation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Holdout {
    /// This share of the examples, between 0 and 1; at least one example.
    Fraction(f64),
    /// This many examples.
    Count(usize),
}

/// Examples in an order.
#[derive(Debug, Clone)]
pub struct Dataset {
    /// The examples.
    pub examples: Vec<Example>,
    /// How much they hold.
    pub report: ReadReport,
}

impl Dataset {
    /// Splits into what is trained on and what is held out, both in the same order.
    ///
    /// The examples with the smallest hash of content are held out: the choice depends on no seed and no order, hardly
    /// changes when rows are added, and equal examples are never on both sides (so slightly more may be held out than
    /// asked for). Error: a side would be empty.
    pub fn split(self, holdout: Holdout) -> Result<(Self, Self), DataError> {
        let hashes: Vec<u64> = self.examples.iter().map(hash_of).collect();
        let limit = largest_held_out_hash(hashes.clone(), holdout)?;
        let (mut train, mut eval) = (Vec::new(), Vec::new());
        for (example, hash) in self.examples.into_iter().zip(hashes) {
            if hash <= limit { &mut eval } else { &mut train }.push(example);
        }
        let half = |examples: Vec<Example>| Self { report: ReadReport::of(&examples), examples };
        Ok((half(train), half(eval)))
    }
}

/// Decides a split: documents with this hash or a smaller one are held out. Error: a side would be empty.
pub(crate) fn largest_held_out_hash(mut hashes: Vec<u64>, holdout: Holdout) -> Result<u64, DataError> {
    hashes.sort_unstable();
    let examples = hashes.len();
    let wanted = match holdout {
        Holdout::Fraction(share) if share > 0.0 && share < 1.0 => (share * examples as f64).round().max(1.0) as usize,
        Holdout::Count(count) if count > 0 => count,
        Holdout::Fraction(_) | Holdout::Count(_) => examples,
    };
    let limit = hashes.get(wanted.wrapping_sub(1)).copied();
    // Equal examples stay together, so more than wanted may be held out.
    if let Some(limit) = limit.filter(|limit| hashes.last() > Some(limit)) {
        return Ok(limit);
    }
    let asked = match holdout {
        Holdout::Fraction(share) => format!("a share of {share}"),
        Holdout::Count(count) => count.to_string(),
    };
    hashes.dedup();
    Err(DataError::BadSplit { asked, examples, distinct: hashes.len() })
}

fn hash_of(example: &Example) -> u64 {
    let mut hash = StableHash::new();
    hash.add_document(&example.tokens, &example.trained);
    hash.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dataset(contents: impl IntoIterator<Item = u32>) -> Dataset {
        let example = |content| Example { tokens: vec![content, content + 1, 7], trained: vec![false, true, true] };
        let examples: Vec<Example> = contents.into_iter().map(example).collect();
        Dataset { report: ReadReport::of(&examples), examples }
    }

    fn contents(dataset: &Dataset) -> Vec<u32> {
        dataset.examples.iter().map(|example| example.tokens[0]).collect()
    }

    #[test]
    fn split_keeps_every_example_once_and_counts_each_half() {
        let (train, eval) = dataset(0..1000).split(Holdout::Fraction(0.1)).unwrap();
        let mut all = [contents(&train), contents(&eval)].concat();
        assert_eq!(eval.examples.len(), 100);
        assert_eq!((eval.report.tokens, eval.report.trained_tokens, train.report.examples), (300, 200, 900));
        assert!(contents(&eval).is_sorted() && contents(&train).is_sorted());
        all.sort_unstable();
        assert!(all.into_iter().eq(0..1000));
    }

    #[test]
    fn split_does_not_depend_on_the_order_of_the_examples() {
        let (_, forward) = dataset(0..50).split(Holdout::Count(5)).unwrap();
        let (_, backward) = dataset((0..50).rev()).split(Holdout::Count(5)).unwrap();
        assert!(contents(&forward).iter().eq(contents(&backward).iter().rev()));
    }

    #[test]
    fn equal_examples_are_never_on_both_sides() {
        let (train, eval) = dataset((0..60).map(|index| index % 6)).split(Holdout::Count(3)).unwrap();
        assert_eq!((train.examples.len(), eval.examples.len()), (50, 10));
    }

    #[test]
    fn split_that_empties_a_side_is_refused() {
        for holdout in [Holdout::Count(0), Holdout::Count(9), Holdout::Fraction(1.0), Holdout::Fraction(f64::NAN)] {
            assert!(matches!(dataset(0..9).split(holdout), Err(DataError::BadSplit { .. })));
        }
        assert!(dataset([1, 1, 1]).split(Holdout::Count(1)).is_err());
    }
}
