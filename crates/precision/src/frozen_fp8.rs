//! A frozen quantized weight as E4M3 with a scale per row, straight from its codes. Only `benches/rates.rs` calls it: runs with
//! `compute = "fp8"` convert weights on the device, with other scales (`kernels/src/linear/fp8_reference.rs`: the largest value of a row
//! becomes 224 in activations and 14 in weights, where it becomes 448 here).
//!
//! The forward GEMM `y = x Wᵀ` sums over inputs and reads the weight as `[outputs, inputs]`; the gradient `dx = dy W` sums
//! over outputs and reads it as `[inputs, outputs]`. fp8 GEMMs on sm89 and sm90 take both operands with the summed axis
//! contiguous, and a scale per row of that order, so there are two copies with scales of their own, both from the
//! stored codes.
//!
//! Bit for bit, and what a device has to do: value = `level * block scale` in f32; amax of the row; `scale = amax / 448`
//! and `factor = 448 / amax` with amax at least [`AMAX_FLOOR`](crate::AMAX_FLOOR); code = E4M3 of `value * factor`, nearest even,
//! saturating. With double quantization the block scale is `level * nested scale`, rounded, `+ offset`, rounded. Each
//! step is one f32 operation; none is fused.
//!
//! The error of E4M3 comes on top of that of the stored format: at most 1/16 of each value.
//!
//! Not supported: the scales of runs.
//! Trade-off: values are decoded twice, once for the amax and once for the codes, instead of being kept in f32.

use crate::amax::larger;
use crate::element::ElementFormat;
use crate::error::{Error, Result};
use crate::float::Fields;
use crate::packing::Decoder;
use crate::quantized::QuantizedTensor;
use crate::rounding::{self, Overflow};
use crate::scaled::ScaledTensor;
use crate::scaling::{Scales, Scaling, f32_scale};
use crate::workers;

/// Which axis of a weight `[outputs, inputs]` a GEMM sums over, and so is contiguous.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WeightOrder {
    /// `[outputs, inputs]`, as stored: the forward GEMM.
    SumOverInputs,
    /// `[inputs, outputs]`, transposed: the GEMM of the input's gradient.
    SumOverOutputs,
}

/// Columns that a worker transposes at a time, and rows: a tile stays in the first-level cache.
const TILE_COLUMNS: usize = 256;
const TILE_ROWS: usize = 16;

impl QuantizedTensor {
    /// The weight in E4M3 with one f32 scale per row of the given order. Equal to dequantizing, transposing and
    /// [`Scaling::PER_ROW`]`.quantize`, without the f32 copy.
    ///
    /// # Errors
    /// [`Error::NotAMatrix`].
    ///
    /// # Panics
    /// If the fields do not belong together, that is, were taken from different tensors.
    pub fn to_e4m3(&self, order: WeightOrder) -> Result<ScaledTensor> {
        let &[outputs, inputs] = self.shape.as_slice() else {
            return Err(Error::NotAMatrix { shape: self.shape.clone() });
        };
        let decoder = self.format.decoder(inputs);
        let weight = Frozen { decoder, codes: &self.codes, scales: &self.scales.block.values(), inputs };
        let count = outputs * inputs;
        assert_eq!(self.codes.len(), count.div_ceil(decoder.packing.codes_per_byte()), "the codes of all values");
        assert_eq!(weight.scales.len(), count.div_ceil(decoder.block_size), "one scale per block");
        let (rows, columns, codes, scales) = match order {
            WeightOrder::SumOverInputs => {
                let (codes, scales) = weight.by_rows(outputs);
                (outputs, inputs, codes, scales)
            }
            WeightOrder::SumOverOutputs => {
                let (codes, scales) = weight.by_columns(outputs);
                (inputs, outputs, codes, scales)
            }
        };
        let (element, scaling, scales) = (ElementFormat::E4m3, Scaling::PER_ROW, Scales::F32(scales));
        Ok(ScaledTensor { element, scaling, rows, columns, codes, scales })
    }
}

/// A quantized weight with its block scales as numbers.
#[derive(Clone, Copy)]
struct Frozen<'a> {
    decoder: Decoder,
    codes: &'a [u8],
    scales: &'a [f32],
    inputs: usize,
}

