//! Serializes diagnoses to bytes that are stored with the tokens in the cache.
//!
//! Files are stored by their index in the source, not by name: a report that is read after files were moved uses their current names. Trade-off: JSON
//! rather than a compact format, because the report is small.

use std::path::{Path, PathBuf};

use crate::diagnose::Diagnosis;

/// Version of the stored report, part of the cache's key. Incremented when the fields of [`Diagnosis`] or their meaning change.
pub(super) const VERSION: [u8; 1] = [8];

/// Serializes a report. `dropped` are the hashes of the records that gave nothing, `files` the names of each source's files. Panics if a place is not
/// in a file of its source.
pub(super) fn to_bytes(diagnoses: Vec<Diagnosis>, dropped: Vec<u64>, files: &[Vec<String>]) -> Vec<u8> {
    let numbered: Vec<Diagnosis> = diagnoses
        .into_iter()
        .zip(files)
        .map(|(diagnosis, files)| diagnosis.with_paths(|path| Some(number(path, files))))
        .collect::<Option<_>>()
        .expect("every file has a number");
    serde_json::to_vec(&(numbered, dropped)).expect("numbers and strings are always valid JSON")
}

/// Parses a report; `None` if the bytes are not a report of sources with these files.
pub(super) fn from_bytes(bytes: &[u8], files: &[Vec<String>]) -> Option<(Vec<Diagnosis>, Vec<u64>)> {
    let (diagnoses, dropped): (Vec<Diagnosis>, Vec<u64>) = serde_json::from_slice(bytes).ok()?;
    if diagnoses.len() != files.len() {
        return None;
    }
    let named = |(diagnosis, files): (Diagnosis, &Vec<String>)| {
        diagnosis.with_paths(|path| files.get(path.to_str()?.parse::<usize>().ok()?).map(PathBuf::from))
    };
    Some((diagnoses.into_iter().zip(files).map(named).collect::<Option<_>>()?, dropped))
}

/// Returns the index of a file, as a path.
fn number(path: &Path, files: &[String]) -> PathBuf {
    match files.iter().position(|name| path == Path::new(name)) {
        Some(number) => number.to_string().into(),
        None => panic!("a record came from {}, which is not one of the files {files:?}", path.display()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::diagnose::FindingCount;
    use crate::finding::FindingKind;
    use crate::source::RecordPlace;

    fn found_at(path: &str) -> Diagnosis {
        let place = RecordPlace { path: path.into(), line: 3 };
        let found = FindingCount { count: 7, first: vec![(place, "why \"so\"".to_owned())] };
        Diagnosis {
            rows: 9,
            rows_kept: 8,
            examples: 10,
            tokens: 11,
            loss_tokens: 5,
            longest: 4,
            tokens_cut: 2,
            chats: 8,
            chats_ended: 6,
            bad_rows: 1,
            findings: [(FindingKind::Truncated, found)].into(),
            unread_keys: [("functions".to_owned(), 4)].into(),
        }
    }

    fn files(names: &[&str]) -> Vec<Vec<String>> {
        vec![names.iter().map(ToString::to_string).collect()]
    }

    #[test]
    fn a_report_is_read_back_with_the_current_names_of_the_files() {
        let bytes = to_bytes(vec![found_at("old/b.jsonl")], vec![7], &files(&["old/a.jsonl", "old/b.jsonl"]));
        assert_eq!(from_bytes(&bytes, &files(&["new/a", "new/c"])), Some((vec![found_at("new/c")], vec![7])));
        assert_eq!(from_bytes(&bytes, &files(&["only"])), None);
        assert_eq!(from_bytes(&bytes, &[]), None);
        assert_eq!(from_bytes(b"{}", &files(&["new/a", "new/c"])), None);
    }

    #[test]
    #[should_panic(expected = "not one of the files")]
    fn a_place_outside_the_files_of_the_source_is_a_bug() {
        to_bytes(vec![found_at("x")], Vec::new(), &files(&["a"]));
    }
}
