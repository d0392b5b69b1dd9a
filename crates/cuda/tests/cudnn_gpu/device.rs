//! Device memory for the tests: filled when allocated, freed when dropped.
//!
//! Trade-off: all copies and fills are synchronous, which is slow and simple.

use std::ffi::c_void;

use cudarc::driver::{result, sys};
use firebrick_cuda::{Context, CudaError, Stream};

/// The byte of a NaN in the 16-bit types and in f32, so that memory that was not written shows.
pub(crate) const NAN: u8 = 0xFF;

pub(crate) struct Gpu {
    context: Context,
    pub(crate) stream: Stream,
    fill: u8,
}

pub(crate) struct Buffer {
    context: Context,
    pub(crate) address: u64,
}

impl Gpu {
    /// Allocates on the context's device; `fill` is the byte that buffers are filled with.
    pub(crate) fn new(context: &Context, fill: u8) -> Result<Self, CudaError> {
        Ok(Self { context: context.clone(), stream: Stream::new(context)?, fill })
    }

    /// Returns the bits of a 16-bit element that was not written.
    pub(crate) fn untouched(&self) -> u16 {
        u16::from_ne_bytes([self.fill; 2])
    }

    /// Returns a filled buffer of `bytes` bytes.
    pub(crate) fn buffer(&self, bytes: usize) -> Result<Buffer, CudaError> {
        let fill = self.fill;
        self.context.with_current(|| {
            // SAFETY: the memory is set right after it is allocated, and not used before.
            let address = unsafe {
                let address = result::malloc_sync(bytes).expect("device memory for the test");
                result::memset_d8_sync(address, fill, bytes).expect("memset of what was just allocated");
                address
            };
            Ok(Buffer { context: self.context.clone(), address })
        })
    }

    /// Sets the first `bytes` bytes of a buffer to 0.
    pub(crate) fn clear(&self, buffer: &Buffer, bytes: usize) -> Result<(), CudaError> {
        self.context.with_current(|| {
            // SAFETY: the buffers of the test are at least as long, and no work is pending when one is cleared.
            unsafe { result::memset_d8_sync(buffer.address, 0, bytes) }.expect("memset");
            Ok(())
        })
    }

    pub(crate) fn upload<T: Copy>(&self, address: u64, values: &[T]) -> Result<(), CudaError> {
        self.context.with_current(|| {
            // SAFETY: the callers pass addresses of buffers that are at least as long.
            unsafe { result::memcpy_htod_sync(address, values) }.expect("upload");
            // A copy from pageable memory returns once it is staged, and a stream of a test does not wait for it.
            result::ctx::synchronize().expect("upload");
            Ok(())
        })
    }

    /// Uploads rows of `width` 16-bit values into rows `stride` apart.
    pub(crate) fn upload_rows(
        &self,
        address: u64,
        stride: usize,
        width: usize,
        values: &[u16],
    ) -> Result<(), CudaError> {
        let host = values.as_ptr().cast_mut().cast();
        self.copy_rows(address, stride, width, values.len() / width, host, true)
    }

    pub(crate) fn download_rows(
        &self,
        address: u64,
        stride: usize,
        width: usize,
        rows: usize,
    ) -> Result<Vec<u16>, CudaError> {
        let mut values = vec![0_u16; rows * width];
        self.copy_rows(address, stride, width, rows, values.as_mut_ptr().cast(), false)?;
        Ok(values)
    }

    pub(crate) fn download_floats(&self, address: u64, count: usize) -> Result<Vec<f32>, CudaError> {
        let mut values = vec![0.0_f32; count];
        self.context.with_current(|| {
            // SAFETY: the test's buffers are at least as long.
            unsafe { result::memcpy_dtoh_sync(&mut values, address) }.expect("download");
            Ok(())
        })?;
        Ok(values)
    }

    fn copy_rows(
        &self,
        address: u64,
        stride: usize,
        width: usize,
        rows: usize,
        host: *mut c_void,
        up: bool,
    ) -> Result<(), CudaError> {
        let (on_host, on_device) = (sys::CUmemorytype::CU_MEMORYTYPE_HOST, sys::CUmemorytype::CU_MEMORYTYPE_DEVICE);
        let (packed, apart) = (width * 2, stride * 2);
        // SAFETY: all fields are integers, pointers or an enum with a variant 0 that is overwritten below.
        let mut copy: sys::CUDA_MEMCPY2D = unsafe { std::mem::MaybeUninit::zeroed().assume_init() };
        copy.srcMemoryType = if up { on_host } else { on_device };
        copy.dstMemoryType = if up { on_device } else { on_host };
        copy.srcHost = host;
        copy.dstHost = host;
        copy.srcDevice = address;
        copy.dstDevice = address;
        copy.srcPitch = if up { packed } else { apart };
        copy.dstPitch = if up { apart } else { packed };
        copy.WidthInBytes = packed;
        copy.Height = rows;
        self.context.with_current(|| {
            // SAFETY: the host slice has `rows * width` values, the device buffer `rows` rows of `stride`.
            unsafe { sys::cuMemcpy2D_v2(&copy) }.result().expect("copy of rows");
            Ok(())
        })
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let _ = self.context.with_current(|| {
            // SAFETY: allocated by `Gpu::buffer` and freed once; cuMemFree waits for work that uses it.
            let _ = unsafe { result::free_sync(self.address) };
            Ok(())
        });
    }
}
