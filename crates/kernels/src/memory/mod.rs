//! Where tensors live and when: sections of device work, host buffers, tensors that wait in host memory, and the estimates of what a
//! run needs and of the work it does.
//!
//! Trade-off: a backend without memory of its own (the CPU) inherits bodies that move nothing.

#[cfg(feature = "flex")]
pub(crate) mod conformance;
pub mod estimate;
pub mod evaluation;
mod host;
pub mod prefetch;
mod run_shape;
pub mod training_shape;
pub mod work;

use burn_tensor::{DType, Tensor, TensorData, backend::Backend};

use crate::comm::Payload;
pub use host::{HostBuffer, Offloaded, Readback};
pub use run_shape::{DeviceTime, GemmAlgorithms, Hint, RunShape};

#[cfg(feature = "cuda")]
pub(crate) use host::{Elsewhere, Memory, Numbers};

/// Memory and ordering of device work.
pub trait MemoryOps: Backend {
    /// The device of the rank with this number on its machine.
    fn device_of(local_rank: usize) -> Self::Device {
        let _ = local_rank;
        Self::Device::default()
    }

    /// Tells what a run will do with the device, before its model is built. Backends that prepare nothing ignore it.
    fn open(device: &Self::Device, shape: &RunShape) {
        let _ = (device, shape);
    }

    /// Tells what comes next, so that a backend can prepare for it; most ignore it.
    fn hint(device: &Self::Device, hint: Hint<'_, Self>) {
        let _ = (device, hint);
    }

    /// Runs a stretch of work in which only operations of `Kernels` touch the device.
    ///
    /// A backend with a stream of its own meets the rest of the device's work only at the edges of the stretch, instead of around
    /// each operation. Sections may nest; the outermost counts. Ordinary Burn operations belong into [`MemoryOps::pause`].
    ///
    /// Other threads may use Burn on the device at any time, with three limits. A tensor that an unfinished section has made is not handed to
    /// them. A tensor that they have changed in place since the section began is not handed to it. While a section may update a tensor in
    /// place (parameters, optimizer state, sums, what a backward takes), a thread that reads it keeps its clone until the values have arrived.
    fn section<R>(device: &Self::Device, work: impl FnOnce() -> R) -> R {
        let _ = device;
        work()
    }

    /// Runs ordinary Burn operations in the middle of a section, ordered after everything before and ahead of everything after.
    fn pause<R>(device: &Self::Device, work: impl FnOnce() -> R) -> R {
        let _ = device;
        work()
    }

    /// Returns memory that is kept for reuse to the driver: after loading, or when the sizes of tensors change.
    fn release_memory(device: &Self::Device) {
        Self::memory_cleanup(device);
    }

    /// Host memory to fill with a tensor's bytes for [`MemoryOps::upload`]; from any thread.
    fn host_buffer(device: &Self::Device, bytes: usize) -> HostBuffer {
        let _ = device;
        HostBuffer::new(vec![0; bytes])
    }

    /// A matrix of the bytes of buffers, one after the other: row-major and in the machine's byte order. A buffer is on its way to the
    /// device before the next one is requested, where the backend can. `buffers` runs no Burn operation: it may be inside a section.
    ///
    /// # Errors
    /// The first that `buffers` has.
    ///
    /// # Panics
    /// If the buffers do not have the bytes of the shape.
    fn upload<E>(
        buffers: impl IntoIterator<Item = Result<HostBuffer, E>>,
        shape: [usize; 2],
        dtype: DType,
        device: &Self::Device,
    ) -> Result<Tensor<Self, 2>, E> {
        let expected = shape[0] * shape[1] * dtype.size();
        let mut buffers = buffers.into_iter();
        let first = buffers.next().transpose()?;
        let mut bytes: Vec<u8> =
            first.map_or_else(Vec::new, |first| first.into_memory().expect("the default is a Vec"));
        // Room for the rest at once, should there be one.
        bytes.reserve_exact(expected.saturating_sub(bytes.len()));
        for buffer in buffers {
            bytes.extend_from_slice(&buffer?);
        }
        assert_eq!(bytes.len(), expected, "a tensor of shape {shape:?} in {dtype:?} has {expected} bytes");
        Ok(Tensor::from_data(TensorData::from_bytes_vec(bytes, shape, dtype), (device, dtype)))
    }

    /// Moves a tensor out of the way until it is needed again; where the backend can, into host memory, copied while
    /// other work runs.
    fn offload(x: Payload<Self, 2>) -> Offloaded<Self> {
        Offloaded::on_device(x)
    }

    /// Ranges of the first axis, in order, by their starts and lengths. They share the tensor's memory where the
    /// backend can.
    fn slices<const D: usize>(x: Tensor<Self, D>, ranges: &[(usize, usize)]) -> Vec<Tensor<Self, D>> {
        ranges.iter().map(|&(start, length)| x.clone().narrow(0, start, length)).collect()
    }

    /// Starts to copy values `[1]` f32 to the host. The host does not wait until it reads them, and then not for work that is queued
    /// after this call. This body reads when the values are waited for, behind everything queued by then.
    ///
    /// # Panics
    /// On CUDA, without values.
    fn read_later(values: Vec<Tensor<Self, 1>>) -> Readback {
        Readback::new(host::OnDevice(values))
    }

    /// Milliseconds of the device since the last call for the same, to be read later as one number. `None` where it is
    /// not measured.
    fn device_time(device: &Self::Device, of: DeviceTime) -> Option<Readback> {
        let _ = (device, of);
        None
    }
}
