//! Allocates tensors in CubeCL's memory, and views tensors as matrices that launches can read.
//!
//! A tensor that is not rows of adjacent values is made contiguous by a kernel of the engine, because Burn's copy
//! would run on CubeCL's stream in the middle of a section.

use burn_cubecl::tensor::CubeTensor;
use burn_tensor::backend::Backend;
use burn_tensor::{DType, Int, Shape, Tensor, TensorMetadata};
use cubecl::server::Handle;

use super::Engine;
use super::failure::{check, check_launch};
use super::matrix::{Cuda, DeviceBlock, MatrixView, Primitive, float, tensor, view};
use super::scratch::ScratchSlot;
use crate::backends::on_cubecl::Taken;
use crate::backends::planning::rows::row_stride;

impl Engine {
    /// Allocates an uninitialized contiguous tensor.
    pub(crate) fn empty(&self, shape: impl Into<Shape>, dtype: DType) -> Primitive {
        let shape = shape.into();
        // CubeCL allocates no memory of size zero.
        let bytes = (shape.num_elements() * dtype.size()).max(1);
        let bytes = if self.rounds_sizes.get() { bytes.next_power_of_two() } else { bytes };
        let client = &self.client;
        if !self.is_in_section() {
            let handle = client.empty(bytes);
            return CubeTensor::new_contiguous(client.clone(), self.device().clone(), shape, handle, dtype);
        }
        let handle = self.recycled_memory(bytes).unwrap_or_else(|| self.new_memory(bytes));
        CubeTensor::new_contiguous(client.clone(), self.device().clone(), shape, handle, dtype)
    }

    /// Returns memory that an earlier tensor had.
    fn recycled_memory(&self, bytes: usize) -> Option<Handle> {
        let mut taken = self.recycled.take(bytes);
        if matches!(taken, Taken::AfterOthers) {
            self.recycled.renew();
            // CubeCL releases an operand before it launches the kernel, which it may first have to compile.
            self.wait_until_submitted();
            check("ordering streams", self.handoff.begin());
            taken = self.recycled.take(bytes);
        }
        match taken {
            Taken::Memory(handle) => {
                self.addresses.forget_width(&handle);
                Some(handle)
            }
            Taken::AfterOthers | Taken::Nothing => None,
        }
    }

    /// Allocates memory from CubeCL, which may reuse memory of Burn's own operations that are still running.
    fn new_memory(&self, bytes: usize) -> Handle {
        self.make_room_for(bytes);
        self.watch.verify();
        let handle = self.client.empty(bytes);
        let start = self.addresses.request(&handle);
        check("ordering streams", self.handoff.begin());
        if self.recycled.keep(bytes, &handle) {
            self.addresses.know_recycled(&handle, start);
        }
        self.watch.restart();
        handle
    }

    /// Returns unused pool memory if the device has less than a section needs now, because CubeCL's queue thread panics if it cannot allocate.
    fn make_room_for(&self, bytes: usize) {
        let free = || check("asking for free memory", self.context.memory()).free_bytes;
        if free() >= bytes as u64 {
            return;
        }
        check_launch(self.repeats.flush());
        check("waiting for the device", self.context.synchronize());
        self.repeats.release();
        self.scratch.release_unused();
        self.recycled.release_free();
        Cuda::memory_cleanup(self.device());
        self.wait_until_submitted();
        // Memory that CubeCL has freed returns to the driver once the device is done.
        check("waiting for the device", self.context.synchronize());
    }

    pub(crate) fn empty_matrix(&self, rows: usize, width: usize, dtype: DType) -> MatrixView {
        self.view_of(self.empty([rows, width], dtype))
    }

    /// Allocates a matrix whose rows have room for `room` more columns, whose contents are valid only until the group that reads the rows has run.
    pub(crate) fn empty_with_room(&self, [rows, width]: [usize; 2], room: usize, dtype: DType) -> MatrixView {
        if room == 0 {
            return self.empty_matrix(rows, width, dtype);
        }
        let stride = row_stride(width, room);
        let whole = self.empty_matrix(rows, stride, dtype);
        self.addresses.set_width(&whole.tensor.handle, width);
        let tensor = view(&whole, 0, &[rows, width], vec![stride, 1]);
        MatrixView { block: DeviceBlock { width, stride, ..whole.block }, tensor }
    }

    /// Returns rows whose `room` columns after the matrix may be written until the group that reads it has run: the
    /// matrix itself if it was allocated with room, else a copy in scratch memory.
    pub(crate) fn with_room(&self, matrix: MatrixView, room: usize) -> (DeviceBlock, Option<MatrixView>) {
        if room == 0 || self.has_room_in_place(&matrix, room) {
            return (matrix.block, Some(matrix));
        }
        let copy = self.scratch_rows([matrix.rows, matrix.width], room, matrix.dtype);
        self.copy_rows(matrix.block, copy);
        (copy, None)
    }

    /// Returns whether the `room` columns after a matrix are unused.
    pub(crate) fn has_room_in_place(&self, matrix: &MatrixView, room: usize) -> bool {
        matrix.has_room(room) && self.addresses.is_whole(&matrix.tensor.handle, matrix.width)
    }

