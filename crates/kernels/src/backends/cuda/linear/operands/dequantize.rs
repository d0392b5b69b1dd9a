//! Dequantizes frozen weights, optionally with LoRA matrices next to them for one GEMM. Kernels: `write_out.cu`.
//! Trade-off: dequantizing materializes in f32, so odd widths are written value by value.

use burn_tensor::DType;
use bytemuck::{Pod, Zeroable};
use firebrick_cuda::{Arguments, LaunchShape};

use super::quantize::kernels_of;
use crate::backends::cuda::device::Device;
use crate::backends::cuda::engine::{BlockArguments, Cuda, DeviceBlock, MatrixView, Source, arguments, grid_of};
use crate::{Adapter, BlockScales, QuantizedWeight, Weight};

/// The surroundings of one weight in its group's matrix; none by default.
#[derive(Default)]
pub(crate) struct Around<'a> {
    /// The adapter.
    pub adapter: Option<&'a Adapter<Cuda>>,
    /// Its first adapter column in the group.
    pub first: usize,
    /// Adapter columns of the group.
    pub ranks: usize,
    /// Rows for its A, with zeros in the remaining ones.
    pub a: Option<DeviceBlock>,
    /// The matrices of the weight, if it is a stack; `out` and `a` then are those of the first one.
    pub stack: Stack,
}

/// Location of a stored weight, as the kernels read it. Parts that a format lacks are null.
#[repr(C)]
#[derive(Clone, Copy, Default, Pod, Zeroable)]
pub(crate) struct StoredArgument {
    codes: u64,
    scales: u64,
    scale_codes: u64,
    map: u64,
    nested: u64,
    offset: u64,
}

/// The matrices of a stack; one by default.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stack {
    /// Number of matrices below each other in the weight.
    pub count: usize,
    /// Values from the start of one to the start of the next, as they are written.
    pub stride: usize,
}

impl Default for Stack {
    fn default() -> Self {
        Self { count: 1, stride: 0 }
    }
}

impl StoredArgument {
    pub(crate) fn dense(address: u64) -> Self {
        Self { codes: address, ..Self::default() }
    }
}

impl Device {
    /// Appends the argument that locates a stored weight. Returns its bytes; owners to hold until the launch are added to `held`.
    pub(super) fn weight_argument(
        &self,
        weight: &Weight<Cuda>,
        arguments: Arguments,
        held: &mut Vec<MatrixView>,
    ) -> (Arguments, usize) {
        match weight {
            Weight::Quantized(weight) => {
                let stored = self.stored_argument(weight, held);
                (arguments! { arguments => stored: value(&stored) }, weight.bytes())
            }
            Weight::Dense(values) => {
                let values = self.flat(values.clone());
                let (address, bytes) = (values.address, values.bytes());
                held.push(values);
                (arguments! { arguments => w: address(address) }, bytes)
            }
        }
    }

    pub(crate) fn stored_argument(&self, weight: &QuantizedWeight<Cuda>, held: &mut Vec<MatrixView>) -> StoredArgument {
        let mut address = |view: MatrixView| {
            held.push(view);
            held.last().map_or(0, |view| view.address)
        };
        let codes = address(self.int_matrix(weight.codes.clone()));
        let without = StoredArgument { codes, ..StoredArgument::default() };
        match &weight.scales {
            BlockScales::Float(scales) => StoredArgument { scales: address(self.flat(scales.clone())), ..without },
            BlockScales::Narrow { codes, map } => StoredArgument {
                scale_codes: address(self.int_matrix(codes.clone())),
                map: address(self.flat(map.clone())),
                ..without
            },
            BlockScales::Nested { codes, absmax, map, offset, .. } => StoredArgument {
                scale_codes: address(self.int_matrix(codes.clone())),
                map: address(self.flat(map.clone())),
                nested: address(self.flat(absmax.clone())),
                offset: address(self.flat(offset.clone())),
                ..without
            },
        }
    }

    /// Writes the values of a weight to the first columns of `out`, and its surroundings next to and below them.
    pub(crate) fn write_out(&self, weight: &Weight<Cuda>, out: DeviceBlock, around: &Around<'_>) {
        let ([all_rows, inputs], Stack { count, stride }) = (weight.shape(), around.stack);
        let rows = all_rows / count;
        assert_eq!(
            (out.rows, out.width, count * rows),
            (rows, inputs + around.ranks, all_rows),
            "room for a weight and its adapter"
        );
        let mut held = Vec::new();
        let (from, bytes) = self.weight_argument(weight, arguments! { out: rows(&out) }, &mut held);
        let pair = around.adapter.map(|adapter| [self.flat(adapter.a.clone()), self.flat(adapter.b.clone())]);
        let [a, b] = pair.as_ref().map_or([0; 2], |pair| [pair[0].address, pair[1].address]);
        let rank = pair.as_ref().map_or(0, |pair| pair[0].rows / count);
        let (a_out, a_rows) = around.a.map_or((0, 0), |block| (block.address, block.rows));
        let wide = inputs.is_multiple_of(8)
            && out.stride.is_multiple_of(8)
            && stride.is_multiple_of(8)
            && [out.address, a_out, a].iter().all(|address| address.is_multiple_of(16));
        let shape = write_out_shape(rows + a_rows, if wide { inputs.div_ceil(8) } else { inputs }, count);
        let bytes = count * out.bytes() + bytes;
        let [write_out, ..] = kernels_of(weight);
        let launch = Source::WriteOut.launch(out.dtype, write_out, shape, bytes);
        let arguments = arguments! {
            from =>
            a_out: address(a_out), a: address(a), b: address(b),
            scale: float(around.adapter.map_or(0.0, |adapter| adapter.scale)), o: int(rows), i: int(inputs),
            rank: int(rank), first: int(around.first), ranks: int(around.ranks), a_rows: int(a_rows),
            stride: long(out.stride), matrix: long(stride),
        };
        // SAFETY: for each matrix of the stack out holds [rows, inputs + ranks] and a_out [a_rows, inputs] at the strides given; what it is written from is a weight
        // of this shape; A is [rank, inputs] and B [rows, rank], f32 and dense, or null with rank 0.
        unsafe { self.launch(launch, &arguments) };
    }

    /// Returns the values of a weight, f32.
    pub(super) fn dequantize(&self, weight: &QuantizedWeight<Cuda>) -> MatrixView {
        let [rows, inputs] = weight.shape;
        let out = self.empty_matrix(rows, inputs, DType::F32);
        self.write_out(&Weight::Quantized(weight.clone()), out.block, &Around::default());
        out
    }
}

/// Returns blocks of whole warps over `pieces` of a row, four rows per block, for each matrix.
fn write_out_shape(rows: usize, pieces: usize, matrices: usize) -> LaunchShape {
    let threads = pieces.next_multiple_of(32).min(256);
    grid_of([pieces.div_ceil(threads), rows.div_ceil(4).clamp(1, 65_535), matrices], threads as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_whole_warps_that_cover_a_row() {
        let shape = |rows, pieces| (write_out_shape(rows, pieces, 1).grid, write_out_shape(rows, pieces, 1).block[0]);
        assert_eq!(shape(4096, 512), ([2, 1024, 1], 256));
        assert_eq!(shape(1, 72), ([1, 1, 1], 96));
        assert_eq!(shape(1 << 20, 33), ([1, 65_535, 1], 64));
    }
}
