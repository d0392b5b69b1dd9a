//! Placement of tensors in memory: host buffers, offloaded tensors, and estimates of a run's memory and work.
//!
//! Trade-off: a backend without device memory of its own (the CPU) inherits bodies that move nothing.

#[cfg(feature = "flex")]
pub(crate) mod conformance;
pub mod estimate;
pub mod evaluation;
pub(crate) mod host;
pub mod prefetch;
pub mod training_shape;
pub mod work;

use burn_tensor::{DType, Int, Tensor, TensorData};

use crate::payload::Payload;
use crate::session::Session;
pub use host::{HostBuffer, Offloaded, Readback};

#[cfg(feature = "cuda")]
pub(crate) use host::Elsewhere;

/// Memory of tensors on the device and the host.
pub trait MemoryOps: Session {
    /// Whether [`MemoryOps::read_later`] waits for nothing that is queued after it. An embedding then has to take an id of -1, which stands for a token
    /// that could not be chosen, for that of any row.
    const READS_LATER: bool = false;

    /// Returns the device of the rank with this local number.
    fn device_of(local_rank: usize) -> Self::Device {
        let _ = local_rank;
        Self::Device::default()
    }

    /// Allocates host memory to be filled with a tensor's bytes for [`MemoryOps::upload`]; may be called from any thread.
    fn host_buffer(device: &Self::Device, bytes: usize) -> HostBuffer {
        let _ = device;
        HostBuffer::new(vec![0; bytes])
    }

    /// Uploads the concatenated bytes of buffers as a matrix, row-major and in native byte order. Where the backend can, it starts to
    /// copy a buffer before it requests the next. `buffers` must run no Burn operation, because it may run inside a section.
    ///
    /// # Panics
    /// If the buffers do not have the byte length of the shape.
    fn upload<E>(
        buffers: impl IntoIterator<Item = Result<HostBuffer, E>>,
        shape: [usize; 2],
        dtype: DType,
        device: &Self::Device,
    ) -> Result<Tensor<Self, 2>, E> {
        Ok(Tensor::from_data(joined(buffers, shape, dtype)?, (device, dtype)))
    }

    /// Moves a tensor away until it is needed again: where the backend can, into host memory, copied while other work runs.
    fn offload(x: Payload<Self, 2>) -> Offloaded<Self> {
        Offloaded::on_device(x)
    }

    /// Returns ranges of the first axis, in order, from starts and lengths. They share the tensor's memory where the backend can.
    fn slices<const D: usize>(x: Payload<Self, D>, ranges: &[(usize, usize)]) -> Vec<Payload<Self, D>> {
        let slice = |&(start, length): &(usize, usize)| match &x {
            Payload::Values(x) => Payload::Values(x.clone().narrow(0, start, length)),
            Payload::Codes(x) => Payload::Codes(x.clone().narrow(0, start, length)),
        };
        ranges.iter().map(slice).collect()
    }

    /// Puts matrices below each other, on CUDA without gaps between rows.
    ///
    /// # Panics
    /// If there are none.
    fn join_rows(mut parts: Vec<Tensor<Self, 2>>) -> Tensor<Self, 2> {
        assert!(!parts.is_empty(), "some expert has rows");
        if parts.len() == 1 {
            return parts.remove(0);
        }
        Self::pause(&parts[0].device(), || Tensor::cat(parts, 0))
    }

    /// Returns zeros of this shape and format.
    fn zeros(shape: [usize; 2], dtype: DType, device: &Self::Device) -> Tensor<Self, 2> {
        Tensor::zeros(shape, (device, dtype))
    }

    /// Returns i32 values; waits until the device has computed them.
    fn read_integers(x: Tensor<Self, 1, Int>) -> Vec<i32> {
        Self::pause(&x.device(), || x.into_data().iter::<i32>().collect())
    }

    /// Copies tensors to the host, by any thread that is in no section, also while another one is. `arrived` gets their values in order, and each
    /// tensor is dropped once it is copied: until then, sections that change its values give their own tensor new memory.
    fn read_alongside(tensors: Vec<Payload<Self>>, mut arrived: impl FnMut(TensorData)) {
        tensors.into_iter().for_each(|tensor| arrived(tensor.to_data()));
    }

    /// Starts to copy values `[n]` f32 to the host. The host waits only when it reads them, and not for work queued
    /// after this call. This default body reads only when the values are waited for, after everything queued by then.
    ///
    /// # Panics
    /// On CUDA, if there are no values.
    fn read_later(values: Vec<Tensor<Self, 1>>) -> Readback {
        let numbers = |values: Tensor<Self, 1>| values.into_data().iter::<f32>().collect::<Vec<_>>();
        Readback::new(move || values.into_iter().flat_map(numbers).collect())
    }
}

/// Returns ranges of the first axis of values, as [`MemoryOps::slices`] does.
pub fn slices<B: MemoryOps, const D: usize>(x: Tensor<B, D>, ranges: &[(usize, usize)]) -> Vec<Tensor<B, D>> {
    B::slices(Payload::Values(x), ranges).into_iter().map(Payload::into_values).collect()
}

/// Concatenates the bytes of buffers from the default [`MemoryOps::host_buffer`].
pub(crate) fn joined<E>(
    buffers: impl IntoIterator<Item = Result<HostBuffer, E>>,
    shape: [usize; 2],
    dtype: DType,
) -> Result<TensorData, E> {
    let expected = shape[0] * shape[1] * dtype.size();
    let mut buffers = buffers.into_iter();
    let first = buffers.next().transpose()?;
    let mut bytes: Vec<u8> = first.map_or_else(Vec::new, |first| first.into_memory().expect("the default is a Vec"));
    // Reserve space for any further buffers at once.
    bytes.reserve_exact(expected.saturating_sub(bytes.len()));
    for buffer in buffers {
        bytes.extend_from_slice(&buffer?);
    }
    assert_eq!(bytes.len(), expected, "a tensor of shape {shape:?} in {dtype:?} has {expected} bytes");
    Ok(TensorData::from_bytes_vec(bytes, shape, dtype))
}
