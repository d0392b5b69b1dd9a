//! The fuzz targets: how bytes are interpreted, and the invariants that hold for all of them.
//!
//! A target returns the messages about its input, so that the test can check them. Only panics are findings; the caller
//! measures time and memory. Not supported: input that only a network can deliver.

mod encode;
mod source;
mod store;
mod template;
pub(crate) mod tokenizer;

use std::fs;
use std::path::{Path, PathBuf};

use firebrick_data::SourceSpec;
use tempfile::TempDir;

#[derive(Debug, Default)]
pub(crate) struct Outcome {
    /// Rows, examples, documents or texts that were read.
    pub(crate) read: usize,
    /// Messages of errors and findings.
    pub(crate) messages: Vec<String>,
}

impl Outcome {
    /// Counts a success or keeps the message of an error.
    pub(crate) fn note<T, E: std::fmt::Display>(&mut self, result: Result<T, E>) -> Option<T> {
        match result {
            Ok(value) => {
                self.read += 1;
                Some(value)
            }
            Err(error) => {
                self.messages.push(error.to_string());
                None
            }
        }
    }
}

pub(crate) type Target = fn(&[u8]) -> Outcome;

/// All targets by name; the corpus of each is the folder of its name.
pub(crate) const TARGETS: [(&str, Target); 15] = [
    ("arrow", |bytes| source::read("rows.arrow", bytes, SourceSpec::default())),
    ("csv", source::csv),
    ("hub_listing", source::hub_listing),
    ("json", source::json),
    ("jsonl", |bytes| source::read("rows.jsonl", bytes, SourceSpec::default())),
    ("messages", template::messages),
    ("packed", source::packed),
    ("parquet", |bytes| source::read("rows.parquet", bytes, SourceSpec::default())),
    ("rows", encode::rows),
    ("saved_folder", source::saved_folder),
    ("template", template::template),
    ("text", source::text),
    ("token_store", store::token_store),
    ("tokenizer_config", tokenizer::tokenizer_config),
    ("tokenizer_json", tokenizer::tokenizer_json),
];

/// Cuts bytes into parts at lines of three dashes.
pub(crate) fn parts(bytes: &[u8]) -> Vec<&[u8]> {
    const CUT: &[u8] = b"\n---\n";
    let mut parts = Vec::new();
    let mut rest = bytes;
    while let Some(at) = rest.windows(CUT.len()).position(|window| window == CUT) {
        parts.push(&rest[..at]);
        rest = &rest[at + CUT.len()..];
    }
    parts.push(rest);
    parts
}

/// An empty folder, in memory where the system supports that, removed at the end of its use; a killed process leaves it.
pub(crate) struct Folder(TempDir);

impl Folder {
    pub(crate) fn new() -> Self {
        let memory = Path::new("/dev/shm");
        let base = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
        Self(TempDir::with_prefix_in("firebrick-fuzz-", base).expect("a folder for files can be made"))
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    /// Writes a file and the folders above it, and returns its path.
    pub(crate) fn write(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.path().join(name);
        fs::create_dir_all(path.parent().expect("inside the folder")).expect("a folder can be made");
        fs::write(&path, bytes).expect("a file can be written");
        path
    }
}
