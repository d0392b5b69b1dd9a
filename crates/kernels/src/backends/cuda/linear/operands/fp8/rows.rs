//! Rows of activations and gradients in 8-bit floats, and the GEMMs that multiply them with codes of weights. Kernels: `fp8.cu`,
//! `gated_fp8.cu`, `norm_fp8.cu`.
//!
//! Results of norms and gated activations, and the gradients of gate and up, are quantized by the launch that computes
//! them, while a block has the row in registers; other rows take a separate pass. The codes are the same. Low-rank
//! values of adapters are known later, and are then written to their columns of the row under its existing scale.
//!
//! Only a Hopper card was available. The pass over the result, and codes under powers of two, are tested on it; the
//! order of block scales is compared with NVIDIA's description; the descriptors are tested against the library.
//! Trade-off: prepared codes are passed to the next GEMM through the engine, and there is one buffer for them: another quantization in
//! between drops them. On compute capability 8.9, results are rounded to the compute format twice, and read and written once more.

use burn_tensor::{DType, Tensor};
use bytemuck::NoUninit;
use cubecl::cuda::CudaDevice;
use firebrick_arch::Activation;
use firebrick_cuda::{LaunchShape, Scaling};

use super::codes::{Codes, PreparedRows, RowLayout, RowScaling};
use crate::NormWeight;
use crate::backends::cuda::device::Device;
use crate::backends::cuda::engine::{
    BlockArguments, Cuda, DeviceBlock, Gemm, GemmScales, MatrixView, ScratchSlot, Source, arguments, grid, grid_of,
    tensor, threads_for,
};
use crate::backends::cuda::linear::gated::gate_and_up;

const KEPT_VALUES: usize = 32;
const WIDEST_NORM: usize = 8192;
/// Widest row that a gated activation keeps in registers: 512 threads.
const WIDEST_GATED: usize = 512 * KEPT_VALUES;
/// Whether partial sums may have fewer bits: cuBLASLt's fast accumulation rounds them to about 14 bits.
const FAST: bool = true;

/// Makes this thread's 8-bit GEMMs on a device scale rows in another card's way, and returns the previous way, for
/// tests. Must not be called while converted weights are kept, whose codes would be outdated.
pub fn scale_rows(device: &CudaDevice, scaling: RowScaling) -> RowScaling {
    let device = Device::of(device);
    device.scratch.forget_contents();
    device.fp8_scales.clear();
    device.row_scaling.replace(scaling)
}

/// Returns the block scales that a GEMM reads for rows of `width` codes with these scales, for tests of their order.
pub fn block_scales(scales_n: Tensor<Cuda, 1>, width: usize) -> Vec<u8> {
    let device = Device::of(&scales_n.device());
    let rows = scales_n.dims()[0];
    let bytes = Scaling::Blocks32.bytes(rows, width);
    let blocks = device.section(|| {
        let scales = device.matrix(scales_n.reshape([1, rows]));
        let address = device.blocks_of(ScratchSlot::Fp8RowBlocks, scales.address, [rows, width]);
        let out = device.empty_matrix(1, bytes / 4, DType::F32);
        device.copy_rows(DeviceBlock::dense(address, [1, bytes / 4], DType::F32), out.block);
        tensor::<2>(out.tensor)
    });
    bytemuck::cast_slice(&blocks.into_data().to_vec::<f32>().expect("it was made in f32")).to_vec()
}

#[repr(C)]
#[derive(Clone, Copy, NoUninit)]
struct RowsOfCodes {
    codes: u64,
    scales: u64,
    column_scales: u64,
    starts: u64,
    lead: i32,
    stride: i32,
    powers_of_two: i32,
    experts: i32,
    columns: i32,
    unused: i32,
}

