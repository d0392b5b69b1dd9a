//! Burn's tensors as launches see them: an address, a shape and a row stride; and new tensors in CubeCL's memory.
//!
//! A matrix is rows of adjacent values at any row stride, so that column ranges of a wider buffer (gate and up of one GEMM) need no
//! copy. Everything else is made contiguous by a kernel of the engine: Burn's own copy would run on CubeCL's stream, in the middle
//! of a section.
//! Trade-off: [`MatrixView`] owns its memory and is cheap to clone; a [`DeviceBlock`] is a bare address, and the caller that makes one holds
//! the owner until the launch that uses it is queued.

use std::ops::Deref;

use burn_cubecl::tensor::CubeTensor;
use burn_tensor::{DType, Int, Shape, Tensor, TensorMetadata, TensorPrimitive};
use cubecl::cuda::CudaRuntime;
use cubecl::zspace::metadata::Metadata;

use super::engine::{Cuda, Engine};
use super::scratch::ScratchSlot;
use crate::backends::cuda_rows::row_stride;

/// The primitive of every tensor of this backend.
pub(super) type Primitive = CubeTensor<CudaRuntime>;

/// Rows in device memory, by address alone.
#[derive(Clone, Copy, Debug)]
pub(super) struct DeviceBlock {
    /// Address of the first value.
    pub address: u64,
    /// Rows.
    pub rows: usize,
    /// Adjacent values of a row.
    pub width: usize,
    /// Values from the start of one row to the next.
    pub stride: usize,
    /// Format of the values.
    pub dtype: DType,
}

impl DeviceBlock {
    /// Rows without gaps.
    pub(super) fn dense(address: u64, [rows, width]: [usize; 2], dtype: DType) -> Self {
        Self { address, rows, width, stride: width, dtype }
    }

    /// `width` columns from `start` on.
    pub(super) fn columns(self, start: usize, width: usize) -> Self {
        debug_assert!(start + width <= self.width, "columns {start}+{width} of {}", self.width);
        Self { address: self.address + (start * self.dtype.size()) as u64, width, ..self }
    }

    /// `rows` rows from `start` on.
    pub(super) fn rows(self, start: usize, rows: usize) -> Self {
        debug_assert!(start + rows <= self.rows, "rows {start}+{rows} of {}", self.rows);
        Self { address: self.address + (start * self.stride * self.dtype.size()) as u64, rows, ..self }
    }

    /// The `width` columns after the last one, in the room of each row.
    pub(super) fn columns_after(self, width: usize) -> Self {
        assert!(self.has_room(width), "room for {width} columns in rows of {} at stride {}", self.width, self.stride);
        Self { width: self.width + width, ..self }.columns(self.width, width)
    }

    /// The same rows with `width` columns more.
    pub(super) fn widened(self, width: usize) -> Self {
        assert!(self.has_room(width), "room for {width} columns in rows of {} at stride {}", self.width, self.stride);
        Self { width: self.width + width, ..self }
    }

    /// Whether rows have room for `width` columns more.
    pub(super) fn has_room(&self, width: usize) -> bool {
        self.width + width <= self.stride
    }

    /// Number of values.
    pub(super) fn count(&self) -> usize {
        self.rows * self.width
    }

    /// Bytes of all values, gaps left out.
    pub(super) fn bytes(&self) -> usize {
        self.count() * self.dtype.size()
    }

    /// Whether rows follow each other without a gap.
    pub(super) fn is_dense(&self) -> bool {
        self.stride == self.width || self.rows <= 1
    }
}

/// A matrix in device memory; keeps its memory alive.
#[derive(Clone, Debug)]
pub(super) struct MatrixView {
    block: DeviceBlock,
    /// Owner of the memory.
    pub tensor: Primitive,
}

impl Deref for MatrixView {
    type Target = DeviceBlock;

    fn deref(&self) -> &DeviceBlock {
        &self.block
    }
}

impl MatrixView {
    /// Its address, without its owner.
    pub(super) fn block(&self) -> DeviceBlock {
        self.block
    }
}

/// An allocation that low-rank intermediates are saved in, one after the other.
#[derive(Debug)]
pub(super) struct LowRankChunk {
    pub memory: MatrixView,
    /// Ranks that are taken.
    pub used: usize,
}

