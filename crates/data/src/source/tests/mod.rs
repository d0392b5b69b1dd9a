//! Invariants of the sources: formats, damage, paths, mixtures.
//!
//! Trade-off: small files that the tests write themselves.

mod damage;
mod formats;
mod hub;
mod mixing;
mod paths;

use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;

use arrow_array::RecordBatch;
use arrow_array::builder::{ListBuilder, StringBuilder, StructBuilder};
use arrow_array::{ArrayRef, BooleanArray, Float64Array, Int64Array, StringArray};
use arrow_schema::{DataType, Field, Fields};
use serde_json::{Value as Json, json};
use tempfile::TempDir;

use firebrick_hub::{Hub, HubSettings};

use super::{Record, SourceError, SourceSpec};

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

/// Returns the rows as a batch of columns.
fn batch(rows: &[Json]) -> RecordBatch {
    let members: Fields =
        vec![Field::new("role", DataType::Utf8, true), Field::new("content", DataType::Utf8, true)].into();
    let mut messages = ListBuilder::new(StructBuilder::from_fields(members, 0));
    for row in rows {
        for message in row["messages"].as_array().unwrap() {
            for (index, key) in ["role", "content"].into_iter().enumerate() {
                let column = messages.values().field_builder::<StringBuilder>(index).unwrap();
                column.append_value(message[key].as_str().unwrap());
            }
            messages.values().append(true);
        }
        messages.append(true);
    }
    let strings = |key: &str| StringArray::from_iter(rows.iter().map(|row| row[key].as_str()));
    let columns: Vec<(&str, ArrayRef)> = vec![
        ("text", Arc::new(strings("text"))),
        ("count", Arc::new(Int64Array::from_iter(rows.iter().map(|row| row["count"].as_i64())))),
        ("share", Arc::new(Float64Array::from_iter(rows.iter().map(|row| row["share"].as_f64())))),
        ("good", Arc::new(BooleanArray::from_iter(rows.iter().map(|row| row["good"].as_bool())))),
        ("note", Arc::new(strings("note"))),
        ("messages", Arc::new(messages.finish())),
    ];
    RecordBatch::try_from_iter_with_nullable(columns.into_iter().map(|(name, column)| (name, column, true))).unwrap()
}

/// Returns the rows as a Parquet file with two row groups.
fn parquet_bytes(rows: &[Json]) -> Vec<u8> {
    let (first, second) = rows.split_at(rows.len() / 2);
    let mut writer = parquet::arrow::ArrowWriter::try_new(Vec::new(), batch(first).schema(), None).unwrap();
    writer.write(&batch(first)).unwrap();
    writer.flush().unwrap();
    writer.write(&batch(second)).unwrap();
    writer.into_inner().unwrap()
}

/// Returns the rows as an Arrow stream, or with `is_file` as an Arrow file, in two batches.
fn arrow_bytes(rows: &[Json], is_file: bool) -> Vec<u8> {
    use arrow_ipc::writer::{FileWriter, StreamWriter};
    let (first, second) = rows.split_at(rows.len() / 2);
    let (first, second) = (batch(first), batch(second));
    if is_file {
        let mut writer = FileWriter::try_new(Vec::new(), &first.schema()).unwrap();
        writer.write(&first).unwrap();
        writer.write(&second).unwrap();
        writer.into_inner().unwrap()
    } else {
        let mut writer = StreamWriter::try_new(Vec::new(), &first.schema()).unwrap();
        writer.write(&first).unwrap();
        writer.write(&second).unwrap();
        writer.into_inner().unwrap()
    }
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn zstandard(bytes: &[u8]) -> Vec<u8> {
    zstd::encode_all(bytes, 1).unwrap()
}

fn text_rows(prefix: &str, count: usize) -> String {
    (0..count).map(|index| format!("{{\"text\":\"{prefix}{index}\"}}\n")).collect()
}
