//! Comma- or tab-separated values with a header row (RFC 4180: quotes doubled inside quotes, line breaks inside quotes).
//!
//! A row goes over several lines only if its quotes close before a separator or the end of a line, and none of its lines ends inside a value beyond
//! those of the header. Otherwise its first line alone is a bad row, and the next line begins a row: a stray quote costs one row. A row over several
//! lines that has another number of values than the header is one bad row, so that lines inside its quotes never become rows.
//!
//! Trade-off: what is between two stray quotes that close like those of a value is taken for one long value, as everywhere. All values are strings and
//! an empty one is the empty string. Guessing types would change texts like "007" or "NA".

use std::collections::HashSet;
use std::io::{BufRead, Read};
use std::mem::take;
use std::path::Path;

use firebrick_arch::counted;
use serde_json::{Map, Value as Json};

use super::column::no_column;
use super::error::{SourceError, SourceResult};
use super::open::{Bytes, checked_text, read_failed};
use super::record::{MAX_RECORD_BYTES, Record, RecordPlace};

/// Maximum number of columns, because each row repeats the names of all columns.
const MAX_COLUMNS: usize = 100_000;
/// Maximum bytes of a file that are read in vain for the ends of quotes.
const MAX_BYTES_IN_VAIN: usize = 4 * MAX_RECORD_BYTES;
const NOT_CLOSED: &str = "a quote is not closed before the end of the file, or the record is larger than 64 MiB. Write a quote \
                          inside quotes twice";
const NO_ROW: &str = "a quote is closed in a later line, but not before a separator, or the row would have more values than the header. \
                      Write a quote inside quotes twice, and quotes around the value";

pub(super) struct CsvRecords {
    bytes: Bytes,
    delimiter: u8,
    names: Vec<String>,
    place: RecordPlace,
    next_line: usize,
    /// Lines that were read; those from `start` on belong to no row yet.
    lines: Vec<u8>,
    start: usize,
    bytes_in_vain: usize,
}

impl CsvRecords {
    /// Reads the header. Errors: it is damaged, names a column twice, or lacks one of `columns`.
    pub(super) fn new(bytes: Bytes, path: &Path, delimiter: u8, columns: Option<&[String]>) -> SourceResult<Self> {
        let place = RecordPlace { path: path.to_owned(), line: 1 };
        let (names, lines) = (Vec::new(), Vec::new());
        let mut records = Self { bytes, delimiter, names, place, next_line: 1, lines, start: 0, bytes_in_vain: 0 };
        let Some(header) = records.row(None)? else { return Ok(records) };
        records.names = records.header(header)?;
        let all: Vec<&String> = records.names.iter().collect();
        match columns.into_iter().flatten().find(|name| !all.contains(name)) {
            Some(missing) => Err(no_column(path, missing, &all)),
            None => Ok(records),
        }
    }

    fn header(&self, row: Row) -> SourceResult<Vec<String>> {
        if let Some(problem) = row.problem {
            return Err(self.bad_row(problem));
        }
        if row.count > MAX_COLUMNS {
            let reason = format!("the header names {} columns, the maximum is {MAX_COLUMNS}", row.count);
            return Err(self.bad_row(&reason));
        }
        let mut seen = HashSet::new();
        let name = |cell: Vec<u8>| {
            let name = checked_text(cell, &self.place)?;
            if !seen.insert(name.clone()) {
                return Err(self.bad_row(&format!("the header names the column {name:?} twice")));
            }
            Ok(name)
        };
        row.cells.into_iter().map(name).collect()
    }

    fn bad_row(&self, reason: &str) -> SourceError {
        let format = if self.delimiter == b'\t' { "TSV" } else { "CSV" };
        SourceError::record(self.place.clone(), None, format!("not a valid {format} row: {reason}"))
    }

    /// Reads the next row that is not blank; `None` at the end.
    fn row(&mut self, columns: Option<usize>) -> SourceResult<Option<Row>> {
        loop {
            if self.start == self.lines.len() {
                self.start = 0;
                self.lines.clear();
            }
            self.place.line = self.next_line;
            let (mut row, mut ends) = (Row::default(), (0, self.start));
            while row.problem.is_none() && (row.lines == 0 || row.is_open) {
                let at = ends.1;
                ends.1 = self.line_end(at)?;
                if at == ends.1 && row.lines == 0 {
                    return Ok(None);
                }
                row.read(&self.lines[at..ends.1], self.delimiter, columns);
                if row.lines == 1 {
                    ends.0 = ends.1;
                }
                if at == ends.1 || ends.1 - self.start > MAX_RECORD_BYTES {
                    row.problem = Some(NOT_CLOSED);
                }
            }
            if row.problem.is_some() {
                self.bytes_in_vain += ends.1 - self.start;
                if self.bytes_in_vain > MAX_BYTES_IN_VAIN {
                    return Err(self.bad_row("too many quotes are not closed. Write a quote inside quotes twice"));
                }
                (row.lines, ends.1) = (1, ends.0);
            }
            self.next_line += row.lines;
            self.start = ends.1;
            if !row.is_blank {
                return Ok(Some(row));
            }
        }
    }

