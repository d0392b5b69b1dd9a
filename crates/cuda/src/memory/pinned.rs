//! Pinned host memory: the device copies from and to it at full speed and asynchronously.
//!
//! Large buffers are system pages that several threads first write, as huge pages if the system has them, and that are then locked: on an H100
//! machine 16 buffers of 268 MB took 0.24 s with eight threads, where the driver's own allocation took 2.5 s with one thread and 2.0 s with four.
//! Trade-off: pinned pages cannot be swapped out, and locking them takes time, so allocate a buffer once and reuse it.

use std::ffi::c_void;
use std::ops::{Deref, DerefMut};
use std::ptr::{self, NonNull};
use std::sync::Once;
use std::{mem, slice, thread};

use cudarc::driver::result;
use cudarc::driver::sys::{self, CU_MEMHOSTALLOC_PORTABLE, CU_MEMHOSTREGISTER_PORTABLE};
use memmap2::MmapMut;

use crate::context::Context;
use crate::error::CudaError;

/// Minimum bytes of a buffer in separate system pages.
const LARGE: usize = 4 << 20;
/// Bytes of a huge page, and the minimum that a thread writes.
const HUGE_PAGE: usize = 2 << 20;
const BYTES_PER_THREAD: usize = 8 * HUGE_PAGE;
const SMALLEST_PAGE: usize = 4096;
const MAX_THREADS: usize = 8;

/// Warns once if large buffers cannot be system pages.
static REFUSED: Once = Once::new();

/// Page-locked bytes on the host, usable for copies with every device of this process, and initially zero.
///
/// Copies of [`crate::Stream`] run after the call has returned. Their `unsafe` contract is that the range is not
/// accessed in the meantime, which the slices that this derefs to cannot check.
pub struct PinnedBuffer {
    context: Context,
    address: NonNull<u8>,
    bytes: usize,
    /// The pages at the address; `None` if the driver allocated them.
    pages: Option<MmapMut>,
}

// SAFETY: the memory belongs to this value alone, and may be freed from any thread.
unsafe impl Send for PinnedBuffer {}
// SAFETY: a shared reference only gives shared slices.
unsafe impl Sync for PinnedBuffer {}

impl PinnedBuffer {
    /// Allocates `bytes` bytes and sets them to zero.
    ///
    /// # Errors
    /// Errors of the driver; [`CudaError::is_out_of_memory`] indicates whether the host has too few pages to pin. On
    /// Linux, a host that overcommitted its memory may kill the process while a large buffer is written.
    pub fn new(context: &Context, bytes: usize) -> Result<Self, CudaError> {
        // If the system has no pages, or the driver cannot lock existing ones (not every platform can), the driver
        // allocates, or reports what is missing.
        if bytes >= LARGE {
            match Self::of_pages(context, bytes) {
                Ok(buffer) => return Ok(buffer),
                Err(why) => REFUSED.call_once(|| {
                    tracing::warn!(
                        "large pinned buffers come from the driver, which takes several times as long: {why}"
                    );
                }),
            }
        }
        // cuMemHostAlloc rejects 0 bytes.
        let allocate = || {
            // SAFETY: a context is current, and the allocation is freed once, in `drop`.
            let address = unsafe { result::malloc_host(bytes.max(1), CU_MEMHOSTALLOC_PORTABLE) };
            context.driver().checked("cuMemHostAlloc", address)
        };
        let address = context.with_current(allocate)?;
        let address = NonNull::new(address.cast::<u8>()).expect("cuMemHostAlloc returns an address on success");
        // SAFETY: the allocation has at least `bytes` bytes, and nothing else refers to it. Slices need initialized memory.
        unsafe { ptr::write_bytes(address.as_ptr(), 0, bytes) };
        Ok(Self { context: context.clone(), address, bytes, pages: None })
    }

    fn of_pages(context: &Context, bytes: usize) -> Result<Self, String> {
        let mut pages = MmapMut::map_anon(bytes).map_err(|error| error.to_string())?;
        #[cfg(target_os = "linux")]
        // This is only advice: without it pages are small, which is slower but works as well.
        let _ = pages.advise(memmap2::Advice::HugePage);
        touch(&mut pages);
        let address = NonNull::new(pages.as_mut_ptr()).expect("a mapping has an address");
        let register = || {
            // SAFETY: these are `bytes` bytes of a mapping that this value owns. They are unregistered in `drop`, before the mapping goes.
            let status = unsafe {
                sys::cuMemHostRegister_v2(address.as_ptr().cast::<c_void>(), bytes, CU_MEMHOSTREGISTER_PORTABLE)
            };
            context.driver().checked("cuMemHostRegister", status.result())
        };
        context.with_current(register).map_err(|error| error.to_string())?;
        Ok(Self { context: context.clone(), address, bytes, pages: Some(pages) })
    }

    /// Returns the address of the first byte, for copies that outlive this borrow.
    pub(crate) fn address(&self) -> *mut u8 {
        self.address.as_ptr()
    }
}

/// Writes a byte to every page, so that the system allocates it now, with a number of threads that suits the bytes.
fn touch(pages: &mut [u8]) {
    let processors = thread::available_parallelism().map_or(1, usize::from);
    let threads = (pages.len() / BYTES_PER_THREAD).clamp(1, processors.min(MAX_THREADS));
    let share = pages.len().div_ceil(threads).next_multiple_of(HUGE_PAGE);
    let write = |part: &mut [u8]| part.iter_mut().step_by(SMALLEST_PAGE).for_each(|byte| *byte = 0);
    if threads == 1 {
        return write(pages);
    }
    thread::scope(|scope| {
        for part in pages.chunks_mut(share) {
            scope.spawn(move || write(part));
        }
    });
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
        let is_freed = self.context.with_current(|| {
            let address = self.address.as_ptr().cast::<c_void>();
            // SAFETY: allocated by cuMemHostAlloc, or registered; undone once, and before the pages go. The caller of a copy promised that
            // none is in progress.
            let freed = unsafe {
                match self.pages {
                    Some(_) => sys::cuMemHostUnregister(address).result(),
                    None => result::free_host(address),
                }
            };
            self.context.driver().checked("freeing pinned memory", freed)
        });
        // This fails only if the driver is already shutting down with the process. Keep pages that it still has pinned.
        if is_freed.is_err() {
            mem::forget(self.pages.take());
        }
    }
}
