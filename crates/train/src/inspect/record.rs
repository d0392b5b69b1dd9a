//! Records with findings: dropped, cut, or trained without a part.

use std::ops::Range;

use firebrick_arch::python_json::unmarked;
use firebrick_data::{DataError, Diagnosis, EncodeOptions, Encoder, FindingKind, Record, RecordPlace, Tokenizer};
use firebrick_trainer::run::data_sets::Input;

use super::sample::SampleDocument;

/// Maximum number of records shown per kind of finding.
const RECORDS_PER_KIND: usize = 2;
/// Maximum characters shown of a record.
const RECORD_CHARACTERS: usize = 2000;
const TOKENS_AROUND_CUT: usize = 150;

/// A record with a finding.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SampleRecord {
    /// The kind of finding.
    pub kind: FindingKind,
    /// File and line.
    pub place: String,
    /// The exact finding, and the remedy.
    pub detail: String,
    /// The beginning of the record as JSON.
    pub json: String,
    /// Its tokens, if it has any: around the cut, or from the beginning.
    pub document: Option<SampleDocument>,
    /// The record was cut before this token.
    pub cut_at: Option<usize>,
}

/// Returns the first records of each kind of finding in a source.
///
/// # Errors
/// A record cannot be read again.
pub(super) fn records(
    input: &Input,
    diagnosis: &Diagnosis,
    tokenizer: &Tokenizer,
) -> Result<Vec<SampleRecord>, DataError> {
    let files = input.source.file_names();
    let mut wanted: Vec<(FindingKind, &RecordPlace, &str)> = Vec::new();
    // A row that cannot be read has nothing to show but its place and the problem.
    for (&kind, found) in diagnosis.findings.iter().filter(|(kind, _)| **kind != FindingKind::Unreadable) {
        wanted.extend(found.first.iter().take(RECORDS_PER_KIND).map(|(place, detail)| (kind, place, detail.as_str())));
    }
    let mut shown = Vec::new();
    for record in input.source.records() {
        if wanted.is_empty() {
            break;
        }
        let record = match record {
            Err(error) if error.can_continue() => continue,
            record => record?,
        };
        let file = &files[record.file as usize];
        let (here, rest) = wanted
            .into_iter()
            .partition(|(_, place, _)| place.line == record.place.line && place.path.display().to_string() == *file);
        wanted = rest;
        for (kind, place, detail) in here {
            shown.push(sample(input, &record, (kind, place, detail), tokenizer)?);
        }
    }
    shown.sort_by_key(|record: &SampleRecord| record.kind);
    Ok(shown)
}

fn sample(
    input: &Input,
    record: &Record,
    (kind, place, detail): (FindingKind, &RecordPlace, &str),
    tokenizer: &Tokenizer,
) -> Result<SampleRecord, DataError> {
    let limit = input.options.max_seq_len;
    let is_cut =
        matches!(kind, FindingKind::Truncated | FindingKind::Split | FindingKind::CutToNothing | FindingKind::TooLong);
    // Encodes the whole record, as it was before the cut.
    let options = EncodeOptions { max_seq_len: usize::MAX, ..input.options.clone() };
    let encoded = Encoder::new(tokenizer, options, record)?.encode(record)?;
    let shown: Range<usize> =
        if is_cut { limit.saturating_sub(TOKENS_AROUND_CUT)..limit + TOKENS_AROUND_CUT } else { 0..usize::MAX };
    let document = encoded.examples.first();
    let document = document.map(|example| match is_cut {
        true => SampleDocument::around(place.to_string(), example, shown, tokenizer),
        false => SampleDocument::new(place.to_string(), example, tokenizer),
    });
    // Invariant: a record was read from a file, so its values can be written.
    let json = unmarked(&serde_json::to_string_pretty(&record.fields).expect("a record is plain values"));
    let cut = json.char_indices().nth(RECORD_CHARACTERS).map(|(end, _)| format!("{} …", &json[..end]));
    Ok(SampleRecord {
        kind,
        place: place.to_string(),
        detail: detail.to_owned(),
        json: cut.unwrap_or(json),
        document: document.transpose()?,
        cut_at: is_cut.then_some(limit),
    })
}
