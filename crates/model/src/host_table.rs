//! The table of layers' own inputs, on the host: gigabytes of which a pass needs a few rows.
//!
//! Rows are read from the file of the checkpoint when a pass needs them, which in steady state is memory of the system's page cache. So nothing is
//! copied, and what the machine has no memory for is read again. Tokens beyond the stored rows were added, and have the mean of these.

use std::sync::Arc;

use burn_tensor::DType;
use firebrick_arch::PER_LAYER_EMBEDDING;
use firebrick_precision::FloatType;

use crate::checkpoint::{Fetched, Shard, stored_as};
use crate::error::ModelError;

#[derive(Debug)]
pub(crate) enum TableSource {
    File(Arc<Shard>),
    /// Random numbers, which repeat.
    Repeated(Vec<f32>),
}

/// The table `[rows, width]`.
#[derive(Debug)]
pub(crate) struct HostTable {
    source: TableSource,
    /// Rows of the source, which has no more.
    pub(crate) stored_rows: usize,
    width: usize,
    /// The other rows.
    pub(crate) mean: Vec<f32>,
}

impl HostTable {
    /// Takes a table of this many rows; a file knows its own.
    pub(crate) fn new(source: TableSource, rows: usize, width: usize) -> Self {
        let stored_rows = match &source {
            TableSource::File(shard) => shard.known(PER_LAYER_EMBEDDING).shape[0],
            TableSource::Repeated(_) => rows,
        };
        Self { source, stored_rows, width, mean: vec![0.0; width] }
    }

    pub(crate) fn is_stored(&self) -> bool {
        matches!(self.source, TableSource::File(_))
    }

    /// Reads the row of a token.
    pub(crate) fn row(&self, id: usize) -> Result<Vec<f32>, ModelError> {
        if id >= self.stored_rows {
            return Ok(self.mean.clone());
        }
        let first = id * self.width;
        match &self.source {
            TableSource::Repeated(values) => {
                Ok((first..first + self.width).map(|at| values[at % values.len()]).collect())
            }
            TableSource::File(shard) => {
                let mut row = vec![0.0; self.width];
                shard.read_elements(PER_LAYER_EMBEDDING, first, DType::F32, bytemuck::cast_slice_mut(&mut row))?;
                Ok(row)
            }
        }
    }

    /// Reads the whole table with this many rows, for a file of this format: as it is stored, if it is so there.
    pub(crate) fn fetched(&self, rows: usize, dtype: FloatType) -> Result<Fetched, ModelError> {
        match &self.source {
            TableSource::File(shard)
                if rows == self.stored_rows && shard.known(PER_LAYER_EMBEDDING).dtype == stored_as(dtype) =>
            {
                Ok(Fetched::Bytes(shard.read(PER_LAYER_EMBEDDING)?.bytes))
            }
            _ => {
                let mut values = Vec::with_capacity(rows * self.width);
                for id in 0..rows {
                    values.extend(self.row(id)?);
                }
                Ok(Fetched::Values(values))
            }
        }
    }
}

/// The mean of rows that come in pieces of any length, summed in f64 by one thread.
pub(crate) struct RowMean {
    sums: Vec<f64>,
    elements: usize,
}

impl RowMean {
    pub(crate) fn new(width: usize) -> Self {
        Self { sums: vec![0.0; width], elements: 0 }
    }

    pub(crate) fn add(&mut self, values: impl Iterator<Item = f32>) {
        for value in values {
            let column = self.elements % self.sums.len();
            self.sums[column] += f64::from(value);
            self.elements += 1;
        }
    }

    pub(crate) fn finish(self) -> Vec<f32> {
        let rows = (self.elements / self.sums.len()) as f64;
        self.sums.into_iter().map(|sum| (sum / rows) as f32).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use tempfile::tempdir;

    use super::*;
    use crate::checkpoint::{HfFolder, TensorF32, WEIGHTS_FILE, write_safetensors_f32};

    #[test]
    fn rows_are_those_of_the_file_and_added_ones_their_mean() {
        let temp = tempdir().unwrap();
        let values: Vec<f32> = (0..12).map(|at| at as f32 / 4.0).collect();
        let table = TensorF32 { shape: vec![3, 4], values: values.clone() };
        let tensors = BTreeMap::from([(PER_LAYER_EMBEDDING.to_owned(), table)]);
        write_safetensors_f32(&temp.path().join(WEIGHTS_FILE), &tensors).unwrap();
        let source = TableSource::File(HfFolder::open(temp.path()).unwrap().shard_of(PER_LAYER_EMBEDDING).unwrap());
        let mut table = HostTable::new(source, 5, 4);
        let mut mean = RowMean::new(4);
        values.chunks(5).for_each(|piece| mean.add(piece.iter().copied()));
        table.mean = mean.finish();
        let rows: Vec<f32> = (0..4).flat_map(|id| table.row(id).unwrap()).collect();
        assert_eq!((&rows[..12], &rows[12..]), (&values[..], &[1.0, 1.25, 1.5, 1.75][..]));
        let Fetched::Values(grown) = table.fetched(4, FloatType::F32).unwrap() else { panic!("it is not stored so") };
        assert_eq!(grown, rows);
        assert!(matches!(table.fetched(3, FloatType::F32).unwrap(), Fetched::Bytes(bytes) if bytes.len() == 48));
    }
}
