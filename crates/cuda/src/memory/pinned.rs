//! Pinned host memory: the device copies from and to it at full speed and asynchronously.
//!
//! Trade-off: pinned pages cannot be swapped out and are slow to allocate (all of them are written here), so allocate a buffer
//! once and reuse it.

use std::ops::{Deref, DerefMut};
use std::ptr::{self, NonNull};
use std::slice;

use cudarc::driver::result;
use cudarc::driver::sys::CU_MEMHOSTALLOC_PORTABLE;

use crate::context::Context;
use crate::error::CudaError;

/// Page-locked bytes on the host, usable for copies with every device of this process, and initially zero.
///
/// Copies of [`crate::Stream`] run after the call has returned. Their `unsafe` is the promise that the range is not accessed
/// in the meantime, which the slices that this derefs to cannot check.
pub struct PinnedBuffer {
    context: Context,
    address: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the memory belongs to this value alone, and may be freed from any thread.
unsafe impl Send for PinnedBuffer {}
// SAFETY: a shared reference only gives shared slices.
unsafe impl Sync for PinnedBuffer {}

impl PinnedBuffer {
    /// Allocates `bytes` bytes and sets them to zero.
    ///
    /// # Errors
    /// Errors of the driver; [`CudaError::is_out_of_memory`] tells whether the host has too few pages to pin.
    pub fn new(context: &Context, bytes: usize) -> Result<Self, CudaError> {
        // cuMemHostAlloc refuses 0 bytes.
        let allocate = || {
            // SAFETY: a context is current, and the allocation is freed once, in `drop`.
            let address = unsafe { result::malloc_host(bytes.max(1), CU_MEMHOSTALLOC_PORTABLE) };
            context.driver().checked("cuMemHostAlloc", address)
        };
        let address = context.with_current(allocate)?;
        let address = NonNull::new(address.cast::<u8>()).expect("cuMemHostAlloc returns an address on success");
        // SAFETY: the allocation has at least `bytes` bytes, and nothing else refers to it. Slices need initialized memory.
        unsafe { ptr::write_bytes(address.as_ptr(), 0, bytes) };
        Ok(Self { context: context.clone(), address, bytes })
    }

    /// The requested number of bytes.
    pub fn len_bytes(&self) -> usize {
        self.bytes
    }

    /// The address of the first byte, for copies that outlive this borrow.
    pub(crate) fn address(&self) -> *mut u8 {
        self.address.as_ptr()
    }
}

impl Deref for PinnedBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: these are `bytes` initialized bytes that live as long as `self`. The caller of a copy promised that the
        // device does not write them now.
        unsafe { slice::from_raw_parts(self.address.as_ptr(), self.bytes) }
    }
}

impl DerefMut for PinnedBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `&mut self` is the only reference.
        unsafe { slice::from_raw_parts_mut(self.address.as_ptr(), self.bytes) }
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        let _ = self.context.with_current(|| {
            // SAFETY: allocated by cuMemHostAlloc and freed once. The caller of a copy promised that none is in progress. The
            // status is ignored: it is an error only if the driver is already shutting down with the process.
            let _ = unsafe { result::free_host(self.address.as_ptr().cast()) };
            Ok(())
        });
    }
}
