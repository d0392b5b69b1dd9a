//! The GGUF container, version 3: metadata, the list of tensors, their bytes.

use std::io::Write;
use std::path::Path;

use firebrick_files::{AtomicFile, AtomicFolder};

use super::blocks::GgmlType;
use crate::error::ModelError;

/// Alignment of tensors in bytes.
const ALIGNMENT: usize = 32;

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Value {
    U32(u32),
    F32(f32),
    Bool(bool),
    Text(String),
    Texts(Vec<String>),
    I32s(Vec<i32>),
    F32s(Vec<f32>),
    Bools(Vec<bool>),
}

/// A tensor of the file, in GGUF's order of dimensions: the innermost first.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Entry {
    pub name: String,
    /// Rows first, as in PyTorch; reversed on disk.
    pub shape: Vec<usize>,
    pub kind: GgmlType,
}

impl Entry {
    fn bytes(&self) -> usize {
        self.kind.bytes_of(self.shape.iter().product())
    }
}

/// Writes a file atomically; what a killed process left of it is removed first. `bytes_of` gives the bytes of each entry, by its number.
pub(super) fn write(
    path: &Path,
    metadata: &[(String, Value)],
    entries: &[Entry],
    mut bytes_of: impl FnMut(usize) -> Result<Vec<u8>, ModelError>,
) -> Result<(), ModelError> {
    let header = header(metadata, entries);
    let partial = AtomicFolder::create(path).map_err(ModelError::io("create", path))?;
    let written = partial.temporary().join("model.gguf");
    let mut file = AtomicFile::create(&written).map_err(ModelError::io("create", path))?;
    let mut put = |bytes: &[u8]| file.write_all(bytes).map_err(ModelError::io("write", path));
    put(&header)?;
    for (index, entry) in entries.iter().enumerate() {
        let mut bytes = bytes_of(index)?;
        assert_eq!(bytes.len(), entry.bytes(), "bytes of `{}`", entry.name);
        bytes.resize(bytes.len().next_multiple_of(ALIGNMENT), 0);
        put(&bytes)?;
    }
    let complete = file.commit().and_then(|()| partial.replace_by(&written));
    complete.map_err(ModelError::io("write", path))
}

fn header(metadata: &[(String, Value)], entries: &[Entry]) -> Vec<u8> {
    let mut out = b"GGUF".to_vec();
    out.extend(3_u32.to_le_bytes());
    out.extend((entries.len() as u64).to_le_bytes());
    out.extend((metadata.len() as u64).to_le_bytes());
    for (key, value) in metadata {
        out.extend(text_bytes(key));
        put_value(&mut out, value);
    }
    let mut offset = 0;
    for entry in entries {
        out.extend(text_bytes(&entry.name));
        out.extend((entry.shape.len() as u32).to_le_bytes());
        entry.shape.iter().rev().for_each(|&size| out.extend((size as u64).to_le_bytes()));
        out.extend(entry.kind.number().to_le_bytes());
        out.extend((offset as u64).to_le_bytes());
        offset += entry.bytes().next_multiple_of(ALIGNMENT);
    }
    out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
    out
}

fn text_bytes(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

/// Appends GGUF's number of the value's type, and the value.
fn put_value(out: &mut Vec<u8>, value: &Value) {
    let (kind, bytes): (u32, Vec<u8>) = match value {
        Value::U32(value) => (4, value.to_le_bytes().to_vec()),
        Value::F32(value) => (6, value.to_le_bytes().to_vec()),
        Value::Bool(value) => (7, vec![u8::from(*value)]),
        Value::Text(text) => (8, text_bytes(text)),
        Value::Texts(texts) => (9, array(8, texts.iter().map(|text| text_bytes(text)))),
        Value::I32s(values) => (9, array(5, values.iter().map(|value| value.to_le_bytes()))),
        Value::F32s(values) => (9, array(6, values.iter().map(|value| value.to_le_bytes()))),
        Value::Bools(values) => (9, array(7, values.iter().map(|value| [u8::from(*value)]))),
    };
    out.extend(kind.to_le_bytes());
    out.extend(bytes);
}

/// Encodes an array whose elements have the type with this number.
fn array<T: IntoIterator<Item = u8>>(kind: u32, values: impl ExactSizeIterator<Item = T>) -> Vec<u8> {
    let head = kind.to_le_bytes().into_iter().chain((values.len() as u64).to_le_bytes());
    head.chain(values.flatten()).collect()
}
