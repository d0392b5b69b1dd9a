//! Plain text: one document per file or per line.
//!
//! Trade-off: a file read as one document must fit the limit of a record.

use std::io::Read;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value as Json};

use super::error::SourceError;
use super::format::TextDocument;
use super::open::{Bytes, FileRecords, Lines, checked_text, read_failed};
use super::record::{MAX_RECORD_BYTES, Record};
use crate::place::Place;

pub(super) fn text_records(bytes: Bytes, path: &Path, unit: TextDocument) -> FileRecords {
    let record = |(bytes, place): (Vec<u8>, Place)| {
        let text = Json::String(checked_text(bytes, &place)?);
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

fn whole_file(bytes: Bytes, path: PathBuf) -> Result<(Vec<u8>, Place), SourceError> {
    let mut text = Vec::new();
    let read = bytes.take(MAX_RECORD_BYTES as u64 + 1).read_to_end(&mut text);
    read.map_err(|reason| read_failed(&path, 1, &reason))?;
    let place = Place { path, line: 1 };
    if text.len() > MAX_RECORD_BYTES {
        let hint = "Read it with text_unit = \"line\", or split it into several files";
        return Err(SourceError::too_large(place, hint));
    }
    Ok((text, place))
}
