//! A JSON document with a list of rows, streamed: one row is in memory at a time, whatever the size of the list.
//!
//! Accepted: a list of objects; an object in which exactly one key (or the one named by `field`) holds a list of
//! objects; and one object per line, which many files called `.json` contain. The parser limits nesting within a row
//! (to 128); nothing recurses outside of rows. Trade-off: the extent of each row is scanned before it is parsed.

mod scanner;

use std::io::{BufRead, Cursor, Read};
use std::path::Path;

use serde_json::Value as Json;

use super::error::SourceError;
use super::jsonl::{JsonLines, parse_object};
use super::open::{Bytes, read_failed};
use super::record::{MAX_RECORD_BYTES, Record};
use crate::place::Place;
use scanner::{Scanner, show};

const HINT: &str = "The file must be one JSON list of objects, or an object with such a list";

/// The records of a file with the format `json`.
pub(super) fn open_json(
    mut bytes: Bytes,
    path: &Path,
    field: Option<&str>,
) -> Result<Box<dyn Iterator<Item = Result<Record, SourceError>> + Send>, SourceError> {
    let mut line = 1;
    let failed = |reason| read_failed(path, 1, &reason);
    let Some(column) = skip_start(&mut bytes, &mut line).map_err(failed)? else {
        return Ok(Box::new(std::iter::empty()));
    };
    // Lines are distinguished from a document by the first line that is not blank and whether anything follows it.
    let mut start = Vec::new();
    (&mut bytes).take(MAX_RECORD_BYTES as u64).read_until(b'\n', &mut start).map_err(failed)?;
    let first: Option<Json> = if start.starts_with(b"{") { serde_json::from_slice(&start).ok() } else { None };
    let is_lines = match first {
        None => false,
        Some(object) => {
            let rest_is_blank = skip_blank(&mut bytes, &mut start).map_err(failed)?;
            !rest_is_blank || (field.is_none() && !has_rows(&object))
        }
    };
    let bytes: Bytes = Box::new(Cursor::new(start).chain(bytes));
    if is_lines {
        if let Some(field) = field {
            let reason = format!("the file has one object per line, so no key {field:?} holds all rows");
            return Err(SourceError::NoRows { place: Place { path: path.to_owned(), line }, reason });
        }
        return Ok(Box::new(JsonLines::after(line - 1, bytes, path.to_owned())));
    }
    let scanner = Scanner { bytes, path: path.to_owned(), line, column };
    Ok(Box::new(JsonDocument::new(scanner, field.map(str::to_owned))))
}

/// Skips leading blanks; returns the column of what follows, or `None` at the end of the file.
fn skip_start(bytes: &mut Bytes, line: &mut usize) -> std::io::Result<Option<usize>> {
    let mut column = 1;
    loop {
        let buffer = bytes.fill_buf()?;
        if buffer.is_empty() {
            return Ok(None);
        }
        let blanks = buffer.iter().take_while(|byte| byte.is_ascii_whitespace()).count();
        for &byte in &buffer[..blanks] {
            (*line, column) = if byte == b'\n' { (*line + 1, 1) } else { (*line, column + 1) };
        }
        let is_blank = blanks == buffer.len();
        bytes.consume(blanks);
        if !is_blank {
            return Ok(Some(column));
        }
    }
}

/// Moves blanks to the end of `start`; returns whether the file ends there.
fn skip_blank(bytes: &mut Bytes, start: &mut Vec<u8>) -> std::io::Result<bool> {
    while start.len() <= MAX_RECORD_BYTES {
        let buffer = bytes.fill_buf()?;
        let blanks = buffer.iter().take_while(|byte| byte.is_ascii_whitespace()).count();
        let (is_end, is_blank) = (buffer.is_empty(), blanks == buffer.len());
        start.extend_from_slice(&buffer[..blanks]);
        bytes.consume(blanks);
        if is_end || !is_blank {
            return Ok(is_end);
        }
    }
    Ok(false)
}

fn has_rows(object: &Json) -> bool {
    let is_rows = |value: &Json| value.as_array().and_then(|items| items.first()).is_some_and(Json::is_object);
    object.as_object().is_some_and(|fields| fields.values().any(is_rows))
}

/// The reader's position in the document.
#[derive(Clone, Copy, PartialEq)]
enum At {
    /// Nothing was read.
    Start,
    /// Inside the list of rows, which may be inside an object; before the first row or after one.
    Rows { in_object: bool, is_first: bool },
    /// Everything was read, or reading failed.
    End,
}

/// The rows of a document.
struct JsonDocument {
    scanner: Scanner,
    field: Option<String>,
    at: At,
}

