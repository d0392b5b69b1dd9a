//! A kernel: what it needs, and its launch.

use std::ffi::c_int;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, PoisonError};

use cudarc::driver::result::{self, function, occupancy};
use cudarc::driver::sys::{CUfunction, CUfunction_attribute};

use super::{Arguments, Loaded};
use crate::stream::same_device;
use crate::{CudaError, Stream};

/// One kernel of a [`crate::Module`]. Clones are the same kernel, and keep the module loaded.
#[derive(Clone)]
pub struct Kernel {
    entry: Arc<Entry>,
}

struct Entry {
    module: Arc<Loaded>,
    name: String,
    function: CUfunction,
    /// Bytes of each parameter; `None` where the driver cannot tell.
    parameters: Option<Vec<usize>>,
    /// Bytes of dynamic shared memory that launches may surely ask for.
    shared_limit: AtomicU32,
}

// SAFETY: a CUfunction is an opaque handle; the driver API takes it from any thread and does its own locking.
unsafe impl Send for Entry {}
// SAFETY: as above; no other field changes but the atomic one.
unsafe impl Sync for Entry {}

/// How many blocks of how many threads run a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LaunchShape {
    /// Blocks along x, y and z; at most 2^31 - 1, 65535 and 65535.
    pub grid: [u32; 3],
    /// Threads of a block along x, y and z; at most 1024, 1024 and 64, and 1024 together.
    pub block: [u32; 3],
    /// Dynamic shared memory of each block in bytes; more than 48 KiB needs [`Kernel::set_dynamic_shared_memory`] first.
    pub shared_bytes: u32,
}

/// What the compiler made of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelAttributes {
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of a thread in local memory: arrays, and registers that were spilled.
    pub local_bytes: u32,
    /// Shared memory of a block in bytes, beside what a launch asks for.
    pub static_shared_bytes: u32,
    /// Most threads that a block may have, given the registers.
    pub max_threads: u32,
}

impl Kernel {
    /// The module's context is current.
    pub(super) fn new(module: Arc<Loaded>, name: &str, function: CUfunction) -> Result<Self, CudaError> {
        // SAFETY: the function is of a loaded module.
        let parameters = unsafe { module.context.driver().parameters(function) };
        let entry = Entry { module, name: name.to_string(), function, parameters, shared_limit: AtomicU32::new(0) };
        Ok(Self { entry: Arc::new(entry) })
    }

    /// Its name in the program.
    pub fn name(&self) -> &str {
        &self.entry.name
    }

    /// Lets launches ask for up to `bytes` of dynamic shared memory (`CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`); needed
    /// above 48 KiB. Never lowers what was set before, and costs nothing when there is nothing to raise.
    ///
    /// # Errors
    /// What the driver says, for more than [`crate::DeviceInfo::shared_memory_per_block_bytes`] less the kernel's static share.
    pub fn set_dynamic_shared_memory(&self, bytes: u32) -> Result<(), CudaError> {
        if bytes <= self.entry.shared_limit.load(Ordering::Relaxed) {
            return Ok(());
        }
        const LIMIT: CUfunction_attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let module = &self.entry.module;
        // Another kernel value of the same function may have raised it further; the limit in the driver only ever rises.
        let _raising = module.raising.lock().unwrap_or_else(PoisonError::into_inner);
        module.context.with_current(|| {
            if self.attribute(LIMIT)? < bytes {
                let value = c_int::try_from(bytes).unwrap_or(c_int::MAX);
                // SAFETY: the function is of a loaded module.
                let set = unsafe { function::set_function_attribute(self.entry.function, LIMIT, value) };
                module.context.driver().checked("cuFuncSetAttribute", set)?;
            }
            self.entry.shared_limit.fetch_max(bytes, Ordering::Relaxed);
            Ok(())
        })
    }

    /// Registers, spills and limits.
    ///
    /// # Errors
    /// What the driver says.
    pub fn attributes(&self) -> Result<KernelAttributes, CudaError> {
        self.entry.module.context.with_current(|| {
            Ok(KernelAttributes {
                registers: self.attribute(CUfunction_attribute::CU_FUNC_ATTRIBUTE_NUM_REGS)?,
                local_bytes: self.attribute(CUfunction_attribute::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?,
                static_shared_bytes: self.attribute(CUfunction_attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?,
                max_threads: self.attribute(CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?,
            })
        })
    }

    /// How many blocks of `threads` threads and `shared_bytes` of dynamic shared memory run on one multiprocessor at once.
    ///
    /// # Errors
    /// What the driver says.
    pub fn occupancy(&self, threads: u32, shared_bytes: u32) -> Result<u32, CudaError> {
        let context = &self.entry.module.context;
        let threads = c_int::try_from(threads).unwrap_or(c_int::MAX);
        let blocks = context.with_current(|| {
            // SAFETY: the function is of a loaded module.
            let blocks = unsafe {
                occupancy::max_active_block_per_multiprocessor(self.entry.function, threads, shared_bytes as usize)
            };
            context.driver().checked("cuOccupancyMaxActiveBlocksPerMultiprocessor", blocks)
        })?;
        Ok(u32::try_from(blocks).unwrap_or(0))
    }

    /// Queues a run of the kernel; the arguments are copied before this returns.
    ///
    /// # Safety
    /// Argument by argument, the types are those that the kernel declares (their number and sizes are checked). Every address
    /// among them is valid for what the kernel reads and writes there from now until the stream has run it, and no other
    /// device work does so at the same time, nor does the host.
    ///
    /// # Errors
    /// [`CudaError::WrongArguments`], [`CudaError::DifferentDevices`], or what the driver says; an error of an earlier kernel can
    /// surface here.
    pub unsafe fn launch(&self, stream: &Stream, shape: LaunchShape, arguments: &Arguments) -> Result<(), CudaError> {
        let context = &self.entry.module.context;
        same_device("cuLaunchKernel", stream.context(), context)?;
        if let Some(declared) = self.entry.parameters.as_ref().filter(|sizes| !arguments.have_sizes(sizes)) {
            return Err(CudaError::WrongArguments {
                kernel: self.entry.name.clone(),
                declared: declared.clone(),
                given: arguments.sizes(),
            });
        }
        let dimensions = |[x, y, z]: [u32; 3]| (x, y, z);
        context.with_current(|| {
            arguments.with_addresses(|addresses| {
                // SAFETY: the function is of a loaded module and the stream is alive; there is an address for each parameter, or
                // else that is the caller's promise, as is all that the kernel does.
                let launched = unsafe {
                    result::launch_kernel(
                        self.entry.function,
                        dimensions(shape.grid),
                        dimensions(shape.block),
                        shape.shared_bytes,
                        stream.handle(),
                        addresses,
                    )
                };
                context.driver().checked("cuLaunchKernel", launched)
            })
        })
    }

    /// The module's context is current.
    fn attribute(&self, attribute: CUfunction_attribute) -> Result<u32, CudaError> {
        // SAFETY: the function is of a loaded module.
        let value = unsafe { function::get_function_attribute(self.entry.function, attribute) };
        let value = self.entry.module.context.driver().checked("cuFuncGetAttribute", value)?;
        Ok(u32::try_from(value).unwrap_or(0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_and_modules_go_to_any_thread() {
        fn check<T: Send + Sync + Clone>() {}
        check::<Kernel>();
        check::<crate::Module>();
    }
}
