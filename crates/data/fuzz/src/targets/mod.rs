//! The fuzz targets: how bytes are interpreted, and the invariants that hold for all of them.
//!
//! A target returns the messages about its input, so that the test can check them. Only panics are findings; the caller
//! measures time and memory. Not supported: input that only a network can deliver.

mod encode;
mod folder;
mod source;
mod store;
mod template;
mod tokenizer;

pub(crate) use folder::Folder;

/// The result for an input.
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

/// A target takes any bytes.
pub(crate) type Target = fn(&[u8]) -> Outcome;

/// All targets by name; the corpus of each is the folder of its name.
pub(crate) const TARGETS: [(&str, Target); 15] = [
    ("arrow", source::arrow),
    ("csv", source::csv),
    ("hub_listing", source::hub_listing),
    ("json", source::json),
    ("jsonl", source::jsonl),
    ("messages", template::messages),
    ("packed", source::packed),
    ("parquet", source::parquet),
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