/// The float primitive of a tensor.
pub(super) fn float<const D: usize>(tensor: Tensor<Cuda, D>) -> Primitive {
    match tensor.into_primitive() {
        TensorPrimitive::Float(primitive) => primitive,
        TensorPrimitive::QFloat(_) => unreachable!("no tensor of ours is of Burn's quantized kind"),
    }
}

/// A tensor of a float primitive.
pub(super) fn tensor<const D: usize>(primitive: Primitive) -> Tensor<Cuda, D> {
    Tensor::from_primitive(TensorPrimitive::Float(primitive))
}

/// A tensor of an integer primitive.
pub(super) fn int_tensor<const D: usize>(primitive: Primitive) -> Tensor<Cuda, D, Int> {
    Tensor::from_primitive(primitive)
}

impl Engine {
    /// A new, uninitialized, contiguous tensor.
    pub(super) fn empty(&self, shape: impl Into<Shape>, dtype: DType) -> Primitive {
        let shape = shape.into();
        // CubeCL allocates no memory of size zero.
        let bytes = (shape.num_elements() * dtype.size()).max(1);
        let client = self.client();
        if !self.is_in_section() {
            let handle = client.empty(bytes);
            return CubeTensor::new_contiguous(client.clone(), self.device().clone(), shape, handle, dtype);
        }
        self.watch.verify();
        let handle = client.empty(bytes);
        let new = CubeTensor::new_contiguous(client.clone(), self.device().clone(), shape, handle, dtype);
        self.resolve_new(&new);
        self.watch.restart();
        new
    }

    /// A new matrix.
    pub(super) fn empty_matrix(&self, rows: usize, width: usize, dtype: DType) -> MatrixView {
        self.view_of(self.empty([rows, width], dtype))
    }

    /// A new matrix whose rows have room for `room` columns more, which hold something only within one operation.
    pub(super) fn empty_with_room(&self, [rows, width]: [usize; 2], room: usize, dtype: DType) -> MatrixView {
        if room == 0 {
            return self.empty_matrix(rows, width, dtype);
        }
        let stride = row_stride(width, room);
        let whole = self.empty_matrix(rows, stride, dtype);
        self.addresses.set_width(&whole.tensor.handle, width);
        let tensor = view(&whole, 0, &[rows, width], vec![stride, 1]);
        MatrixView { block: DeviceBlock { width, stride, ..whole.block }, tensor }
    }

    /// A matrix that may be written to in `room` columns after its own, until the next operation: itself, where it was allocated so;
    /// otherwise a copy in scratch memory.
    pub(super) fn with_room(&self, matrix: MatrixView, room: usize) -> (DeviceBlock, Option<MatrixView>) {
        if room == 0 || (matrix.has_room(room) && self.addresses.is_whole(&matrix.tensor.handle, matrix.width)) {
            return (matrix.block(), Some(matrix));
        }
        let copy = self.scratch_rows([matrix.rows, matrix.width], room, matrix.dtype);
        self.copy_rows(matrix.block(), copy);
        (copy, None)
    }

    /// Rows of scratch memory with room for `room` columns more.
    pub(super) fn scratch_rows(&self, [rows, width]: [usize; 2], room: usize, dtype: DType) -> DeviceBlock {
        let stride = row_stride(width, room);
        let address = self.scratch.take(ScratchSlot::WideRows, rows * stride * dtype.size());
        DeviceBlock { address, rows, width, stride, dtype }
    }

    /// Any tensor as a matrix: the first axis is rows, the others are adjacent. Copied where it is not laid out so.
    pub(super) fn matrix<const D: usize>(&self, tensor: Tensor<Cuda, D>) -> MatrixView {
        self.view_of(float(tensor))
    }

    /// The same of an integer tensor, without gaps.
    pub(super) fn int_matrix<const D: usize>(&self, tensor: Tensor<Cuda, D, Int>) -> MatrixView {
        self.dense(self.view_of(tensor.into_primitive()))
    }

    /// A primitive as a matrix; see [`Engine::matrix`].
    pub(super) fn view_of(&self, primitive: Primitive) -> MatrixView {
        let shape: Vec<usize> = primitive.shape().to_vec();
        let strides: Vec<usize> = primitive.meta.strides().to_vec();
        let (rows, width) = match shape.as_slice() {
            [] => (1, 1),
            [values] => (1, *values),
            [rows, rest @ ..] => (*rows, rest.iter().product()),
        };
        let inner = if shape.len() == 1 { 0 } else { 1 };
        let mut expected = 1;
        let is_adjacent = (inner..shape.len()).rev().all(|axis| {
            let fits = shape[axis] == 1 || strides[axis] == expected;
            expected *= shape[axis];
            fits
        });
        if !is_adjacent {
            return self.view_of(self.contiguous(&primitive));
        }
        let stride = if shape.len() < 2 || rows == 1 { width } else { strides[0] };
        let address = self.address(&primitive);
        MatrixView { block: DeviceBlock { address, rows, width, stride, dtype: primitive.dtype }, tensor: primitive }
    }

