//! Rows of JSON as tables: Parquet and Arrow, in two batches, with null where a row or an object inside it lacks a key; and packed files.

use std::io::Write;
use std::sync::Arc;

use arrow_array::types::Int32Type;
use arrow_array::{
    Array, ArrayRef, BooleanArray, Float64Array, Int64Array, ListArray, NullArray, RecordBatch, StringArray,
    StructArray,
};
use arrow_ipc::writer::{FileWriter, StreamWriter};
use arrow_schema::{Field, FieldRef};
use firebrick_arch::python_json::number;
use serde_json::Value as Json;

fn column(values: &[&Json]) -> ArrayRef {
    match values.iter().find(|value| !value.is_null()) {
        None => Arc::new(NullArray::new(values.len())),
        Some(Json::Bool(_)) => Arc::new(BooleanArray::from_iter(values.iter().map(|value| value.as_bool()))),
        Some(first) if first.is_i64() => Arc::new(Int64Array::from_iter(values.iter().map(|value| value.as_i64()))),
        Some(first) if first.is_number() || number(first).is_some() => {
            let float = |value: &&Json| value.as_f64().or_else(|| number(value)?.parse().ok());
            Arc::new(Float64Array::from_iter(values.iter().map(float)))
        }
        Some(Json::Array(_)) => {
            let lists = values.iter().map(|list| list.as_array().map(|items| items.iter().map(|_| Some(0))));
            let (_, offsets, _, nulls) = ListArray::from_iter_primitive::<Int32Type, _, _>(lists).into_parts();
            let items = column(&values.iter().filter_map(|list| list.as_array()).flatten().collect::<Vec<_>>());
            Arc::new(ListArray::new(field("item", &items), offsets, items, nulls))
        }
        Some(Json::Object(_)) => {
            let (fields, columns): (Vec<FieldRef>, Vec<ArrayRef>) = columns(values).into_iter().unzip();
            let present: Vec<bool> = values.iter().map(|value| !value.is_null()).collect();
            Arc::new(StructArray::new(fields.into(), columns, Some(present.into())))
        }
        Some(_) => Arc::new(StringArray::from_iter(values.iter().map(|value| value.as_str()))),
    }
}

fn field(name: &str, column: &ArrayRef) -> FieldRef {
    Arc::new(Field::new(name, column.data_type().clone(), true))
}

/// Returns a column for each key of the objects, in the order in which they first occur.
fn columns(objects: &[&Json]) -> Vec<(FieldRef, ArrayRef)> {
    let mut names: Vec<&String> = Vec::new();
    for name in objects.iter().filter_map(|object| object.as_object()).flat_map(|fields| fields.keys()) {
        names.extend((!names.contains(&name)).then_some(name));
    }
    let named = |name: &String| {
        let column = column(&objects.iter().map(|object| &object[name]).collect::<Vec<_>>());
        (field(name, &column), column)
    };
    names.into_iter().map(named).collect()
}

fn batches(rows: &[Json]) -> [RecordBatch; 2] {
    let columns = columns(&rows.iter().collect::<Vec<_>>());
    let columns = columns.iter().map(|(field, column)| (field.name(), column.clone(), true));
    let batch = RecordBatch::try_from_iter_with_nullable(columns).unwrap();
    let middle = rows.len() / 2;
    [batch.slice(0, middle), batch.slice(middle, rows.len() - middle)]
}

/// Returns the rows as a Parquet file with two row groups.
pub(crate) fn parquet_bytes(rows: &[Json]) -> Vec<u8> {
    let batches = batches(rows);
    let mut writer = parquet::arrow::ArrowWriter::try_new(Vec::new(), batches[0].schema(), None).unwrap();
    for batch in &batches {
        writer.write(batch).unwrap();
        writer.flush().unwrap();
    }
    writer.into_inner().unwrap()
}

/// Returns the rows as an Arrow stream, or with `is_file` as an Arrow file.
pub(crate) fn arrow_bytes(rows: &[Json], is_file: bool) -> Vec<u8> {
    let [first, second] = batches(rows);
    if is_file {
        let mut writer = FileWriter::try_new(Vec::new(), &first.schema()).unwrap();
        writer.write(&first).and_then(|()| writer.write(&second)).unwrap();
        writer.into_inner().unwrap()
    } else {
        let mut writer = StreamWriter::try_new(Vec::new(), &first.schema()).unwrap();
        writer.write(&first).and_then(|()| writer.write(&second)).unwrap();
        writer.into_inner().unwrap()
    }
}

pub(crate) fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

pub(crate) fn zstandard(bytes: &[u8]) -> Vec<u8> {
    zstd::encode_all(bytes, 1).unwrap()
}
