//! Diagnoses as the bytes that lie beside tokens in the cache.
//!
//! Files are kept by their number in the source, which decides the cache's key, not by their name, which does not: a report
//! read after files were moved names them where they are now. Gives up a compact form: the report is small JSON.

use std::path::{Path, PathBuf};

use crate::diagnose::Diagnosis;

/// Layout and meaning of what is stored, part of the cache's key. Raised when a [`Diagnosis`] comes to have other fields, or
/// to count otherwise.
pub(super) const VERSION: [u8; 1] = [2];

/// `files` are the names of each source's files.
///
/// # Panics
/// If a place is in no file of its source.
pub(super) fn to_bytes(diagnoses: Vec<Diagnosis>, files: &[Vec<String>]) -> Vec<u8> {
    let numbered: Vec<Diagnosis> = diagnoses
        .into_iter()
        .zip(files)
        .map(|(diagnosis, files)| diagnosis.with_paths(|path| number(path, files)))
        .collect();
    serde_json::to_vec(&numbered).expect("numbers and texts are always JSON")
}

/// `None` if the bytes are no report of sources with these files.
pub(super) fn from_bytes(bytes: &[u8], files: &[Vec<String>]) -> Option<Vec<Diagnosis>> {
    let diagnoses: Vec<Diagnosis> = serde_json::from_slice(bytes).ok()?;
    let is_known = |(diagnosis, files): (&Diagnosis, &Vec<String>)| {
        let mut places = diagnosis.findings.values().flat_map(|seen| &seen.first);
        places.all(|(place, _)| name(&place.path, files).is_some())
    };
    if diagnoses.len() != files.len() || !diagnoses.iter().zip(files).all(is_known) {
        return None;
    }
    let named = |(diagnosis, files): (Diagnosis, &Vec<String>)| {
        diagnosis.with_paths(|path| name(path, files).expect("looked at above").into())
    };
    Some(diagnoses.into_iter().zip(files).map(named).collect())
}

/// The number of a file as a path.
fn number(path: &Path, files: &[String]) -> PathBuf {
    let shown = path.display().to_string();
    let is_it = |name: &String| *name == shown || in_snapshot(name).is_some_and(|end| path.ends_with(end));
    match files.iter().position(is_it) {
        Some(number) => number.to_string().into(),
        None => panic!("a record came from {shown}, which is none of the files {files:?}"),
    }
}

fn name<'a>(number: &Path, files: &'a [String]) -> Option<&'a String> {
    files.get(number.to_str()?.parse::<usize>().ok()?)
}

/// Where a Hub file `owner/name@commit/path` lies in the Hub's cache, which ends so.
fn in_snapshot(name: &str) -> Option<PathBuf> {
    let (_, end) = name.split_once('@')?;
    Some(Path::new("snapshots").join(end))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::diagnose::{FindingKind, Seen};
    use crate::error::Place;

    fn found_at(path: &str) -> Diagnosis {
        let place = Place { path: path.into(), line: 3 };
        let seen = Seen { count: 7, first: vec![(place, "why \"so\"".to_owned())] };
        Diagnosis {
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
        }
    }

    fn files(names: &[&str]) -> Vec<Vec<String>> {
        vec![names.iter().map(ToString::to_string).collect()]
    }

    #[test]
    fn report_comes_back_with_the_names_that_files_have_now() {
        let bytes = to_bytes(vec![found_at("old/b.jsonl")], &files(&["old/a.jsonl", "old/b.jsonl"]));
        assert_eq!(from_bytes(&bytes, &files(&["new/a", "new/c"])), Some(vec![found_at("new/c")]));
        assert_eq!(from_bytes(&bytes, &files(&["only"])), None);
        assert_eq!(from_bytes(&bytes, &[]), None);
        assert_eq!(from_bytes(b"{}", &files(&["new/a", "new/c"])), None);
    }

    #[test]
    fn files_of_the_hub_are_known_by_their_place_in_its_cache() {
        let hub = files(&["o/n@c0/a/x.jsonl", "o/n@c0/x.jsonl"]);
        let bytes = to_bytes(vec![found_at("any/datasets--o--n/snapshots/c0/x.jsonl")], &hub);
        assert_eq!(from_bytes(&bytes, &hub), Some(vec![found_at("o/n@c0/x.jsonl")]));
    }

    #[test]
    #[should_panic(expected = "none of the files")]
    fn place_in_no_file_of_the_source_is_our_bug() {
        to_bytes(vec![found_at("x")], &files(&["a"]));
    }
}