impl Device {
    fn argument(&self, layout: &RowLayout, codes: &Codes) -> RowsOfCodes {
        RowsOfCodes {
            codes: codes.block.address,
            scales: codes.scales,
            column_scales: layout.column_scales.unwrap_or(0),
            starts: layout.experts.map_or(0, |experts| experts.starts),
            lead: layout.lead as i32,
            stride: layout.stride as i32,
            powers_of_two: i32::from(self.row_scaling.get().has_powers_of_two()),
            experts: layout.experts.map_or(0, |experts| experts.count as i32),
            columns: layout.experts.map_or(0, |experts| experts.columns as i32),
            unused: 0,
        }
    }

    /// Returns the codes of `x`, multiplied by column scales if given: prepared ones, or new ones.
    pub(super) fn rows_in_codes(&self, x: DeviceBlock, layout: RowLayout) -> Codes {
        let prepared = self.prepared_rows.take();
        let fits = |rows: &PreparedRows| self.is_current(rows.owner) && rows.x == x && rows.layout == layout;
        prepared.filter(fits).map_or_else(|| self.quantize_rows(x, layout), |rows| rows.codes)
    }

    fn quantize_rows(&self, x: DeviceBlock, layout: RowLayout) -> Codes {
        assert!(x.is_in_vectors() && x.width.is_multiple_of(16), "rows of {x:?}");
        let codes = self.room_for_codes(x, layout);
        let bytes = x.bytes() + x.count();
        let shape = one_row_each(x.rows, threads(x.width, 1024));
        let launch =
            Source::Fp8.launch(x.dtype, layout.kernel(["quantize_rows", "quantize_expert_rows"]), shape, bytes);
        let arguments = arguments! {
            out: value(&self.argument(&layout, &codes)), x: rows(&x), x_stride: long(x.stride), width: int(x.width),
        };
        // SAFETY: the buffer has room for the codes of all rows and a scale for each; x has these rows at its stride; there is a scale for
        // each column of x, or for each of every expert, or none.
        unsafe { self.launch(launch, &arguments) };
        codes
    }

    /// Writes low-rank values times a factor to the leading codes of rows of `width` values, and zeros to the remaining columns.
    pub(super) fn low_columns(
        &self,
        codes: &Codes,
        layout: RowLayout,
        width: usize,
        low: Option<(DeviceBlock, u64)>,
        dtype: DType,
    ) {
        let (rows, columns) = (codes.block.rows, layout.stride - width);
        if columns == 0 {
            return;
        }
        let ranks = low.map_or(0, |(low, _)| low.width);
        assert!(ranks <= layout.lead, "{ranks} low-rank values in {} columns", layout.lead);
        let (bytes, shape) = (rows * (columns + ranks * 2), grid((rows * columns).div_ceil(4096), 256));
        let launch = Source::Fp8.launch(dtype, "low_columns", shape, bytes);
        let arguments = arguments! {
            out: value(&self.argument(&layout, codes)), low: address(low.map_or(0, |(low, _)| low.address)),
            low_stride: long(low.map_or(0, |(low, _)| low.stride)),
            factor: address(low.map_or(0, |(_, factor)| factor)), n: long(rows), ranks: int(ranks), width: int(width),
        };
        // SAFETY: the codes are rows of `stride` bytes with a scale for each; `low` has these rows at its stride; the factor is an f32, or one
        // per expert, that is read only with low-rank values.
        unsafe { self.launch(launch, &arguments) };
    }

    /// Runs [`Device::rms_norm`], and also writes its result in codes if a block can keep a row in registers.
    pub(crate) fn rms_norm_in_codes(&self, x: &MatrixView, norm: &NormWeight<Cuda>, layout: RowLayout) -> MatrixView {
        let weight = self.norm_weight(norm, x.width);
        if x.width > WIDEST_NORM || x.dtype.size() != 2 || !x.is_in_vectors() {
            return self.rms_norm(x, norm, 0);
        }
        let y = self.empty_matrix(x.rows, x.width, x.dtype);
        let codes = self.room_for_codes(y.block, layout);
        let shape = one_row_each(x.rows, threads_for(x.width, 512));
        let launch = Source::NormFp8.launch(x.dtype, "rms_norm_codes", shape, 2 * x.bytes() + x.count());
        let arguments = arguments! {
            out: value(&self.argument(&layout, &codes)), y: rows(&y), y_stride: long(y.stride), x: rows(x),
            w: rows(&weight), w_offset: float(norm.offset), d: int(x.width), eps: float(norm.epsilon),
        };
        // SAFETY: x and y are dense [rows, width] of this dtype, the weight is [width] f32, and there is room for the codes of all rows.
        unsafe { self.launch(launch, &arguments) };
        self.prepare_rows(&y, layout, codes);
        y
    }