    /// Rows without gaps: copied where there are any.
    pub(super) fn dense(&self, matrix: MatrixView) -> MatrixView {
        if matrix.is_dense() { matrix } else { self.view_of(self.contiguous(&matrix.tensor)) }
    }

    /// A tensor as rows without gaps.
    pub(super) fn flat<const D: usize>(&self, tensor: Tensor<Cuda, D>) -> MatrixView {
        self.dense(self.matrix(tensor))
    }

    /// A tensor in a format, without gaps: converted where it has another.
    pub(super) fn flat_as<const D: usize>(&self, tensor: Tensor<Cuda, D>, dtype: DType) -> MatrixView {
        let values = self.matrix_as(tensor, dtype);
        self.dense(values)
    }

    /// A tensor as a matrix in a format: converted where it has another.
    pub(super) fn matrix_as<const D: usize>(&self, tensor: Tensor<Cuda, D>, dtype: DType) -> MatrixView {
        let values = self.matrix(tensor);
        if values.dtype == dtype {
            return values;
        }
        let values = self.dense(values);
        let converted = self.view_of(self.empty(values.tensor.shape(), dtype));
        self.cast(values.block(), converted.block(), 1.0);
        converted
    }

    /// Whether matrices are column ranges of one buffer, side by side in this order.
    pub(super) fn are_adjacent(&self, parts: &[MatrixView]) -> bool {
        let total: usize = parts.iter().map(|part| part.width).sum();
        let stride = parts[0].stride;
        let beside = parts.windows(2).all(|pair| {
            pair[0].address + (pair[0].width * pair[0].dtype.size()) as u64 == pair[1].address
                && pair[0].dtype == pair[1].dtype
                && pair[0].rows == pair[1].rows
        });
        // Buffers of one row that happen to follow each other are not one buffer.
        beside && parts[0].rows > 1 && stride >= total && parts.iter().all(|part| part.stride == stride)
    }

    /// Matrices side by side as one: without a copy where they are column ranges of one buffer.
    pub(super) fn adjacent_columns(&self, mut parts: Vec<MatrixView>) -> MatrixView {
        let total = parts.iter().map(|part| part.width).sum();
        if parts.len() == 1 {
            return parts.remove(0);
        }
        if self.are_adjacent(&parts) {
            let first = parts.remove(0);
            let block = DeviceBlock { width: total, ..first.block };
            return MatrixView { block, ..first };
        }
        let joined = self.empty_matrix(parts[0].rows, total, parts[0].dtype);
        let mut start = 0;
        for part in &parts {
            self.copy_rows(part.block(), joined.block().columns(start, part.width));
            start += part.width;
        }
        joined
    }

    /// Column ranges of a buffer as tensors, in order. They share its memory.
    pub(super) fn split<const D: usize>(&self, whole: &MatrixView, widths: &[usize]) -> Vec<Tensor<Cuda, D>> {
        let mut start = 0;
        let mut parts = Vec::with_capacity(widths.len());
        for &width in widths {
            parts.push(tensor(view(whole, start, &[whole.rows, width], vec![whole.stride, 1])));
            start += width;
        }
        parts
    }

    /// Rows `start .. start + rows` of a dense matrix. Shares memory.
    pub(super) fn row_range(&self, matrix: &MatrixView, start: usize, rows: usize) -> Primitive {
        assert!(matrix.is_dense() && start + rows <= matrix.rows, "rows {start}+{rows} of {}", matrix.rows);
        view(matrix, start * matrix.width, &[rows, matrix.width], vec![matrix.width, 1])
    }
}

/// Part of a matrix's memory with another shape, `start` values on.
pub(super) fn view(matrix: &MatrixView, start: usize, shape: &[usize], strides: Vec<usize>) -> Primitive {
    let mut view = matrix.tensor.clone();
    view.handle = view.handle.offset_start((start * matrix.dtype.size()) as u64);
    *view.meta = Metadata::new(shape.to_vec(), strides);
    view
}
