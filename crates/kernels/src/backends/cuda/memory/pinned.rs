//! Pinned host memory: a pool of buffers per device that any thread may use.

use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cubecl::cuda::CudaDevice;
use firebrick_cuda::{Context, CudaError, Driver, PinnedBuffer};

use crate::backends::cuda::engine::check;

/// Unused pinned buffers, shared with the threads that fill them.
#[derive(Clone, Default)]
pub(crate) struct Pool(Arc<Mutex<Vec<PinnedBuffer>>>);

impl Pool {
    fn lock(&self) -> MutexGuard<'_, Vec<PinnedBuffer>> {
        // No code under the lock can panic.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a buffer of exactly `bytes`, from the pool or new.
    pub(crate) fn take(&self, context: &Context, bytes: usize) -> Result<PinnedBuffer, CudaError> {
        let mut free = self.lock();
        if let Some(index) = free.iter().position(|buffer| buffer.len() == bytes) {
            return Ok(free.swap_remove(index));
        }
        drop(free);
        PinnedBuffer::new(context, bytes)
    }

    /// Returns such a buffer, which returns to the pool when dropped. The caller keeps it until its copies are done.
    pub(crate) fn lend(&self, context: &Context, bytes: usize) -> Result<Lent, CudaError> {
        Ok(Lent { buffer: Some(self.take(context, bytes)?), pool: self.clone() })
    }

    pub(crate) fn put(&self, buffer: PinnedBuffer) {
        self.lock().push(buffer);
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.lock().iter().map(|buffer| buffer.len() as u64).sum()
    }

    pub(crate) fn clear(&self) {
        self.lock().clear();
    }
}

/// Pinned memory that comes from a pool and returns to it.
pub(crate) struct Lent {
    buffer: Option<PinnedBuffer>,
    pool: Pool,
}

impl Lent {
    pub(crate) fn pinned(&self) -> &PinnedBuffer {
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

impl Drop for Lent {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            self.pool.put(buffer);
        }
    }
}

/// Returns context and pool of a device, for threads without their own engine.
pub(crate) fn shared(device: &CudaDevice) -> (Context, Pool) {
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
