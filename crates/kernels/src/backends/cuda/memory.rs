//! Memory and ordering on CUDA: sections and pauses, pinned host buffers, uploads from them, and numbers that are read later.
//!
//! Pinned buffers come from a pool per device that any thread may use. A buffer returns to it when its upload is done.
//! Trade-off: buffers are reused only for exactly their size.

use std::any::Any;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn_tensor::backend::Backend;
use burn_tensor::{DType, Int, Tensor};
use cubecl::cuda::CudaDevice;
use firebrick_cuda::{Context, CudaError, Driver, Event, PinnedBuffer};

use super::engine::{Cuda, engine};
use super::failure::check;
use super::launch::at;
use super::offload;
use super::tensor::{float, int_tensor, tensor};
use crate::memory::Memory;
use crate::{HostBuffer, MemoryOps, Offloaded, Readback};

impl MemoryOps for Cuda {
    fn section<R>(device: &Self::Device, work: impl FnOnce() -> R) -> R {
        engine(device).section(work)
    }

    fn pause<R>(device: &Self::Device, work: impl FnOnce() -> R) -> R {
        engine(device).pause(work)
    }

    fn release_memory(device: &Self::Device) {
        let engine = engine(device);
        assert!(!engine.is_in_section(), "memory is not released inside a section: kernels may still use it");
        check("waiting for the device", engine.context().synchronize());
        engine.scratch.release();
        engine.copies.release();
        Self::memory_cleanup(device);
    }

    fn host_buffer(device: &Self::Device, bytes: usize) -> HostBuffer {
        let (context, pool) = shared(device);
        HostBuffer::new(check("allocating pinned memory", pool.lend(&context, bytes)))
    }

    fn upload(buffer: HostBuffer, shape: [usize; 2], dtype: DType, device: &Self::Device) -> Tensor<Self, 2> {
        let bytes = shape[0] * shape[1] * dtype.size();
        assert_eq!(buffer.len(), bytes, "a tensor of shape {shape:?} in {dtype:?} has {bytes} bytes");
        let engine = engine(device);
        let lent = buffer.into_memory::<Lent>().expect("a buffer of this backend");
        engine.section(|| {
            let matrix = engine.empty_matrix(shape[0], shape[1], dtype);
            // SAFETY: the tensor has the bytes of the buffer; the buffer is held below until the copy is done.
            let copied = unsafe { engine.stream().copy_to_device(at(matrix.address), lent.pinned(), bytes) };
            check("copying to the device", copied);
            let done = check("recording an event", Event::new(engine.context()));
            check("recording an event", engine.stream().record(&done));
            engine.copies.keep_until(lent, done);
            tensor(matrix.tensor)
        })
    }

    fn offload(x_nd: Tensor<Self, 2>) -> Offloaded<Self> {
        let engine = engine(&x_nd.device());
        Offloaded::elsewhere(offload::offload(&engine, float(x_nd)))
    }

    fn prefetch(offloaded: &mut Offloaded<Self>, device: &Self::Device) {
        offload::prefetch(&engine(device), offloaded.elsewhere_mut());
    }

    fn restore(offloaded: Offloaded<Self>, device: &Self::Device) -> Tensor<Self, 2> {
        offloaded.into_parts().unwrap_or_else(|copy| tensor(offload::restore(&engine(device), copy)))
    }

    fn offload_codes(codes: Tensor<Self, 2, Int>) -> Offloaded<Self, Int> {
        let engine = engine(&codes.device());
        Offloaded::elsewhere(offload::offload(&engine, codes.into_primitive()))
    }

    fn prefetch_codes(offloaded: &mut Offloaded<Self, Int>, device: &Self::Device) {
        offload::prefetch(&engine(device), offloaded.elsewhere_mut());
    }

    fn restore_codes(offloaded: Offloaded<Self, Int>, device: &Self::Device) -> Tensor<Self, 2, Int> {
        offloaded.into_parts().unwrap_or_else(|copy| int_tensor(offload::restore(&engine(device), copy)))
    }

    fn read_later(values: Vec<Tensor<Self, 1>>) -> Readback {
        let engine = engine(&values[0].device());
        let copied = engine.section(|| {
            let values = values.into_iter().map(|value| engine.flat(value)).collect();
            check("copying numbers to the host", engine.copies.numbers(&engine, values))
        });
        Readback::new(copied)
    }

    fn restore_wait(device: &Self::Device) -> Readback {
        Readback::new(engine(device).copies.take_waits())
    }

    fn reserve_offload(device: &Self::Device, count: usize, bytes: usize) {
        engine(device).copies.reserve(count, bytes);
    }
}

/// Pinned buffers that nothing uses, shared with the threads that fill them.
#[derive(Clone, Default)]
pub(super) struct Pool(Arc<Mutex<Vec<PinnedBuffer>>>);

impl Pool {
    fn lock(&self) -> MutexGuard<'_, Vec<PinnedBuffer>> {
        // Nothing that can panic happens under the lock.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A buffer of exactly `bytes`, from the pool or new.
    pub(super) fn take(&self, context: &Context, bytes: usize) -> Result<PinnedBuffer, CudaError> {
        let mut free = self.lock();
        if let Some(index) = free.iter().position(|buffer| buffer.len() == bytes) {
            return Ok(free.swap_remove(index));
        }
        drop(free);
        PinnedBuffer::new(context, bytes)
    }

    /// The same, returned to the pool when it is dropped. The caller keeps it until its copies are done.
    pub(super) fn lend(&self, context: &Context, bytes: usize) -> Result<Lent, CudaError> {
        Ok(Lent { buffer: Some(self.take(context, bytes)?), pool: self.clone() })
    }

    pub(super) fn put(&self, buffer: PinnedBuffer) {
        self.lock().push(buffer);
    }

    pub(super) fn clear(&self) {
        self.lock().clear();
    }
}

/// Pinned memory that comes from a pool and returns to it.
pub(super) struct Lent {
    buffer: Option<PinnedBuffer>,
    pool: Pool,
}

impl Lent {
    /// The buffer, for copies.
    pub(super) fn pinned(&self) -> &PinnedBuffer {
        self.buffer.as_ref().expect("a lent buffer is there until it is dropped")
    }
}

impl Deref for Lent {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.buffer.as_deref().unwrap_or_default()
    }
}

impl DerefMut for Lent {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.buffer.as_deref_mut().unwrap_or_default()
    }
}

impl Memory for Lent {
    fn into_any(self: Box<Self>) -> Box<dyn Any + Send> {
        self
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            self.pool.put(buffer);
        }
    }
}

/// Context and pool of a device, for threads that have no engine of their own.
pub(super) fn shared(device: &CudaDevice) -> (Context, Pool) {
    static POOLS: Mutex<Vec<(usize, Context, Pool)>> = Mutex::new(Vec::new());
    let mut pools = POOLS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, context, pool)) = pools.iter().find(|(index, ..)| *index == device.index) {
        return (context.clone(), pool.clone());
    }
    let context = Driver::load().and_then(|driver| Context::retain(&driver, device.index));
    let (context, pool) = (check("starting CUDA", context), Pool::default());
    pools.push((device.index, context.clone(), pool.clone()));
    (context, pool)
}
