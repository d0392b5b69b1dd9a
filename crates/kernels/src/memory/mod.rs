//! Where tensors live and when: sections of device work, host buffers, tensors that wait in host memory, and the estimates of what a
//! run needs and of the work it does.
//!
//! Trade-off: a backend without memory of its own (the CPU) inherits bodies that move nothing.

#[cfg(feature = "flex")]
pub(crate) mod conformance;
pub mod estimate;
pub mod evaluation;
mod host_buffer;
mod offload;
pub mod prefetch;
mod readback;
pub mod training_shape;
pub mod work;

use std::convert::Infallible;

use burn_tensor::{DType, Int, Tensor, TensorData, backend::Backend};

pub use host_buffer::HostBuffer;
pub use offload::Offloaded;
pub use readback::Readback;

#[cfg(feature = "cuda")]
pub(crate) use host_buffer::Memory;
#[cfg(feature = "cuda")]
pub(crate) use offload::Elsewhere;
#[cfg(feature = "cuda")]
pub(crate) use readback::Numbers;

/// Memory and ordering of device work.
pub trait MemoryOps: Backend {
    /// Keeps the threads of this process, those that it will start included, on the processors near the device, and with them pinned
    /// memory, which the system allocates near the thread that asks for it. Returns what was done, for the log; `None` where the device
    /// is not near one part of the machine, or the system does not say which.
    fn stay_near(device: &Self::Device) -> Option<String> {
        let _ = device;
        None
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

    /// Bytes that this thread's memory pools hold on the device. `None` where no pools are kept, or the driver reports the card's memory.
    fn allocated_bytes(device: &Self::Device) -> Option<u64> {
        let _ = device;
        None
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

    /// Moves a tensor out of the way until its backward; where the backend can, into host memory, copied while other work runs.
    fn offload(x_nd: Tensor<Self, 2>) -> Offloaded<Self> {
        Offloaded::on_device(x_nd)
    }

    /// Lets go of what offloaded tensors still take on the device, so that later work, which waits for their copies, can have the memory.
    fn settle_offloads(device: &Self::Device) {
        let _ = device;
    }

    /// Starts to bring a tensor back, so that [`MemoryOps::restore`] need not wait.
    fn prefetch(offloaded: &mut Offloaded<Self>, device: &Self::Device) {
        let _ = (offloaded, device);
    }

    /// The tensor that was offloaded, bit for bit.
    fn restore(offloaded: Offloaded<Self>, device: &Self::Device) -> Tensor<Self, 2> {
        let _ = device;
        match offloaded.into_parts::<Infallible>() {
            Ok(x_nd) => x_nd,
            Err(never) => match never {},
        }
    }

    /// [`MemoryOps::offload`] for the codes of quantized optimizer state.
    fn offload_codes(codes: Tensor<Self, 2, Int>) -> Offloaded<Self, Int> {
        Offloaded::on_device(codes)
    }

    /// [`MemoryOps::prefetch`] for codes.
    fn prefetch_codes(offloaded: &mut Offloaded<Self, Int>, device: &Self::Device) {
        let _ = (offloaded, device);
    }

    /// [`MemoryOps::restore`] for codes.
    fn restore_codes(offloaded: Offloaded<Self, Int>, device: &Self::Device) -> Tensor<Self, 2, Int> {
        let _ = device;
        match offloaded.into_parts::<Infallible>() {
            Ok(codes) => codes,
            Err(never) => match never {},
        }
    }

    /// Starts to copy values `[1]` f32 to the host. The host does not wait until it reads them, and then not for work that is queued
    /// after this call. This body reads when the values are waited for, behind everything queued by then.
    ///
    /// # Panics
    /// On CUDA, without values.
    fn read_later(values: Vec<Tensor<Self, 1>>) -> Readback {
        Readback::new(readback::OnDevice(values))
    }

    /// Milliseconds for which the device has waited for restored tensors since the last call, to be read later as one number: what
    /// the copies cost beyond the work that they run next to. 0 where nothing is kept elsewhere.
    fn restore_wait(device: &Self::Device) -> Readback {
        let _ = device;
        Readback::new(readback::Known(vec![0.0]))
    }

    /// Lets the device keep this many bytes of converted frozen weights from one pass to the next: for the forward, and for the
    /// backward. Backends that convert nothing, or in another way, ignore it.
    fn keep_weights(device: &Self::Device, bytes: [u64; 2]) {
        let _ = (device, bytes);
    }

    /// Tells what [`MemoryOps::make_room`] counts with: a pass over `tokens` tokens takes up to `bytes` on the device and in host memory, in
    /// addition to parameters, gradients and optimizer state.
    fn expect_passes(device: &Self::Device, bytes: [u64; 2], tokens: usize) {
        let _ = (device, bytes, tokens);
    }

    /// Before a pass over `tokens` tokens: where pools keep buffers of exact sizes, returns what passes over other numbers of tokens left
    /// there, if the device has too little left for this pass or the host's buffers are more than the largest pass needs. Not inside a
    /// section.
    fn make_room(device: &Self::Device, tokens: usize) {
        let _ = (device, tokens);
    }

    /// Allocates, while other work runs, what [`MemoryOps::offload`] will need for `count` tensors of `bytes` bytes.
    fn reserve_offload(device: &Self::Device, count: usize, bytes: usize) {
        let _ = (device, count, bytes);
    }
}