impl Frozen<'_> {
    /// Values of a row from a column on.
    fn decode(self, row: usize, column: usize, values: &mut [f32]) {
        self.decoder.range(self.codes, self.scales, row * self.inputs + column, values);
    }

    fn by_rows(self, outputs: usize) -> (Vec<u8>, Vec<f32>) {
        let (mut codes, mut scales) = (vec![0; outputs * self.inputs], vec![0.0; outputs]);
        let span = workers::blocks_per_worker(outputs, self.inputs);
        let spans = codes.chunks_mut(span * self.inputs).zip(scales.chunks_mut(span)).enumerate();
        workers::run(spans.map(|(worker, (codes, scales))| {
            move || {
                let mut values = vec![0.0; self.inputs];
                let rows = codes.chunks_mut(self.inputs).zip(scales);
                for (row, (codes, scale)) in (worker * span..).zip(rows) {
                    self.decode(row, 0, &mut values);
                    let factor;
                    (*scale, factor) = row_scale(larger(0.0, &values));
                    for (value, code) in values.iter().zip(codes) {
                        *code = e4m3(value * factor);
                    }
                }
            }
        }));
        (codes, scales)
    }

    fn by_columns(self, outputs: usize) -> (Vec<u8>, Vec<f32>) {
        let (scales, factors): (Vec<f32>, Vec<f32>) = self.column_amax(outputs).into_iter().map(row_scale).unzip();
        let mut codes = vec![0; outputs * self.inputs];
        let span = workers::blocks_per_worker(self.inputs, outputs).next_multiple_of(TILE_COLUMNS);
        let spans = codes.chunks_mut(span * outputs).zip(factors.chunks(span)).enumerate();
        workers::run(spans.map(|(worker, (codes, factors))| {
            move || {
                let tiles = codes.chunks_mut(TILE_COLUMNS * outputs).zip(factors.chunks(TILE_COLUMNS)).enumerate();
                for (tile, (codes, factors)) in tiles {
                    self.transpose(worker * span + tile * TILE_COLUMNS, factors, codes, outputs);
                }
            }
        }));
        (codes, scales)
    }

    /// The codes of the columns from `first` on, one for each factor; `codes` has `outputs` of each column.
    fn transpose(self, first: usize, factors: &[f32], codes: &mut [u8], outputs: usize) {
        let mut values = [[0.0; TILE_COLUMNS]; TILE_ROWS];
        for row in (0..outputs).step_by(TILE_ROWS) {
            let rows = TILE_ROWS.min(outputs - row);
            for (within, values) in values[..rows].iter_mut().enumerate() {
                self.decode(row + within, first, &mut values[..factors.len()]);
            }
            for (column, (codes, factor)) in codes.chunks_mut(outputs).zip(factors).enumerate() {
                for (code, values) in codes[row..row + rows].iter_mut().zip(&values) {
                    *code = e4m3(values[column] * factor);
                }
            }
        }
    }

    /// The largest magnitude of each column.
    fn column_amax(self, outputs: usize) -> Vec<f32> {
        let span = workers::blocks_per_worker(outputs, self.inputs);
        let partial = workers::run((0..outputs).step_by(span).map(|first| {
            move || {
                let (mut amax, mut values) = (vec![0.0; self.inputs], vec![0.0; self.inputs]);
                for row in first..outputs.min(first + span) {
                    self.decode(row, 0, &mut values);
                    keep_larger(&mut amax, &values);
                }
                amax
            }
        }));
        partial
            .into_iter()
            .reduce(|mut all, part| {
                keep_larger(&mut all, &part);
                all
            })
            .expect("at least one row")
    }
}

fn keep_larger(amax: &mut [f32], values: &[f32]) {
    amax.iter_mut().zip(values).for_each(|(amax, value)| *amax = larger(*amax, &[*value]));
}

fn row_scale(amax: f32) -> (f32, f32) {
    f32_scale(amax, ElementFormat::E4m3.format().max())
}

#[inline(always)]
fn e4m3(scaled: f32) -> u8 {
    rounding::encode(Fields::E4M3, scaled, Overflow::Saturate) as u8
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_values::Draws;
    use crate::{QuantFormat, Rounding};

    fn weight(format: QuantFormat, [outputs, inputs]: [usize; 2]) -> QuantizedTensor {
        let values = Draws((outputs * inputs) as u64).vector(outputs * inputs, 0.02);
        format.quantize(&values, &[outputs, inputs]).unwrap()
    }

    #[test]
    fn both_orders_equal_quantizing_the_dequantized_weight() {
        for format in QuantFormat::ALL {
            let shapes = [[1, 1], [3, 5], [17, 64], [40, 300], [130, 129], [40, 288], [520, 768]];
            for [outputs, inputs] in shapes.into_iter().filter(|[_, inputs]| format.check_columns(*inputs).is_ok()) {
                let weight = weight(format, [outputs, inputs]);
                let values = weight.dequantize();
                let quantize = |values: &[f32], shape| {
                    Scaling::PER_ROW.quantize(ElementFormat::E4m3, values, shape, Rounding::Nearest).unwrap()
                };
                let forward = weight.to_e4m3(WeightOrder::SumOverInputs).unwrap();
                assert_eq!(forward, quantize(&values, [outputs, inputs]), "{format} {outputs} x {inputs}");
                let transposed: Vec<f32> =
                    (0..values.len()).map(|index| values[index % outputs * inputs + index / outputs]).collect();
                let backward = weight.to_e4m3(WeightOrder::SumOverOutputs).unwrap();
                assert_eq!(backward, quantize(&transposed, [inputs, outputs]), "{format} {outputs} x {inputs}");
            }
        }
    }

    #[test]
    fn a_value_moves_by_at_most_a_sixteenth() {
        let weight = weight(QuantFormat::Nf4 { double_quant: true }, [64, 256]);
        let fp8 = weight.to_e4m3(WeightOrder::SumOverInputs).unwrap();
        let amax = fp8.scales.values();
        for (index, (value, back)) in weight.dequantize().iter().zip(fp8.dequantize()).enumerate() {
            let bound = (value.abs() / 16.0).max(amax[index / 256] / 1024.0) * 1.000_001;
            assert!((value - back).abs() <= bound, "{value} became {back}");
        }
    }

    #[test]
    fn what_is_not_a_matrix_is_refused() {
        let norm = QuantFormat::ALL[0].quantize(&[1.0; 64], &[64]).unwrap();
        let error = norm.to_e4m3(WeightOrder::SumOverInputs).unwrap_err();
        assert_eq!(error, Error::NotAMatrix { shape: vec![64] });
    }
}
