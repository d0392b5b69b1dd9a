//! Arrow IPC, both forms: a stream of messages, and the file form, which is that stream between two markers and an
//! index.
//!
//! Always read as a stream, so it may be compressed and needs no seeking. Memory grows with the bytes that are present, not with those that a message
//! claims. Not bounded: the decompressed size of a buffer that is compressed inside the file. Not supported: files whose messages are not in order
//! (the format allows them, no known writer produces them).
//!
//! Source: Arrow columnar format, "Serialization and Interprocess Communication".

use std::io::{Cursor, Read, Result as IoResult};
use std::path::Path;

use arrow_array::RecordBatch;
use arrow_ipc::reader::StreamReader;

use super::column::{batch_records, select_columns};
use super::error::{SourceError, SourceResult};
use super::format::magic;
use super::open::{Bytes, FileRecords, read_failed};
use crate::catch_panic::catch_panic;

const FORMAT: &str = "Arrow";
const FILE_MAGIC: &[u8; 8] = b"ARROW1\0\0";
const CONTINUATION: [u8; 4] = [0xff; 4];
const MAX_PADDING_BYTES: usize = 512;
/// Maximum size of the part after the stream in a file; an index of millions of batches is smaller.
const MAX_INDEX_BYTES: u64 = 64 << 20;

/// Opens an Arrow file; the first bytes distinguish the two forms.
pub(super) fn open_arrow(mut bytes: Bytes, path: &Path, columns: Option<&[String]>) -> SourceResult<FileRecords> {
    let failed = |reason| read_failed(path, 1, &reason);
    let mut start = Vec::new();
    (&mut bytes).take(8).read_to_end(&mut start).map_err(failed)?;
    let is_file = start == FILE_MAGIC;
    if !is_file && !start.starts_with(&CONTINUATION) {
        let unknown = ("neither an Arrow file nor a stream", "Set its format with file_format = \"...\"");
        return Err(SourceError::wrong_format(path, "arrow", magic(&start).unwrap_or(unknown)));
    }
    if is_file {
        start = after_padding(&mut bytes).map_err(failed)?;
    }
    let bytes: Bytes = Box::new(Cursor::new(start).chain(bytes));
    let reader = decode(|| StreamReader::try_new(bytes, None).map_err(|error| error.to_string()));
    let mut reader = reader.map_err(|reason| SourceError::bad_row(path, FORMAT, 0, &reason))?;
    let indices = select_columns(&reader.schema(), columns, path)?;
    let next_batch = move || -> Result<Option<RecordBatch>, String> {
        match decode(|| reader.next().transpose().map_err(|error| error.to_string()))? {
            Some(batch) => batch.project(&indices).map(Some).map_err(|error| error.to_string()),
            None if is_file && !has_index(reader.get_mut()) => {
                Err("the end mark is missing: it was cut short".to_owned())
            }
            None => Ok(None),
        }
    };
    Ok(batch_records(Box::new(next_batch), path, FORMAT, || {}))
}

fn decode<T>(work: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_panic("the decoder", work).map_err(|reason| format!("{reason} (it is damaged or was cut short)"))
}

/// Returns the first word after the marker of a file that is not zero: writers pad to 8 or 64 bytes.
fn after_padding(bytes: &mut Bytes) -> IoResult<Vec<u8>> {
    let mut word = Vec::new();
    for _ in 0..MAX_PADDING_BYTES / 4 {
        word.clear();
        if bytes.take(4).read_to_end(&mut word)? < 4 || word != [0; 4] {
            break;
        }
    }
    Ok(word)
}

/// Returns whether a file ends with its marker, which follows the index.
fn has_index(bytes: &mut Bytes) -> bool {
    let mut index = Vec::new();
    bytes.take(MAX_INDEX_BYTES).read_to_end(&mut index).is_ok() && index.ends_with(&FILE_MAGIC[..6])
}
