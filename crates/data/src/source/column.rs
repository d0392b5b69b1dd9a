//! Columns of Arrow arrays as the JSON values of records.
//!
//! Not supported: types that have no JSON form (bytes, times, decimals, maps); [`select_columns`] refuses them by name.
//! A float that is not finite becomes null, because JSON cannot represent it.

use std::path::Path;
use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::types::{
    ArrowPrimitiveType, Float16Type, Float32Type, Float64Type, Int8Type, Int16Type, Int32Type, Int64Type, UInt8Type,
    UInt16Type, UInt32Type, UInt64Type,
};
use arrow_array::{Array, ArrayRef, RecordBatch};
use arrow_schema::{DataType, Schema};
use serde_json::{Map, Number, Value as Json};

use super::error::SourceError;
use super::record::{MAX_RECORD_BYTES, MAX_RECORD_VALUES, Record};
use crate::place::Place;

/// Minimum size that a JSON value counts for, so that lists of nulls have a size too.
const VALUE_BYTES: usize = MAX_RECORD_BYTES / MAX_RECORD_VALUES;

/// A record exceeded [`MAX_RECORD_BYTES`].
pub(super) struct TooLarge;

/// Finds the requested columns, or all if none are named, and refuses those without a JSON form.
pub(super) fn select_columns(
    schema: &Schema,
    requested: Option<&[String]>,
    path: &Path,
) -> Result<Vec<usize>, SourceError> {
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

/// The error for a requested column that does not exist.
pub(super) fn no_column(path: &Path, name: &str, all: &[&String]) -> SourceError {
    SourceError::NoColumn { path: path.to_owned(), column: name.to_owned(), found: format!("{all:?}") }
}

fn check_type(column: &str, data_type: &DataType, path: &Path) -> Result<(), SourceError> {
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
        other => {
            let found = other.to_string();
            Err(SourceError::ColumnType { path: path.to_owned(), column: column.to_owned(), found })
        }
    }
}

/// A batch whose rows become records one by one.
pub(super) struct BatchRows {
    batch: RecordBatch,
    names: Vec<String>,
    next: usize,
}

impl BatchRows {
    /// Takes a batch of columns that [`select_columns`] accepted.
    pub(super) fn new(batch: RecordBatch) -> Self {
        let names = batch.schema_ref().fields().iter().map(|field| field.name().clone()).collect();
        Self { batch, names, next: 0 }
    }

    /// The next row; `row` is its number in the file, counted from 1.
    pub(super) fn next_record(&mut self, path: &Arc<Path>, row: usize) -> Option<Result<Record, SourceError>> {
        if self.next >= self.batch.num_rows() {
            return None;
        }
        let place = Place { path: path.to_path_buf(), line: row };
        let mut left = MAX_RECORD_BYTES;
        let mut fields = Map::with_capacity(self.names.len());
        for (name, column) in self.names.iter().zip(self.batch.columns()) {
            match value_at(column, self.next, &mut left) {
                Ok(value) => fields.insert(name.clone(), value),
                Err(TooLarge) => {
                    let hint = "Split the row into several, or omit columns with columns = [...]";
                    return Some(Err(SourceError::RecordTooLarge { place, hint }));
                }
            };
        }
        self.next += 1;
        Some(Ok(Record::new(fields, place)))
    }
}

fn value_at(array: &ArrayRef, row: usize, left: &mut usize) -> Result<Json, TooLarge> {
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
            value_at(dictionary.values(), key_at(dictionary.keys(), row), left)?
        }
        other => unreachable!("column type {other} was accepted by select_columns"),
    })
}

/// The key of a dictionary as an index; the decoder has checked its range.
fn key_at(keys: &dyn Array, row: usize) -> usize {
    fn key<T: ArrowPrimitiveType>(keys: &dyn Array, row: usize) -> usize
    where
        T::Native: arrow_buffer::ArrowNativeType,
    {
        arrow_buffer::ArrowNativeType::as_usize(keys.as_primitive::<T>().value(row))
    }
    match keys.data_type() {
        DataType::Int8 => key::<Int8Type>(keys, row),
        DataType::Int16 => key::<Int16Type>(keys, row),
        DataType::Int32 => key::<Int32Type>(keys, row),
        DataType::Int64 => key::<Int64Type>(keys, row),
        DataType::UInt8 => key::<UInt8Type>(keys, row),
        DataType::UInt16 => key::<UInt16Type>(keys, row),
        DataType::UInt32 => key::<UInt32Type>(keys, row),
        _ => key::<UInt64Type>(keys, row),
    }
}

fn text(text: &str, left: &mut usize) -> Result<Json, TooLarge> {
    *left = left.checked_sub(text.len()).ok_or(TooLarge)?;
    Ok(Json::String(text.to_owned()))
}

fn integer<T: ArrowPrimitiveType>(array: &ArrayRef, row: usize) -> Json
where
    Number: From<T::Native>,
{
    Json::Number(Number::from(array.as_primitive::<T>().value(row)))
}

fn float(value: f64) -> Json {
    Number::from_f64(value).map_or(Json::Null, Json::Number)
}

fn list(items: &ArrayRef, left: &mut usize) -> Result<Json, TooLarge> {
    (0..items.len()).map(|index| value_at(items, index, left)).collect::<Result<_, _>>().map(Json::Array)
}
