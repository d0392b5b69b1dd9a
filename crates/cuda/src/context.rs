//! The primary context of a device, which CubeCL, and so Burn, uses.
//!
//! Not supported: contexts other than the primary one. Their memory could not be shared with Burn.

use std::sync::Arc;

use cudarc::driver::result;
use cudarc::driver::sys::{self, CUcontext, CUdevice};

use crate::driver::Driver;
use crate::error::CudaError;

/// The primary context of one device, kept alive as long as any clone lives.
///
/// CubeCL retains the same context, so the device memory of Burn tensors is valid in it, and events order the work of both.
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

// SAFETY: a CUcontext is an opaque handle; the driver API accepts it from any thread and does its own locking.
unsafe impl Send for Primary {}
// SAFETY: as above; no field changes after construction.
unsafe impl Sync for Primary {}

/// The current memory of a device, over all processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceMemory {
    /// Memory that no process has taken, in bytes.
    pub free_bytes: u64,
    /// Total bytes of the device.
    pub total_bytes: u64,
}

impl Context {
    /// Retains the primary context of device `ordinal`, creating it if this process has none yet (a few hundred MiB of
    /// device memory).
    pub fn retain(driver: &Driver, ordinal: usize) -> Result<Self, CudaError> {
        let device = driver.handle(ordinal)?;
        // SAFETY: `device` came from cuDeviceGet.
        let handle = driver.checked("cuDevicePrimaryCtxRetain", unsafe { result::primary_ctx::retain(device) })?;
        Ok(Self { primary: Arc::new(Primary { driver: *driver, ordinal, device, handle }) })
    }

    /// Returns the number of the device.
    pub fn ordinal(&self) -> usize {
        self.primary.ordinal
    }

    /// Returns the driver.
    pub fn driver(&self) -> &Driver {
        &self.primary.driver
    }

    /// Returns the free and total memory of the device.
    pub fn memory(&self) -> Result<DeviceMemory, CudaError> {
        let info = self.with_current(|| self.driver().checked("cuMemGetInfo", result::mem_get_info()))?;
        Ok(DeviceMemory { free_bytes: info.0 as u64, total_bytes: info.1 as u64 })
    }

    /// Lets stream-ordered allocations (`cuMemAllocAsync`) reuse only memory whose release their stream is ordered
    /// after. By default the driver may also wait for another stream, or check whether it happens to be done; the
    /// memory would then depend on work that a second stream, ordered only by events, does not account for.
    pub fn reuse_in_stream_order_only(&self) -> Result<(), CudaError> {
        let mut pool = std::ptr::null_mut();
        // SAFETY: the pointer is valid for a write, and the device came from cuDeviceGet.
        let found = unsafe { sys::cuDeviceGetDefaultMemPool(&mut pool, self.primary.device) };
        self.driver().checked("cuDeviceGetDefaultMemPool", found.result())?;
        for attribute in [
            sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC,
            sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES,
        ] {
            let mut is_allowed: std::ffi::c_int = 0;
            // SAFETY: the pool is the device's own, and both attributes are of the type int, which the driver copies.
            let set = unsafe { sys::cuMemPoolSetAttribute(pool, attribute, (&raw mut is_allowed).cast()) };
            self.driver().checked("cuMemPoolSetAttribute", set.result())?;
        }
        Ok(())
    }

    /// Waits until the device has finished all work submitted to this context, including CubeCL's.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.with_current(|| self.driver().checked("cuCtxSynchronize", result::ctx::synchronize()))
    }

    /// Runs `work` with this context current on the calling thread, and restores the previous context afterwards, even
    /// after a panic, because CubeCL manages the current context of its threads itself.
    pub fn with_current<T>(&self, work: impl FnOnce() -> Result<T, CudaError>) -> Result<T, CudaError> {
        struct Pop;
        impl Drop for Pop {
            fn drop(&mut self) {
                let mut popped = std::ptr::null_mut();
                // SAFETY: the pointer is valid for a write. The status is ignored: popping what was just pushed
                // fails only when the process is ending, and then nothing can be done about it.
                let _ = unsafe { sys::cuCtxPopCurrent_v2(&mut popped) };
            }
        }
        // SAFETY: `handle` is alive, since `self` retains it.
        let pushed = unsafe { sys::cuCtxPushCurrent_v2(self.handle()) };
        self.driver().checked("cuCtxPushCurrent", pushed.result())?;
        let _pop = Pop;
        work()
    }

    /// Returns the handle, alive as long as `self`.
    pub(crate) fn handle(&self) -> CUcontext {
        self.primary.handle
    }
}

impl Drop for Primary {
    fn drop(&mut self) {
        // SAFETY: `device` came from cuDeviceGet and its primary context was retained once by this value. The status is
        // ignored: it is an error only if the driver is already shutting down with the process.
        let _ = unsafe { result::primary_ctx::release(self.device) };
    }
}
