//! Line formats: one JSON object per line, and plain text, one document per file or per line.
//!
//! A bad line is an error with file, line and column; the lines after it can still be read, unless the first line shows
//! that the file has another form. Trade-off: objects that span several lines are not supported, and a text read as one
//! document must fit the limit of a record.

use std::io::Read;
use std::mem::take;
use std::path::{Path, PathBuf};

use firebrick_arch::{counted, python_json};
use serde_json::{Map, Value as Json};

use super::error::{SourceError, SourceResult};
use super::format::TextDocument;
use super::open::{Bytes, FileRecords, Lines, checked_text, read_failed};
use super::record::{MAX_RECORD_BYTES, MAX_RECORD_VALUES, Record, RecordPlace};

pub(super) const TOO_LONG: &str =
    "Each line must be one JSON object; a file that is one JSON list is read with file_format = \"json\"";

const PYTHON: &str = "This is a Python dict, whose quotes are not those of JSON: write each row with json.dumps(row)";
const ONE_PER_LINE: &str = "Each line must be one whole JSON object";
pub(super) const OVER_LINES: &str =
    "Several objects over several lines each are no format: `jq -c . FILE > NEW.jsonl` writes one a line";
const BEGINS_A_LIST: &str =
    "The file begins with '[', so it seems to be one JSON list, which is read with file_format = \"json\"";

/// Reads lines. `is_first`: they are a whole file rather than the rest of one.
pub(super) fn json_lines(lines: Lines, mut is_first: bool) -> FileRecords {
    Box::new(lines.map(move |line| {
        let (line, place) = line?;
        let other_form = match line.trim_ascii() {
            _ if !take(&mut is_first) => None,
            b"{" => Some(OVER_LINES),
            line => line.starts_with(b"[").then_some(BEGINS_A_LIST),
        };
        match (parse_object(&line, &place, other_form.unwrap_or(ONE_PER_LINE)), other_form) {
            (Err(SourceError::BadRecord { place, column, problem, .. }), Some(_)) => {
                Err(SourceError::record(place, column, problem))
            }
            (fields, _) => Ok(Record::new(fields?, place)),
        }
    }))
}

/// Parses the text of one record. `place` is that of its first line; `hint` says what the format expects.
pub(super) fn parse_object(bytes: &[u8], place: &RecordPlace, hint: &'static str) -> SourceResult<Map<String, Json>> {
    // A value has at least two bytes.
    if bytes.len() > 2 * MAX_RECORD_VALUES && values(bytes) > MAX_RECORD_VALUES {
        let problem =
            format!("one record has more than {} million values. Split it into several", MAX_RECORD_VALUES / 1_000_000);
        return Err(SourceError::record(place.clone(), None, problem).recoverable());
    }
    match python_json::from_slice(bytes) {
        // The parser has checked the UTF-8 of all strings, and bytes outside strings are ASCII.
        Ok(Json::Object(fields)) => Ok(fields),
        Ok(other) => {
            let problem = format!("a row must be a JSON object like {{\"text\": \"...\"}}, found {}", describe(&other));
            Err(SourceError::record(place.clone(), None, problem).recoverable())
        }
        Err(reason) => {
            // Invalid text gets a more precise message than "invalid character".
            checked_text(bytes.to_vec(), place).map_err(SourceError::recoverable)?;
            let whole = reason.to_string();
            let is_line = [ONE_PER_LINE, OVER_LINES].contains(&hint);
            let message = match whole.split(" at line ").next().unwrap_or(&whole) {
                "trailing characters" if is_line && bytes.get(reason.column().saturating_sub(1)) == Some(&b',') => {
                    "a comma follows the object (`sed 's/,$//' FILE > NEW.jsonl` takes it away)"
                }
                "trailing characters" => "something follows the object",
                message if is_line && message.starts_with("EOF while parsing") => "the line ends inside an object",
                message => message,
            };
            let line = place.line + reason.line().saturating_sub(1);
            let place = RecordPlace { path: place.path.clone(), line };
            let hint = if bytes.trim_ascii_start().starts_with(b"{'") { PYTHON } else { hint };
            Err(SourceError::not_json(place, reason.column(), message, hint).recoverable())
        }
    }
}

/// Estimates the number of values of a JSON text: commas and brackets outside strings.
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
        Json::Array(items) if is_chat(items) => format!(
            "a list of {}: `jq -c '{{messages: .}}' FILE > NEW.jsonl` writes each as an object",
            counted(items.len(), "message")
        ),
        Json::Array(items) => {
            format!("a list of {} (a file that is one JSON list is read with file_format = \"json\")", items.len())
        }
        Json::Object(_) => unreachable!("the caller takes objects"),
    }
}

fn is_chat(items: &[Json]) -> bool {
    let is_message = |item: &Json| item.get("role").or_else(|| item.get("from")).is_some();
    !items.is_empty() && items.iter().all(is_message)
}

pub(super) fn text_records(bytes: Bytes, path: &Path, unit: TextDocument) -> FileRecords {
    let record = |(bytes, place): (Vec<u8>, RecordPlace)| {
        let text = Json::String(checked_text(bytes, &place).map_err(SourceError::recoverable)?);
        Ok(Record::new(Map::from_iter([("text".to_owned(), text)]), place))
    };
    match unit {
        TextDocument::File => {
            let path = path.to_owned();
            Box::new(std::iter::once_with(move || whole_file(bytes, path).and_then(record)))
        }
        TextDocument::Line => {
            let hint = "The file has no line breaks where they are expected: is it text?";
            Box::new(Lines::after(0, bytes, path, hint).map(move |line| line.and_then(record)))
        }
    }
}

fn whole_file(bytes: Bytes, path: PathBuf) -> SourceResult<(Vec<u8>, RecordPlace)> {
    let mut text = Vec::new();
    let read = bytes.take(MAX_RECORD_BYTES as u64 + 1).read_to_end(&mut text);
    read.map_err(|reason| read_failed(&path, 1, &reason))?;
    let place = RecordPlace { path, line: 1 };
    if text.len() > MAX_RECORD_BYTES {
        let hint = "Read it with text_unit = \"line\", or split it into several files";
        return Err(SourceError::too_large(place, hint));
    }
    Ok((text, place))
}
