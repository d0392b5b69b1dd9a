//! Memory outside CubeCL's pool: device memory for libraries and kernels in addition to tensors, and host memory for copies.
//!
//! Trade-off: no pool. An allocation takes tens of microseconds or more, and freeing waits for the device, so allocate a
//! buffer once and reuse it, not in every step.

mod pinned;

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{CUdeviceptr, CUresult};

pub use pinned::PinnedBuffer;

use crate::context::Context;
use crate::error::CudaError;

/// In debug builds, the buffers of all devices: bytes by device and address.
static LIVE: Mutex<BTreeMap<(usize, u64), u64>> = Mutex::new(BTreeMap::new());

/// Bytes of device memory, freed on drop and not initialized.
pub struct DeviceBuffer {
    context: Context,
    address: CUdeviceptr,
    bytes: usize,
}

impl DeviceBuffer {
    /// Allocates `bytes` bytes, aligned to 256 (as `cuMemAlloc` guarantees).
    pub fn new(context: &Context, bytes: usize) -> Result<Self, CudaError> {
        // cuMemAlloc rejects 0 bytes; one unused byte gives a valid address.
        // SAFETY: a context is current, and the allocation is freed once, in `drop`.
        let allocate = || Ok(unsafe { result::malloc_sync(bytes.max(1)) });
        match context.with_current(allocate)? {
            Ok(address) => {
                if cfg!(debug_assertions) {
                    let key = (context.ordinal(), address);
                    LIVE.lock().unwrap_or_else(PoisonError::into_inner).insert(key, bytes as u64);
                }
                Ok(Self { context: context.clone(), address, bytes })
            }
            Err(DriverError(CUresult::CUDA_ERROR_OUT_OF_MEMORY)) => {
                let memory = context.memory()?;
                Err(CudaError::OutOfMemory {
                    requested_bytes: bytes as u64,
                    free_bytes: memory.free_bytes,
                    total_bytes: memory.total_bytes,
                })
            }
            Err(error) => context.driver().checked("cuMemAlloc", Err(error)),
        }
    }

    /// Returns whether a buffer of this device contains these bytes. Release builds always return false.
    pub fn is_live(context: &Context, address: u64, bytes: u64) -> bool {
        let live = LIVE.lock().unwrap_or_else(PoisonError::into_inner);
        let before = live.range((context.ordinal(), 0)..=(context.ordinal(), address)).next_back();
        before.is_some_and(|((_, start), size)| address + bytes <= start + size)
    }

    /// Returns the requested number of bytes.
    pub fn len_bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the address of the first byte. The caller must keep the buffer alive while the device uses it.
    pub fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        if cfg!(debug_assertions) {
            LIVE.lock().unwrap_or_else(PoisonError::into_inner).remove(&(self.context.ordinal(), self.address));
        }
        let _ = self.context.with_current(|| {
            // SAFETY: allocated by cuMemAlloc in this context and freed once. cuMemFree waits for work submitted before it. The
            // status is ignored: it is an error only if the driver is already shutting down with the process, or if the
            // context is lost and its memory with it.
            let _ = unsafe { result::free_sync(self.address) };
            Ok(())
        });
    }
}
