//! Arrow IPC, both forms: a stream of messages, and the file form, which is that stream between two markers and an
//! index.
//!
//! Always read as a stream, so it may be compressed and needs no seeking. Messages are split here and the sizes they
//! claim are checked before the decoder sees them, so that a damaged file cannot request more memory than it has bytes.
//! Not supported: files whose messages are not in order (the format allows them, no known writer produces them).
//!
//! Source: Arrow columnar format, "Serialization and Interprocess Communication".

use std::collections::VecDeque;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use arrow_array::RecordBatch;
use arrow_buffer::Buffer;
use arrow_ipc::reader::StreamDecoder;
use arrow_ipc::{Message, MessageHeader, root_as_message};

use super::batches::Batches;
use super::column::select_columns;
use super::error::SourceError;
use super::open::{Bytes, read_failed};
use crate::catch_panic::catch_panic;

const FILE_MAGIC: &[u8; 8] = b"ARROW1\0\0";
const CONTINUATION: [u8; 4] = [0xff; 4];
const MAX_PADDING_BYTES: usize = 512;
/// Maximum size of a message's metadata; schemas of thousands of columns are far smaller.
const MAX_METADATA_BYTES: usize = 64 << 20;

/// The batches of an Arrow file.
pub(super) struct ArrowBatches {
    bytes: Bytes,
    path: Arc<Path>,
    /// Maximum bytes of one batch, compressed and decompressed.
    max_bytes: u64,
    decoder: StreamDecoder,
    columns: Option<Vec<String>>,
    /// The columns to read; known once the schema is.
    indices: Option<Vec<usize>>,
    is_file: bool,
    batches: VecDeque<RecordBatch>,
    /// The first row of the current batch, for errors.
    row: usize,
    has_ended: bool,
}

impl ArrowBatches {
    /// Distinguishes the two forms by the first bytes.
    pub(super) fn new(mut bytes: Bytes, path: &Path, columns: Option<Vec<String>>) -> Result<Self, SourceError> {
        let failed = |reason| read_failed(path, 1, &reason);
        let mut start = Vec::new();
        (&mut bytes).take(8).read_to_end(&mut start).map_err(failed)?;
        let is_file = start == FILE_MAGIC;
        if !is_file && !start.starts_with(&CONTINUATION) {
            let found = super::format::magic(&start);
            let (found, hint) =
                found.unwrap_or(("neither an Arrow file nor a stream", "Set its format with file_format = \"...\""));
            let expected = "arrow".to_owned();
            return Err(SourceError::WrongFormat {
                path: path.to_owned(),
                expected,
                found: found.to_owned(),
                hint: hint.to_owned(),
            });
        }
        if is_file {
            start = after_padding(&mut bytes).map_err(failed)?;
        }
        let bytes: Bytes = Box::new(std::io::Cursor::new(start).chain(bytes));
        Ok(Self {
            bytes,
            path: path.into(),
            max_bytes: max_batch_bytes(std::fs::metadata(path).map_or(0, |file| file.len())),
            decoder: StreamDecoder::new(),
            columns,
            indices: None,
            is_file,
            batches: VecDeque::new(),
            row: 0,
            has_ended: false,
        })
    }

    fn bad(&self, reason: impl Into<String>) -> SourceError {
        let path = self.path.to_path_buf();
        SourceError::BadColumns { path, format: "Arrow", row: self.row + 1, reason: reason.into() }
    }

    /// Reads exactly `size` bytes; memory grows with the bytes present, not with the size claimed.
    fn exactly(&mut self, size: u64) -> Result<Vec<u8>, SourceError> {
        let mut buffer = Vec::new();
        let read = (&mut self.bytes).take(size).read_to_end(&mut buffer);
        read.map_err(|reason| read_failed(&self.path, self.row + 1, &reason))?;
        if (buffer.len() as u64) < size {
            return Err(self.bad("the file ends inside a message: it was cut short"));
        }
        Ok(buffer)
    }

    /// Reads the next message and passes it to the decoder; the resulting batches are in `self.batches`.
    fn read_message(&mut self) -> Result<(), SourceError> {
        let mut mark = Vec::new();
        let read = (&mut self.bytes).take(4).read_to_end(&mut mark);
        read.map_err(|reason| read_failed(&self.path, self.row + 1, &reason))?;
        if mark.is_empty() && !self.is_file {
            return self.end();
        }
        if mark.len() < 4 {
            return Err(self.bad("the end mark is missing: the file was cut short"));
        }
        if mark == CONTINUATION {
            mark = self.exactly(4)?;
        }
        let size = u32::from_le_bytes([mark[0], mark[1], mark[2], mark[3]]) as usize;
        if size == 0 {
            return self.end();
        }
        if size > MAX_METADATA_BYTES {
            return Err(self.bad(format!("a message claims {size} bytes of metadata")));
        }
        let metadata = self.exactly(size as u64)?;
        let message = root_as_message(&metadata).map_err(|reason| self.bad(format!("damaged message: {reason}")))?;
        let is_data = matches!(message.header_type(), MessageHeader::RecordBatch | MessageHeader::DictionaryBatch);
        let body_size = u64::try_from(message.bodyLength()).ok().filter(|&size| size <= self.max_bytes);
        let Some(body_size) = body_size else {
            let claimed = message.bodyLength();
            return Err(self.bad(format!(
                "a batch claims {claimed} bytes, the maximum is {}; write smaller batches",
                self.max_bytes
            )));
        };
        let body = self.exactly(body_size)?;
        check_claims(&message, &body, self.max_bytes).map_err(|reason| self.bad(reason))?;
        self.decode(mark)?;
        if is_data {
            self.check_schema()?;
        }
        self.decode(metadata)?;
        self.decode(body)
    }

