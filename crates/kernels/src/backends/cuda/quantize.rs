//! Launches over frozen weights: quantize to NF4, dequantize, and write out for a GEMM with the adapter around. Kernels:
//! `source/nf4.cu`.
//! Not supported: quantized formats other than NF4.

use burn_tensor::{DType, Tensor};
use firebrick_cuda::{Arguments, LaunchShape};
use firebrick_precision::{QuantFormat, blockwise, nf4};

use super::engine::Engine;
use super::launch::{Launch, at, grid};
use super::matrix::{Cuda, DeviceBlock, MatrixView, Primitive, int_tensor, tensor};
use super::program::Source;
use super::scratch::ScratchSlot;
use crate::{Adapter, BlockScales, QuantizedWeight, Scales, Weight};

/// What lies around the values of one weight of a group; nothing by default.
#[derive(Default)]
pub(super) struct Around<'a> {
    /// The adapter.
    pub adapter: Option<&'a Adapter<Cuda>>,
    /// Its first column among those of the group.
    pub first: usize,
    /// Columns of the group.
    pub ranks: usize,
    /// Rows that its A goes to, and zeros to those that are left.
    pub a: Option<DeviceBlock>,
}

/// A launch that does not depend on the format of activations.
fn plain(name: &'static str, shape: LaunchShape, bytes: usize) -> Launch {
    Launch { source: Source::Nf4, dtype: DType::F32, name, shape, bytes }
}

impl Engine {
    /// The arguments that say what a weight is: codes, then scales. Returns what must be held until the launch.
    pub(super) fn weight_arguments(
        &self,
        weight: &QuantizedWeight<Cuda>,
        arguments: Arguments,
        held: &mut Vec<MatrixView>,
    ) -> Arguments {
        let QuantFormat::Nf4 { .. } = weight.format;
        let mut address = |view: MatrixView| {
            held.push(view);
            held.last().map_or(0, |view| view.address)
        };
        let codes = address(self.int_matrix(weight.codes.clone()));
        let scales = match &weight.scales.block {
            BlockScales::Float(absmax) => [address(self.flat(absmax.clone())), 0, 0, 0, 0],
            BlockScales::Nested { codes, absmax, map, offset, .. } => [
                0,
                address(self.int_matrix(codes.clone())),
                address(self.flat(absmax.clone())),
                address(self.flat(map.clone())),
                address(self.flat(offset.clone())),
            ],
        };
        scales.into_iter().fold(arguments.pointer(at(codes)), |arguments, scale| arguments.pointer(at(scale)))
    }

    /// Writes the values of a weight to the first columns of `out`, and what lies next to and below them.
    pub(super) fn write_out(&self, weight: &Weight<Cuda>, out: DeviceBlock, around: &Around<'_>) {
        let [rows, inputs] = weight.shape();
        assert_eq!((out.rows, out.width), (rows, inputs + around.ranks), "room for a weight and its adapter");
        let mut held = Vec::new();
        let to = Arguments::new().pointer(at(out.address));
        let (name, from, bytes) = match weight {
            Weight::Quantized(weight) => {
                ("nf4_write_out", self.weight_arguments(weight, to, &mut held), weight.bytes())
            }
            Weight::Dense(values) => {
                let values = self.flat(values.clone());
                let (address, bytes) = (values.address, values.bytes());
                let name = match values.dtype {
                    DType::BF16 => "dense_write_out_bf16",
                    DType::F16 => "dense_write_out_f16",
                    _ => "dense_write_out_f32",
                };
                held.push(values);
                (name, to.pointer(at(address)), bytes)
            }
        };
        let pair = around.adapter.map(|adapter| [self.flat(adapter.a.clone()), self.flat(adapter.b.clone())]);
        let [a, b] = pair.as_ref().map_or([0; 2], |pair| [pair[0].address, pair[1].address]);
        let rank = pair.as_ref().map_or(0, |pair| pair[0].rows);
        let (a_out, a_rows) = around.a.map_or((0, 0), |block| (block.address, block.rows));
        let wide = inputs.is_multiple_of(8)
            && out.stride.is_multiple_of(8)
            && [out.address, a_out, a].iter().all(|address| address.is_multiple_of(16));
        let launch = Launch {
            source: Source::Nf4,
            dtype: out.dtype,
            name,
            shape: write_out_shape(rows + a_rows, if wide { inputs.div_ceil(8) } else { inputs }),
            bytes: out.bytes() + bytes,
        };
        let arguments = from
            .pointer(at(a_out))
            .pointer(at(a))
            .pointer(at(b))
            .f32(around.adapter.map_or(0.0, |adapter| adapter.scale as f32))
            .i32(rows as i32)
            .i32(inputs as i32)
            .i32(rank as i32)
            .i32(around.first as i32)
            .i32(around.ranks as i32)
            .i32(a_rows as i32)
            .i64(out.stride as i64);
        // SAFETY: out holds [rows, inputs + ranks] and a_out [a_rows, inputs] at the stride given; what it is written from is a weight
        // of this shape; A is [rank, inputs] and B [rows, rank], f32 and dense, or null with rank 0.
        unsafe { self.launch(launch, &arguments) };
    }

