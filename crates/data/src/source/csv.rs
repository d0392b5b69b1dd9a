//! Comma- or tab-separated values with a header row (RFC 4180: quotes doubled inside quotes, line breaks inside quotes).
//!
//! Trade-off: all values are strings and an empty one is the empty string. Guessing types would change texts like "007" or "NA".

use std::collections::HashSet;
use std::io::{Error as IoError, Read, Result as IoResult};
use std::path::{Path, PathBuf};

use csv::{ByteRecord, Error as CsvError, ErrorKind, Reader, ReaderBuilder, Terminator};
use serde_json::{Map, Value as Json};

use super::column::no_column;
use super::error::{SourceError, SourceResult};
use super::open::{Bytes, checked_text, read_failed};
use super::record::{MAX_RECORD_BYTES, Place, Record};

const BUFFER_BYTES: usize = 256 << 10;
/// Maximum number of columns, because each row repeats the names of all columns.
const MAX_COLUMNS: usize = 100_000;

/// Stops reading when one row has taken too many bytes: an unclosed quote would take in the whole file.
struct LimitedReader {
    bytes: Bytes,
    left: usize,
    /// Whether the end of the file was reached; a row that reaches it has no line break.
    has_ended: bool,
}

impl Read for LimitedReader {
    fn read(&mut self, buffer: &mut [u8]) -> IoResult<usize> {
        if self.left == 0 {
            return Err(IoError::other("row too large"));
        }
        let size = buffer.len().min(self.left);
        let read = self.bytes.read(&mut buffer[..size])?;
        self.left -= read;
        // The reader reads more only inside a row or for the next row.
        self.has_ended |= read == 0 && !buffer.is_empty();
        Ok(read)
    }
}

pub(super) struct CsvRecords {
    reader: Reader<LimitedReader>,
    path: PathBuf,
    names: Vec<String>,
    row: ByteRecord,
    /// Line where the row begins, from 1.
    line: usize,
}

impl CsvRecords {
    /// Reads the header. Errors: it is damaged, names a column twice, or lacks one of `columns`.
    pub(super) fn new(bytes: Bytes, path: &Path, delimiter: u8, columns: Option<&[String]>) -> SourceResult<Self> {
        let reader = ReaderBuilder::new()
            .delimiter(delimiter)
            .has_headers(false)
            .flexible(true)
            .terminator(Terminator::Any(b'\n'))
            .buffer_capacity(BUFFER_BYTES)
            .from_reader(LimitedReader { bytes, left: 0, has_ended: false });
        let path = path.to_owned();
        let mut records = Self { reader, path, names: Vec::new(), row: ByteRecord::new(), line: 1 };
        if !records.advance()? {
            return Ok(records);
        }
        records.names = records.header()?;
        let all: Vec<&String> = records.names.iter().collect();
        match columns.into_iter().flatten().find(|name| !all.contains(name)) {
            Some(missing) => Err(no_column(&records.path, missing, &all)),
            None => Ok(records),
        }
    }

    fn header(&self) -> SourceResult<Vec<String>> {
        let place = self.place();
        if self.row.len() > MAX_COLUMNS {
            let reason = format!("the header names {} columns, the maximum is {MAX_COLUMNS}", self.row.len());
            return Err(bad_row(place, &reason));
        }
        let mut seen = HashSet::new();
        let name = |cell: &[u8]| {
            let name = checked_text(cell.to_vec(), &place)?;
            if !seen.insert(name.clone()) {
                let reason = format!("the header names the column {name:?} twice");
                return Err(bad_row(place.clone(), &reason));
            }
            Ok(name)
        };
        self.cells().map(name).collect()
    }

    fn place(&self) -> Place {
        Place { path: self.path.clone(), line: self.line }
    }

    /// Returns the values of the row; line breaks may be `\r\n`.
    fn cells(&self) -> impl Iterator<Item = &[u8]> {
        let last = self.row.len().saturating_sub(1);
        let cells = self.row.iter().enumerate();
        cells.map(move |(index, cell)| if index == last { cell.strip_suffix(b"\r").unwrap_or(cell) } else { cell })
    }

    fn is_blank(&self) -> bool {
        self.row.len() == 1 && matches!(self.row.get(0), Some(b"" | b"\r"))
    }

    /// Reads the next row into `self.row`; returns false at the end.
    fn advance(&mut self) -> SourceResult<bool> {
        loop {
            self.reader.get_mut().left = MAX_RECORD_BYTES + BUFFER_BYTES;
            self.line = self.lines_passed() + 1;
            if !self.reader.read_byte_record(&mut self.row).map_err(|error| self.failed(&error))? {
                return Ok(false);
            }
            // The reader's position is before the blank lines that it skips. At the end of the file the last row may have no line break, or one that
            // belongs to an unclosed quote.
            let inside = self.row.as_slice().iter().filter(|&&byte| byte == b'\n').count();
            self.line = self.lines_passed() + usize::from(self.reader.get_ref().has_ended) - inside;
            if !self.is_blank() {
                return Ok(true);
            }
        }
    }

    fn lines_passed(&self) -> usize {
        usize::try_from(self.reader.position().line() - 1).unwrap_or(usize::MAX)
    }

    fn failed(&self, error: &CsvError) -> SourceError {
        match error.kind() {
            ErrorKind::Io(_) if self.reader.get_ref().left == 0 => {
                SourceError::too_large(self.place(), "An unclosed quote takes in everything that follows")
            }
            ErrorKind::Io(reason) => read_failed(&self.path, self.line, reason),
            _ => bad_row(self.place(), &error.to_string()),
        }
    }

    fn record(&self) -> SourceResult<Record> {
        let place = self.place();
        if self.row.len() != self.names.len() {
            let reason = format!(
                "{} values, but the header names {} columns. Quote values that contain the separator or a line break",
                self.row.len(),
                self.names.len()
            );
            return Err(bad_row(place, &reason));
        }
        let mut fields = Map::with_capacity(self.names.len());
        for (name, cell) in self.names.iter().zip(self.cells()) {
            fields.insert(name.clone(), Json::String(checked_text(cell.to_vec(), &place)?));
        }
        Ok(Record::new(fields, place))
    }
}

impl Iterator for CsvRecords {
    type Item = Result<Record, SourceError>;

    fn next(&mut self) -> Option<Self::Item> {
        match self.advance() {
            Ok(true) => Some(self.record()),
            Ok(false) => None,
            Err(error) => Some(Err(error)),
        }
    }
}

fn bad_row(place: Place, reason: &str) -> SourceError {
    SourceError::record(place, None, format!("not a valid CSV row: {reason}"))
}
