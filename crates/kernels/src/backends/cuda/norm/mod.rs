//! RMSNorm on CUDA. Kernels: `norm.cu`.

use burn_tensor::Tensor;
use bytemuck::NoUninit;

use crate::backends::cuda::device::{Device, in_section};
use crate::backends::cuda::engine::{
    BlockArguments, Cuda, DeviceBlock, MatrixView, Primitive, ScratchSlot, Source, arguments, grid, tensor, threads_for,
};
use crate::{NormOps, NormWeight};

impl NormOps for Cuda {
    fn rms_norm(
        x_nd: Tensor<Self, 2>,
        norm: &NormWeight<Self>,
        residual_nd: Option<Tensor<Self, 2>>,
    ) -> Tensor<Self, 2> {
        in_section(&x_nd.device(), |device| {
            let x = device.flat(x_nd);
            let y = match residual_nd {
                Some(residual_nd) => device.rms_norm_add(&x, norm, residual_nd),
                None => device.rms_norm(&x, norm, 0),
            };
            tensor(y.tensor)
        })
    }

    fn rms_norm_backward(
        x_nd: Tensor<Self, 2>,
        norm: &NormWeight<Self>,
        dy_nd: Tensor<Self, 2>,
        d_residual_nd: Option<Tensor<Self, 2>>,
    ) -> (Tensor<Self, 2>, Option<Tensor<Self, 1>>) {
        in_section(&x_nd.device(), |device| {
            let (x, dy) = (device.flat(x_nd), device.matrix(dy_nd));
            let residual = d_residual_nd.map(|residual| device.matrix_as(residual, x.dtype));
            let dx = device.empty_matrix(x.rows, x.width, x.dtype);
            let d_weight = device.rms_norm_backward(dx.block, &x, norm, dy.block, residual.as_ref(), None);
            (tensor(dx.tensor), d_weight.map(tensor))
        })
    }
}

/// Low-rank gradients, and the destination for them times `1 / rms` of their rows.
#[derive(Clone, Copy)]
pub(super) struct ScaledRows {
    pub low: DeviceBlock,
    /// Dense rows of the same shape.
    pub to: DeviceBlock,
}

#[repr(C)]
#[derive(Clone, Copy, Default, NoUninit)]
struct LowRankRows {
    low: u64,
    scaled: u64,
    stride: i64,
    ranks: i32,
    unused: i32,
}

impl From<ScaledRows> for LowRankRows {
    fn from(ScaledRows { low, to }: ScaledRows) -> Self {
        Self { low: low.address, scaled: to.address, stride: low.stride as i64, ranks: low.width as i32, unused: 0 }
    }
}

impl Device {
    /// Computes `x / rms(x) * (offset + weight)`, in rows with `room` columns after them.
    pub(super) fn rms_norm(&self, x: &MatrixView, norm: &NormWeight<Cuda>, room: usize) -> MatrixView {
        let y = self.empty_with_room([x.rows, x.width], room, x.dtype);
        self.rms_norm_to(y.block, x, norm, None);
        y
    }

    /// Computes `x / rms(x) * (offset + weight)` plus a residual, dense.
    pub(super) fn rms_norm_add(
        &self,
        x: &MatrixView,
        norm: &NormWeight<Cuda>,
        residual_nd: Tensor<Cuda, 2>,
    ) -> MatrixView {
        let residual = self.flat_as(residual_nd, x.dtype);
        let y = self.empty_matrix(x.rows, x.width, x.dtype);
        self.rms_norm_to(y.block, x, norm, Some(&residual));
        y
    }

