//! Copies between host and device, and on the device, in the order of a stream.
//!
//! All of them return at once. What was asked for happens when the stream gets there, so memory of both sides must stay
//! allocated until then, and the host must leave its side alone: an [`crate::Event`] recorded behind the copy says when. That
//! is what each `unsafe` here asks for, since no borrow lasts long enough.

use cudarc::driver::sys;

use crate::{CudaError, DevicePointer, PinnedBuffer, Stream};

impl Stream {
    /// Copies the first `bytes` bytes of `source` to `target` and what follows it.
    ///
    /// # Safety
    /// `target` has room for them in memory of this stream's device. Until the copy is done: both sides stay allocated, the
    /// host does not write its side, and no other device work touches the target.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// When the buffer has fewer bytes.
    pub unsafe fn copy_to_device(
        &self,
        target: DevicePointer<u8>,
        source: &PinnedBuffer,
        bytes: usize,
    ) -> Result<(), CudaError> {
        check_length(bytes, source.len_bytes());
        if bytes == 0 {
            return Ok(());
        }
        self.context().with_current(|| {
            let from = source.address().cast_const().cast();
            // SAFETY: the host side was checked; the device side and the time are the caller's promise.
            let copied = unsafe { sys::cuMemcpyHtoDAsync_v2(target.address(), from, bytes, self.handle()) };
            self.context().driver().checked("cuMemcpyHtoDAsync", copied.result())
        })
    }

    /// Copies `bytes` bytes from `source` and what follows it to the beginning of `target`.
    ///
    /// # Safety
    /// `source` has as many bytes in memory of this stream's device. From now until the copy is done: both sides stay
    /// allocated, the host neither reads nor writes its side (it is taken by shared reference so that an `Arc` will do, and
    /// no slice of it may be held), and no other device work writes the source.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// When the buffer has fewer bytes.
    pub unsafe fn copy_to_host(
        &self,
        target: &PinnedBuffer,
        source: DevicePointer<u8>,
        bytes: usize,
    ) -> Result<(), CudaError> {
        check_length(bytes, target.len_bytes());
        if bytes == 0 {
            return Ok(());
        }
        self.context().with_current(|| {
            let to = target.address().cast();
            // SAFETY: the host side was checked; the device side and the time are the caller's promise. The address is that
            // which the driver gave, not one made from a shared reference to the bytes.
            let copied = unsafe { sys::cuMemcpyDtoHAsync_v2(to, source.address(), bytes, self.handle()) };
            self.context().driver().checked("cuMemcpyDtoHAsync", copied.result())
        })
    }

    /// Copies `bytes` bytes from one place on this stream's device to another.
    ///
    /// # Safety
    /// Both places have that many bytes on this stream's device and do not overlap. Until the copy is done: both stay
    /// allocated, and no other device work writes the source or touches the target.
    ///
    /// # Errors
    /// What the driver says.
    pub unsafe fn copy_on_device(
        &self,
        target: DevicePointer<u8>,
        source: DevicePointer<u8>,
        bytes: usize,
    ) -> Result<(), CudaError> {
        if bytes == 0 {
            return Ok(());
        }
        self.context().with_current(|| {
            let (to, from) = (target.address(), source.address());
            // SAFETY: the caller's promise is the one that is asked for.
            let copied = unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, bytes, self.handle()) };
            self.context().driver().checked("cuMemcpyDtoDAsync", copied.result())
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
    fn all_of_a_buffer_can_be_copied() {
        check_length(8, 8);
        check_length(0, 0);
    }

    #[test]
    #[should_panic(expected = "a copy of 9 bytes with a pinned buffer of 8 bytes")]
    fn more_than_a_buffer_has_is_refused() {
        check_length(9, 8);
    }
}
