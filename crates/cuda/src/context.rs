//! A device's primary context: the one that CubeCL, and so Burn, works in.

use std::sync::Arc;

use cudarc::driver::result;
use cudarc::driver::sys::{self, CUcontext, CUdevice};

use crate::{CudaError, Driver};

/// The primary context of one device, kept alive for as long as any clone lives.
///
/// CubeCL retains the same context, so device memory of a Burn tensor is valid in it and events order work of both.
#[derive(Clone)]
pub struct Context {
    primary: Arc<Primary>,
}

struct Primary {
    driver: Driver,
    ordinal: usize,
    device: CUdevice,
    handle: CUcontext,
}

// SAFETY: a CUcontext is an opaque handle; the driver API takes it from any thread and does its own locking.
unsafe impl Send for Primary {}
// SAFETY: as above; no field changes after construction.
unsafe impl Sync for Primary {}

/// Memory of a device as the driver sees it now, all processes together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceMemory {
    /// Bytes that an allocation could still get.
    pub free_bytes: u64,
    /// Bytes that the device has.
    pub total_bytes: u64,
}

impl Context {
    /// Retains the primary context of device `ordinal`, creating it where this process has none yet (some hundred MiB of
    /// device memory).
    ///
    /// # Errors
    /// [`CudaError::NoSuchDevice`], or what the driver says.
    pub fn retain(driver: &Driver, ordinal: usize) -> Result<Self, CudaError> {
        let device = driver.handle(ordinal)?;
        // SAFETY: `device` came from cuDeviceGet.
        let handle = driver.checked("cuDevicePrimaryCtxRetain", unsafe { result::primary_ctx::retain(device) })?;
        Ok(Self { primary: Arc::new(Primary { driver: *driver, ordinal, device, handle }) })
    }

    /// Number of the device.
    pub fn ordinal(&self) -> usize {
        self.primary.ordinal
    }

    /// The driver that the context was retained from.
    pub fn driver(&self) -> &Driver {
        &self.primary.driver
    }

    /// Free and total memory of the device.
    ///
    /// # Errors
    /// What the driver says.
    pub fn memory(&self) -> Result<DeviceMemory, CudaError> {
        let info = self.with_current(|| self.driver().checked("cuMemGetInfo", result::mem_get_info()))?;
        Ok(DeviceMemory { free_bytes: info.0 as u64, total_bytes: info.1 as u64 })
    }

    /// Waits until the device has done all that was submitted to this context, CubeCL's work included.
    ///
    /// # Errors
    /// What the driver says; an error of an earlier kernel can surface here.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.with_current(|| self.driver().checked("cuCtxSynchronize", result::ctx::synchronize()))
    }

    /// Runs `work` with this context current on the calling thread, and leaves the thread as it was, also on a panic:
    /// CubeCL's threads have their own idea of what is current.
    ///
    /// # Errors
    /// What `work` returns, or what the driver says.
    pub fn with_current<T>(&self, work: impl FnOnce() -> Result<T, CudaError>) -> Result<T, CudaError> {
        struct Pop;
        impl Drop for Pop {
            fn drop(&mut self) {
                let mut popped = std::ptr::null_mut();
                // SAFETY: the pointer is valid for a write. The status is dropped: popping what was just pushed fails
                // only when the process is ending, where nothing can be done about it.
                let _ = unsafe { sys::cuCtxPopCurrent_v2(&mut popped) };
            }
        }
        // SAFETY: `handle` is alive, since `self` retains it.
        let pushed = unsafe { sys::cuCtxPushCurrent_v2(self.handle()) };
        self.driver().checked("cuCtxPushCurrent", pushed.result())?;
        let _pop = Pop;
        work()
    }

    /// Alive as long as `self`.
    pub(crate) fn handle(&self) -> CUcontext {
        self.primary.handle
    }
}

impl Drop for Primary {
    fn drop(&mut self) {
        // SAFETY: `device` came from cuDeviceGet and its primary context was retained once by this value. The status is
        // dropped: it is an error only when the driver is already shutting down with the process.
        let _ = unsafe { result::primary_ctx::release(self.device) };
    }
}
