//! Streams a JSON document with a list of rows: one row is in memory at a time, for any size of the list.
//!
//! Accepted: a list of objects; an object in which exactly one key (or the one named by `field`) holds a list of
//! objects; and one object per line, which many files called `.json` contain. The parser limits nesting within a row
//! (to 128); nothing recurses outside of rows. Trade-off: the extent of each row is scanned before it is parsed.

mod scanner;

use std::io::{BufRead, Cursor, Read};
use std::path::Path;

use serde_json::Value as Json;

use super::error::{SourceError, SourceResult};
use super::lines::{TOO_LONG, json_lines, parse_object};
use super::open::{Bytes, FileRecords, Lines, read_failed};
use super::record::{MAX_RECORD_BYTES, Place, Record};
use scanner::{HINT, Scanner, show};

pub(super) fn open_json(bytes: Bytes, path: &Path, field: Option<&str>) -> SourceResult<FileRecords> {
    let mut scanner = Scanner { bytes, path: path.to_owned(), line: 1, column: 1 };
    if scanner.peek()?.is_none() {
        return Ok(Box::new(std::iter::empty()));
    }
    let Scanner { mut bytes, line, .. } = scanner;
    let failed = |reason| read_failed(path, line, &reason);
    // The first line that is not blank, and whether anything follows it, distinguish lines from a document.
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
    scanner.bytes = Box::new(Cursor::new(start).chain(bytes));
    if !is_lines {
        let field = field.map(str::to_owned);
        let mut document = JsonDocument { scanner, field, in_object: false, is_first: true };
        document.find_rows()?;
        return Ok(Box::new(document));
    }
    if let Some(field) = field {
        return Err(no_rows(
            scanner.place(),
            &format!("the file has one object per line, so no key {field:?} holds all rows"),
        ));
    }
    Ok(json_lines(Lines::after(line - 1, scanner.bytes, path, TOO_LONG)))
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

struct JsonDocument {
    scanner: Scanner,
    field: Option<String>,
    /// Whether the list of rows is inside an object.
    in_object: bool,
    /// Whether no row was read.
    is_first: bool,
}

fn no_rows(place: Place, reason: &str) -> SourceError {
    SourceError::record(
        place,
        None,
        format!("cannot find the rows: {reason}. Set the key that holds them with field = \"...\""),
    )
}

impl JsonDocument {
    fn no_rows(&self, reason: &str) -> SourceError {
        no_rows(self.scanner.place(), reason)
    }

    fn find_rows(&mut self) -> SourceResult<()> {
        match self.scanner.peek()? {
            Some(b'[') => {
                if let Some(field) = &self.field {
                    return Err(self.no_rows(&format!("the document is a list, so it has no key {field:?}")));
                }
                self.scanner.skip();
                Ok(())
            }
            Some(b'{') => {
                self.scanner.skip();
                if self.next_list(true, true)? {
                    return Ok(());
                }
                Err(self.no_rows("no key holds a list of objects"))
            }
            found => Err(self.scanner.bad(format!("expected '[' or '{{', found {}", show(found)))),
        }
    }

    /// Skips the keys of the object up to the list of rows, and enters it; returns false at the end of the object.
    fn next_list(&mut self, mut is_first: bool, is_wanted: bool) -> SourceResult<bool> {
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
                    return Err(self.no_rows(&format!("{key:?} holds no list of objects")));
                }
                self.scanner.value(0, None)?;
                continue;
            }
            self.scanner.skip();
            let first = self.scanner.peek()?;
            let is_list = first == Some(b'{') || (self.field.is_some() && first == Some(b']'));
            if is_wanted && is_field && is_list {
                self.in_object = true;
                return Ok(true);
            }
            if self.field.is_some() && is_wanted && is_field {
                return Err(self.no_rows(&format!("{key:?} holds a list, but not of objects")));
            }
            self.scanner.value(1, None)?;
        }
    }

    fn key(&mut self) -> SourceResult<String> {
        if self.scanner.peek()? != Some(b'"') {
            return Err(self.scanner.bad("expected a key in quotes"));
        }
        let mut key = Vec::new();
        self.scanner.value(0, Some(&mut key))?;
        serde_json::from_slice(&key).map_err(|reason| {
            let whole = reason.to_string();
            // The position that the message gives is within the key.
            self.scanner.bad(whole.split(" at line ").next().unwrap_or(&whole))
        })
    }

    /// Checks that nothing but the end of the document follows the list of rows.
    fn finish(&mut self) -> SourceResult<()> {
        // If no list is named, a second one would make the choice a guess.
        if self.in_object && self.next_list(false, self.field.is_none())? {
            return Err(self.no_rows("several keys hold lists of objects"));
        }
        match self.scanner.peek()? {
            None => Ok(()),
            found => Err(self.scanner.bad(format!("expected the end of the file, found {}", show(found)))),
        }
    }

    fn row(&mut self) -> SourceResult<Option<Record>> {
        match self.scanner.peek()? {
            Some(b']') => {
                self.scanner.skip();
                self.finish()?;
                return Ok(None);
            }
            Some(b',') if !self.is_first => self.scanner.skip(),
            _ if self.is_first => {}
            found => return Err(self.scanner.bad(format!("expected ',' or ']', found {}", show(found)))),
        }
        self.is_first = false;
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
        self.row().transpose()
    }
}
