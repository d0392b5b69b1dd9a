//! Data files of every format, packed or not, folders that `datasets` saved, and listings of the Hub.

use firebrick_data::{Format, Hub, HubSettings, Place, SourceError, SourceSpec, TextUnit};

use super::{Folder, Outcome, parts};

/// More rows than any input of a fuzzer has, unless it is a bomb.
const MAX_ROWS: usize = 100_000;
const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

pub(crate) fn jsonl(bytes: &[u8]) -> Outcome {
    read("rows.jsonl", bytes, SourceSpec::default())
}

/// Without a named list, and with one.
pub(crate) fn json(bytes: &[u8]) -> Outcome {
    let mut outcome = read("rows.json", bytes, SourceSpec::default());
    let named = read("rows.json", bytes, SourceSpec { field: Some("data".to_owned()), ..SourceSpec::default() });
    outcome.read += named.read;
    outcome.said.extend(named.said);
    outcome
}

/// The first byte: separated by tabs if it is odd.
pub(crate) fn csv(bytes: &[u8]) -> Outcome {
    let (first, rest) = bytes.split_first().unwrap_or((&0, &[]));
    read(if first % 2 == 0 { "rows.csv" } else { "rows.tsv" }, rest, SourceSpec::default())
}

/// The first byte: a line a document if it is odd.
pub(crate) fn text(bytes: &[u8]) -> Outcome {
    let (first, rest) = bytes.split_first().unwrap_or((&0, &[]));
    let text_unit = if first % 2 == 0 { TextUnit::File } else { TextUnit::Line };
    read("rows.txt", rest, SourceSpec { text_unit, ..SourceSpec::default() })
}

pub(crate) fn parquet(bytes: &[u8]) -> Outcome {
    read("rows.parquet", bytes, SourceSpec::default())
}

pub(crate) fn arrow(bytes: &[u8]) -> Outcome {
    read("rows.arrow", bytes, SourceSpec::default())
}

/// The first byte chooses the compression and what is inside.
pub(crate) fn packed(bytes: &[u8]) -> Outcome {
    const INSIDE: [&str; 7] = ["jsonl", "json", "csv", "tsv", "txt", "arrow", "parquet"];
    let (&first, rest) = bytes.split_first().unwrap_or((&0, &[]));
    let ending = if first % 2 == 0 { "gz" } else { "zst" };
    let inside = INSIDE[usize::from(first / 2) % INSIDE.len()];
    read(&format!("rows.{inside}.{ending}"), rest, SourceSpec::default())
}

/// A folder of `Dataset.save_to_disk` or `DatasetDict.save_to_disk`: `state.json`, then `dataset_dict.json`.
pub(crate) fn saved_folder(bytes: &[u8]) -> Outcome {
    let folder = Folder::new("saved");
    let row = b"{\"text\":\"a\"}\n";
    for (name, part) in ["state.json", "dataset_dict.json"].into_iter().zip(parts(bytes)) {
        folder.write(name, part);
        folder.write(&format!("train/{name}"), part);
    }
    folder.write("rows.jsonl", row);
    folder.write("train/rows.jsonl", row);
    let path = folder.path().to_str().expect("a path of our own").to_owned();
    let mut outcome = Outcome::default();
    records(&SourceSpec::new(path), &offline(&folder), &mut outcome);
    outcome
}

/// What the Hub answered about a dataset. The first byte: the configuration and split that are asked for.
pub(crate) fn hub_listing(bytes: &[u8]) -> Outcome {
    let (&first, rest) = bytes.split_first().unwrap_or((&0, &[]));
    let folder = Folder::new("hub");
    folder.write("datasets--owner--name/refs/main", COMMIT.as_bytes());
    folder.write(&format!("datasets--owner--name/.firebrick/{COMMIT}.json"), rest);
    let row = b"{\"text\":\"a\"}\n";
    folder.write(&format!("datasets--owner--name/snapshots/{COMMIT}/train.jsonl"), row);
    let choose = |bits: u8| [None, Some("train"), Some("test"), Some("a")][usize::from(bits % 4)].map(str::to_owned);
    let spec =
        SourceSpec { split: choose(first), config: choose(first / 4), ..SourceSpec::new("hf://datasets/owner/name") };
    let mut outcome = Outcome::default();
    records(&spec, &offline(&folder), &mut outcome);
    outcome
}

/// A Hub that is never asked, with a cache in the folder.
fn offline(folder: &Folder) -> Hub {
    let endpoint = "http://127.0.0.1:9".to_owned();
    Hub::new(HubSettings { endpoint, cache: folder.path().to_owned(), token: None, is_offline: true })
}

/// Reads a file of these bytes.
fn read(name: &str, bytes: &[u8], spec: SourceSpec) -> Outcome {
    let folder = Folder::new("source");
    let path = folder.write(name, bytes).to_str().expect("a path of our own").to_owned();
    let mut outcome = Outcome::default();
    records(&SourceSpec { path, ..spec }, &offline(&folder), &mut outcome);
    for said in &outcome.said {
        assert!(said.contains(name), "an error that does not name the file: {said}");
    }
    outcome
}

fn records(spec: &SourceSpec, hub: &Hub, outcome: &mut Outcome) {
    let Some(source) = outcome.note(spec.resolve(hub)) else { return };
    outcome.read = 0;
    let mut last: Option<Place> = None;
    let mut has_ended = false;
    let files = source.file_names().len();
    for record in source.records().take(MAX_ROWS) {
        assert!(!has_ended, "a record after an error that ends the stream");
        has_ended = match &record {
            // A file called .json may hold lines, of which the next can still be read.
            Err(SourceError::BadJson { .. } | SourceError::NotAnObject { .. }) => false,
            Err(_) => true,
            Ok(record) => {
                // Several rows of JSON may stand in a line; a file may be named twice.
                let is_later = |last: &Place| {
                    last.path != record.place.path || last.line < record.place.line || source.format() == Format::Json
                };
                assert!(files > 1 || last.as_ref().is_none_or(is_later), "{} behind {last:?}", record.place);
                last = Some(record.place.clone());
                false
            }
        };
        // A file of bad lines has as many errors as lines; the words of the first ones tell enough.
        if outcome.said.len() < 16 || record.is_ok() {
            outcome.note(record);
        }
    }
}
