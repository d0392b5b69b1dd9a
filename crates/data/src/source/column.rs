//! Reads files whose rows come in column batches (Parquet and Arrow) as single records.
//!
//! Not supported: types that have no JSON form (bytes, times, decimals, maps); [`select_columns`] refuses them by name.
//! A float that is not finite is what it is in JSON as Python writes it. Trade-off: no reading after an error.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::types::{
    ArrowPrimitiveType, Float16Type, Float32Type, Float64Type, Int8Type, Int16Type, Int32Type, Int64Type, UInt8Type,
    UInt16Type, UInt32Type, UInt64Type,
};
use arrow_array::{Array, ArrayRef, RecordBatch};
use arrow_schema::{DataType, Schema};
use firebrick_arch::python_json::NUMBER;
use serde_json::{Map, Number, Value as Json};

use super::error::{SourceError, SourceResult};
use super::open::FileRecords;
use super::record::{MAX_RECORD_BYTES, MAX_RECORD_VALUES, Record, RecordPlace};

/// Minimum size that a JSON value counts for, so that lists of nulls have a size too.
const VALUE_BYTES: usize = MAX_RECORD_BYTES / MAX_RECORD_VALUES;

/// A record exceeded [`MAX_RECORD_BYTES`].
pub(super) struct TooLarge;

/// Finds the requested columns, or all if none are named, and refuses those without a JSON form.
pub(super) fn select_columns(schema: &Schema, requested: Option<&[String]>, path: &Path) -> SourceResult<Vec<usize>> {
    let fields = schema.fields();
    let indices = match requested {
        None => (0..fields.len()).collect(),
        Some(names) => {
            let all: Vec<&String> = fields.iter().map(|field| field.name()).collect();
            let find =
                |name: &String| all.iter().position(|known| *known == name).ok_or_else(|| no_column(path, name, &all));
            let mut indices = names.iter().map(find).collect::<Result<Vec<_>, _>>()?;
            indices.sort_unstable();
            indices.dedup();
            indices
        }
    };
    for &index in &indices {
        check_type(fields[index].name(), fields[index].data_type(), path)?;
    }
    Ok(indices)
}

pub(super) fn no_column(path: &Path, name: &str, all: &[&String]) -> SourceError {
    SourceError::file(path, format!("no column {name:?}; the columns are {all:?}"))
}

fn check_type(column: &str, data_type: &DataType, path: &Path) -> SourceResult<()> {
    use DataType as T;
    match data_type {
        T::Null | T::Boolean | T::Utf8 | T::LargeUtf8 | T::Utf8View => Ok(()),
        T::Int8 | T::Int16 | T::Int32 | T::Int64 | T::UInt8 | T::UInt16 | T::UInt32 | T::UInt64 => Ok(()),
        T::Float16 | T::Float32 | T::Float64 => Ok(()),
        T::List(item) | T::LargeList(item) | T::FixedSizeList(item, _) => {
            check_type(&format!("{column}[]"), item.data_type(), path)
        }
        T::Struct(fields) => fields
            .iter()
            .try_for_each(|field| check_type(&format!("{column}.{}", field.name()), field.data_type(), path)),
        T::Dictionary(_, value) => check_type(column, value, path),
        other => Err(SourceError::file(
            path,
            format!(
                "column {column:?} has the type {other}, which is not a string, number, list or struct. Omit it: name the \
                 columns to read with columns = [...]"
            ),
        )),
    }
}

/// Reads the next batch of a file, of columns that [`select_columns`] accepted. The error is the decoder's.
pub(super) type NextBatch = Box<dyn FnMut() -> Result<Option<RecordBatch>, String> + Send>;

struct BatchRecords {
    next_batch: NextBatch,
    path: PathBuf,
    format: &'static str,
    batch: RecordBatch,
    /// The next row of the batch.
    next: usize,
    /// Rows of the file that were read.
    row: usize,
}

/// Returns the rows of all batches, and calls `count_row` for each.
pub(super) fn batch_records(
    next_batch: NextBatch,
    path: &Path,
    format: &'static str,
    mut count_row: impl FnMut() + Send + 'static,
) -> FileRecords {
    let batch = RecordBatch::new_empty(Arc::new(Schema::empty()));
    let mut records = BatchRecords { next_batch, path: path.to_owned(), format, batch, next: 0, row: 0 };
    Box::new(std::iter::from_fn(move || records.record().transpose()).inspect(move |_| count_row()))
}

