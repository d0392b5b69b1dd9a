//! A file that grows by whole records. A record that a full disk cut off is removed, so later records follow whole ones.

use std::fs::File;
use std::io::Write;
use std::path::PathBuf;

use crate::storage::StorageError;

/// An open file, positioned at its end.
#[derive(Debug)]
pub(super) struct AppendedFile {
    file: File,
    pub(super) path: PathBuf,
    /// Bytes of the whole records.
    pub(super) length: u64,
}

impl AppendedFile {
    /// Wraps a file that was just opened for appending or created.
    pub(super) fn new(file: File, path: PathBuf) -> Self {
        let length = file.metadata().map_or(0, |metadata| metadata.len());
        Self { file, path, length }
    }

    /// Appends one record, in one write, so that a kill tears at most the last one.
    pub(super) fn append(&mut self, record: &[u8]) -> Result<(), StorageError> {
        if let Err(source) = self.file.write_all(record) {
            // If this fails too, the torn record stays; the error below is the one to report.
            let _ = self.file.set_len(self.length);
            return Err(StorageError::writing(&self.path, record.len() as u64, source));
        }
        self.length += record.len() as u64;
        Ok(())
    }

    /// Waits until all records are on the disk.
    pub(super) fn flush(&mut self) -> Result<(), StorageError> {
        self.file.sync_data().map_err(|source| StorageError::writing(&self.path, 0, source))
    }
}
