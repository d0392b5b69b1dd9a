//! What was found in the rows of a source, in words, and as the bytes that lie beside its tokens in the cache.

use std::collections::BTreeMap;
use std::fmt::{self, Display};
use std::path::PathBuf;

use firebrick_data::{Diagnosis, FindingKind, Place, Seen, Shape};
use serde::{Deserialize, Serialize};

/// Layout of the stored report, part of the cache's key. Raised when [`Stored`] changes.
pub(crate) const VERSION: [u8; 1] = [1];

/// A source and what its rows held.
#[derive(Debug, Clone, PartialEq)]
pub struct SourceReport {
    /// Its path as the recipe writes it.
    pub name: String,
    /// Its file format.
    pub format: String,
    /// What its rows are.
    pub shape: String,
    /// What was found in them.
    pub diagnosis: Diagnosis,
}

impl Display for SourceReport {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} ({}, {}): {}", self.name, self.format, self.shape, self.diagnosis)
    }
}

/// The name of a shape as recipes write it.
pub(crate) fn shape_name(shape: Shape) -> String {
    match shape {
        Shape::Messages => "chat",
        Shape::Auto => "auto",
        Shape::Sharegpt => "sharegpt",
        Shape::Alpaca => "alpaca",
        Shape::Text => "text",
        Shape::PromptCompletion => "prompt_completion",
        Shape::Pretokenized => "pretokenized",
    }
    .to_owned()
}

/// As JSON; paths that are no text lose their foreign bytes.
#[derive(Serialize, Deserialize)]
struct Stored {
    name: String,
    format: String,
    shape: String,
    rows: u64,
    rows_kept: u64,
    examples: u64,
    tokens: u64,
    trained_tokens: u64,
    longest: usize,
    tokens_cut: u64,
    chats: u64,
    chats_ended: u64,
    bad_rows: u64,
    findings: BTreeMap<FindingKind, StoredSeen>,
}

#[derive(Serialize, Deserialize)]
struct StoredSeen {
    count: u64,
    first: Vec<(String, usize, String)>,
}

pub(crate) fn to_bytes(reports: &[SourceReport]) -> Vec<u8> {
    let stored: Vec<Stored> = reports.iter().map(Stored::of).collect();
    serde_json::to_vec(&stored).expect("plain data is always JSON")
}

pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Vec<SourceReport>> {
    let stored: Vec<Stored> = serde_json::from_slice(bytes).ok()?;
    Some(stored.into_iter().map(Stored::into_report).collect())
}

impl Stored {
    fn of(report: &SourceReport) -> Self {
        let found = &report.diagnosis;
        let place = |(place, detail): &(Place, String)| (place.path.display().to_string(), place.line, detail.clone());
        let seen = |seen: &Seen| StoredSeen { count: seen.count, first: seen.first.iter().map(place).collect() };
        Self {
            name: report.name.clone(),
            format: report.format.clone(),
            shape: report.shape.clone(),
            rows: found.rows,
            rows_kept: found.rows_kept,
            examples: found.examples,
            tokens: found.tokens,
            trained_tokens: found.trained_tokens,
            longest: found.longest,
            tokens_cut: found.tokens_cut,
            chats: found.chats,
            chats_ended: found.chats_ended,
            bad_rows: found.bad_rows,
            findings: found.findings.iter().map(|(kind, found)| (*kind, seen(found))).collect(),
        }
    }

    fn into_report(self) -> SourceReport {
        let place = |(path, line, detail): (String, usize, String)| (Place { path: PathBuf::from(path), line }, detail);
        let seen = |seen: StoredSeen| Seen { count: seen.count, first: seen.first.into_iter().map(place).collect() };
        let diagnosis = Diagnosis {
            rows: self.rows,
            rows_kept: self.rows_kept,
            examples: self.examples,
            tokens: self.tokens,
            trained_tokens: self.trained_tokens,
            longest: self.longest,
            tokens_cut: self.tokens_cut,
            chats: self.chats,
            chats_ended: self.chats_ended,
            bad_rows: self.bad_rows,
            findings: self.findings.into_iter().map(|(kind, found)| (kind, seen(found))).collect(),
        };
        SourceReport { name: self.name, format: self.format, shape: self.shape, diagnosis }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn report_comes_back_from_its_bytes_as_it_was() {
        let place = Place { path: PathBuf::from("a/b.jsonl"), line: 3 };
        let seen = Seen { count: 7, first: vec![(place, "why \"so\"".to_owned())] };
        let diagnosis = Diagnosis {
            rows: 9,
            rows_kept: 8,
            examples: 10,
            tokens: 11,
            trained_tokens: 5,
            longest: 4,
            tokens_cut: 2,
            chats: 8,
            chats_ended: 6,
            bad_rows: 1,
            findings: [(FindingKind::Truncated, seen)].into(),
        };
        let name = |text: &str| text.to_owned();
        let report = SourceReport { name: name("a"), format: name("jsonl"), shape: name("chat"), diagnosis };
        assert_eq!(from_bytes(&to_bytes(std::slice::from_ref(&report))), Some(vec![report]));
        assert_eq!(from_bytes(b"{}"), None);
    }
}
