//! Host memory that the device copies from and to at full speed, and while the host does other things.
//!
//! What it gives up: pinned pages cannot be swapped out and take long to allocate (they are touched here, all of them), so a
//! buffer is made once and reused.

use std::ops::{Deref, DerefMut};
use std::ptr::{self, NonNull};
use std::slice;

use cudarc::driver::result;
use cudarc::driver::sys::CU_MEMHOSTALLOC_PORTABLE;

use crate::{Context, CudaError};

/// Page-locked bytes on the host, good for copies with every device of this process; zero when new.
///
/// The copies of [`crate::Stream`] run after the call that asks for them has returned: their `unsafe` is the promise that
/// nobody touches the range in the meantime, which the slices that this derefs to cannot know.
pub struct PinnedBuffer {
    context: Context,
    address: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the memory belongs to this value alone, and the driver frees it from any thread.
unsafe impl Send for PinnedBuffer {}
// SAFETY: a shared reference only gives shared slices.
unsafe impl Sync for PinnedBuffer {}

impl PinnedBuffer {
    /// Allocates `bytes` bytes and sets them to zero.
    ///
    /// # Errors
    /// What the driver says; [`CudaError::is_out_of_memory`] tells whether the host has too few pages to pin.
    pub fn new(context: &Context, bytes: usize) -> Result<Self, CudaError> {
        // cuMemHostAlloc refuses 0 bytes.
        let allocate = || {
            // SAFETY: a context is current; what is allocated is freed once, in `drop`.
            let address = unsafe { result::malloc_host(bytes.max(1), CU_MEMHOSTALLOC_PORTABLE) };
            context.driver().checked("cuMemHostAlloc", address)
        };
        let address = context.with_current(allocate)?;
        let address = NonNull::new(address.cast::<u8>()).expect("cuMemHostAlloc succeeds with an address");
        // SAFETY: the allocation has at least `bytes` bytes and nobody else knows of it. Slices need initialised memory.
        unsafe { ptr::write_bytes(address.as_ptr(), 0, bytes) };
        Ok(Self { context: context.clone(), address, bytes })
    }

    /// How many bytes were asked for.
    pub fn len_bytes(&self) -> usize {
        self.bytes
    }

    /// The first byte, for copies that outlive this borrow.
    pub(crate) fn address(&self) -> *mut u8 {
        self.address.as_ptr()
    }
}

impl Deref for PinnedBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `bytes` initialised bytes that live as long as `self`; that no copy of the device writes them now is the
        // promise of whoever asked for the copy.
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
            // SAFETY: made by cuMemHostAlloc and freed once; that no copy is under way is the promise of whoever asked for
            // it. The status is dropped: it is an error only when the driver is already shutting down with the process.
            let _ = unsafe { result::free_host(self.address.as_ptr().cast()) };
            Ok(())
        });
    }
}
