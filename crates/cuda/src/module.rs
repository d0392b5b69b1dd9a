//! Compiled programs on a device, and launching their kernels.
//!
//! Not supported: clusters, cooperative launches and graphs. Nothing here needs them.

mod arguments;
mod kernel;
mod loaded;
mod signature;

use std::ffi::CString;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::result::DriverError;
use cudarc::driver::sys::{self, CUresult};

pub use arguments::Arguments;
pub use kernel::{Kernel, LaunchShape};

use crate::context::Context;
use crate::error::CudaError;
use crate::nvrtc::Image;
use loaded::Loaded;

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

    /// The kernel with this name: an `extern "C"` function of the program, or the mangled name of another function.
    ///
    /// # Errors
    /// [`CudaError::NoSuchKernel`], or errors of the driver.
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
