//! Burn's tensors as operands of launches: a buffer, an offset and a row stride.
//!
//! A tensor has a buffer of its own, or is a view of one; CubeCL is asked once per memory handle (`on_cubecl/handle_number.rs`). Buffers are bound
//! whole, and launches pass offsets in values, because a view may begin anywhere.

use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use burn_tensor::{DType, Int, Shape, Tensor, TensorMetadata, TensorPrimitive};
use cubecl::server::Handle;
use cubecl::wgpu::{WgpuDevice, WgpuRuntime};
use rustc_hash::FxHashMap;

use super::Engine;
use crate::backends::on_cubecl::{DeviceFailure, Taken, handle_number, suppressed_message};

/// f32 values, i32 indices, booleans as u32: WebGPU has no 8-bit storage.
pub type Wgpu = CubeBackend<WgpuRuntime, f32, i32, u32>;

/// The primitive of every tensor of this backend.
pub(crate) type Primitive = CubeTensor<WgpuRuntime>;

/// Number of buffers after which all are forgotten, because those of freed tensors accumulate.
const MAX_KNOWN: usize = 1 << 16;
/// Bytes of a tensor from which on memory that is kept is counted.
const MIN_TRIMMED: usize = 1 << 16;
/// Bytes that are always kept.
const KEPT_BYTES: usize = 64 << 20;

/// Buffers of memory handles, by number.
pub(super) type Buffers = FxHashMap<usize, wgpu::Buffer>;

/// Rows of adjacent values in a buffer.
#[derive(Clone, Debug)]
pub(crate) struct Matrix {
    /// Owner of the memory.
    pub tensor: Primitive,
    pub rows: usize,
    /// Adjacent values per row.
    pub width: usize,
    /// Values from the start of one row to the next.
    pub stride: usize,
    /// Values before the first one in the buffer.
    pub offset: usize,
}

impl Matrix {
    pub(crate) fn dtype(&self) -> DType {
        self.tensor.dtype
    }

    pub(crate) fn columns(&self, start: usize, width: usize) -> Self {
        debug_assert!(start + width <= self.width, "columns {start}+{width} of {}", self.width);
        Self { offset: self.offset + start, width, ..self.clone() }
    }

    pub(crate) fn rows(&self, start: usize, rows: usize) -> Self {
        debug_assert!(start + rows <= self.rows, "rows {start}+{rows} of {}", self.rows);
        Self { offset: self.offset + start * self.stride, rows, ..self.clone() }
    }

    /// Returns the values of a new matrix without gaps.
    pub(crate) fn into_vector(self) -> Tensor<Wgpu, 1> {
        tensor::<2>(self.tensor).reshape([-1])
    }

    /// Returns the values of a row that [`Engine::owned`] has returned for a vector.
    pub(crate) fn into_values(self) -> Tensor<Wgpu, 1> {
        match self.tensor.shape().num_dims() {
            1 => tensor(self.tensor),
            _ => self.into_vector(),
        }
    }

    pub(crate) fn count(&self) -> usize {
        self.rows * self.width
    }

    pub(crate) fn bytes(&self) -> f64 {
        (self.count() * self.tensor.dtype.size()) as f64
    }
}

pub(crate) fn primitive<const D: usize>(tensor: Tensor<Wgpu, D>) -> Primitive {
    match tensor.into_primitive() {
        TensorPrimitive::Float(primitive) => primitive,
        TensorPrimitive::QFloat(_) => unreachable!("no tensor of ours is of Burn's quantized kind"),
    }
}

pub(crate) fn int_primitive<const D: usize>(tensor: Tensor<Wgpu, D, Int>) -> Primitive {
    tensor.into_primitive()
}

pub(crate) fn tensor<const D: usize>(primitive: Primitive) -> Tensor<Wgpu, D> {
    Tensor::from_primitive(TensorPrimitive::Float(primitive))
}

pub(crate) fn int_tensor<const D: usize>(primitive: Primitive) -> Tensor<Wgpu, D, Int> {
    Tensor::from_primitive(primitive)
}

impl Engine {
    /// Allocates an uninitialized tensor without gaps.
    pub(crate) fn empty(&self, shape: impl Into<Shape>, dtype: DType) -> Primitive {
        let shape = shape.into();
        let bytes = (shape.num_elements() * dtype.size()).next_multiple_of(4).max(4);
        let handle = match self.recycled.take(bytes) {
            Taken::Memory(handle) => handle,
            Taken::AfterOthers => {
                // Operations of CubeCL that still use it are submitted, and so come first.
                self.recycled.renew();
                self.flush_burn();
                match self.recycled.take(bytes) {
                    Taken::Memory(handle) => handle,
                    Taken::AfterOthers | Taken::Nothing => self.new_memory(bytes),
                }
            }
            Taken::Nothing => self.new_memory(bytes),
        };
        let new = CubeTensor::new_contiguous(self.gpu.client.clone(), WgpuDevice::DefaultDevice, shape, handle, dtype);
        if self.is_filled.get() {
            self.fill(&new, f32::NAN.to_bits());
        }
        new
    }

    /// Runs `work`, in which matrices that may have fewer rows each time get memory for so many.
    pub(crate) fn with_room<R>(&self, rows: usize, work: impl FnOnce() -> R) -> R {
        let before = self.min_rows.replace(rows);
        let result = work();
        self.min_rows.set(before);
        result
    }

