//! Asynchronous copies between host and device, in the order of a stream.
//!
//! All copies return at once and happen when the stream reaches them. Until then, memory on both sides must stay
//! allocated, and the host must not access its side. An [`crate::Event`] recorded after the copy marks its end. The
//! calls are `unsafe` for this reason, since no borrow lasts long enough.
//!
//! Not supported: pageable host memory (copies from it are not asynchronous), and copies within the device.

use cudarc::driver::sys;

use crate::error::CudaError;
use crate::memory::PinnedBuffer;
use crate::stream::Stream;

impl Stream {
    /// Copies the first `bytes` bytes of `source` to `target`.
    ///
    /// # Safety
    /// `target` has room for them in memory of this stream's device. Until the copy is done, both sides stay allocated, the
    /// host does not write its side, and no other device work accesses the target.
    ///
    /// # Panics
    /// If the buffer has fewer bytes.
    pub unsafe fn copy_to_device(&self, target: u64, source: &PinnedBuffer, bytes: usize) -> Result<(), CudaError> {
        check_length(bytes, source.len());
        if bytes == 0 {
            return Ok(());
        }
        self.context().with_current(|| {
            let from = source.address().cast_const().cast();
            // SAFETY: the length of the host side was checked; the device side and the lifetimes are the caller's promise.
            let copied = unsafe { sys::cuMemcpyHtoDAsync_v2(target, from, bytes, self.handle()) };
            self.context().driver().checked("cuMemcpyHtoDAsync", copied.result())
        })
    }

    /// Copies `bytes` bytes from `source` to the beginning of `target`.
    ///
    /// # Safety
    /// `source` has as many bytes in memory of this stream's device. Until the copy is done, both sides stay allocated, the host
    /// neither reads nor writes its side and holds no slice of it (the buffer is a shared reference only so that it can be in
    /// an `Arc`), and no other device work writes the source.
    ///
    /// # Panics
    /// If the buffer has fewer bytes.
    pub unsafe fn copy_to_host(&self, target: &PinnedBuffer, source: u64, bytes: usize) -> Result<(), CudaError> {
        check_length(bytes, target.len());
        if bytes == 0 {
            return Ok(());
        }
        self.context().with_current(|| {
            let to = target.address().cast();
            // SAFETY: the length of the host side was checked; the device side and the lifetimes are the caller's promise. The
            // address is the driver's own, not derived from a shared reference to the bytes.
            let copied = unsafe { sys::cuMemcpyDtoHAsync_v2(to, source, bytes, self.handle()) };
            self.context().driver().checked("cuMemcpyDtoHAsync", copied.result())
        })
    }
}

fn check_length(bytes: usize, buffer: usize) {
    assert!(bytes <= buffer, "a copy of {bytes} bytes with a pinned buffer of {buffer} bytes");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[should_panic(expected = "a copy of 9 bytes with a pinned buffer of 8 bytes")]
    fn a_copy_longer_than_its_buffer_is_refused() {
        check_length(9, 8);
    }
}
