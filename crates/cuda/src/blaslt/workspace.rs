//! Device memory that cuBLASLt's kernels use for themselves.

use cudarc::driver::result;
use cudarc::driver::sys::CUdeviceptr;

use crate::{Context, CudaError};

/// Bytes of device memory, aligned to 256 (cuMemAlloc's promise), freed with their owner.
pub(super) struct Workspace {
    context: Context,
    address: CUdeviceptr,
    bytes: usize,
}

impl Workspace {
    pub(super) fn new(context: &Context, bytes: usize) -> Result<Self, CudaError> {
        let allocate = || {
            // cuMemAlloc refuses 0 bytes; a byte that no algorithm is told of keeps the address real.
            // SAFETY: a context is current; what is allocated is freed once, in `drop`.
            let address = unsafe { result::malloc_sync(bytes.max(1)) };
            context.driver().checked("cuMemAlloc", address)
        };
        Ok(Self { address: context.with_current(allocate)?, context: context.clone(), bytes })
    }

    pub(super) fn address(&self) -> u64 {
        self.address
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Workspace {
    fn drop(&mut self) {
        let _ = self.context.with_current(|| {
            // SAFETY: made by cuMemAlloc in this context and freed once; the driver waits for work that uses it. The status is
            // dropped: it is an error only when the driver is already shutting down with the process.
            let _ = unsafe { result::free_sync(self.address) };
            Ok(())
        });
    }
}
