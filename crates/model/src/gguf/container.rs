//! The GGUF container, version 3: metadata, the list of tensors, their bytes.
//!
//! Trade-off: sizes and offsets are computed before any tensor is read, so one tensor is in memory at a time.

use std::io::Write;
use std::path::Path;

use firebrick_files::AtomicFile;

use super::blocks::GgmlType;
use crate::error::ModelError;

/// Where tensors begin: multiples of this many bytes.
const ALIGNMENT: usize = 32;

/// A value of the metadata.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Value {
    U32(u32),
    F32(f32),
    Bool(bool),
    Text(String),
    Texts(Vec<String>),
    I32s(Vec<i32>),
}

/// A tensor of the file, in GGUF's order of dimensions: the innermost first.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Entry {
    pub name: String,
    /// Rows first, as in PyTorch; turned around on disk.
    pub shape: Vec<usize>,
    pub kind: GgmlType,
}

impl Entry {
    fn bytes(&self) -> usize {
        self.kind.bytes_of(self.shape.iter().product())
    }
}

/// Writes a file atomically; `bytes_of` gives the bytes of each entry, by its number.
pub(super) fn write(
    path: &Path,
    metadata: &[(String, Value)],
    entries: &[Entry],
    mut bytes_of: impl FnMut(usize) -> Result<Vec<u8>, ModelError>,
) -> Result<(), ModelError> {
    let header = header(metadata, entries);
    let mut file = AtomicFile::create(path).map_err(ModelError::io("create", path))?;
    let mut put = |bytes: &[u8]| file.write_all(bytes).map_err(ModelError::io("write", path));
    put(&header)?;
    for (index, entry) in entries.iter().enumerate() {
        let mut bytes = bytes_of(index)?;
        assert_eq!(bytes.len(), entry.bytes(), "bytes of `{}`", entry.name);
        bytes.resize(bytes.len().next_multiple_of(ALIGNMENT), 0);
        put(&bytes)?;
    }
    file.commit().map_err(ModelError::io("write", path))
}

fn header(metadata: &[(String, Value)], entries: &[Entry]) -> Vec<u8> {
    let mut out = b"GGUF".to_vec();
    out.extend(3_u32.to_le_bytes());
    out.extend((entries.len() as u64).to_le_bytes());
    out.extend((metadata.len() as u64).to_le_bytes());
    for (key, value) in metadata {
        put_text(&mut out, key);
        put_value(&mut out, value);
    }
    let mut offset = 0;
    for entry in entries {
        put_text(&mut out, &entry.name);
        out.extend((entry.shape.len() as u32).to_le_bytes());
        entry.shape.iter().rev().for_each(|&size| out.extend((size as u64).to_le_bytes()));
        out.extend(entry.kind.number().to_le_bytes());
        out.extend((offset as u64).to_le_bytes());
        offset += entry.bytes().next_multiple_of(ALIGNMENT);
    }
    out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
    out
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn put_value(out: &mut Vec<u8>, value: &Value) {
    /// GGUF's numbers of types.
    const U32: u32 = 4;
    const I32: u32 = 5;
    const F32: u32 = 6;
    const BOOL: u32 = 7;
    const TEXT: u32 = 8;
    const ARRAY: u32 = 9;
    let number = |out: &mut Vec<u8>, number: u32| out.extend(number.to_le_bytes());
    let array = |out: &mut Vec<u8>, of: u32, length: usize| {
        number(out, ARRAY);
        number(out, of);
        out.extend((length as u64).to_le_bytes());
    };
    match value {
        Value::U32(value) => {
            number(out, U32);
            out.extend(value.to_le_bytes());
        }
        Value::F32(value) => {
            number(out, F32);
            out.extend(value.to_le_bytes());
        }
        Value::Bool(value) => {
            number(out, BOOL);
            out.push(u8::from(*value));
        }
        Value::Text(text) => {
            number(out, TEXT);
            put_text(out, text);
        }
        Value::Texts(texts) => {
            array(out, TEXT, texts.len());
            texts.iter().for_each(|text| put_text(out, text));
        }
        Value::I32s(values) => {
            array(out, I32, values.len());
            values.iter().for_each(|value| out.extend(value.to_le_bytes()));
        }
    }
}
