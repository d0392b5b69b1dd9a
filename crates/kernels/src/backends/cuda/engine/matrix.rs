//! Burn's tensors as launches see them: an address, a shape and a row stride.
//!
//! A matrix is rows of adjacent values at any row stride, so that column ranges of a wider buffer (gate and up of one GEMM) need no
//! copy.
//! Trade-off: [`MatrixView`] owns its memory and is cheap to clone; a [`DeviceBlock`] is a bare address, and the caller that makes one holds
//! the owner until the launch that uses it is queued.

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

/// Rows in device memory, by address alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DeviceBlock {
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
    pub(crate) fn dense(address: u64, [rows, width]: [usize; 2], dtype: DType) -> Self {
        Self { address, rows, width, stride: width, dtype }
    }

    /// `width` columns from `start` on.
    pub(crate) fn columns(self, start: usize, width: usize) -> Self {
        debug_assert!(start + width <= self.width, "columns {start}+{width} of {}", self.width);
        Self { address: self.address + (start * self.dtype.size()) as u64, width, ..self }
    }

    /// The columns of a range, as those of a module of a group.
    pub(crate) fn column_range(self, columns: &Range<usize>) -> Self {
        self.columns(columns.start, columns.len())
    }

    /// `rows` rows from `start` on.
    pub(crate) fn rows(self, start: usize, rows: usize) -> Self {
        debug_assert!(start + rows <= self.rows, "rows {start}+{rows} of {}", self.rows);
        Self { address: self.address + (start * self.stride * self.dtype.size()) as u64, rows, ..self }
    }

    /// The `width` columns after the last one, in the room of each row.
    pub(crate) fn columns_after(self, width: usize) -> Self {
        assert!(self.has_room(width), "room for {width} columns in rows of {} at stride {}", self.width, self.stride);
        Self { width: self.width + width, ..self }.columns(self.width, width)
    }

    /// The same rows with `width` columns more.
    pub(crate) fn widened(self, width: usize) -> Self {
        assert!(self.has_room(width), "room for {width} columns in rows of {} at stride {}", self.width, self.stride);
        Self { width: self.width + width, ..self }
    }

    /// Whether rows have room for `width` columns more.
    pub(crate) fn has_room(&self, width: usize) -> bool {
        self.width + width <= self.stride
    }

    /// Whether every row begins on 16 bytes, where its values have two.
    pub(crate) fn begins_on_vectors(&self) -> bool {
        self.stride.is_multiple_of(8) && self.address.is_multiple_of(16)
    }

    /// Whether rows are whole vectors of eight values, each on 16 bytes where values have two.
    pub(crate) fn is_in_vectors(&self) -> bool {
        self.width.is_multiple_of(8) && self.begins_on_vectors()
    }

    /// Number of values.
    pub(crate) fn count(&self) -> usize {
        self.rows * self.width
    }

    /// Bytes of all values, gaps left out.
    pub(crate) fn bytes(&self) -> usize {
        self.count() * self.dtype.size()
    }

    /// Bytes from the first value to the last, gaps included.
    pub(super) fn extent(&self) -> u64 {
        let values = if self.rows == 0 { 0 } else { (self.rows - 1) * self.stride + self.width };
        (values * self.dtype.size()) as u64
    }

    /// Whether rows follow each other without a gap.
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

impl MatrixView {
    /// Its address, without its owner.
    pub(crate) fn block(&self) -> DeviceBlock {
        self.block
    }
}

/// An allocation that low-rank intermediates are saved in, one after the other.
#[derive(Debug)]
pub(crate) struct LowRankChunk {
    pub memory: MatrixView,
    /// Ranks that are taken.
    pub used: usize,
}

/// The float primitive of a tensor.
pub(crate) fn float<const D: usize>(tensor: Tensor<Cuda, D>) -> Primitive {
    match tensor.into_primitive() {
        TensorPrimitive::Float(primitive) => primitive,
        TensorPrimitive::QFloat(_) => unreachable!("no tensor of ours is of Burn's quantized kind"),
    }
}

/// A tensor of a float primitive.
pub(crate) fn tensor<const D: usize>(primitive: Primitive) -> Tensor<Cuda, D> {
    Tensor::from_primitive(TensorPrimitive::Float(primitive))
}

/// A tensor of an integer primitive.
pub(crate) fn int_tensor<const D: usize>(primitive: Primitive) -> Tensor<Cuda, D, Int> {
    Tensor::from_primitive(primitive)
}

/// Values or codes of a primitive.
pub(crate) fn payload<const D: usize>(primitive: Primitive, is_codes: bool) -> Payload<Cuda, D> {
    if is_codes { Payload::Codes(int_tensor(primitive)) } else { Payload::Values(tensor(primitive)) }
}

/// Part of a matrix's memory with another shape, `start` values on.
pub(crate) fn view(matrix: &MatrixView, start: usize, shape: &[usize], strides: Vec<usize>) -> Primitive {
    let mut view = matrix.tensor.clone();
    view.handle = view.handle.offset_start((start * matrix.dtype.size()) as u64);
    *view.meta = Metadata::new(shape.to_vec(), strides);
    view
}