    /// Computes `x / rms(x) * (offset + weight)`, plus a residual if given, into rows of any stride.
    pub(super) fn rms_norm_to(
        &self,
        y: DeviceBlock,
        x: &MatrixView,
        norm: &NormWeight<Cuda>,
        residual: Option<&MatrixView>,
    ) {
        assert!(x.is_dense() && y.count() == x.count() && y.dtype == x.dtype, "norm: rows of one format");
        if let Some(residual) = residual {
            assert!(residual.count() == x.count() && residual.dtype == x.dtype, "norm: a residual of the same shape");
        }
        let weight = self.norm_weight(norm, x.width);
        let bytes = (2 + usize::from(residual.is_some())) * x.bytes();
        let launch = Source::Norm.launch(x.dtype, "rms_norm", grid(x.rows, threads_for(x.width, 512)), bytes);
        let arguments = arguments! {
            y: rows(&y), y_stride: long(y.stride), x: rows(x), w: rows(&weight), w_offset: float(norm.offset),
            residual: address(residual.map_or(0, |residual| residual.address)),
            residual_stride: long(residual.map_or(0, |residual| residual.stride)), d: int(x.width),
            eps: float(norm.epsilon),
        };
        // SAFETY: y and the residual (at their strides) and x (dense) are [rows, width] of this dtype, the weight is [width] f32; one
        // block per row.
        unsafe { self.launch(launch, &arguments) };
    }

    /// Writes the input gradient plus the residual's to `dx`, which may be `dy`, and returns the weight gradient if it trains. Given low-rank
    /// gradients of the adapters that read the norm's result, also writes these times `1 / rms(x)` of their rows to dense rows.
    pub(super) fn rms_norm_backward(
        &self,
        dx: DeviceBlock,
        x: &MatrixView,
        norm: &NormWeight<Cuda>,
        dy: DeviceBlock,
        residual: Option<&MatrixView>,
        scaled: Option<ScaledRows>,
    ) -> Option<Primitive> {
        assert!(x.is_dense() && dy.dtype == x.dtype && dx.dtype == x.dtype, "norm: rows of one format");
        let weight = self.norm_weight(norm, x.width);
        let blocks = if norm.trains { x.rows.min(3 * self.multiprocessors) } else { x.rows };
        let partial = if norm.trains { self.scratch.take(ScratchSlot::Partial, blocks * x.width * 4) } else { 0 };
        let bytes = (3 + usize::from(residual.is_some())) * x.bytes();
        let launch = Source::Norm.launch(x.dtype, "rms_norm_backward", grid(blocks, threads_for(x.width, 256)), bytes);
        let arguments = arguments! {
            dx: rows(&dx), dx_stride: long(dx.stride), x: rows(x), w: rows(&weight), w_offset: float(norm.offset),
            dy: rows(&dy), dy_stride: long(dy.stride),
            dx_residual: address(residual.map_or(0, |residual| residual.address)),
            residual_stride: long(residual.map_or(0, |residual| residual.stride)), dw_partial: address(partial),
            low: value(&scaled.map_or_else(LowRankRows::default, LowRankRows::from)), n: long(x.rows),
            d: int(x.width), eps: float(norm.epsilon),
        };
        // SAFETY: all matrices are [rows, width] of this dtype at the strides given, x without gaps; the partial sums are [blocks, width]
        // f32 or null; low-rank gradients are rows of this dtype, and there is room for them a second time.
        unsafe { self.launch(launch, &arguments) };
        norm.trains.then(|| self.sum_partial_rows(partial, blocks, x.width))
    }

    /// Computes `dA` of the adapters that read a norm's result from its input and [`ScaledRows::to`], without recomputing the result.
    pub(super) fn sum_over_normed_tokens(
        &self,
        scaled: DeviceBlock,
        x: &MatrixView,
        norm: &NormWeight<Cuda>,
    ) -> MatrixView {
        let sum = self.sum_over_tokens(scaled, x.block);
        let weight = self.norm_weight(norm, x.width);
        let bytes = 2 * sum.bytes();
        let launch = Source::Norm.launch(x.dtype, "times_weight", grid(sum.count().div_ceil(256), 256), bytes);
        let arguments = arguments! {
            y: rows(&sum), w: rows(&weight), w_offset: float(norm.offset), count: long(sum.count()), d: int(sum.width),
        };
        // SAFETY: the sum is dense f32 rows of as many columns as the weight has f32 values.
        unsafe { self.launch(launch, &arguments) };
        sum
    }

    pub(super) fn norm_weight(&self, norm: &NormWeight<Cuda>, width: usize) -> MatrixView {
        let weight = self.flat(norm.weight.clone());
        let expected = (width, burn_tensor::DType::F32);
        assert_eq!((weight.width, weight.dtype), expected, "a norm has one f32 per column");
        weight
    }
}
