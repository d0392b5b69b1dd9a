//! A kernel and its launch.
//!
//! Trade-off: number and sizes of arguments are checked at each launch, their types and names only in debug builds.

use std::ffi::c_int;
use std::hash::{Hash, Hasher};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, PoisonError};

use cudarc::driver::result::{self, function};
use cudarc::driver::sys::{CUfunction, CUfunction_attribute};

use super::Loaded;
use super::arguments::Arguments;
use super::signature::{Parameter, parameters};
use crate::driver::{LaunchAttribute, LaunchConfig};
use crate::error::CudaError;
use crate::stream::{Stream, same_device};

/// `CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION` of cuda.h.
const STARTS_EARLY: u32 = 6;

/// A kernel of a [`crate::Module`]. Clones are the same kernel, and keep the module loaded.
#[derive(Clone)]
pub struct Kernel {
    entry: Arc<Entry>,
}

struct Entry {
    module: Arc<Loaded>,
    name: String,
    function: CUfunction,
    /// The declared parameters; `None` if the source does not define the kernel by its name.
    parameters: Option<Vec<Parameter>>,
    /// Bytes of each parameter; `None` if the driver cannot tell.
    sizes: Option<Vec<usize>>,
    /// Bytes of dynamic shared memory that launches are already allowed to use.
    shared_limit: AtomicU32,
}

// SAFETY: a CUfunction is an opaque handle; the driver API accepts it from any thread and does its own locking.
unsafe impl Send for Entry {}
// SAFETY: as above; the only field that changes is atomic.
unsafe impl Sync for Entry {}

/// The number of blocks and of threads per block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LaunchShape {
    /// Blocks along x, y and z; at most 2^31 - 1, 65535 and 65535.
    pub grid: [u32; 3],
    /// Threads of a block along x, y and z; at most 1024, 1024 and 64, and 1024 in total.
    pub block: [u32; 3],
    /// Dynamic shared memory of each block in bytes; more than 48 KiB needs [`Kernel::set_dynamic_shared_memory`] first.
    pub shared_bytes: u32,
    /// Whether blocks may start while earlier work of the stream ends. The kernel must wait for it itself (`griddepcontrol.wait`) before it touches
    /// memory. Needs compute capability 9.0 and [`crate::Driver::launches_early`].
    pub starts_early: bool,
}

/// Hashes the kernel's identity in this process.
impl Hash for Kernel {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.entry.function as usize).hash(state);
    }
}

impl Kernel {
    /// Creates a kernel. The context of the module must be current.
    pub(super) fn new(module: Arc<Loaded>, name: &str, function: CUfunction) -> Result<Self, CudaError> {
        // Do not query past the last parameter to find the end, because tools that check calls report that.
        let parameters = parameters(&module.source, name);
        let count = parameters.as_ref().map(Vec::len);
        // SAFETY: the function belongs to a loaded module.
        let sizes = count.and_then(|count| unsafe { module.context.driver().parameters(function, count) });
        let shared_limit = AtomicU32::new(0);
        let entry = Entry { module, name: name.to_string(), function, parameters, sizes, shared_limit };
        Ok(Self { entry: Arc::new(entry) })
    }

    /// Allows launches to use up to `bytes` of dynamic shared memory (`CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`); needed
    /// above 48 KiB. Never lowers the limit, and costs nothing if it is high enough already.
    ///
    /// # Errors
    /// Errors of the driver, for more than [`crate::DeviceInfo::shared_memory_per_block_bytes`] minus the kernel's static share.
    pub fn set_dynamic_shared_memory(&self, bytes: u32) -> Result<(), CudaError> {
        if bytes <= self.entry.shared_limit.load(Ordering::Relaxed) {
            return Ok(());
        }
        const LIMIT: CUfunction_attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let module = &self.entry.module;
        // Another `Kernel` of the same function may have raised the limit further; it must not be lowered.
        let _raising = module.raising.lock().unwrap_or_else(PoisonError::into_inner);
        module.context.with_current(|| {
            if self.attribute(LIMIT)? < bytes {
                let value = c_int::try_from(bytes).unwrap_or(c_int::MAX);
                // SAFETY: the function belongs to a loaded module.
                let set = unsafe { function::set_function_attribute(self.entry.function, LIMIT, value) };
                module.context.driver().checked("cuFuncSetAttribute", set)?;
            }
            self.entry.shared_limit.fetch_max(bytes, Ordering::Relaxed);
            Ok(())
        })
    }

    /// Submits a run of the kernel to the stream; the arguments are copied before this returns.
    ///
    /// # Safety
    /// The types of the arguments must be those that the kernel declares (their number and sizes are checked, and their
    /// kinds in debug builds). Every address must be valid for the kernel's reads and writes until the stream has run
    /// it, and in that time neither other device work nor the host may access memory that it writes. If it starts early, it must wait itself.
    ///
    /// # Errors
    /// [`CudaError::WrongArguments`], [`CudaError::DifferentDevices`], or errors of the driver, including those
    /// of earlier kernels.
    pub unsafe fn launch(&self, stream: &Stream, shape: LaunchShape, arguments: &Arguments) -> Result<(), CudaError> {
        let context = &self.entry.module.context;
        same_device("cuLaunchKernel", stream.context(), context)?;
        let Entry { name, parameters, sizes, .. } = &*self.entry;
        let count = parameters.as_ref().map(Vec::len);
        let is_wrong = match sizes {
            Some(sizes) => !arguments.have_sizes(sizes),
            None => count.is_some_and(|count| arguments.count != count),
        };
        if is_wrong {
            return Err(CudaError::WrongArguments {
                kernel: name.clone(),
                declared: sizes.clone().unwrap_or_else(|| vec![0; count.unwrap_or(0)]),
                given: arguments.sizes(),
            });
        }
        #[cfg(debug_assertions)]
        arguments.assert_declared(name, parameters.as_deref().unwrap_or_default());
        let dimensions = |[x, y, z]: [u32; 3]| (x, y, z);
        context.with_current(|| {
            arguments.with_addresses(|addresses| {
                if shape.starts_early {
                    let value = [1, 0, 0, 0, 0, 0, 0, 0];
                    let attribute = LaunchAttribute { id: STARTS_EARLY, padding: 0, value };
                    let LaunchShape { grid, block, shared_bytes, .. } = shape;
                    let (stream, attributes) = (stream.handle(), &raw const attribute);
                    let config = LaunchConfig { grid, block, shared_bytes, stream, attributes, count: 1 };
                    // SAFETY: as below.
                    return unsafe { context.driver().launch_with(&config, self.entry.function, addresses) };
                }
                // SAFETY: the function belongs to a loaded module, and the stream is alive. There is an address for each
                // parameter (checked, or promised by the caller), and what the kernel does is the caller's promise.
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

    /// Returns an attribute. The context of the module must be current.
    fn attribute(&self, attribute: CUfunction_attribute) -> Result<u32, CudaError> {
        // SAFETY: the function belongs to a loaded module.
        let value = unsafe { function::get_function_attribute(self.entry.function, attribute) };
        let value = self.entry.module.context.driver().checked("cuFuncGetAttribute", value)?;
        Ok(u32::try_from(value).unwrap_or(0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_and_modules_can_be_sent_to_any_thread() {
        fn check<T: Send + Sync + Clone>() {}
        check::<Kernel>();
        check::<crate::Module>();
    }
}
