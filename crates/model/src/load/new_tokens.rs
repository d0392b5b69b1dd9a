//! Rows of embedding and head for added tokens, as transformers' `resize_token_embeddings` starts them: normal around the mean of the
//! table's rows, with their covariance times 1e-9.
//!
//! Such a vector is the mean plus a weighted sum of the centered rows, with normally distributed weights, so no covariance is computed. Rows that the
//! folder already has for a new token, because its tables are larger than its tokenizer, also start so: they were never trained.
//! Trade-off: the whole grown table is in host memory, and one thread sums its rows, so that the sums are the same on every machine.

use burn_tensor::DType;
use firebrick_arch::ModelConfig;
use firebrick_kernels::HostBuffer;

use super::synthetic::{normal, stream};
use crate::checkpoint::Values;
use crate::checkpoint::read::convert::{element, write};
use crate::error::ModelError;

/// Scale of the covariance in transformers.
const COVARIANCE_SCALE: f64 = 1e-9;

/// Builds the table `[vocab, hidden]` of this name from the folder's `[stored vocab, hidden]`. Rows that belong to no new token are zero.
pub(super) fn with_new_rows<'a>(
    values: Values<'a>,
    name: &str,
    config: &ModelConfig,
    seed: u64,
    allocate: &dyn Fn(usize) -> HostBuffer,
) -> Result<Values<'a>, ModelError> {
    let (rows, width, dtype) = (config.spec.vocab_size, config.spec.hidden_size, values.dtype);
    if rows == config.stored_vocab_size && config.new_tokens.is_empty() {
        return Ok(values);
    }
    let row_bytes = width * dtype.size();
    let mut buffer = allocate(rows * row_bytes);
    let stored = values.read_into(&mut buffer)?;
    buffer[stored..].fill(0);
    if !config.new_tokens.is_empty() {
        let table = Table { bytes: &buffer[..stored], dtype, width };
        let started = table.start_rows(config.new_tokens.len(), seed, name);
        for (&id, row) in config.new_tokens.iter().zip(started.chunks(width)) {
            let out = &mut buffer[id * row_bytes..][..row_bytes];
            write(row.iter().map(|&value| value as f32), dtype, out);
        }
    }
    Ok(Values::here(buffer, dtype))
}

struct Table<'a> {
    bytes: &'a [u8],
    dtype: DType,
    width: usize,
}

impl Table<'_> {
    /// Computes the start values of `count` rows, one after the other, in f64.
    fn start_rows(&self, count: usize, seed: u64, name: &str) -> Vec<f64> {
        let row_bytes = self.width * self.dtype.size();
        let rows = self.bytes.len() / row_bytes;
        let mut random = stream(seed, &format!("{name} of new tokens"));
        let (mut mean, mut sums) = (vec![0.0; self.width], vec![0.0; count * self.width]);
        let mut totals = vec![0.0; count];
        for bytes in self.bytes.chunks(row_bytes) {
            let row: Vec<f64> = (0..self.width).map(|at| f64::from(element(bytes, self.dtype, at))).collect();
            let weights = normal(count, 1.0, &mut random);
            mean.iter_mut().zip(&row).for_each(|(sum, value)| *sum += value);
            for ((weight, sums), total) in weights.iter().zip(sums.chunks_mut(self.width)).zip(&mut totals) {
                let weight = f64::from(*weight);
                *total += weight;
                sums.iter_mut().zip(&row).for_each(|(sum, value)| *sum += weight * value);
            }
        }
        mean.iter_mut().for_each(|sum| *sum /= rows as f64);
        let scale = (COVARIANCE_SCALE / rows as f64).sqrt();
        for (sums, total) in sums.chunks_mut(self.width).zip(totals) {
            sums.iter_mut().zip(&mean).for_each(|(sum, mean)| *sum = mean + scale * (*sum - total * mean));
        }
        sums
    }
}

#[cfg(test)]
mod tests {
    use firebrick_kernels::MemoryOps;
    use firebrick_kernels::backends::Flex;

    use super::*;
    use crate::test_config::tiny;

    /// Returns the tiny model's table of 11 rows, in this format, with rows of these new tokens.
    fn table(new_tokens: &[usize], dtype: DType) -> Vec<f64> {
        let mut config = tiny(&[]).unwrap();
        config.add_tokens(new_tokens);
        let mut bytes = vec![0; 11 * config.spec.hidden_size * dtype.size()];
        let elements = bytes.len() / dtype.size();
        write((0..elements).map(|at| (0.9 * at as f32).sin()), dtype, &mut bytes);
        let device = Default::default();
        let mut buffer = Flex::host_buffer(&device, bytes.len());
        buffer.copy_from_slice(&bytes);
        let allocate = |bytes| Flex::host_buffer(&device, bytes);
        let values = with_new_rows(Values::here(buffer, dtype), "t", &config, 3, &allocate).unwrap();
        let grown = values.into_buffer(&allocate).unwrap();
        let elements = config.spec.vocab_size * config.spec.hidden_size;
        assert_eq!(grown.len(), elements * dtype.size());
        (0..elements).map(|at| f64::from(element(&grown, dtype, at))).collect()
    }

    #[test]
    fn new_rows_lie_around_the_mean() {
        for (dtype, tolerance) in [(DType::F32, 1e-4), (DType::BF16, 1e-2), (DType::F16, 1e-2)] {
            let (old, grown) = (table(&[], dtype), table(&[11, 12], dtype));
            let width = old.len() / 11;
            assert_eq!(grown[..old.len()], old);
            for column in 0..width {
                let mean = (0..11).map(|row| old[row * width + column]).sum::<f64>() / 11.0;
                for row in [11, 12] {
                    let value = grown[row * width + column];
                    assert!((value - mean).abs() < tolerance, "{dtype:?}: {value} and {mean}");
                }
            }
            assert_eq!(grown, table(&[11, 12], dtype), "the same seed gives the same rows");
            let taken = table(&[9, 10], dtype);
            assert_eq!((taken.len(), &taken[..9 * width]), (old.len(), &old[..9 * width]));
        }
        let rows = table(&[11, 12], DType::F32);
        let width = rows.len() / 13;
        assert_ne!(rows[11 * width..12 * width], rows[12 * width..]);
    }

    #[test]
    fn new_rows_spread_as_the_table_does() {
        let (rows, width, count) = (400, 3, 64);
        let values = normal(rows * width, 1.0, &mut stream(1, "table"));
        let bytes: Vec<u8> =
            values.iter().enumerate().flat_map(|(at, value)| (value * (1 + at % width) as f32).to_le_bytes()).collect();
        let table = Table { bytes: &bytes, dtype: DType::F32, width };
        let started = table.start_rows(count, 0, "t");
        for column in 0..width {
            let of = |row: usize| started[row * width + column];
            let mean = (0..count).map(of).sum::<f64>() / count as f64;
            let deviation = ((0..count).map(|row| (of(row) - mean).powi(2)).sum::<f64>() / count as f64).sqrt();
            let expected = (column + 1) as f64 * COVARIANCE_SCALE.sqrt();
            assert!((deviation / expected - 1.0).abs() < 0.3, "column {column}: {deviation:e}, expected {expected:e}");
        }
    }
}