impl BatchRecords {
    fn record(&mut self) -> SourceResult<Option<Record>> {
        while self.next >= self.batch.num_rows() {
            let batch = (self.next_batch)()
                .map_err(|reason| SourceError::bad_row(&self.path, self.format, self.row, &reason))?;
            let Some(batch) = batch else { return Ok(None) };
            (self.batch, self.next) = (batch, 0);
        }
        let place = RecordPlace { path: self.path.clone(), line: self.row + 1 };
        let mut left = MAX_RECORD_BYTES;
        let mut fields = Map::with_capacity(self.batch.num_columns());
        for (field, column) in self.batch.schema_ref().fields().iter().zip(self.batch.columns()) {
            let Ok(value) = value_at(column, self.next, &mut left) else {
                let hint = "Split the row into several, or omit columns with columns = [...]";
                return Err(SourceError::too_large(place, hint));
            };
            fields.insert(field.name().clone(), value);
        }
        self.next += 1;
        self.row += 1;
        Ok(Some(Record::new(fields, place)))
    }
}

fn value_at(array: &dyn Array, row: usize, left: &mut usize) -> Result<Json, TooLarge> {
    use DataType as T;
    *left = left.checked_sub(VALUE_BYTES).ok_or(TooLarge)?;
    if array.is_null(row) {
        return Ok(Json::Null);
    }
    Ok(match array.data_type() {
        T::Null => Json::Null,
        T::Boolean => Json::Bool(array.as_boolean().value(row)),
        T::Utf8 => text(array.as_string::<i32>().value(row), left)?,
        T::LargeUtf8 => text(array.as_string::<i64>().value(row), left)?,
        T::Utf8View => text(array.as_string_view().value(row), left)?,
        T::Int8 => integer::<Int8Type>(array, row),
        T::Int16 => integer::<Int16Type>(array, row),
        T::Int32 => integer::<Int32Type>(array, row),
        T::Int64 => integer::<Int64Type>(array, row),
        T::UInt8 => integer::<UInt8Type>(array, row),
        T::UInt16 => integer::<UInt16Type>(array, row),
        T::UInt32 => integer::<UInt32Type>(array, row),
        T::UInt64 => integer::<UInt64Type>(array, row),
        T::Float16 => float(f64::from(array.as_primitive::<Float16Type>().value(row).to_f32())),
        T::Float32 => float(f64::from(array.as_primitive::<Float32Type>().value(row))),
        T::Float64 => float(array.as_primitive::<Float64Type>().value(row)),
        T::List(_) => list(&array.as_list::<i32>().value(row), left)?,
        T::LargeList(_) => list(&array.as_list::<i64>().value(row), left)?,
        T::FixedSizeList(_, _) => list(&array.as_fixed_size_list().value(row), left)?,
        T::Struct(fields) => {
            let columns = array.as_struct().columns();
            let member = |(field, column): (&arrow_schema::FieldRef, &ArrayRef)| {
                Ok((field.name().clone(), value_at(column, row, left)?))
            };
            Json::Object(fields.iter().zip(columns).map(member).collect::<Result<_, _>>()?)
        }
        T::Dictionary(_, _) => {
            let dictionary = array.as_any_dictionary();
            let key = value_at(dictionary.keys(), row, left)?.as_u64().expect("the decoder has checked the keys");
            value_at(dictionary.values(), key as usize, left)?
        }
        other => unreachable!("column type {other} was accepted by select_columns"),
    })
}

fn text(text: &str, left: &mut usize) -> Result<Json, TooLarge> {
    *left = left.checked_sub(text.len()).ok_or(TooLarge)?;
    Ok(Json::String(text.to_owned()))
}

fn integer<T: ArrowPrimitiveType>(array: &dyn Array, row: usize) -> Json
where
    Number: From<T::Native>,
{
    Json::Number(Number::from(array.as_primitive::<T>().value(row)))
}

fn float(value: f64) -> Json {
    let python = || {
        if value.is_nan() {
            "NaN"
        } else if value > 0.0 {
            "Infinity"
        } else {
            "-Infinity"
        }
    };
    Number::from_f64(value).map_or_else(|| Json::String(format!("{NUMBER}{}", python())), Json::Number)
}

fn list(items: &dyn Array, left: &mut usize) -> Result<Json, TooLarge> {
    (0..items.len()).map(|index| value_at(items, index, left)).collect::<Result<_, _>>().map(Json::Array)
}
