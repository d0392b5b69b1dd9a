//! Parquet, a batch of rows at a time.
//!
//! The batch is made small where rows are large. Gives up brotli (rare, and a decoder more) and files that are packed
//! as a whole, as reading begins at the end.

use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{ParquetRecordBatchReader, ParquetRecordBatchReaderBuilder};
use parquet::file::metadata::ParquetMetaData;

use super::Record;
use super::column::{BatchRows, wanted_columns};
use super::error::SourceError;
use super::format::{Compression, magic};
use super::open::{Progress, open_bytes};

/// About how many bytes one batch may unpack to.
const BATCH_BYTES: u64 = 16 << 20;
const MAX_BATCH_ROWS: u64 = 1024;

/// The records of a Parquet file.
pub(super) struct ParquetRecords {
    reader: ParquetRecordBatchReader,
    path: Arc<Path>,
    rows: Option<BatchRows>,
    row: usize,
    has_failed: bool,
    progress: Progress,
    bytes_per_row: f64,
    counted: f64,
}

impl ParquetRecords {
    /// Reads the description at the end of the file. Errors: it is no Parquet file or damaged; a column has no JSON
    /// form or is missing.
    pub(super) fn new(path: &Path, columns: Option<&[String]>, progress: &Progress) -> Result<Self, SourceError> {
        let bad = |reason| bad(path, 0, reason);
        refuse_others(path)?;
        let refused = |reason| SourceError::Open { path: path.to_owned(), reason };
        let file = File::open(path).map_err(refused)?;
        let size = file.metadata().map_err(refused)?.len();
        let builder = guarded(|| ParquetRecordBatchReaderBuilder::try_new(file).map_err(|error| error.to_string()));
        let builder = builder.map_err(bad)?;
        let indices = wanted_columns(builder.schema(), columns, path)?;
        let mask = ProjectionMask::roots(builder.parquet_schema(), indices);
        let rows = batch_rows(builder.metadata());
        let total = u64::try_from(builder.metadata().file_metadata().num_rows()).unwrap_or(0);
        let reader = guarded(|| {
            let builder = builder.with_projection(mask).with_batch_size(rows);
            builder.build().map_err(|error| error.to_string())
        });
        Ok(Self {
            reader: reader.map_err(bad)?,
            path: path.into(),
            rows: None,
            row: 0,
            has_failed: false,
            progress: Arc::clone(progress),
            bytes_per_row: size as f64 / total.max(1) as f64,
            counted: 0.0,
        })
    }

    fn record(&mut self) -> Result<Option<Record>, SourceError> {
        loop {
            if let Some(rows) = &mut self.rows {
                if let Some(record) = rows.next_record(&self.path, self.row + 1) {
                    self.row += 1;
                    self.count_row();
                    return record.map(Some);
                }
                self.rows = None;
            }
            let reader = &mut self.reader;
            let batch = guarded(|| reader.next().transpose().map_err(|error| error.to_string()));
            match batch.map_err(|reason| bad(&self.path, self.row, reason))? {
                Some(batch) => self.rows = Some(BatchRows::new(batch)),
                None => return Ok(None),
            }
        }
    }

    /// The file is read in pieces here and there, so progress is counted in rows of average size.
    fn count_row(&mut self) {
        self.counted += self.bytes_per_row;
        let whole = self.counted as u64;
        self.progress.fetch_add(whole, Ordering::Relaxed);
        self.counted -= whole as f64;
    }
}

impl Iterator for ParquetRecords {
    type Item = Result<Record, SourceError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.has_failed {
            return None;
        }
        let record = self.record().transpose();
        self.has_failed = !matches!(record, Some(Ok(_)));
        record
    }
}

/// Runs a decoder on bytes that anybody may have written: where it panics instead of refusing them, that is an error of
/// the file to us. The decoder is not used again.
pub(super) fn guarded<T>(decode: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(decode)).unwrap_or_else(|panic| {
        let said = panic.downcast_ref::<String>().map(String::as_str);
        let said = said.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no reason given");
        Err(format!("the decoder gave up on damaged data: {said}"))
    })
}

fn bad(path: &Path, row: usize, reason: String) -> SourceError {
    SourceError::BadColumns { path: path.to_owned(), format: "Parquet", row: row + 1, reason }
}

fn refuse_others(path: &Path) -> Result<(), SourceError> {
    let wrong = |found: &str, hint: &str| {
        let (expected, found, hint) = ("parquet".to_owned(), found.to_owned(), hint.to_owned());
        Err(SourceError::WrongFormat { path: path.to_owned(), expected, found, hint })
    };
    if Compression::of_name(path) != Compression::None {
        return wrong("packed as a whole", "Unpack it: Parquet is packed inside already, and read from its end");
    }
    let mut bytes = open_bytes(path, &Progress::default())?;
    let start = bytes.fill_buf().map_err(|reason| SourceError::Open { path: path.to_owned(), reason })?;
    match magic(start) {
        _ if start.starts_with(b"PAR1") => Ok(()),
        Some((found, hint)) => wrong(found, hint),
        None => wrong("something else (it does not begin with PAR1)", "Name its format with format = \"...\""),
    }
}

/// So many rows that a batch has about [`BATCH_BYTES`], by the largest mean of a row group.
fn batch_rows(metadata: &ParquetMetaData) -> usize {
    let mean = |rows: i64, bytes: i64| u64::try_from(bytes).unwrap_or(0) / u64::try_from(rows).unwrap_or(0).max(1);
    let groups = metadata.row_groups().iter();
    let largest = groups.map(|group| mean(group.num_rows(), group.total_byte_size())).max().unwrap_or(1);
    usize::try_from((BATCH_BYTES / largest.max(1)).clamp(8, MAX_BATCH_ROWS)).expect("at most 1024")
}
