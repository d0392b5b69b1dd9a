//! Burn's tensors as launch operands: an address, a shape and a row stride.
//!
//! A matrix consists of rows of adjacent values with any row stride, so that column ranges of a wider buffer (gate and up of one GEMM) need no copy.
//! Trade-off: [`MatrixView`] owns its memory and is cheap to clone; a [`DeviceBlock`] is only an address, and its
//! creator must hold the owner until the launch that uses it is queued.

use std::ops::{Deref, Range};

use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use burn_tensor::{DType, Int, Tensor, TensorPrimitive};
use cubecl::cuda::CudaRuntime;
use cubecl::zspace::metadata::Metadata;

use crate::Payload;

/// f32 by default; half formats are chosen tensor by tensor.
pub type Cuda = CubeBackend<CudaRuntime, f32, i32, u8>;

/// The primitive of every tensor of this backend.
pub(crate) type Primitive = CubeTensor<CudaRuntime>;

/// Rows in device memory, without ownership.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DeviceBlock {
    /// Address of the first value.
    pub address: u64,
    /// Number of rows.
    pub rows: usize,
    /// Adjacent values per row.
    pub width: usize,
    /// Values from the start of one row to the next.
    pub stride: usize,
    /// Format of the values.
    pub dtype: DType,
}

impl DeviceBlock {
    pub(crate) fn dense(address: u64, [rows, width]: [usize; 2], dtype: DType) -> Self {
        Self { address, rows, width, stride: width, dtype }
    }

    pub(crate) fn columns(self, start: usize, width: usize) -> Self {
        debug_assert!(start + width <= self.width, "columns {start}+{width} of {}", self.width);
        Self { address: self.address + (start * self.dtype.size()) as u64, width, ..self }
    }

    /// Returns a range of columns, such as those of a module in its group.
    pub(crate) fn column_range(self, columns: &Range<usize>) -> Self {
        self.columns(columns.start, columns.len())
    }

    pub(crate) fn rows(self, start: usize, rows: usize) -> Self {
        debug_assert!(start + rows <= self.rows, "rows {start}+{rows} of {}", self.rows);
        Self { address: self.address + (start * self.stride * self.dtype.size()) as u64, rows, ..self }
    }

    /// Returns the `width` columns after the last one, in the free part of each row.
    pub(crate) fn columns_after(self, width: usize) -> Self {
        self.widened(width).columns(self.width, width)
    }

    /// Returns the same rows with `width` more columns.
    pub(crate) fn widened(self, width: usize) -> Self {
        assert!(self.has_room(width), "room for {width} columns in rows of {} at stride {}", self.width, self.stride);
        Self { width: self.width + width, ..self }
    }

    pub(crate) fn has_room(&self, width: usize) -> bool {
        self.width + width <= self.stride
    }

    /// Returns whether every row of 16-bit values begins at a multiple of 16 bytes.
    pub(crate) fn begins_on_vectors(&self) -> bool {
        self.stride.is_multiple_of(8) && self.address.is_multiple_of(16)
    }

    /// Returns whether rows consist of whole vectors of eight values; with 16-bit values each vector is aligned to 16 bytes.
    pub(crate) fn is_in_vectors(&self) -> bool {
        self.width.is_multiple_of(8) && self.begins_on_vectors()
    }

    pub(crate) fn count(&self) -> usize {
        self.rows * self.width
    }

    /// Returns the bytes of all values, without gaps.
    pub(crate) fn bytes(&self) -> usize {
        self.count() * self.dtype.size()
    }

    /// Returns the bytes from the first value to the last, including gaps.
    pub(super) fn extent(&self) -> u64 {
        let values = if self.rows == 0 { 0 } else { (self.rows - 1) * self.stride + self.width };
        (values * self.dtype.size()) as u64
    }

    pub(crate) fn is_dense(&self) -> bool {
        self.stride == self.width || self.rows <= 1
    }
}

/// A matrix in device memory; keeps its memory alive.
#[derive(Clone, Debug)]
pub(crate) struct MatrixView {
    pub(crate) block: DeviceBlock,
    /// Owner of the memory.
    pub tensor: Primitive,
}

impl Deref for MatrixView {
    type Target = DeviceBlock;

    fn deref(&self) -> &DeviceBlock {
        &self.block
    }
}

pub(crate) fn float<const D: usize>(tensor: Tensor<Cuda, D>) -> Primitive {
    match tensor.into_primitive() {
        TensorPrimitive::Float(primitive) => primitive,
        TensorPrimitive::QFloat(_) => unreachable!("no tensor of ours is of Burn's quantized kind"),
    }
}

pub(crate) fn tensor<const D: usize>(primitive: Primitive) -> Tensor<Cuda, D> {
    Tensor::from_primitive(TensorPrimitive::Float(primitive))
}

pub(crate) fn int_tensor<const D: usize>(primitive: Primitive) -> Tensor<Cuda, D, Int> {
    Tensor::from_primitive(primitive)
}

pub(crate) fn payload<const D: usize>(primitive: Primitive, is_codes: bool) -> Payload<Cuda, D> {
    if is_codes { Payload::Codes(int_tensor(primitive)) } else { Payload::Values(tensor(primitive)) }
}

/// Returns the primitive of values or codes, and whether it is codes.
pub(crate) fn primitive<const D: usize>(payload: Payload<Cuda, D>) -> (Primitive, bool) {
    match payload {
        Payload::Values(values) => (float(values), false),
        Payload::Codes(codes) => (codes.into_primitive(), true),
    }
}

/// Returns a view of a matrix's memory with another shape, offset by `start` values.
pub(crate) fn view(matrix: &MatrixView, start: usize, shape: &[usize], strides: Vec<usize>) -> Primitive {
    let mut view = matrix.tensor.clone();
    view.handle = view.handle.offset_start((start * matrix.dtype.size()) as u64);
    *view.meta = Metadata::new(shape.to_vec(), strides);
    view
}
