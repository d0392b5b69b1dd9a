//! Invariants of the sources: formats, damage, paths, mixtures.

mod damage;
mod formats;
mod hub;
mod mixing;
mod paths;
#[path = "../../../tests/data/tables.rs"]
mod tables;

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use arrow_array::{ArrayRef, RecordBatch, StringArray};
use serde_json::{Value as Json, json};
use tempfile::TempDir;

use firebrick_hub::{Hub, HubSettings};

use super::{Record, SourceError, SourceSpec};
use tables::{arrow_bytes, gzip, parquet_bytes, zstandard};

struct Folder(TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn write(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        // Some file systems flush a rewritten file to the disk at once, and a new one later.
        let _ = fs::remove_file(&path);
        fs::write(&path, bytes).unwrap();
        path
    }

    fn spec(&self, name: &str) -> SourceSpec {
        SourceSpec::new(self.path(name).to_str().unwrap())
    }
}

fn no_hub() -> Hub {
    let (endpoint, cache) = ("http://127.0.0.1:9".to_owned(), PathBuf::from("/nonexistent/cache"));
    Hub::new(HubSettings { endpoint, cache, token: None, is_offline: true })
}

fn read(spec: &SourceSpec) -> Result<Vec<Record>, SourceError> {
    spec.resolve(&no_hub())?.records().collect()
}

fn fields(spec: &SourceSpec) -> Vec<Json> {
    read(spec).unwrap_or_else(|error| panic!("{error}")).into_iter().map(|record| Json::Object(record.fields)).collect()
}

fn error_of(spec: &SourceSpec) -> String {
    read(spec).expect_err("must be refused").to_string()
}

/// Checks that the source is refused with all of these words.
fn refuses(spec: &SourceSpec, words: &[&str]) {
    let error = error_of(spec);
    assert!(words.iter().all(|word| error.contains(word)), "expected {words:?} in {error}");
}

fn texts(records: &[Record]) -> Vec<&str> {
    records.iter().map(|record| record.fields["text"].as_str().unwrap()).collect()
}

/// Returns rows with values of all types.
fn rows() -> Vec<Json> {
    let row = |index: i64| {
        let message = |turn: i64| {
            let role = if turn == 0 { "user" } else { "assistant" };
            json!({ "role": role, "content": format!("{index}-{turn} \"ü\n") })
        };
        let messages: Vec<Json> = (0..index % 3).map(message).collect();
        json!({
            "text": format!("row {index}, with a comma"),
            "count": index - 2,
            "share": index as f64 / 4.0 + 0.5,
            "good": index % 2 == 0,
            "note": if index % 4 == 1 { Json::Null } else { json!(format!("n{index}")) },
            "messages": messages,
        })
    };
    (0..7).map(row).collect()
}

fn lines(rows: &[Json]) -> String {
    rows.iter().map(|row| format!("{row}\n")).collect()
}

fn text_rows(prefix: &str, count: usize) -> String {
    (0..count).map(|index| format!("{{\"text\":\"{prefix}{index}\"}}\n")).collect()
}