    /// The values of a weight, f32.
    pub(super) fn dequantize(&self, weight: &QuantizedWeight<Cuda>) -> MatrixView {
        let [rows, inputs] = weight.shape;
        let out = self.empty_matrix(rows, inputs, DType::F32);
        let mut held = Vec::new();
        let arguments = self.weight_arguments(weight, Arguments::new().pointer(at(out.address)), &mut held);
        let bytes = out.bytes() + weight.bytes();
        let launch = plain("nf4_dequantize_f32", grid(out.count().div_ceil(4096), 256), bytes);
        // SAFETY: out holds all values of the weight in f32; codes and scales are those of the weight.
        unsafe { self.launch(launch, &arguments.i64(out.count() as i64)) };
        out
    }

    /// Quantizes a matrix; `map` is the signed dynamic map and `table` what dequantization looks codes up in.
    pub(super) fn quantize(
        &self,
        values: Tensor<Cuda, 2>,
        format: QuantFormat,
        map: Tensor<Cuda, 1>,
        table: Tensor<Cuda, 2>,
    ) -> QuantizedWeight<Cuda> {
        let QuantFormat::Nf4 { double_quant } = format;
        let shape = values.dims();
        let values = self.flat(values);
        let count = values.count();
        let blocks = count.div_ceil(nf4::BLOCK_SIZE);
        let codes = self.empty([blocks * nf4::BLOCK_SIZE / 2], DType::U8);
        let absmax = self.empty([blocks], DType::F32);
        let name = match values.dtype {
            DType::BF16 => "nf4_quantize_bf16",
            DType::F16 => "nf4_quantize_f16",
            _ => "nf4_quantize_f32",
        };
        let arguments = Arguments::new()
            .pointer(at(self.address(&codes)))
            .pointer(at(self.address(&absmax)))
            .pointer(at(values.address))
            .i64(count as i64);
        let bytes = values.bytes() + count / 2;
        // SAFETY: codes hold half a byte and absmax an f32 for every block of 64 of the values, which are dense.
        unsafe { self.launch(plain(name, grid(count.div_ceil(4096), 256), bytes), &arguments) };
        let block =
            if double_quant { self.nested_scales(&absmax, blocks, map) } else { BlockScales::Float(tensor(absmax)) };
        QuantizedWeight { format, codes: int_tensor(codes), scales: Scales { block }, table, shape }
    }

    /// Block scales in 8 bits around their mean.
    fn nested_scales(&self, absmax: &Primitive, blocks: usize, map: Tensor<Cuda, 1>) -> BlockScales<Cuda> {
        let nested = blocks.div_ceil(blockwise::BLOCK_SIZE);
        let codes = self.empty([nested * blockwise::BLOCK_SIZE], DType::U8);
        let nested_absmax = self.empty([nested], DType::F32);
        let offset = self.empty([1], DType::F32);
        let parts = blocks.div_ceil(4096).min(1024);
        let partial = at(self.scratch.take(ScratchSlot::Partial, 1024 * 8));
        let (from, mean) = (at(self.address(absmax)), at(self.address(&offset)));
        let sum = Arguments::new().pointer(partial).pointer(from).i64(blocks as i64);
        let divide = Arguments::new().pointer(mean).pointer(partial).i32(parts as i32).i64(blocks as i64);
        let map_view = self.flat(map.clone());
        let quantize = Arguments::new()
            .pointer(at(self.address(&codes)))
            .pointer(at(self.address(&nested_absmax)))
            .pointer(from)
            .pointer(mean)
            .pointer(at(map_view.address))
            .i64(blocks as i64);
        // SAFETY: the partial sums have room for 1024 f64; one code per block and one f32 per 256; the map has 256 values.
        unsafe {
            self.launch(plain("absmax_sum", grid(parts, 256), blocks * 4), &sum);
            self.launch(plain("absmax_mean", grid(1, 256), parts * 8), &divide);
            self.launch(plain("absmax_quantize", grid(nested, 256), blocks * 5), &quantize);
        }
        BlockScales::Nested {
            codes: int_tensor(codes),
            absmax: tensor(nested_absmax),
            map,
            offset: tensor(offset),
            blocks,
        }
    }
}

/// Blocks of whole warps over `pieces` of a row, four rows per block.
fn write_out_shape(rows: usize, pieces: usize) -> LaunchShape {
    let threads = pieces.next_multiple_of(32).min(256);
    LaunchShape {
        grid: [pieces.div_ceil(threads) as u32, rows.div_ceil(4).clamp(1, 65_535) as u32, 1],
        block: [threads as u32, 1, 1],
        shared_bytes: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_whole_warps_that_cover_a_row() {
        let shape = |rows, pieces| (write_out_shape(rows, pieces).grid, write_out_shape(rows, pieces).block[0]);
        assert_eq!(shape(4096, 512), ([2, 1024, 1], 256));
        assert_eq!(shape(1, 72), ([1, 1, 1], 96));
        assert_eq!(shape(1 << 20, 33), ([1, 65_535, 1], 64));
    }
}