    /// Runs [`Device::gated`], and also writes its result in codes if a block can keep a row in registers.
    pub(crate) fn gated_in_codes(
        &self,
        gate: &MatrixView,
        up: &MatrixView,
        activation: Activation,
        layout: RowLayout,
    ) -> MatrixView {
        if gate.width > WIDEST_GATED || !(gate.is_in_vectors() && up.is_in_vectors()) {
            return self.gated(gate, up, activation, 0);
        }
        let y = self.empty_matrix(gate.rows, gate.width, gate.dtype);
        let codes = self.room_for_codes(y.block, layout);
        let shape = one_row_each(gate.rows, threads(gate.width, 512));
        let bytes = 3 * gate.bytes() + gate.count();
        let launch = Source::GatedFp8(activation).launch(gate.dtype, "gated_codes", shape, bytes);
        let arguments = arguments! {
            out: value(&self.argument(&layout, &codes)), y: rows(&y), y_stride: long(y.stride),
        };
        let arguments = arguments! { gate_and_up(arguments, [gate.block, up.block]) => f: int(gate.width) };
        // SAFETY: y, gate and up have the strides given and are [rows, width] of this dtype; there is room for the codes of all rows.
        unsafe { self.launch(launch, &arguments) };
        self.prepare_rows(&y, layout, codes);
        y
    }

    /// Runs [`Device::gated_backward`], and also writes both gradients in codes, side by side, if a block can keep their rows in registers.
    pub(crate) fn gated_backward_in_codes(
        &self,
        gate: Tensor<Cuda, 2>,
        up: Tensor<Cuda, 2>,
        activation: Activation,
        dy: &MatrixView,
        recompute: bool,
        layout: RowLayout,
    ) -> MatrixView {
        let operands = self.gated_operands(gate, up, dy);
        let [gate, up, d_gate, d_up] = operands.blocks;
        if gate.width > WIDEST_GATED || ![gate, up, d_gate, d_up, dy.block].iter().all(DeviceBlock::is_in_vectors) {
            return self.gated_backward_of(operands, activation, dy, recompute);
        }
        let codes = self.room_for_codes(operands.target.block, layout);
        let shape = one_row_each(gate.rows, threads(gate.width, 512));
        let bytes = (6 + usize::from(recompute)) * gate.bytes();
        let name = layout.kernel(["gated_backward_codes", "gated_backward_expert_codes"]);
        let launch = Source::GatedFp8(activation).launch(gate.dtype, name, shape, bytes);
        let arguments = arguments! { out: value(&self.argument(&layout, &codes)) };
        let arguments = arguments! { operands.arguments(arguments, dy, recompute) => f: int(gate.width) };
        // SAFETY: as for `gated_backward`, and there is room for the codes of both gradients side by side.
        unsafe { self.launch(launch, &arguments) };
        self.prepare_rows(&operands.target, layout, codes);
        operands.target
    }

    fn room_for_codes(&self, x: DeviceBlock, layout: RowLayout) -> Codes {
        assert!(layout.lead + x.width <= layout.stride, "{} columns in {layout:?}", x.width);
        // The buffer is about to be overwritten.
        *self.prepared_rows.borrow_mut() = None;
        let address = self.scratch.take(ScratchSlot::Fp8Rows, x.rows * (layout.stride + 4));
        let block = DeviceBlock::dense(address, [x.rows, layout.stride], DType::U8);
        Codes { block, scales: address + block.count() as u64 }
    }

    fn prepare_rows(&self, x: &MatrixView, layout: RowLayout, codes: Codes) {
        let owner = self.owner(&x.tensor);
        self.prepared_rows.replace(owner.map(|owner| PreparedRows { owner, x: x.block, layout, codes }));
    }

