//! A module in device memory: what [`crate::Module`] and its kernels share.
//!
//! Trade-off: the code stays on the device as long as any of them lives.

use std::ptr;
use std::sync::{Arc, Mutex};

use cudarc::driver::sys::{self, CUmodule};

use crate::context::Context;
use crate::error::CudaError;
use crate::nvrtc::Image;

/// A loaded image, unloaded on drop.
pub(super) struct Loaded {
    pub(super) context: Context,
    pub(super) program: String,
    /// What it was compiled from.
    pub(super) source: Arc<str>,
    pub(super) handle: CUmodule,
    /// Locked while the shared memory limit of a kernel is raised, which reads the limit first.
    pub(super) raising: Mutex<()>,
}

// SAFETY: a CUmodule is an opaque handle; the driver API accepts it from any thread and does its own locking.
unsafe impl Send for Loaded {}
// SAFETY: as above; no other field changes without its lock.
unsafe impl Sync for Loaded {}

impl Loaded {
    pub(super) fn new(context: &Context, image: &Image) -> Result<Self, CudaError> {
        let load = || {
            let mut handle = ptr::null_mut();
            // SAFETY: a context is current, the pointer is valid for a write, and the image is a complete ELF file from NVRTC,
            // whose header tells the driver how much to read. It is not needed after the call.
            let status = unsafe { sys::cuModuleLoadData(&mut handle, image.bytes().as_ptr().cast()) };
            context.driver().checked("cuModuleLoadData", status.result()).map(|()| handle)
        };
        let handle = context.with_current(load)?;
        let (program, source) = (image.name().to_owned(), image.source().clone());
        Ok(Self { context: context.clone(), program, source, handle, raising: Mutex::new(()) })
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        let _ = self.context.with_current(|| {
            // SAFETY: loaded by cuModuleLoadData in this context and unloaded once, when no kernel of it is left; the driver
            // waits for running launches. The status is ignored: it is an error only if the driver is already shutting down
            // with the process, or if the context is lost.
            let _ = unsafe { sys::cuModuleUnload(self.handle) };
            Ok(())
        });
    }
}
