//! A JSON document with a list of rows, streamed: one row is in memory at a time, whatever the size of the list.
//!
//! Accepted: a list of objects; an object in which exactly one key (or the one named by `field`) holds a list of
//! objects; and objects one a line, which many files called `.json` hold. Nesting inside a row is bounded by the
//! parser (128), outside of rows nothing recurses.

use std::io::{BufRead, Cursor, Read};
use std::path::{Path, PathBuf};

use serde_json::Value as Json;

use super::error::SourceError;
use super::jsonl::{JsonLines, parse_object};
use super::open::{Bytes, read_failed};
use super::{MAX_RECORD_BYTES, Record};
use crate::error::Place;

const HINT: &str = "The file must be one JSON list of objects, or an object with such a list";
const TOO_LARGE: &str =
    "Cut it into several; if the list of rows is deeper in the document, write one JSON object a line";

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
    // The first line that is not blank, and whether anything comes after it, tell lines from a document.
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
            let reason = format!("the file holds one object a line, so no key {field:?} holds all rows");
            return Err(SourceError::NoRows { place: Place { path: path.to_owned(), line }, reason });
        }
        return Ok(Box::new(JsonLines::after(line - 1, bytes, path.to_owned())));
    }
    let scanner = Scanner { bytes, path: path.to_owned(), line, column };
    Ok(Box::new(JsonDocument::new(scanner, field.map(str::to_owned))))
}

/// Passes the blanks at the beginning; the column of what follows, none at the end of the file.
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

/// Moves blanks to the end of `start`; whether the file ends there.
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

/// Cuts a document into the texts of its values.
struct Scanner {
    bytes: Bytes,
    path: PathBuf,
    line: usize,
    column: usize,
}

impl Scanner {
    fn place(&self) -> Place {
        Place { path: self.path.clone(), line: self.line }
    }

    fn bad(&self, reason: impl Into<String>) -> SourceError {
        SourceError::BadJson { place: self.place(), column: self.column, reason: reason.into(), hint: HINT }
    }

    fn fill(&mut self) -> Result<&[u8], SourceError> {
        let line = self.line;
        self.bytes.fill_buf().map_err(|reason| read_failed(&self.path, line, &reason))
    }

    fn consume(&mut self, count: usize, newlines: usize, after_newline: usize) {
        self.bytes.consume(count);
        self.line += newlines;
        self.column = if newlines > 0 { after_newline + 1 } else { self.column + count };
    }

    /// The next byte that is not blank, not consumed; none at the end.
    fn peek(&mut self) -> Result<Option<u8>, SourceError> {
        loop {
            let buffer = self.fill()?;
            let Some(&first) = buffer.first() else { return Ok(None) };
            if !first.is_ascii_whitespace() {
                return Ok(Some(first));
            }
            self.consume(1, usize::from(first == b'\n'), 0);
        }
    }

    /// Consumes the byte that [`Scanner::peek`] showed.
    fn skip(&mut self) {
        self.consume(1, 0, 0);
    }

    fn expect(&mut self, wanted: u8) -> Result<(), SourceError> {
        match self.peek()? {
            Some(byte) if byte == wanted => {
                self.skip();
                Ok(())
            }
            found => Err(self.bad(format!("expected {:?}, found {}", char::from(wanted), show(found)))),
        }
    }

    /// Passes the next value, of which `depth` brackets are open already, and keeps its text if asked to. Nothing but
    /// its extent is checked.
    fn value(&mut self, depth: usize, mut text: Option<&mut Vec<u8>>) -> Result<(), SourceError> {
        self.peek()?;
        let place = self.place();
        let mut state = Extent { depth, in_string: false, escaped: false };
        let mut size: u64 = 0;
        loop {
            let buffer = self.bytes.fill_buf().map_err(|reason| read_failed(&self.path, self.line, &reason))?;
            if buffer.is_empty() {
                let is_scalar = state.depth == 0 && !state.in_string && size > 0;
                return if is_scalar { Ok(()) } else { Err(self.bad("the file ends inside a value")) };
            }
            let (taken, done) = state.pass(buffer);
            let part = &buffer[..taken];
            let newlines = part.iter().filter(|&&byte| byte == b'\n').count();
            let after = taken - part.iter().rposition(|&byte| byte == b'\n').map_or(0, |newline| newline + 1);
            if let Some(text) = text.as_deref_mut() {
                text.extend_from_slice(part);
                if text.len() > MAX_RECORD_BYTES {
                    return Err(SourceError::RecordTooLarge { place, hint: TOO_LARGE });
                }
            }
            size += taken as u64;
            self.consume(taken, newlines, after);
            if done {
                return if size == 0 { Err(self.bad("expected a value")) } else { Ok(()) };
            }
        }
    }
}

/// Finds the end of a value, byte by byte.
struct Extent {
    depth: usize,
    in_string: bool,
    escaped: bool,
}

impl Extent {
    /// How many of the bytes belong to the value, and whether it ends there.
    fn pass(&mut self, bytes: &[u8]) -> (usize, bool) {
        for (index, &byte) in bytes.iter().enumerate() {
            if self.in_string {
                (self.in_string, self.escaped) = (self.escaped || byte != b'"', !self.escaped && byte == b'\\');
                if !self.in_string && self.depth == 0 {
                    return (index + 1, true);
                }
                continue;
            }
            let is_outside = self.depth == 0;
            match byte {
                b',' | b']' | b'}' | b':' | b' ' | b'\t' | b'\n' | b'\r' if is_outside => return (index, true),
                b'"' => self.in_string = true,
                b'{' | b'[' => self.depth += 1,
                b'}' | b']' => {
                    self.depth -= 1;
                    if self.depth == 0 {
                        return (index + 1, true);
                    }
                }
                _ => {}
            }
        }
        (bytes.len(), false)
    }
}

fn show(byte: Option<u8>) -> String {
    byte.map_or("the end of the file".to_owned(), |byte| format!("{:?}", char::from(byte)))
}

/// Where the reader stands in the document.
#[derive(Clone, Copy, PartialEq)]
enum At {
    /// Nothing read.
    Start,
    /// Inside the list of rows, which is inside an object or not; before the first row or after one.
    Rows { in_object: bool, is_first: bool },
    /// All said, or a failure.
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

    /// Up to the first row.
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

    /// Passes the keys of the object up to the list of rows, which is then entered; false at the end of the object.
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
        serde_json::from_slice(&key).map_err(|reason| self.scanner.bad(reason.to_string()))
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