    /// The end of the stream; the decoder returns what it still has.
    fn end(&mut self) -> Result<(), SourceError> {
        self.has_ended = true;
        self.decode(vec![0; 4])?;
        self.decoder.finish().map_err(|reason| self.bad(reason.to_string()))?;
        self.check_schema()
    }

    /// Selects the columns once the schema is known.
    fn check_schema(&mut self) -> Result<(), SourceError> {
        if self.indices.is_none() {
            let schema = self.decoder.schema().ok_or_else(|| self.bad("there is no schema before the data"))?;
            self.indices = Some(select_columns(&schema, self.columns.as_deref(), &self.path)?);
        }
        Ok(())
    }

    fn decode(&mut self, bytes: Vec<u8>) -> Result<(), SourceError> {
        let mut buffer = Buffer::from_vec(bytes);
        while !buffer.is_empty() {
            let decoder = &mut self.decoder;
            let decoded = catch_panic("the decoder", || decoder.decode(&mut buffer).map_err(|error| error.to_string()));
            if let Some(batch) = decoded.map_err(|reason| self.bad(reason))? {
                self.batches.push_back(batch);
            }
        }
        Ok(())
    }
}

impl Batches for ArrowBatches {
    fn next_batch(&mut self, row: usize) -> Result<Option<RecordBatch>, SourceError> {
        self.row = row;
        loop {
            if let Some(batch) = self.batches.pop_front() {
                self.check_schema()?;
                let indices = self.indices.as_deref().expect("set by check_schema");
                return batch.project(indices).map(Some).map_err(|reason| self.bad(reason.to_string()));
            }
            if self.has_ended {
                return Ok(None);
            }
            self.read_message()?;
        }
    }
}

/// Maximum decompressed size of one batch of a file of `size` bytes: a hundred times its size, within fixed limits.
fn max_batch_bytes(size: u64) -> u64 {
    const SMALL: u64 = 256 << 20;
    const RATIO: u64 = 100;
    const MAX_SKELETONS: u64 = 2 << 30;
    size.saturating_mul(RATIO).clamp(SMALL, MAX_SKELETONS)
}

/// The first word after the marker of a file that is not zero: writers pad to 8 or 64 bytes.
fn after_padding(bytes: &mut Bytes) -> std::io::Result<Vec<u8>> {
    let mut word = Vec::new();
    for _ in 0..MAX_PADDING_BYTES / 4 {
        word.clear();
        if bytes.take(4).read_to_end(&mut word)? < 4 || word != [0; 4] {
            break;
        }
    }
    Ok(word)
}

/// Checks what a batch claims about itself against the bytes it has: decompressed sizes and the number of rows.
fn check_claims(message: &Message<'_>, body: &[u8], most: u64) -> Result<(), String> {
    let batch = match message.header_type() {
        MessageHeader::RecordBatch => message.header_as_record_batch(),
        MessageHeader::DictionaryBatch => message.header_as_dictionary_batch().and_then(|batch| batch.data()),
        _ => return Ok(()),
    };
    let batch = batch.ok_or("a batch without a description")?;
    let mut bytes = body.len() as u64;
    if batch.compression().is_some() {
        for buffer in batch.buffers().iter().flatten() {
            // Each compressed buffer begins with its decompressed size, or -1 if it is stored uncompressed.
            let at = usize::try_from(buffer.offset()).unwrap_or(usize::MAX);
            let size = body.get(at..).and_then(|rest| rest.first_chunk::<8>()).map(|size| i64::from_le_bytes(*size));
            let size = if buffer.length() < 8 { None } else { size };
            bytes = bytes.saturating_add(size.and_then(|size| u64::try_from(size).ok()).unwrap_or(0));
        }
    }
    if bytes > most {
        return Err(format!(
            "a batch claims to decompress to {bytes} bytes, the maximum is {most}; write smaller batches"
        ));
    }
    // A row takes at least a bit, except for columns of nulls only, which are not useful by the billion.
    let most = i64::try_from(bytes * 8).unwrap_or(i64::MAX).max(1 << 20);
    let claimed = batch.nodes().iter().flatten().map(|node| node.length()).chain([batch.length()]).max().unwrap_or(0);
    if claimed > most {
        return Err(format!("a batch of {bytes} bytes claims {claimed} values"));
    }
    Ok(())
}
