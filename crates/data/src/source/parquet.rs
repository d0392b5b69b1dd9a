//! Parquet, one batch of rows at a time.
//!
//! Batches are small if rows are large, and strings stay in their pages until a record is built from them. Not bounded: the decompressed size of a
//! single page, because the decoder trusts the page headers of a file that the user chose. Not supported: brotli (rare, and another decoder), and
//! compressed Parquet files, because reading begins at the end of the file.

use std::fmt::Display;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use arrow_schema::{DataType, Field, FieldRef, Fields, Schema};
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{ArrowReaderMetadata, ArrowReaderOptions, ParquetRecordBatchReaderBuilder};
use parquet::errors::ParquetError;
use parquet::file::metadata::ParquetMetaData;

use super::column::{batch_records, select_columns};
use super::error::{SourceError, SourceResult};
use super::format::{Compression, magic};
use super::open::{FileRecords, Progress, open_bytes};
use crate::catch_panic::catch_panic;

const FORMAT: &str = "Parquet";
/// Approximate bytes that one batch decompresses to.
const BATCH_BYTES: u64 = 16 << 20;
const MAX_BATCH_ROWS: u64 = 1024;

/// Opens a Parquet file. Errors: the file is not Parquet or is damaged; a column has no JSON form or does not exist.
pub(super) fn open_parquet(path: &Path, columns: Option<&[String]>, progress: &Progress) -> SourceResult<FileRecords> {
    check_is_parquet(path)?;
    let bad = |reason: String| SourceError::bad_row(path, FORMAT, 0, &reason);
    let refused = |reason| SourceError::Open { path: path.to_owned(), reason };
    let file = File::open(path).map_err(refused)?;
    let size = file.metadata().map_err(refused)?.len();
    let metadata = decode(|| read_metadata(&file)).map_err(bad)?;
    let builder = ParquetRecordBatchReaderBuilder::new_with_metadata(file, metadata);
    let indices = select_columns(builder.schema(), columns, path)?;
    let mask = ProjectionMask::roots(builder.parquet_schema(), indices);
    let rows = batch_rows(builder.metadata());
    let total = u64::try_from(builder.metadata().file_metadata().num_rows()).unwrap_or(0);
    let mut reader = decode(|| builder.with_projection(mask).with_batch_size(rows).build()).map_err(bad)?;
    let next_batch = move || decode(|| reader.next().transpose());
    // The file is read in pieces in no simple order, so progress is counted in rows of average size.
    let (progress, bytes_per_row, mut counted) = (Arc::clone(progress), size as f64 / total.max(1) as f64, 0.0);
    let count_row = move || {
        counted += bytes_per_row;
        progress.fetch_add(counted as u64, Ordering::Relaxed);
        counted = counted.fract();
    };
    Ok(batch_records(Box::new(next_batch), path, FORMAT, count_row))
}

fn decode<T, E: Display>(work: impl FnOnce() -> Result<T, E>) -> Result<T, String> {
    catch_panic("the decoder", || work().map_err(|error| error.to_string()))
}

/// Reads the metadata with string columns as views: a dictionary of one long string for a million rows is not read as a million long strings.
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

fn check_is_parquet(path: &Path) -> SourceResult<()> {
    let wrong = |found| Err(SourceError::wrong_format(path, "parquet", found));
    if Compression::of_name(path) != Compression::None {
        return wrong(("compressed", "Unpack it: Parquet is compressed internally and is read from its end"));
    }
    let mut bytes = open_bytes(path, &Progress::default())?;
    let start = bytes.fill_buf().map_err(|reason| SourceError::Open { path: path.to_owned(), reason })?;
    match magic(start) {
        _ if start.starts_with(b"PAR1") => Ok(()),
        Some(found) => wrong(found),
        None => wrong(("something else (it does not begin with PAR1)", "Set file_format = \"csv\", or what it is")),
    }
}

/// Returns the number of rows for a batch of about [`BATCH_BYTES`], from the largest mean row size of a row group.
fn batch_rows(metadata: &ParquetMetaData) -> usize {
    let mean = |rows: i64, bytes: i64| u64::try_from(bytes).unwrap_or(0) / u64::try_from(rows).unwrap_or(0).max(1);
    let groups = metadata.row_groups().iter();
    let largest = groups.map(|group| mean(group.num_rows(), group.total_byte_size())).max().unwrap_or(1);
    usize::try_from((BATCH_BYTES / largest.max(1)).clamp(1, MAX_BATCH_ROWS)).expect("at most 1024")
}