impl JsonDocument {
    fn new(scanner: Scanner, field: Option<String>) -> Self {
        Self { scanner, field, at: At::Start }
    }

    fn no_rows(&self, reason: String) -> SourceError {
        SourceError::NoRows { place: self.scanner.place(), reason }
    }

    /// Advances to the first row.
    fn find_rows(&mut self) -> Result<(), SourceError> {
        match self.scanner.peek()? {
            Some(b'[') => {
                if let Some(field) = &self.field {
                    return Err(self.no_rows(format!("the document is a list, so it has no key {field:?}")));
                }
                self.scanner.skip();
                self.at = At::Rows { in_object: false, is_first: true };
                Ok(())
            }
            Some(b'{') => {
                self.scanner.skip();
                if self.next_list(true, true)? {
                    return Ok(());
                }
                Err(self.no_rows("no key holds a list of objects".to_owned()))
            }
            found => Err(self.scanner.bad(format!("expected '[' or '{{', found {}", show(found)))),
        }
    }

    /// Skips the keys of the object up to the list of rows, and enters it; returns false at the end of the object.
    fn next_list(&mut self, mut is_first: bool, is_wanted: bool) -> Result<bool, SourceError> {
        loop {
            match self.scanner.peek()? {
                Some(b'}') => {
                    self.scanner.skip();
                    return Ok(false);
                }
                Some(b',') if !is_first => self.scanner.skip(),
                _ if is_first => {}
                found => return Err(self.scanner.bad(format!("expected ',' or '}}', found {}", show(found)))),
            }
            is_first = false;
            let key = self.key()?;
            self.scanner.expect(b':')?;
            let is_field = self.field.as_ref().is_none_or(|field| *field == key);
            if self.scanner.peek()? != Some(b'[') {
                if self.field.is_some() && is_field {
                    return Err(self.no_rows(format!("{key:?} holds no list of objects")));
                }
                self.scanner.value(0, None)?;
                continue;
            }
            self.scanner.skip();
            let first = self.scanner.peek()?;
            let is_list = first == Some(b'{') || (self.field.is_some() && first == Some(b']'));
            if is_wanted && is_field && is_list {
                self.at = At::Rows { in_object: true, is_first: true };
                return Ok(true);
            }
            if self.field.is_some() && is_wanted && is_field {
                return Err(self.no_rows(format!("{key:?} holds a list, but not of objects")));
            }
            self.scanner.value(1, None)?;
        }
    }

    fn key(&mut self) -> Result<String, SourceError> {
        if self.scanner.peek()? != Some(b'"') {
            return Err(self.scanner.bad("expected a key in quotes"));
        }
        let mut key = Vec::new();
        self.scanner.value(0, Some(&mut key))?;
        serde_json::from_slice(&key).map_err(|reason| {
            let whole = reason.to_string();
            // The position it gives is within the key.
            self.scanner.bad(whole.split(" at line ").next().unwrap_or(&whole))
        })
    }

    /// After the list of rows: what follows must end the document.
    fn finish(&mut self, in_object: bool) -> Result<(), SourceError> {
        // Where no list is named, a second one would make the choice a guess.
        if in_object && self.next_list(false, self.field.is_none())? {
            return Err(self.no_rows("several keys hold lists of objects".to_owned()));
        }
        match self.scanner.peek()? {
            None => Ok(()),
            found => Err(self.scanner.bad(format!("expected the end of the file, found {}", show(found)))),
        }
    }

    fn row(&mut self) -> Result<Option<Record>, SourceError> {
        if self.at == At::Start {
            self.find_rows()?;
        }
        let At::Rows { in_object, is_first } = self.at else { return Ok(None) };
        match self.scanner.peek()? {
            Some(b']') => {
                self.scanner.skip();
                self.finish(in_object)?;
                return Ok(None);
            }
            Some(b',') if !is_first => self.scanner.skip(),
            _ if is_first => {}
            found => return Err(self.scanner.bad(format!("expected ',' or ']', found {}", show(found)))),
        }
        self.at = At::Rows { in_object, is_first: false };
        self.scanner.peek()?;
        let place = self.scanner.place();
        let mut text = Vec::new();
        self.scanner.value(0, Some(&mut text))?;
        let fields = parse_object(&text, &place, HINT)?;
        Ok(Some(Record::new(fields, place)))
    }
}

impl Iterator for JsonDocument {
    type Item = Result<Record, SourceError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.at == At::End {
            return None;
        }
        let row = self.row().transpose();
        if !matches!(row, Some(Ok(_))) {
            self.at = At::End;
        }
        row
    }
}
