//! Plain text: one document per file or per line.
//!
//! Trade-off: a file read as one document must fit the limit of a record.

use std::io::Read;
use std::path::PathBuf;

use serde_json::{Map, Value as Json};

use super::error::SourceError;
use super::format::TextDocument;
use super::open::{Bytes, checked_text, read_failed, read_line};
use super::record::{MAX_RECORD_BYTES, Record};
use crate::place::Place;

/// The records `{"text": ...}` of a text file.
pub(super) struct TextRecords {
    bytes: Bytes,
    path: PathBuf,
    unit: TextDocument,
    line_number: usize,
    ended: bool,
}

impl TextRecords {
    /// Starts with the first line.
    pub(super) fn new(bytes: Bytes, path: PathBuf, unit: TextDocument) -> Self {
        Self { bytes, path, unit, line_number: 0, ended: false }
    }

    fn place(&self) -> Place {
        Place { path: self.path.clone(), line: self.line_number.max(1) }
    }

    fn whole_file(&mut self) -> Result<Option<Vec<u8>>, SourceError> {
        self.ended = true;
        self.line_number = 1;
        let mut text = Vec::new();
        let read = (&mut self.bytes).take(MAX_RECORD_BYTES as u64 + 1).read_to_end(&mut text);
        read.map_err(|reason| read_failed(&self.path, 1, &reason))?;
        if text.len() > MAX_RECORD_BYTES {
            let hint = "Read it with text_unit = \"line\", or split it into several files";
            return Err(SourceError::RecordTooLarge { place: self.place(), hint });
        }
        Ok(Some(text))
    }

    fn line(&mut self) -> Result<Option<Vec<u8>>, SourceError> {
        let mut line = Vec::new();
        loop {
            self.line_number += 1;
            let read = read_line(&mut self.bytes, &mut line, MAX_RECORD_BYTES);
            if !read.map_err(|reason| read_failed(&self.path, self.line_number, &reason))? {
                return Ok(None);
            }
            if line.len() > MAX_RECORD_BYTES {
                let hint = "The file has no line breaks where they are expected: is it text?";
                return Err(SourceError::RecordTooLarge { place: self.place(), hint });
            }
            if !line.trim_ascii().is_empty() {
                return Ok(Some(line));
            }
        }
    }
}

impl Iterator for TextRecords {
    type Item = Result<Record, SourceError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        let text = match self.unit {
            TextDocument::File => self.whole_file(),
            TextDocument::Line => self.line(),
        };
        self.ended |= !matches!(text, Ok(Some(_)));
        let place = self.place();
        let text = text.transpose()?.and_then(|bytes| checked_text(bytes, &place));
        let record = |text| Record::new(Map::from_iter([("text".to_owned(), Json::String(text))]), place.clone());
        Some(text.map(record))
    }
}
