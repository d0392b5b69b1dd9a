//! Burn's tensors as our launches see them: an address, a shape and a row stride; and new tensors in CubeCL's memory.
//!
//! A matrix is rows of adjacent values at any row stride, so that column ranges of a wider buffer (queries, keys and values
//! of one product) need no copy. Everything else is made contiguous by a kernel of ours: Burn's own copy would run on
//! CubeCL's stream, in the middle of our section.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn_cubecl::tensor::CubeTensor;
use burn_tensor::{DType, Int, Shape, Tensor, TensorMetadata, TensorPrimitive};
use cubecl::cuda::CudaRuntime;
use cubecl::zspace::metadata::Metadata;

use super::Cuda;
use super::engine::Engine;
use super::failure::DeviceFailure;

/// The primitive behind every tensor of this backend.
pub(super) type Primitive = CubeTensor<CudaRuntime>;

/// A matrix in device memory; keeps its memory alive.
#[derive(Clone, Debug)]
pub(super) struct Matrix {
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
    /// Owner of the memory.
    pub tensor: Primitive,
}

impl Matrix {
    /// Bytes of a value.
    pub(super) fn element_bytes(&self) -> usize {
        self.dtype.size()
    }

    /// Whether rows follow each other without a gap.
    pub(super) fn is_dense(&self) -> bool {
        self.stride == self.width || self.rows <= 1
    }
}

