//! Which documents are held out for evaluation, from their hashes alone.
//!
//! The documents with the smallest hashes are held out: the choice depends on no seed and no order, changes little when
//! documents are added, and never puts equal documents on both sides. Trade-off: slightly more may be held out than
//! requested, because equal documents stay together.

use super::error::CacheError;

/// How much of a set of documents to hold out for evaluation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Holdout {
    /// This share of the documents, between 0 and 1; at least one document.
    Fraction(f64),
    /// This many documents.
    Count(usize),
}

/// The largest hash that is held out: all documents with this hash or a smaller one are. Error: a side would be empty.
pub(super) fn largest_held_out_hash(mut hashes: Vec<u64>, holdout: Holdout) -> Result<u64, CacheError> {
    hashes.sort_unstable();
    let documents = hashes.len();
    let count = match holdout {
        Holdout::Fraction(share) if share > 0.0 && share < 1.0 => (share * documents as f64).round().max(1.0) as usize,
        Holdout::Count(count) if count > 0 => count,
        Holdout::Fraction(_) | Holdout::Count(_) => documents,
    };
    let limit = hashes.get(count.wrapping_sub(1)).copied();
    if let Some(limit) = limit.filter(|limit| hashes.last() > Some(limit)) {
        return Ok(limit);
    }
    let requested = match holdout {
        Holdout::Fraction(share) => format!("a share of {share}"),
        Holdout::Count(count) => count.to_string(),
    };
    hashes.dedup();
    Err(CacheError::BadSplit { requested, documents, distinct: hashes.len() })
}