    /// Runs a GEMM of codes into `d`: `gemm` names the blocks of the codes `a` and `b`. The kernel of experts reads an f32 per row in any case.
    pub(super) fn fp8_gemm(&self, gemm: Gemm, [a, b]: [&Codes; 2], d: DeviceBlock) {
        let [rows, columns] = [a.block.rows, b.block.rows];
        match (gemm.experts, self.row_scaling.get()) {
            (Some(_), _) | (None, RowScaling::InGemm { .. }) => {
                let scales = Some(GemmScales { a: a.scales, b: b.scales, scaling: Scaling::OuterVector });
                self.gemm(Gemm { scales, is_fast: FAST, ..gemm }, d);
            }
            (None, RowScaling::InBlocks) => {
                let width = a.block.stride;
                let a = self.blocks_of(ScratchSlot::Fp8RowBlocks, a.scales, [rows, width]);
                let b = self.blocks_of(ScratchSlot::Fp8WeightBlocks, b.scales, [columns, width]);
                self.gemm(Gemm { scales: Some(GemmScales { a, b, scaling: Scaling::Blocks32 }), ..gemm }, d);
            }
            (None, RowScaling::Afterwards) => {
                self.gemm(Gemm { c: None, bias: None, is_fast: FAST, ..gemm }, d);
                self.scale_products(gemm, [a.scales, b.scales], d);
            }
        }
    }

    /// Returns the address of the block scales of rows of `width` codes, from the row scales, which are powers of two.
    fn blocks_of(&self, slot: ScratchSlot, scales: u64, [rows, width]: [usize; 2]) -> u64 {
        let bytes = Scaling::Blocks32.bytes(rows, width);
        let blocks = self.scratch.take(slot, bytes);
        let arguments = arguments! {
            blocks: address(blocks), scales: address(scales), rows: int(rows), tiles: int(width.div_ceil(128)),
        };
        let shape = grid(bytes.div_ceil(16 * 256), 256);
        let launch = Source::Fp8.launch(DType::F32, "block_scales", shape, bytes + rows * 4);
        // SAFETY: there is a scale for each row, and room for tiles of 128 rows by four blocks.
        unsafe { self.launch(launch, &arguments) };
        blocks
    }

    /// Multiplies the result of a GEMM over unscaled codes by the scales of its rows and columns, and adds the GEMM's addends.
    fn scale_products(&self, gemm: Gemm, [of_rows, of_columns]: [u64; 2], d: DeviceBlock) {
        assert!(
            d.is_in_vectors() && gemm.c.is_none_or(|c| c.is_in_vectors() && c.stride == d.stride),
            "{}: rows of {d:?}",
            gemm.name
        );
        assert!(gemm.c.is_none_or(|c| c.address != d.address), "{}: what is added is overwritten before", gemm.name);
        assert!(d.dtype != DType::F16, "{}: products of codes are beyond f16", gemm.name);
        let arguments = arguments! {
            d: rows(&d), stride: long(d.stride), row_scales: address(of_rows), column_scales: address(of_columns),
            c: address(gemm.c.map_or(0, |c| c.address)), bias: address(gemm.bias.unwrap_or(0)), n: long(d.rows),
            width: int(d.width),
        };
        let bytes = 2 * d.bytes() + gemm.c.map_or(0, |c| c.bytes());
        let launch = Source::Fp8.launch(d.dtype, "scale_products", grid(d.count().div_ceil(2048), 256), bytes);
        // SAFETY: d and c are rows of this dtype at one stride; rows and columns have a scale each, and columns a bias where there is one.
        unsafe { self.launch(launch, &arguments) };
    }
}

fn threads(width: usize, most: usize) -> u32 {
    width.div_ceil(KEPT_VALUES).next_multiple_of(32).clamp(64, most) as u32
}

fn one_row_each(rows: usize, threads: u32) -> LaunchShape {
    grid_of([rows, 1, 1], threads)
}
