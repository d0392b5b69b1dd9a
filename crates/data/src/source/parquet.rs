//! Parquet, one batch of rows at a time.
//!
//! Batches are small where rows are large, and strings stay in their pages until a record is built from them. Not
//! bounded: what a single page decompresses to, because the decoder trusts the page headers of a file that the user
//! chose. Not supported: brotli (rare, and another decoder), and compressed Parquet files, because reading begins at
//! the end of the file.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use arrow_array::RecordBatch;
use arrow_schema::{DataType, Field, FieldRef, Fields, Schema};
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{
    ArrowReaderMetadata, ArrowReaderOptions, ParquetRecordBatchReader, ParquetRecordBatchReaderBuilder,
};
use parquet::errors::ParquetError;
use parquet::file::metadata::ParquetMetaData;

use super::batches::Batches;
use super::column::select_columns;
use super::error::SourceError;
use super::format::{Compression, magic};
use super::open::{Progress, open_bytes};
use crate::catch_panic::catch_panic;

/// Named in error messages when the library panics.
const DECODER: &str = "the decoder";
/// Approximate bytes that one batch decompresses to.
const BATCH_BYTES: u64 = 16 << 20;
const MAX_BATCH_ROWS: u64 = 1024;

/// The batches of a Parquet file.
pub(super) struct ParquetBatches {
    reader: ParquetRecordBatchReader,
    path: PathBuf,
    progress: Progress,
    bytes_per_row: f64,
    counted: f64,
}

impl ParquetBatches {
    /// Reads the metadata at the end of the file. Errors: the file is not Parquet or is damaged; a column has no JSON
    /// form or does not exist.
    pub(super) fn new(path: &Path, columns: Option<&[String]>, progress: &Progress) -> Result<Self, SourceError> {
        let bad = |reason| bad(path, 0, reason);
        check_is_parquet(path)?;
        let refused = |reason| SourceError::Open { path: path.to_owned(), reason };
        let file = File::open(path).map_err(refused)?;
        let size = file.metadata().map_err(refused)?.len();
        let metadata = catch_panic(DECODER, || read_metadata(&file).map_err(|error| error.to_string())).map_err(bad)?;
        let builder = ParquetRecordBatchReaderBuilder::new_with_metadata(file, metadata);
        let indices = select_columns(builder.schema(), columns, path)?;
        let mask = ProjectionMask::roots(builder.parquet_schema(), indices);
        let rows = batch_rows(builder.metadata());
        let total = u64::try_from(builder.metadata().file_metadata().num_rows()).unwrap_or(0);
        let reader = catch_panic(DECODER, || {
            let builder = builder.with_projection(mask).with_batch_size(rows);
            builder.build().map_err(|error| error.to_string())
        });
        Ok(Self {
            reader: reader.map_err(bad)?,
            path: path.to_owned(),
            progress: Arc::clone(progress),
            bytes_per_row: size as f64 / total.max(1) as f64,
            counted: 0.0,
        })
    }
}

impl Batches for ParquetBatches {
    fn next_batch(&mut self, row: usize) -> Result<Option<RecordBatch>, SourceError> {
        let reader = &mut self.reader;
        let batch = catch_panic(DECODER, || reader.next().transpose().map_err(|error| error.to_string()));
        batch.map_err(|reason| bad(&self.path, row, reason))
    }

    /// The file is read in pieces in no simple order, so progress is counted in rows of average size.
    fn count_row(&mut self) {
        self.counted += self.bytes_per_row;
        let whole = self.counted as u64;
        self.progress.fetch_add(whole, Ordering::Relaxed);
        self.counted -= whole as f64;
    }
}

/// The file's metadata with string columns as views: a dictionary of one long string for a million rows is then read as
/// such, and not as a million long strings.
fn read_metadata(file: &File) -> Result<ArrowReaderMetadata, ParquetError> {
    let metadata = ArrowReaderMetadata::load(file, ArrowReaderOptions::new())?;
    let schema = Schema::new_with_metadata(as_views(metadata.schema().fields()), metadata.schema().metadata().clone());
    let options = ArrowReaderOptions::new().with_schema(Arc::new(schema));
    ArrowReaderMetadata::try_new(Arc::clone(metadata.metadata()), options)
}

fn as_views(fields: &Fields) -> Fields {
    fields.iter().map(as_view).collect()
}

fn as_view(field: &FieldRef) -> FieldRef {
    let data_type = match field.data_type() {
        DataType::Utf8 | DataType::LargeUtf8 => DataType::Utf8View,
        DataType::List(item) => DataType::List(as_view(item)),
        DataType::LargeList(item) => DataType::LargeList(as_view(item)),
        DataType::Struct(members) => DataType::Struct(as_views(members)),
        _ => return Arc::clone(field),
    };
    Arc::new(Field::clone(field).with_data_type(data_type))
}

fn bad(path: &Path, row: usize, reason: String) -> SourceError {
    SourceError::BadColumns { path: path.to_owned(), format: "Parquet", row: row + 1, reason }
}

fn check_is_parquet(path: &Path) -> Result<(), SourceError> {
    let wrong = |found: &str, hint: &str| {
        let (expected, found, hint) = ("parquet".to_owned(), found.to_owned(), hint.to_owned());
        Err(SourceError::WrongFormat { path: path.to_owned(), expected, found, hint })
    };
    if Compression::of_name(path) != Compression::None {
        return wrong("compressed", "Unpack it: Parquet is compressed internally and is read from its end");
    }
    let mut bytes = open_bytes(path, &Progress::default())?;
    let start = bytes.fill_buf().map_err(|reason| SourceError::Open { path: path.to_owned(), reason })?;
    match magic(start) {
        _ if start.starts_with(b"PAR1") => Ok(()),
        Some((found, hint)) => wrong(found, hint),
        None => wrong("something else (it does not begin with PAR1)", "Set its format with file_format = \"...\""),
    }
}

/// The number of rows for a batch of about [`BATCH_BYTES`], by the largest mean row size of a row group.
fn batch_rows(metadata: &ParquetMetaData) -> usize {
    let mean = |rows: i64, bytes: i64| u64::try_from(bytes).unwrap_or(0) / u64::try_from(rows).unwrap_or(0).max(1);
    let groups = metadata.row_groups().iter();
    let largest = groups.map(|group| mean(group.num_rows(), group.total_byte_size())).max().unwrap_or(1);
    usize::try_from((BATCH_BYTES / largest.max(1)).clamp(1, MAX_BATCH_ROWS)).expect("at most 1024")
}
