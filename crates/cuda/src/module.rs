//! Compiled programs on a device, and launching their kernels.
//!
//! Not supported: clusters and cooperative launches. Nothing here needs them.

mod arguments;
mod kernel;
mod signature;

use std::ffi::CString;
use std::ptr;
use std::sync::{Arc, Mutex};

use cudarc::driver::result::DriverError;
use cudarc::driver::sys::{self, CUmodule, CUresult};

pub use arguments::Arguments;
pub use kernel::{Kernel, LaunchShape};

use crate::context::Context;
use crate::error::CudaError;
use crate::nvrtc::Image;

/// An [`Image`], loaded into a context. Clones share it.
#[derive(Clone)]
pub struct Module {
    loaded: Arc<Loaded>,
}

impl Module {
    /// Loads an image. The driver copies its code to the device now or, by default, when a kernel is first used.
    ///
    /// # Errors
    /// Errors of the driver, for instance if the image is for another architecture or from a newer CUDA than the driver's.
    pub fn load(context: &Context, image: &Image) -> Result<Self, CudaError> {
        Ok(Self { loaded: Arc::new(Loaded::new(context, image)?) })
    }

    /// Returns the kernel with this name: an `extern "C"` function of the program, or the mangled name of another function.
    pub fn kernel(&self, name: &str) -> Result<Kernel, CudaError> {
        let missing = || CudaError::NoSuchKernel { program: self.loaded.program.clone(), kernel: name.to_string() };
        let c_name = CString::new(name).map_err(|_| missing())?;
        let context = &self.loaded.context;
        context.with_current(|| {
            let mut function = ptr::null_mut();
            // SAFETY: the module is loaded, the name ends in a zero, and the pointer is valid for a write.
            let status = unsafe { sys::cuModuleGetFunction(&mut function, self.loaded.handle, c_name.as_ptr()) };
            match status.result() {
                Err(DriverError(CUresult::CUDA_ERROR_NOT_FOUND)) => Err(missing()),
                result => {
                    context.driver().checked("cuModuleGetFunction", result)?;
                    Kernel::new(self.loaded.clone(), name, function)
                }
            }
        })
    }
}

/// A loaded image, which a module and its kernels share: unloaded on drop, so the code stays on the device as long as any of
/// them lives.
struct Loaded {
    context: Context,
    program: String,
    source: Arc<str>,
    handle: CUmodule,
    /// Locked while the shared memory limit of a kernel is raised, which reads the limit first.
    raising: Mutex<()>,
}

// SAFETY: a CUmodule is an opaque handle; the driver API accepts it from any thread and does its own locking.
unsafe impl Send for Loaded {}
// SAFETY: as above; no other field changes without its lock.
unsafe impl Sync for Loaded {}

impl Loaded {
    fn new(context: &Context, image: &Image) -> Result<Self, CudaError> {
        let load = || {
            let mut handle = ptr::null_mut();
            // SAFETY: a context is current, the pointer is valid for a write, and the image from NVRTC is a complete ELF file,
            // whose header tells the driver how much to read, or a text that ends in a zero. It is not needed after the call.
            let status = unsafe { sys::cuModuleLoadData(&mut handle, image.bytes().as_ptr().cast()) };
            context.driver().checked("cuModuleLoadData", status.result()).map(|()| handle)
        };
        let handle = context.with_current(load)?;
        let (program, source) = (image.name.clone(), image.source.clone());
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