/// The float primitive of a tensor.
pub(super) fn float<const D: usize>(tensor: Tensor<Cuda, D>) -> Primitive {
    match tensor.into_primitive() {
        TensorPrimitive::Float(primitive) => primitive,
        TensorPrimitive::QFloat(_) => unreachable!("no tensor of ours is of Burn's quantised kind"),
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

/// Device address of a tensor's first value. Waits for CubeCL's queue thread, so all that was asked of CubeCL before has been
/// submitted when this returns.
pub(super) fn address(primitive: &Primitive) -> u64 {
    // CubeCL allocates on its queue thread and panics there; asking for the address then panics here.
    let asked = catch_unwind(AssertUnwindSafe(|| primitive.client.get_resource(primitive.handle.clone())));
    match asked {
        Ok(Ok(resource)) => resource.resource().ptr,
        Ok(Err(_)) | Err(_) => DeviceFailure {
            operation: "allocating a tensor",
            out_of_memory: true,
            message: format!("{} bytes could not be allocated", primitive.handle.size()),
        }
        .raise(),
    }
}

impl Engine {
    /// A new, uninitialised, contiguous tensor.
    pub(super) fn empty(&self, shape: impl Into<Shape>, dtype: DType) -> Primitive {
        let shape = shape.into();
        // CubeCL hands out no memory of size zero.
        let bytes = (shape.num_elements() * dtype.size()).max(1);
        let client = self.client();
        let handle = client.empty(bytes);
        CubeTensor::new_contiguous(client.clone(), self.device().clone(), shape, handle, dtype)
    }

    /// A new matrix.
    pub(super) fn empty_matrix(&self, rows: usize, width: usize, dtype: DType) -> Matrix {
        self.matrix_of(self.empty([rows, width], dtype))
    }

    /// Any tensor as a matrix: the first axis is rows, the others are adjacent. Copied where it is not laid out so.
    pub(super) fn matrix<const D: usize>(&self, tensor: Tensor<Cuda, D>) -> Matrix {
        self.matrix_of(float(tensor))
    }

    /// The same of an integer tensor.
    pub(super) fn int_matrix<const D: usize>(&self, tensor: Tensor<Cuda, D, Int>) -> Matrix {
        self.matrix_of(tensor.into_primitive())
    }

    pub(super) fn matrix_of(&self, primitive: Primitive) -> Matrix {
        let shape: Vec<usize> = primitive.shape().to_vec();
        let strides: Vec<usize> = primitive.meta.strides().to_vec();
        let (rows, width) = match shape.as_slice() {
            [] => (1, 1),
            [values] => (1, *values),
            [rows, rest @ ..] => (*rows, rest.iter().product()),
        };
        let inner = if shape.len() == 1 { 0 } else { 1 };
        let adjacent = (inner..shape.len()).rev().scan(1, |expected, axis| {
            let fits = shape[axis] == 1 || strides[axis] == *expected;
            *expected *= shape[axis];
            Some(fits)
        });
        if !adjacent.collect::<Vec<_>>().into_iter().all(|fits| fits) {
            return self.matrix_of(self.contiguous(primitive));
        }
        let stride = if shape.len() < 2 || rows == 1 { width } else { strides[0] };
        Matrix { address: address(&primitive), rows, width, stride, dtype: primitive.dtype, tensor: primitive }
    }

    /// Rows without gaps: copied where there are any.
    pub(super) fn dense(&self, matrix: Matrix) -> Matrix {
        if matrix.is_dense() { matrix } else { self.matrix_of(self.contiguous(matrix.tensor)) }
    }

    /// Flat, contiguous values.
    pub(super) fn flat<const D: usize>(&self, tensor: Tensor<Cuda, D>) -> Matrix {
        let matrix = self.matrix(tensor);
        self.dense(matrix)
    }

    /// Flat rows of a matrix whose row stride is its width: what is added to a product is laid out as its result.
    pub(super) fn flat_rows(&self, tensor: Tensor<Cuda, 2>) -> Matrix {
        self.flat(tensor)
    }

    /// Whether matrices are column ranges of one buffer, side by side in this order.
    pub(super) fn adjacent(&self, parts: &[&Matrix]) -> bool {
        let total: usize = parts.iter().map(|part| part.width).sum();
        let stride = parts[0].stride;
        let beside = parts.windows(2).all(|pair| {
            pair[0].address + (pair[0].width * pair[0].element_bytes()) as u64 == pair[1].address
                && pair[0].dtype == pair[1].dtype
                && pair[0].rows == pair[1].rows
        });
        // Buffers of one row that happen to follow each other are not one buffer.
        beside && parts[0].rows > 1 && stride >= total && parts.iter().all(|part| part.stride == stride)
    }

    /// Matrices side by side as one: without a copy where they are column ranges of one buffer.
    pub(super) fn adjacent_columns(&self, mut parts: Vec<Matrix>) -> Matrix {
        if parts.len() == 1 {
            return parts.remove(0);
        }
        let total = parts.iter().map(|part| part.width).sum();
        if self.adjacent(&parts.iter().collect::<Vec<_>>()) {
            return Matrix { width: total, ..parts.remove(0) };
        }
        self.copied_columns(&parts, total)
    }

    /// The same, in memory that nobody else holds.
    pub(super) fn owned_columns(&self, mut parts: Vec<Matrix>) -> Matrix {
        let total = parts.iter().map(|part| part.width).sum();
        if self.adjacent(&parts.iter().collect::<Vec<_>>()) {
            // The parts hold the buffer once each: the last of them tells whether it is the only one left.
            let first = parts.remove(0);
            drop(std::mem::take(&mut parts));
            if first.tensor.handle.can_mut() {
                return Matrix { width: total, ..first };
            }
            return self.copied_columns(&[Matrix { width: total, ..first }], total);
        }
        self.copied_columns(&parts, total)
    }

    fn copied_columns(&self, parts: &[Matrix], total: usize) -> Matrix {
        let joined = self.empty_matrix(parts[0].rows, total, parts[0].dtype);
        let mut start = 0;
        for part in parts {
            self.copy_rows(part, joined.address + (start * part.element_bytes()) as u64, total);
            start += part.width;
        }
        joined
    }

    /// Columns from `start` on of a matrix, as a tensor of the given shape whose first axis is rows. Shares memory.
    pub(super) fn columns(&self, matrix: &Matrix, start: usize, shape: &[usize]) -> Primitive {
        let mut strides = vec![1; shape.len()];
        for axis in (1..shape.len().saturating_sub(1)).rev() {
            strides[axis] = strides[axis + 1] * shape[axis + 1];
        }
        strides[0] = matrix.stride;
        view(matrix, start, shape, strides)
    }

    /// Rows `start .. start + rows` of a dense matrix. Shares memory.
    pub(super) fn rows(&self, matrix: &Matrix, start: usize, rows: usize) -> Primitive {
        assert!(matrix.is_dense() && start + rows <= matrix.rows, "rows {start}+{rows} of {}", matrix.rows);
        view(matrix, start * matrix.width, &[rows, matrix.width], vec![matrix.width, 1])
    }
}

/// Part of a matrix's memory under another shape, `start` values on.
fn view(matrix: &Matrix, start: usize, shape: &[usize], strides: Vec<usize>) -> Primitive {
    let mut view = matrix.tensor.clone();
    view.handle = view.handle.offset_start((start * matrix.element_bytes()) as u64);
    *view.meta = Metadata::new(shape.to_vec(), strides);
    view
}
