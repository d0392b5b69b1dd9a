//! Cuts a JSON document into the texts of its values, without storing the document.
//!
//! Trade-off: only the extent of a value is determined here, by counting brackets; the parser checks the values that
//! are kept.

use std::path::PathBuf;
use std::slice::from_ref;

use super::super::error::{SourceError, SourceResult};
use super::super::open::{Bytes, read_failed};
use super::super::record::{MAX_RECORD_BYTES, RecordPlace};

pub(super) const HINT: &str = "The file must be one JSON list of objects, or an object with such a list";
const TOO_LARGE: &str =
    "Cut it into several; if the list of rows is deeper in the document, write one JSON object a line";

pub(super) struct Scanner {
    pub(super) bytes: Bytes,
    pub(super) path: PathBuf,
    pub(super) line: usize,
    pub(super) column: usize,
}

impl Scanner {
    pub(super) fn place(&self) -> RecordPlace {
        RecordPlace { path: self.path.clone(), line: self.line }
    }

    pub(super) fn bad(&self, reason: impl AsRef<str>) -> SourceError {
        SourceError::not_json(self.place(), self.column, reason.as_ref(), HINT)
    }

    fn fill(&mut self) -> SourceResult<&[u8]> {
        let line = self.line;
        self.bytes.fill_buf().map_err(|reason| read_failed(&self.path, line, &reason))
    }

    fn consume(&mut self, count: usize, newlines: usize, after_newline: usize) {
        self.bytes.consume(count);
        self.line += newlines;
        self.column = if newlines > 0 { after_newline + 1 } else { self.column + count };
    }

    /// Returns the next byte that is not blank, without consuming it; `None` at the end.
    pub(super) fn peek(&mut self) -> SourceResult<Option<u8>> {
        loop {
            let buffer = self.fill()?;
            let Some(&first) = buffer.first() else { return Ok(None) };
            if !first.is_ascii_whitespace() {
                return Ok(Some(first));
            }
            self.consume(1, usize::from(first == b'\n'), 0);
        }
    }

    /// Consumes the byte that [`Scanner::peek`] returned.
    pub(super) fn skip(&mut self) {
        self.consume(1, 0, 0);
    }

    pub(super) fn expect(&mut self, expected: u8) -> SourceResult<()> {
        match self.peek()? {
            Some(byte) if byte == expected => {
                self.skip();
                Ok(())
            }
            found => Err(self.bad(format!("expected {:?}, found {}", char::from(expected), show(found)))),
        }
    }

    /// Skips the next value, of which `depth` brackets are already open, and stores its text if requested. Only its extent is checked.
    pub(super) fn value(&mut self, depth: usize, mut text: Option<&mut Vec<u8>>) -> SourceResult<()> {
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
            }
            size += taken as u64;
            self.consume(taken, newlines, after);
            if text.as_ref().is_some_and(|text| text.len() > MAX_RECORD_BYTES) {
                return Err(SourceError::too_large(place, TOO_LARGE));
            }
            if done {
                return if size == 0 { Err(self.bad("expected a value")) } else { Ok(()) };
            }
        }
    }
}

/// Returns the text of the first item of each list of objects among the values of an object. The object begins with its bracket and is complete.
pub(super) fn first_items(object: &[u8]) -> impl Iterator<Item = &[u8]> {
    let (mut state, mut previous) = (Extent::default(), 0);
    object.iter().enumerate().filter_map(move |(at, byte)| {
        let is_first = state.depth == 2 && !state.in_string && previous == b'[' && *byte == b'{';
        state.pass(from_ref(byte));
        if !byte.is_ascii_whitespace() {
            previous = *byte;
        }
        is_first.then(|| &object[at..at + Extent::default().pass(&object[at..]).0])
    })
}

/// Finds the end of a value, byte by byte.
#[derive(Default)]
struct Extent {
    depth: usize,
    in_string: bool,
    escaped: bool,
}

impl Extent {
    /// Returns how many of the bytes belong to the value, and whether it ends there.
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

pub(super) fn show(byte: Option<u8>) -> String {
    byte.map_or("the end of the file".to_owned(), |byte| format!("{:?}", char::from(byte)))
}
