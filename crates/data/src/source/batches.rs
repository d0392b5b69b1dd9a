//! Files whose rows come in column batches, as single records: the common part of Parquet and Arrow.
//!
//! Trade-off: no reading after an error. [`Records`](super::Records) does not continue after an error in such a file.

use std::path::Path;
use std::sync::Arc;

use arrow_array::RecordBatch;

use super::column::BatchRows;
use super::error::SourceError;
use super::record::Record;

/// A file of column batches.
pub(super) trait Batches {
    /// The next batch of the requested columns; `row` is the index of its first row in the file, from 0.
    fn next_batch(&mut self, row: usize) -> Result<Option<RecordBatch>, SourceError>;

    /// Called after each row of the batch that is used.
    fn count_row(&mut self) {}
}

/// The records of a file of column batches.
pub(super) struct BatchRecords<B> {
    batches: B,
    path: Arc<Path>,
    rows: Option<BatchRows>,
    row: usize,
}

impl<B: Batches> BatchRecords<B> {
    pub(super) fn new(batches: B, path: &Path) -> Self {
        Self { batches, path: path.into(), rows: None, row: 0 }
    }

    fn record(&mut self) -> Result<Option<Record>, SourceError> {
        loop {
            if let Some(rows) = &mut self.rows {
                if let Some(record) = rows.next_record(&self.path, self.row + 1) {
                    self.row += 1;
                    self.batches.count_row();
                    return record.map(Some);
                }
                self.rows = None;
            }
            match self.batches.next_batch(self.row)? {
                Some(batch) => self.rows = Some(BatchRows::new(batch)),
                None => return Ok(None),
            }
        }
    }
}

impl<B: Batches> Iterator for BatchRecords<B> {
    type Item = Result<Record, SourceError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.record().transpose()
    }
}