    /// Returns rows of scratch memory with room for `room` more columns.
    pub(crate) fn scratch_rows(&self, [rows, width]: [usize; 2], room: usize, dtype: DType) -> DeviceBlock {
        let stride = row_stride(width, room);
        let address = self.scratch.take(ScratchSlot::WideRows, rows * stride * dtype.size());
        DeviceBlock { address, rows, width, stride, dtype }
    }

    /// Views any tensor as a matrix, with the first axis as rows and the others adjacent; copies it if its layout differs.
    pub(crate) fn matrix<const D: usize>(&self, tensor: Tensor<Cuda, D>) -> MatrixView {
        self.view_of(float(tensor))
    }

    /// Views an integer tensor as a matrix without gaps.
    pub(crate) fn int_matrix<const D: usize>(&self, tensor: Tensor<Cuda, D, Int>) -> MatrixView {
        self.dense(self.view_of(tensor.into_primitive()))
    }

    /// Views a primitive as a matrix, as [`Engine::matrix`] does.
    pub(crate) fn view_of(&self, primitive: Primitive) -> MatrixView {
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

    /// Returns rows without gaps; copies if there are any.
    pub(crate) fn dense(&self, matrix: MatrixView) -> MatrixView {
        if matrix.is_dense() { matrix } else { self.view_of(self.contiguous(&matrix.tensor)) }
    }

    /// Views a tensor as rows without gaps.
    pub(crate) fn flat<const D: usize>(&self, tensor: Tensor<Cuda, D>) -> MatrixView {
        self.dense(self.matrix(tensor))
    }

    /// Views a tensor as rows without gaps in a format; converts it if necessary.
    pub(crate) fn flat_as<const D: usize>(&self, tensor: Tensor<Cuda, D>, dtype: DType) -> MatrixView {
        let values = self.matrix_as(tensor, dtype);
        self.dense(values)
    }

    /// Views a tensor as a matrix in a format; converts it if necessary.
    pub(crate) fn matrix_as<const D: usize>(&self, tensor: Tensor<Cuda, D>, dtype: DType) -> MatrixView {
        self.in_format(self.matrix(tensor), dtype)
    }

    /// Returns the matrix itself if it has the format, else a dense copy in it.
    pub(crate) fn in_format(&self, values: MatrixView, dtype: DType) -> MatrixView {
        if values.dtype == dtype {
            return values;
        }
        let values = self.dense(values);
        let converted = self.view_of(self.empty(values.tensor.shape(), dtype));
        self.cast(values.block, converted.block, 1.0);
        converted
    }

    /// Returns whether matrices are column ranges of one buffer, side by side in this order.
    pub(crate) fn are_adjacent(&self, parts: &[MatrixView]) -> bool {
        let total: usize = parts.iter().map(|part| part.width).sum();
        let stride = parts[0].stride;
        let beside = parts.windows(2).all(|pair| {
            pair[0].address + (pair[0].width * pair[0].dtype.size()) as u64 == pair[1].address
                && pair[0].dtype == pair[1].dtype
                && pair[0].rows == pair[1].rows
        });
        // With one row, adjacent buffers could be mistaken for one buffer.
        beside && parts[0].rows > 1 && stride >= total && parts.iter().all(|part| part.stride == stride)
    }

    /// Joins matrices side by side: without a copy if they are column ranges of one buffer, in the room of the first if the others fit there.
    pub(crate) fn adjacent_columns(&self, mut parts: Vec<MatrixView>) -> MatrixView {
        let total = parts.iter().map(|part| part.width).sum();
        if parts.len() == 1 {
            return parts.remove(0);
        }
        if self.are_adjacent(&parts) {
            let first = parts.remove(0);
            let block = DeviceBlock { width: total, ..first.block };
            return MatrixView { block, ..first };
        }
        let first = parts.remove(0);
        let joined = if self.has_room_in_place(&first, total - first.width) {
            self.addresses.set_width(&first.tensor.handle, total);
            MatrixView { block: DeviceBlock { width: total, ..first.block }, tensor: first.tensor }
        } else {
            let joined = self.empty_matrix(first.rows, total, first.dtype);
            self.copy_rows(first.block, joined.block.columns(0, first.width));
            joined
        };
        let mut start = first.block.width;
        for part in &parts {
            self.copy_rows(part.block, joined.block.columns(start, part.width));
            start += part.width;
        }
        joined
    }

    /// Returns column ranges of a buffer as tensors, in order. They share its memory.
    pub(crate) fn split<const D: usize>(&self, whole: &MatrixView, widths: &[usize]) -> Vec<Tensor<Cuda, D>> {
        let mut start = 0;
        let mut parts = Vec::with_capacity(widths.len());
        for &width in widths {
            parts.push(tensor(view(whole, start, &[whole.rows, width], vec![whole.stride, 1])));
            start += width;
        }
        parts
    }

    /// Returns rows `start .. start + rows` of a dense matrix, sharing its memory.
    pub(crate) fn row_range(&self, matrix: &MatrixView, start: usize, rows: usize) -> Primitive {
        assert!(matrix.is_dense() && start + rows <= matrix.rows, "rows {start}+{rows} of {}", matrix.rows);
        view(matrix, start * matrix.width, &[rows, matrix.width], vec![matrix.width, 1])
    }
}
