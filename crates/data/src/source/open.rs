//! Opens a file as a stream of uncompressed bytes and counts how much of it was read.
//!
//! Memory is limited to a few buffers and the decompressor's window, so a file that decompresses to terabytes costs only time. Trade-off: a
//! decompressor runs on the reading thread.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Result as IoResult};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use flate2::bufread::MultiGzDecoder;

use super::error::{SourceError, SourceResult};
use super::format::{Compression, FileFormat, magic};
use super::record::{MAX_RECORD_BYTES, Record, RecordPlace};

const BUFFER_BYTES: usize = 256 << 10;
const UNPACKED_BYTES: usize = 64 << 10;
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";
const UTF_16_MARKS: [&[u8]; 2] = [b"\xff\xfe", b"\xfe\xff"];

/// Uncompressed bytes.
pub(super) type Bytes = Box<dyn BufRead + Send>;

/// The records of one file. No record is requested after the end, nor after an error that ends the file.
pub(super) type FileRecords = Box<dyn Iterator<Item = Result<Record, SourceError>> + Send>;

/// Number of bytes of a source's files read so far, before decompression.
pub(super) type Progress = Arc<AtomicU64>;

/// A file's bytes, counted as they are used rather than as they are read ahead: mixing by size steps row by row.
struct Counted {
    reader: BufReader<File>,
    progress: Progress,
}

impl Read for Counted {
    fn read(&mut self, buffer: &mut [u8]) -> IoResult<usize> {
        let read = self.reader.read(buffer)?;
        self.progress.fetch_add(read as u64, Ordering::Relaxed);
        Ok(read)
    }
}

impl BufRead for Counted {
    fn fill_buf(&mut self) -> IoResult<&[u8]> {
        self.reader.fill_buf()
    }

    fn consume(&mut self, count: usize) {
        self.reader.consume(count);
        self.progress.fetch_add(count as u64, Ordering::Relaxed);
    }
}

/// Opens and decompresses a file. Error: the operating system refuses.
pub(super) fn open_bytes(path: &Path, progress: &Progress) -> SourceResult<Bytes> {
    let refused = |reason| SourceError::Open { path: path.to_owned(), reason };
    let file = File::open(path).map_err(refused)?;
    let reader = BufReader::with_capacity(BUFFER_BYTES, file);
    let reader = Counted { reader, progress: Arc::clone(progress) };
    Ok(match Compression::of_name(path) {
        Compression::None => Box::new(reader),
        Compression::Gzip => Box::new(BufReader::with_capacity(UNPACKED_BYTES, MultiGzDecoder::new(reader))),
        Compression::Zstandard => {
            let decoder = zstd::stream::read::Decoder::with_buffer(reader).map_err(refused)?;
            Box::new(BufReader::with_capacity(UNPACKED_BYTES, decoder))
        }
    })
}

/// Opens a file as [`open_bytes`] does, for text formats: skips a byte order mark and refuses binary files.
pub(super) fn open_text(path: &Path, format: FileFormat, progress: &Progress) -> SourceResult<Bytes> {
    let mut bytes = open_bytes(path, progress)?;
    let start = bytes.fill_buf().map_err(|reason| read_failed(path, 1, &reason))?;
    if let Some(found) = magic(start) {
        return Err(SourceError::wrong_format(path, &format.name(), found));
    }
    let begin = start.trim_ascii_start();
    let is = |tag: &[u8]| begin.get(..tag.len()).is_some_and(|begin| begin.eq_ignore_ascii_case(tag));
    let is_page = is(b"<!doctype html") || is(b"<html");
    if is_page && format != FileFormat::Text {
        let hint = "Download the file itself, which is at .../resolve/main/... on the Hub";
        return Err(SourceError::wrong_format(path, &format.name(), ("a page of a website", hint)));
    }
    if UTF_16_MARKS.iter().any(|mark| start.starts_with(mark)) {
        return Err(SourceError::file(path, "its text is UTF-16. Convert it: `iconv -f UTF-16 -t UTF-8 FILE > NEW`"));
    }
    if start.starts_with(BYTE_ORDER_MARK) {
        bytes.consume(BYTE_ORDER_MARK.len());
    }
    Ok(bytes)
}

pub(super) fn read_failed(path: &Path, line: usize, reason: &std::io::Error) -> SourceError {
    let mut reason = reason.to_string();
    if Compression::of_name(path) != Compression::None {
        reason.push_str(" (the compressed file is damaged or was cut short)");
    }
    let place = RecordPlace { path: path.to_owned(), line };
    SourceError::record(place, None, format!("cannot continue reading: {reason}"))
}

/// Checks that text is UTF-8 without NUL. `place` is that of its first line; the error names the line within it.
pub(super) fn checked_text(bytes: Vec<u8>, place: &RecordPlace) -> SourceResult<String> {
    let bad = |at: usize, bytes: &[u8], problem| {
        let before = &bytes[..at];
        let line = place.line + before.iter().filter(|&&byte| byte == b'\n').count();
        let column = at - before.iter().rposition(|&byte| byte == b'\n').map_or(0, |newline| newline + 1) + 1;
        SourceError::record(RecordPlace { path: place.path.clone(), line }, Some(column), problem)
    };
    let text = String::from_utf8(bytes).map_err(|error| {
        let problem = "not valid UTF-8. If it is Latin-1, convert it: `iconv -f LATIN1 -t UTF-8 FILE > NEW`";
        bad(error.utf8_error().valid_up_to(), error.as_bytes(), problem)
    })?;
    match text.find('\0') {
        Some(at) => Err(bad(at, text.as_bytes(), "a NUL character: the file is damaged or not text")),
        None => Ok(text),
    }
}

/// The lines of a text that are not blank, without their line breaks, with their places.
pub(super) struct Lines {
    bytes: Bytes,
    /// The last line.
    place: RecordPlace,
    /// Advice about a line that is too long.
    hint: &'static str,
}

impl Lines {
    pub(super) fn after(number: usize, bytes: Bytes, path: &Path, hint: &'static str) -> Self {
        Self { bytes, place: RecordPlace { path: path.to_owned(), line: number }, hint }
    }

    /// Returns the next line that is not blank; empty at the end.
    fn advance(&mut self) -> SourceResult<Vec<u8>> {
        let mut line = Vec::new();
        loop {
            self.place.line += 1;
            // The line break may be two more bytes.
            let read = (&mut self.bytes).take(MAX_RECORD_BYTES as u64 + 2).read_until(b'\n', &mut line);
            let is_end = read.map_err(|reason| read_failed(&self.place.path, self.place.line, &reason))? == 0;
            if line.pop_if(|last| *last == b'\n').is_some() {
                line.pop_if(|last| *last == b'\r');
            }
            if line.len() > MAX_RECORD_BYTES {
                return Err(SourceError::too_large(self.place.clone(), self.hint));
            }
            if is_end || !line.trim_ascii().is_empty() {
                return Ok(line);
            }
            line.clear();
        }
    }
}

impl Iterator for Lines {
    type Item = Result<(Vec<u8>, RecordPlace), SourceError>;

    fn next(&mut self) -> Option<Self::Item> {
        let line = self.advance().map(|line| (!line.is_empty()).then(|| (line, self.place.clone())));
        line.transpose()
    }
}