    /// Returns for how many rows a new matrix of `rows` gets memory.
    pub(crate) fn room(&self, rows: usize) -> usize {
        rows.max(self.min_rows.get())
    }

    /// Returns free memory to CubeCL if tensors of other sizes had most of it: rows of changing lengths would otherwise keep theirs for ever.
    fn trim(&self, bytes: usize) {
        let [kept, used] = self.recycled.bytes();
        self.most_bytes.set(self.most_bytes.get().max(used + bytes));
        if kept + bytes > self.most_bytes.get() * 3 / 2 + KEPT_BYTES {
            // CubeCL's next operation on it comes after all work so far.
            self.submit_so_far();
            self.recycled.release_free();
        }
    }

    fn new_memory(&self, bytes: usize) -> Handle {
        if bytes >= MIN_TRIMMED {
            self.trim(bytes);
        }
        let most = self.gpu.limits.max_storage_buffer_binding_size;
        if bytes as u64 > most {
            let message = format!("a tensor of {bytes} bytes is more than launches can bind here, {most} bytes");
            DeviceFailure { operation: "allocating a tensor", out_of_memory: true, message }.raise();
        }
        let handle = self.gpu.client.empty(bytes);
        self.buffer(&handle);
        self.recycled.keep(bytes, &handle);
        handle
    }

    pub(crate) fn empty_matrix(&self, rows: usize, width: usize) -> Matrix {
        self.matrix_of(self.empty([rows, width], DType::F32))
    }

    /// Views any tensor as a matrix, with the last axis as columns, if its rows are of adjacent values; else copies it.
    pub(crate) fn matrix<const D: usize>(&self, tensor: Tensor<Wgpu, D>) -> Matrix {
        self.matrix_of(primitive(tensor))
    }

    /// Views a primitive as a matrix, as [`Engine::matrix`] does.
    pub(crate) fn matrix_of(&self, primitive: Primitive) -> Matrix {
        let (shape, strides) = (primitive.shape(), primitive.meta.strides().to_vec());
        let axes = shape.num_dims();
        let width = shape[axes - 1];
        let rows = shape.num_elements() / width.max(1);
        let stride = if axes == 1 { width } else { strides[axes - 2] };
        let is_dense_before = (0..axes.saturating_sub(2))
            .all(|axis| shape[axis] == 1 || strides[axis] == strides[axis + 1] * shape[axis + 1]);
        let is_read = (strides[axes - 1] == 1 || width <= 1) && is_dense_before && (stride >= width || rows <= 1);
        if !is_read {
            return self.pause(|| self.matrix_of(burn_cubecl::kernel::into_contiguous(primitive)));
        }
        let bytes = primitive.handle.offset_start.unwrap_or(0) as usize;
        let offset = bytes / primitive.dtype.size();
        Matrix { rows, width, stride: if rows <= 1 { width } else { stride }, offset, tensor: primitive }
    }

    /// Views a tensor as one row of values, as launches that see no shape read it.
    pub(crate) fn values<const D: usize>(&self, tensor: Tensor<Wgpu, D>) -> Matrix {
        self.values_of(primitive(tensor))
    }

    /// Views a primitive as [`Engine::values`] does.
    pub(crate) fn values_of(&self, tensor: Primitive) -> Matrix {
        let matrix = self.matrix_of(tensor);
        if matrix.stride == matrix.width {
            return Matrix { rows: 1, width: matrix.count(), stride: matrix.count(), ..matrix };
        }
        let count = matrix.count();
        let dense = self.pause(|| burn_cubecl::kernel::into_contiguous(matrix.tensor));
        Matrix { rows: 1, width: count, stride: count, ..self.matrix_of(dense) }
    }

    /// Returns whether no other tensor has this tensor's memory, so that an operation that takes the tensor may write there.
    pub(crate) fn is_unshared(&self, primitive: &Primitive) -> bool {
        self.recycled.is_unshared(&primitive.handle).unwrap_or(false)
    }

    /// Returns the buffer of a handle's memory, and a number that identifies it; holds the memory until the section ends.
    pub(super) fn buffer(&self, handle: &Handle) -> (wgpu::Buffer, Option<usize>) {
        let number = handle_number(handle);
        if let Some(known) = number.and_then(|number| self.buffers.borrow().get(&number).cloned()) {
            return (known, number);
        }
        let answer =
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| self.gpu.client.get_resource(handle.clone())));
        let Ok(Ok(resource)) = answer else {
            self.gpu.check("allocating a tensor");
            let detail = suppressed_message().unwrap_or_default();
            let message = format!("CubeCL could not allocate {} bytes: {detail}", handle.size());
            DeviceFailure { operation: "allocating a tensor", out_of_memory: true, message }.raise();
        };
        let resource = resource.resource();
        assert_eq!(resource.offset, handle.offset_start.unwrap_or(0), "each memory handle has a buffer of its own");
        let buffer = resource.buffer.clone();
        if let Some(number) = number {
            let mut buffers = self.buffers.borrow_mut();
            if buffers.len() >= MAX_KNOWN {
                buffers.clear();
                self.groups.borrow_mut().clear();
            }
            buffers.insert(number, buffer.clone());
        }
        (buffer, number)
    }
}
