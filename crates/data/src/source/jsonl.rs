//! One JSON object per line.
//!
//! A bad line is an error with file, line and column; the lines after it can still be read. Trade-off: objects that
//! span several lines are not supported.

use std::path::PathBuf;

use serde_json::{Map, Value as Json};

use super::error::SourceError;
use super::open::{Bytes, checked_text, read_failed, read_line};
use super::record::{MAX_RECORD_BYTES, MAX_RECORD_VALUES, Record};
use crate::place::Place;

/// The records of a JSONL file.
pub(super) struct JsonLines {
    bytes: Bytes,
    path: PathBuf,
    line_number: usize,
    line: Vec<u8>,
    ended: bool,
}

impl JsonLines {
    /// Starts with the first line.
    pub(super) fn new(bytes: Bytes, path: PathBuf) -> Self {
        Self::after(0, bytes, path)
    }

    /// Starts after the given number of lines.
    pub(super) fn after(line_number: usize, bytes: Bytes, path: PathBuf) -> Self {
        Self { bytes, path, line_number, line: Vec::new(), ended: false }
    }

    fn place(&self) -> Place {
        Place { path: self.path.clone(), line: self.line_number }
    }

    /// Reads the next line that is not blank into `self.line`; returns false at the end.
    fn advance(&mut self) -> Result<bool, SourceError> {
        loop {
            self.line_number += 1;
            let read = read_line(&mut self.bytes, &mut self.line, MAX_RECORD_BYTES);
            if !read.map_err(|reason| read_failed(&self.path, self.line_number, &reason))? {
                return Ok(false);
            }
            if self.line.len() > MAX_RECORD_BYTES {
                let hint = "Each line must be one JSON object; a file that is one JSON list is read with file_format = \
                            \"json\"";
                return Err(SourceError::RecordTooLarge { place: self.place(), hint });
            }
            if !self.line.trim_ascii().is_empty() {
                return Ok(true);
            }
        }
    }
}

impl Iterator for JsonLines {
    type Item = Result<Record, SourceError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        match self.advance() {
            Ok(true) => {
                let place = self.place();
                let parsed = parse_object(&self.line, &place, "Each line must be one whole JSON object");
                Some(parsed.map(|fields| Record::new(fields, place)))
            }
            Ok(false) => {
                self.ended = true;
                None
            }
            Err(error) => {
                self.ended = true;
                Some(Err(error))
            }
        }
    }
}

/// Parses the text of one record. `place` is that of its first line; `hint` says what the format expects.
pub(super) fn parse_object(bytes: &[u8], place: &Place, hint: &'static str) -> Result<Map<String, Json>, SourceError> {
    // A value has at least two bytes.
    if bytes.len() > 2 * MAX_RECORD_VALUES && values(bytes) > MAX_RECORD_VALUES {
        return Err(SourceError::TooManyValues { place: place.clone() });
    }
    match serde_json::from_slice(bytes) {
        // The parser has checked the UTF-8 of all strings, and bytes outside of strings are ASCII.
        Ok(Json::Object(fields)) => Ok(fields),
        Ok(other) => Err(SourceError::NotAnObject { place: place.clone(), found: describe(&other) }),
        Err(reason) => {
            // Invalid text gets a more precise message than "invalid character".
            checked_text(bytes.to_vec(), place)?;
            let whole = reason.to_string();
            let message = whole.split(" at line ").next().unwrap_or(&whole).to_owned();
            let line = place.line + reason.line().saturating_sub(1);
            let place = Place { path: place.path.clone(), line };
            Err(SourceError::BadJson { place, column: reason.column(), reason: message, hint })
        }
    }
}

/// Estimates the number of values of a JSON text: commas and brackets outside of strings.
fn values(bytes: &[u8]) -> usize {
    let (mut count, mut in_string, mut escaped) = (0, false, false);
    for &byte in bytes {
        if in_string {
            (in_string, escaped) = (escaped || byte != b'"', !escaped && byte == b'\\');
        } else if byte == b'"' {
            in_string = true;
        } else {
            count += usize::from(matches!(byte, b',' | b'[' | b'{'));
        }
    }
    count
}

fn describe(value: &Json) -> String {
    match value {
        Json::Null => "null".to_owned(),
        Json::Bool(value) => format!("the boolean {value}"),
        Json::Number(value) => format!("the number {value}"),
        Json::String(_) => "a string".to_owned(),
        Json::Array(items) => {
            format!("a list of {} (a file that is one JSON list is read with file_format = \"json\")", items.len())
        }
        Json::Object(_) => unreachable!("the caller takes objects"),
    }
}
