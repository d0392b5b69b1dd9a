//! Streams a JSON document with a list of rows: one row is in memory at a time, for any size of the list, next to the text of at most 64 MiB that
//! shows whether the document is an object, a record or lines.
//!
//! Accepted: a list of objects; an object in which exactly one key (or the one named by `field`) holds a list of
//! objects; one object that is a record itself; and one object per line, which many files called `.json` contain. The
//! parser limits nesting within a row (to 128); nothing recurses outside of rows. Trade-off: the extent of each row is
//! scanned before it is parsed.

mod scanner;

use std::io::{Cursor, Read};
use std::iter::once;
use std::path::Path;

use serde_json::{Map, Value as Json};

use super::error::{SourceError, SourceResult};
use super::lines::{OVER_LINES, TOO_LONG, json_lines, parse_object};
use super::open::{Bytes, FileRecords, Lines};
use super::record::{Record, RecordPlace};
use scanner::{HINT, Scanner, first_items, show};

pub(super) fn open_json(bytes: Bytes, path: &Path, field: Option<&str>) -> SourceResult<FileRecords> {
    let mut scanner = Scanner { bytes, path: path.to_owned(), line: 1, column: 1 };
    let first = scanner.peek()?;
    if first.is_none() {
        return Ok(Box::new(std::iter::empty()));
    }
    let (place, column) = (scanner.place(), scanner.column);
    let mut text = Vec::new();
    // What follows the first object distinguishes lines from a document.
    if first == Some(b'{') && scanner.value(0, Some(&mut text)).is_ok() {
        let is_one_line = scanner.line == place.line;
        match (scanner.peek()?, field) {
            (None, None) if !has_rows(&text, &place) => {
                if let Ok(fields) = parse_object(&text, &place, HINT) {
                    return Ok(Box::new(once(Ok(Record::new(fields, place)))));
                }
            }
            (None, _) => {}
            (Some(_), Some(field)) if is_one_line => {
                let reason = format!("the file has one object per line, so no key {field:?} holds all rows");
                return Err(no_rows(scanner.place(), &reason));
            }
            (Some(_), None) if is_one_line => {
                let first = parse_object(&text, &place, HINT).map(|fields| Record::new(fields, place));
                let rest = Lines::after(scanner.line - 1, scanner.bytes, path, TOO_LONG);
                return Ok(Box::new(once(first).chain(json_lines(rest, false))));
            }
            (Some(b'{'), _) => {
                let problem =
                    format!("several documents follow each other. {OVER_LINES}, `jq -s . FILE > NEW.json` a list");
                return Err(SourceError::record(scanner.place(), Some(scanner.column), problem));
            }
            (found, _) => return Err(scanner.bad(format!("expected the end of the file, found {}", show(found)))),
        }
    }
    scanner =
        Scanner { bytes: Box::new(Cursor::new(text).chain(scanner.bytes)), path: place.path, line: place.line, column };
    let field = field.map(str::to_owned);
    let mut document = JsonDocument { scanner, field, in_object: false, lists: Vec::new(), is_first: true };
    document.find_rows()?;
    Ok(Box::new(std::iter::from_fn(move || document.row().transpose())))
}

/// Returns whether an object holds rows rather than being one: it has a list of objects, and no list of messages. Only their first items are parsed.
fn has_rows(object: &[u8], place: &RecordPlace) -> bool {
    let is_message = |item: Map<String, Json>| {
        [["role", "content"], ["role", "tool_calls"], ["from", "value"]]
            .iter()
            .any(|keys| keys.iter().all(|key| item.contains_key(*key)))
    };
    let mut items = first_items(object).peekable();
    items.peek().is_some() && !items.any(|item| parse_object(item, place, HINT).is_ok_and(is_message))
}

struct JsonDocument {
    scanner: Scanner,
    field: Option<String>,
    /// Whether the list of rows is inside an object.
    in_object: bool,
    /// Keys that hold lists of objects.
    lists: Vec<String>,
    /// Whether no row was read.
    is_first: bool,
}

fn no_rows(place: RecordPlace, reason: &str) -> SourceError {
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
                self.lists.push(key);
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
            return Err(self.no_rows(&format!("the keys {} hold lists of objects", self.lists.join(", "))));
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
