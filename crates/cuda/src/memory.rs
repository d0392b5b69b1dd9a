//! Memory of our own, apart from CubeCL's pool: what libraries and kernels need beside tensors, and host memory to copy with.
//!
//! What it gives up: no pool. Allocating takes the driver tens of microseconds and more, and freeing waits for the device, so a
//! buffer is made once and reused, not made anew in a step.

mod pinned;

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{CUdeviceptr, CUresult};

pub use pinned::PinnedBuffer;

use crate::stream::same_device;
use crate::{Context, CudaError, DevicePointer, Stream};

/// Bytes of device memory, freed with their owner. Fresh contents are whatever was there.
pub struct DeviceBuffer {
    context: Context,
    address: CUdeviceptr,
    bytes: usize,
}

impl DeviceBuffer {
    /// Allocates `bytes` bytes, aligned to 256 (`cuMemAlloc`'s promise).
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`], or what the driver says.
    pub fn new(context: &Context, bytes: usize) -> Result<Self, CudaError> {
        // cuMemAlloc refuses 0 bytes; a byte that nobody is told of keeps the address real.
        // SAFETY: a context is current; what is allocated is freed once, in `drop`.
        let allocate = || Ok(unsafe { result::malloc_sync(bytes.max(1)) });
        match context.with_current(allocate)? {
            Ok(address) => Ok(Self { context: context.clone(), address, bytes }),
            Err(DriverError(CUresult::CUDA_ERROR_OUT_OF_MEMORY)) => {
                let memory = context.memory()?;
                Err(CudaError::OutOfMemory {
                    asked_bytes: bytes as u64,
                    free_bytes: memory.free_bytes,
                    total_bytes: memory.total_bytes,
                })
            }
            Err(error) => context.driver().checked("cuMemAlloc", Err(error)),
        }
    }

    /// How many bytes were asked for.
    pub fn len_bytes(&self) -> usize {
        self.bytes
    }

    /// The first byte, as the first of elements of type `T`. The caller keeps the buffer alive while the device uses it.
    pub fn pointer<T>(&self) -> DevicePointer<T> {
        DevicePointer::from_address(self.address)
    }

    /// The context that the memory belongs to.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// Writes zeros to all of it when the stream gets there; the host does not wait. Not `unsafe`: nothing on the host sees
    /// this memory, and freeing it waits for the device.
    ///
    /// # Errors
    /// [`CudaError::DifferentDevices`], or what the driver says.
    pub fn fill_zero(&self, stream: &Stream) -> Result<(), CudaError> {
        same_device("cuMemsetD8Async", stream.context(), &self.context)?;
        if self.bytes == 0 {
            return Ok(());
        }
        self.context.with_current(|| {
            // SAFETY: the range is this allocation's, and `drop` frees it only when the device is done with it.
            let filled = unsafe { result::memset_d8_async(self.address, 0, self.bytes, stream.handle()) };
            self.context.driver().checked("cuMemsetD8Async", filled)
        })
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        let _ = self.context.with_current(|| {
            // SAFETY: made by cuMemAlloc in this context and freed once. cuMemFree waits for the work that the device was
            // given before it. The status is dropped: it is an error only when the driver is already shutting down with the
            // process, or when the context is lost and its memory with it.
            let _ = unsafe { result::free_sync(self.address) };
            Ok(())
        });
    }
}
