//! Compiled programs on a device, and launching the kernels in them.
//!
//! What it gives up: no clusters, no cooperative launches, no graphs; nothing here uses them. A kernel's code stays on the device
//! for as long as any [`Kernel`] or [`Module`] of it lives.

mod arguments;
mod kernel;

use std::ffi::CString;
use std::ptr;
use std::sync::{Arc, Mutex};

use cudarc::driver::result::DriverError;
use cudarc::driver::sys::{self, CUmodule, CUresult};

pub use arguments::Arguments;
pub use kernel::{Kernel, KernelAttributes, LaunchShape};

use crate::{Context, CudaError, Image};

/// An [`Image`], loaded into a context. Clones share it.
#[derive(Clone)]
pub struct Module {
    loaded: Arc<Loaded>,
}

/// What kernels hold on to.
struct Loaded {
    context: Context,
    program: String,
    handle: CUmodule,
    /// Held while a kernel's shared memory limit is raised: raising reads the limit first.
    raising: Mutex<()>,
}

// SAFETY: a CUmodule is an opaque handle; the driver API takes it from any thread and does its own locking.
unsafe impl Send for Loaded {}
// SAFETY: as above; no other field changes without its lock.
unsafe impl Sync for Loaded {}

impl Module {
    /// Loads an image. The driver copies its code to the device now or, by default, when a kernel is first used.
    ///
    /// # Errors
    /// What the driver says, which includes an image of another architecture or of a newer CUDA than its own.
    pub fn load(context: &Context, image: &Image) -> Result<Self, CudaError> {
        let load = || {
            let mut handle = ptr::null_mut();
            // SAFETY: a context is current, the pointer is valid for a write, and the image is a whole ELF file as NVRTC made
            // it, of which the driver reads as much as its own header tells. It is not needed after the call.
            let status = unsafe { sys::cuModuleLoadData(&mut handle, image.bytes().as_ptr().cast()) };
            context.driver().checked("cuModuleLoadData", status.result()).map(|()| handle)
        };
        let handle = context.with_current(load)?;
        let program = image.name.clone();
        Ok(Self { loaded: Arc::new(Loaded { context: context.clone(), program, handle, raising: Mutex::new(()) }) })
    }

    /// The kernel of this name: an `extern "C"` function of the program, or the mangled name of another.
    ///
    /// # Errors
    /// [`CudaError::NoSuchKernel`], or what the driver says.
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

    /// The context that it was loaded into.
    pub fn context(&self) -> &Context {
        &self.loaded.context
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        let _ = self.context.with_current(|| {
            // SAFETY: made by cuModuleLoadData in this context and unloaded once, when no kernel of it is left; the driver waits
            // for launches under way. The status is dropped: it is an error only when the driver is already shutting down with
            // the process, or when the context is lost.
            let _ = unsafe { sys::cuModuleUnload(self.handle) };
            Ok(())
        });
    }
}