    /// Returns where the line ends that begins at `at`, and reads it first if necessary; at the end of the file `at`.
    fn line_end(&mut self, at: usize) -> SourceResult<usize> {
        if at == self.lines.len() {
            let limit = MAX_RECORD_BYTES as u64 + 2;
            let read = (&mut self.bytes).take(limit).read_until(b'\n', &mut self.lines);
            read.map_err(|reason| read_failed(&self.place.path, self.next_line, &reason))?;
        }
        let length = self.lines[at..].iter().position(|&byte| byte == b'\n').map(|end| end + 1);
        let end = length.map_or(self.lines.len(), |length| at + length);
        if end - at > MAX_RECORD_BYTES {
            return Err(SourceError::too_large(self.place.clone(), "Its line does not end"));
        }
        Ok(end)
    }

    fn record(&self, row: Row) -> SourceResult<Record> {
        if let Some(problem) = row.problem {
            return Err(self.bad_row(problem));
        }
        if row.count != self.names.len() {
            return Err(self.bad_row(&format!(
                "{}, but the header names {}. Quote values that contain the separator or a line break",
                counted(row.count, "value"),
                counted(self.names.len(), "column")
            )));
        }
        let value = |(name, cell): (&String, Vec<u8>)| {
            checked_text(cell, &self.place).map(|text| (name.clone(), Json::String(text)))
        };
        let fields = self.names.iter().zip(row.cells).map(value).collect::<SourceResult<Map<_, _>>>()?;
        Ok(Record::new(fields, self.place.clone()))
    }
}

impl Iterator for CsvRecords {
    type Item = Result<Record, SourceError>;

    fn next(&mut self) -> Option<Self::Item> {
        match self.row(Some(self.names.len())) {
            Ok(row) => row.map(|row| self.record(row).map_err(SourceError::recoverable)),
            Err(error) => Some(Err(error)),
        }
    }
}

#[derive(Default)]
struct Row {
    /// As many as there are columns, at most.
    cells: Vec<Vec<u8>>,
    count: usize,
    lines: usize,
    cell: Vec<u8>,
    is_quoted: bool,
    is_open: bool,
    is_blank: bool,
    has_rest: bool,
    /// Why the quotes of its first line fit no row.
    problem: Option<&'static str>,
}

impl Row {
    /// Adds a line with its line end, the first one or one inside quotes.
    fn read(&mut self, line: &[u8], delimiter: u8, columns: Option<usize>) {
        self.lines += 1;
        self.split(line, delimiter, columns.unwrap_or(MAX_COLUMNS));
        let is_too_long = self.is_open && columns.is_some_and(|columns| self.count >= columns);
        if self.lines > 1 && (self.has_rest || is_too_long) {
            self.problem = Some(NO_ROW);
        }
    }

    fn split(&mut self, line: &[u8], delimiter: u8, most: usize) {
        let text = line.strip_suffix(b"\n").unwrap_or(line);
        let text = text.strip_suffix(b"\r").unwrap_or(text);
        let mut at = 0;
        loop {
            if !self.is_open && line.get(at) == Some(&b'"') {
                (self.is_open, self.is_quoted) = (true, true);
                at += 1;
            }
            while self.is_open {
                let Some(length) = line[at..].iter().position(|&byte| byte == b'"') else {
                    return self.cell.extend_from_slice(&line[at..]);
                };
                self.cell.extend_from_slice(&line[at..at + length]);
                at += length + 1;
                self.is_open = line.get(at) == Some(&b'"');
                if self.is_open {
                    self.cell.push(b'"');
                    at += 1;
                }
            }
            let length = text[at..].iter().position(|&byte| byte == delimiter);
            let end = length.map_or(text.len(), |length| at + length);
            self.has_rest |= self.is_quoted && at < end;
            self.cell.extend_from_slice(&text[at..end]);
            self.is_blank = text.is_empty() && !self.is_quoted;
            self.is_quoted = false;
            let cell = take(&mut self.cell);
            if self.cells.len() < most {
                self.cells.push(cell);
            }
            self.count += 1;
            if length.is_none() {
                return;
            }
            at = end + 1;
        }
    }
}
