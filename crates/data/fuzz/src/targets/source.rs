//! Data files of every format, compressed or not, folders that `datasets` saved, and listings of the Hub.

use firebrick_data::{FileFormat, Hub, HubSettings, RecordPlace, SourceError, SourceSpec, TextDocument};

use super::{Folder, Outcome, parts};

/// More rows than the input of a fuzzer has.
const MAX_ROWS: usize = 100_000;
const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// Reads JSON without a named list, and with one.
pub(crate) fn json(bytes: &[u8]) -> Outcome {
    let mut outcome = read("rows.json", bytes, SourceSpec::default());
    let named = read("rows.json", bytes, SourceSpec { field: Some("data".to_owned()), ..SourceSpec::default() });
    outcome.read += named.read;
    outcome.messages.extend(named.messages);
    outcome
}

/// Reads CSV. If the first byte is odd, tabs separate the values.
pub(crate) fn csv(bytes: &[u8]) -> Outcome {
    let (first, rest) = bytes.split_first().unwrap_or((&0, &[]));
    read(if first % 2 == 0 { "rows.csv" } else { "rows.tsv" }, rest, SourceSpec::default())
}

/// Reads text. If the first byte is odd, each line is a document.
pub(crate) fn text(bytes: &[u8]) -> Outcome {
    let (first, rest) = bytes.split_first().unwrap_or((&0, &[]));
    let text_unit = if first % 2 == 0 { TextDocument::File } else { TextDocument::Line };
    read("rows.txt", rest, SourceSpec { text_unit, ..SourceSpec::default() })
}

/// Reads a compressed file. The first byte chooses the compression and the inner format.
pub(crate) fn packed(bytes: &[u8]) -> Outcome {
    const INSIDE: [&str; 7] = ["jsonl", "json", "csv", "tsv", "txt", "arrow", "parquet"];
    let (&first, rest) = bytes.split_first().unwrap_or((&0, &[]));
    let ending = if first % 2 == 0 { "gz" } else { "zst" };
    let inside = INSIDE[usize::from(first / 2) % INSIDE.len()];
    read(&format!("rows.{inside}.{ending}"), rest, SourceSpec::default())
}

/// Reads a folder of `Dataset.save_to_disk` or `DatasetDict.save_to_disk`: `state.json`, then `dataset_dict.json`.
pub(crate) fn saved_folder(bytes: &[u8]) -> Outcome {
    let folder = Folder::new();
    let row = b"{\"text\":\"a\"}\n";
    for (name, part) in ["state.json", "dataset_dict.json"].into_iter().zip(parts(bytes)) {
        folder.write(name, part);
        folder.write(&format!("train/{name}"), part);
    }
    folder.write("rows.jsonl", row);
    folder.write("train/rows.jsonl", row);
    let path = folder.path().to_str().expect("a path of this process").to_owned();
    records(&SourceSpec::new(path), &folder)
}

/// Reads the Hub's response about a dataset. The first byte: the requested configuration and split.
pub(crate) fn hub_listing(bytes: &[u8]) -> Outcome {
    let (&first, rest) = bytes.split_first().unwrap_or((&0, &[]));
    let folder = Folder::new();
    folder.write("datasets--owner--name/refs/main", COMMIT.as_bytes());
    folder.write(&format!("datasets--owner--name/.firebrick/{COMMIT}.json"), rest);
    let row = b"{\"text\":\"a\"}\n";
    folder.write(&format!("datasets--owner--name/snapshots/{COMMIT}/train.jsonl"), row);
    let choose = |bits: u8| [None, Some("train"), Some("test"), Some("a")][usize::from(bits % 4)].map(str::to_owned);
    let spec =
        SourceSpec { split: choose(first), config: choose(first / 4), ..SourceSpec::new("hf://datasets/owner/name") };
    records(&spec, &folder)
}

pub(crate) fn read(name: &str, bytes: &[u8], spec: SourceSpec) -> Outcome {
    let folder = Folder::new();
    let path = folder.write(name, bytes).to_str().expect("a path of this process").to_owned();
    let outcome = records(&SourceSpec { path, ..spec }, &folder);
    for message in &outcome.messages {
        assert!(message.contains(name), "an error that does not name the file: {message}");
    }
    outcome
}

/// Reads a source through a Hub without a network, whose cache is the folder.
fn records(spec: &SourceSpec, folder: &Folder) -> Outcome {
    let (endpoint, cache) = ("http://127.0.0.1:9".to_owned(), folder.path().to_owned());
    let hub = Hub::new(HubSettings { endpoint, cache, token: None, is_offline: true });
    let mut outcome = Outcome::default();
    let Some(source) = outcome.note(spec.resolve(&hub)) else { return outcome };
    outcome.read = 0;
    let mut last: Option<RecordPlace> = None;
    let mut has_ended = false;
    let files = source.file_names().len();
    for record in source.records().take(MAX_ROWS) {
        assert!(!has_ended, "a record after an error that ends the stream");
        has_ended = match &record {
            // A file called .json may contain one object per line, of which the next can still be read.
            Err(SourceError::BadRecord { can_continue: true, .. }) => false,
            Err(_) => true,
            Ok(record) => {
                // A line may contain several rows of JSON; a file may be named twice.
                let is_later = |last: &RecordPlace| {
                    last.path != record.place.path
                        || last.line < record.place.line
                        || source.format() == FileFormat::Json
                };
                assert!(files > 1 || last.as_ref().is_none_or(is_later), "{} after {last:?}", record.place);
                last = Some(record.place.clone());
                false
            }
        };
        // A file of bad lines has as many errors as lines; the first ones are enough.
        if outcome.messages.len() < 16 || record.is_ok() {
            outcome.note(record);
        }
    }
    outcome
}
