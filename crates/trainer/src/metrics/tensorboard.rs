//! Scalars as TensorBoard event files.
//!
//! An event file is a list of records: length (u64, little-endian), masked CRC-32C of the length (u32), the bytes of a protobuf `Event`, masked
//! CRC-32C of the bytes (u32). Only four fields of `Event` are needed, so they are encoded by hand (field numbers: tensorflow/core/util/event.proto
//! and framework/summary.proto).
//!
//! A resumed run adds a file that begins with a session start at its first step, so TensorBoard ignores what older files contain from that step on.
//! Not supported: images, text, histograms.

use std::fs::{self, File};
use std::path::Path;

use crate::metrics::appended::AppendedFile;
use crate::metrics::protobuf::{bytes, double, float, string, varint};
use crate::metrics::{MetricSink, now};
use crate::storage::StorageError;

/// Content of the first record of every file.
const FILE_VERSION: &str = "brain.Event:2";

/// An open event file.
#[derive(Debug)]
pub struct EventWriter {
    file: AppendedFile,
}

impl EventWriter {
    /// Creates an event file in a folder. `resumed_step` is the last step that older files keep, if there are any.
    pub fn create(folder: &Path, resumed_step: Option<u64>) -> Result<EventWriter, StorageError> {
        fs::create_dir_all(folder).map_err(|source| StorageError::io("create", folder, source))?;
        let host = std::env::var("HOSTNAME").or_else(|_| std::env::var("COMPUTERNAME")).unwrap_or_default();
        let host: String = host.chars().filter(|c| c.is_ascii_alphanumeric() || *c == '-').collect();
        let host = if host.is_empty() { "host" } else { &host };
        let mut number = 0;
        let (file, path) = loop {
            let name = format!("events.out.tfevents.{:010}.{host}.{}.{number}", now().as_secs(), std::process::id());
            let path = folder.join(name);
            match File::create_new(&path) {
                Ok(file) => break (file, path),
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => number += 1,
                Err(source) => return Err(StorageError::io("create", &path, source)),
            }
        };
        let mut writer = EventWriter { file: AppendedFile::new(file, path) };
        writer.record(&event(0, &string(3, FILE_VERSION)))?;
        if let Some(step) = resumed_step {
            let session_start = varint(1, 1);
            writer.record(&event(step + 1, &bytes(7, &session_start)))?;
        }
        Ok(writer)
    }

    fn record(&mut self, data: &[u8]) -> Result<(), StorageError> {
        let length = (data.len() as u64).to_le_bytes();
        let mut record = Vec::with_capacity(data.len() + 16);
        record.extend(length);
        record.extend(masked_crc(&length).to_le_bytes());
        record.extend(data);
        record.extend(masked_crc(data).to_le_bytes());
        self.file.append(&record)
    }
}

impl MetricSink for EventWriter {
    fn plot(&mut self, step: u64, scalars: Vec<(String, f64)>, _: bool) -> Result<(), StorageError> {
        let mut summary = Vec::new();
        for (tag, value) in scalars {
            let mut one = string(1, &tag);
            one.extend(float(2, value as f32));
            summary.extend(bytes(1, &one));
        }
        self.record(&event(step, &bytes(5, &summary)))
    }

    fn flush(&mut self) -> Result<(), StorageError> {
        self.file.flush()
    }
}

/// Returns the CRC-32C, rotated and shifted as the record format requires.
fn masked_crc(data: &[u8]) -> u32 {
    crc32c::crc32c(data).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// Encodes `Event { 1: wall_time, 2: step, ..what }`.
fn event(step: u64, what: &[u8]) -> Vec<u8> {
    [&double(1, now().as_secs_f64())[..], &varint(2, step), what].concat()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::protobuf;

    /// Checks both checksums of each record and returns its event.
    fn records(file: &[u8]) -> Vec<Vec<u8>> {
        let mut found = Vec::new();
        let mut rest = file;
        while !rest.is_empty() {
            let u32_at = |at: usize| u32::from_le_bytes(rest[at..at + 4].try_into().unwrap());
            let length = u64::from_le_bytes(rest[..8].try_into().unwrap()) as usize;
            assert_eq!(u32_at(8), masked_crc(&rest[..8]));
            assert_eq!(u32_at(12 + length), masked_crc(&rest[12..12 + length]));
            found.push(rest[12..12 + length].to_vec());
            rest = &rest[16 + length..];
        }
        found
    }

    fn fields(message: &[u8]) -> Vec<(u32, Vec<u8>)> {
        protobuf::fields(message).unwrap()
    }

    fn only_file(folder: &Path) -> Vec<u8> {
        let mut entries = fs::read_dir(folder).unwrap();
        let path = entries.next().unwrap().unwrap().path();
        assert!(entries.next().is_none());
        assert!(path.file_name().unwrap().to_str().unwrap().starts_with("events.out.tfevents."));
        fs::read(path).unwrap()
    }

    #[test]
    fn checksum_is_the_masked_castagnoli_one() {
        // The check value of CRC-32C is 0xe3069283 for "123456789".
        assert_eq!(masked_crc(b"123456789"), 0xe306_9283_u32.rotate_right(15).wrapping_add(0xa282_ead8));
    }

    #[test]
    fn scalars_read_back_with_step_tag_and_value() {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = EventWriter::create(folder.path(), None).unwrap();
        writer.plot(300, vec![("train/loss".to_owned(), 1.5), ("train/lr".to_owned(), 2e-4)], false).unwrap();
        writer.flush().unwrap();
        let records = records(&only_file(folder.path()));
        assert_eq!(records.len(), 2);
        assert_eq!(fields(&records[0])[2], (3, FILE_VERSION.into()));
        let event = fields(&records[1]);
        assert_eq!(event[1], (2, 300_u64.to_le_bytes().to_vec()));
        let values = fields(&event[2].1);
        assert_eq!((event[2].0, values.len()), (5, 2));
        let expected = [(1, b"train/lr".to_vec()), (2, 2e-4_f32.to_le_bytes().to_vec())];
        assert_eq!(fields(&values[1].1), expected);
    }

    #[test]
    fn a_resumed_run_starts_a_session() {
        let folder = tempfile::tempdir().unwrap();
        EventWriter::create(folder.path(), None).unwrap();
        let second = EventWriter::create(folder.path(), Some(41)).unwrap();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
        let records = records(&fs::read(&second.file.path).unwrap());
        let start = fields(&records[1]);
        assert_eq!(start[1], (2, 42_u64.to_le_bytes().to_vec()));
        assert_eq!((start[2].0, fields(&start[2].1)), (7, vec![(1, 1_u64.to_le_bytes().to_vec())]));
    }
}
