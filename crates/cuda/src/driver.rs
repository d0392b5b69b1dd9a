//! The CUDA driver: its library, its version and its devices.
//!
//! cudarc loads the driver library when its first function is called, and panics if the library or a function is missing.
//! [`Driver::load`] therefore opens the library itself first, and looks up by name the few functions that some drivers or some
//! versions of cudarc's bindings lack. After that, only functions that every driver since CUDA 11 exports are called through
//! cudarc.
//!
//! Trade-off: drivers before CUDA 12.2 (R535) are rejected. Those before 12.5 cannot order a stream against a whole context, for
//! which [`crate::StreamHandoff`] makes the host wait.

use std::env;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::Path;
use std::ptr;

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{CUcontext, CUdevice, CUdevice_attribute, CUevent, CUfunction, CUresult, CUstream};
use libloading::Library;

use crate::error::CudaError;
use crate::imitation::Imitation;
use crate::library::open_file;

/// `CUresult` as an integer: a newer driver may return a code that cudarc's enum does not list.
type Status = u32;

/// `cuTensorMapEncodeTiled` of cuda.h, with a pointer to bytes for the map, and enums as the integers that they are in C.
pub(crate) type EncodeTiled = unsafe extern "C" fn(
    *mut c_void,
    u32,
    u32,
    *mut c_void,
    *const u64,
    *const u64,
    *const u32,
    *const u32,
    u32,
    u32,
    u32,
    u32,
) -> Status;

/// `CUlaunchConfig` of cuda.h with one attribute.
#[repr(C)]
pub(crate) struct LaunchConfig {
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) shared_bytes: u32,
    pub(crate) stream: CUstream,
    pub(crate) attributes: *const LaunchAttribute,
    pub(crate) count: u32,
}

/// `CUlaunchAttribute` of cuda.h.
#[repr(C)]
pub(crate) struct LaunchAttribute {
    pub(crate) id: u32,
    pub(crate) padding: u32,
    pub(crate) value: [u64; 8],
}

type LaunchKernelEx =
    unsafe extern "C" fn(*const LaunchConfig, CUfunction, *mut *mut c_void, *mut *mut c_void) -> Status;

/// Functions looked up by name.
#[derive(Clone, Copy)]
struct Symbols {
    /// `cuLaunchKernelEx`, where graphs record launches that start early.
    launch_kernel_ex: Option<LaunchKernelEx>,
    /// `cuCtxRecordEvent` and `cuCtxWaitEvent`, available since CUDA 12.5.
    context_events: Option<[unsafe extern "C" fn(CUcontext, CUevent) -> Status; 2]>,
    event_elapsed_time: unsafe extern "C" fn(*mut f32, CUevent, CUevent) -> Status,
    /// Available since CUDA 12.4; only a check uses it.
    func_get_param_info: Option<unsafe extern "C" fn(CUfunction, usize, *mut usize, *mut usize) -> Status>,
    tensor_map_encode_tiled: EncodeTiled,
    error_name: unsafe extern "C" fn(Status, *mut *const c_char) -> Status,
    error_string: unsafe extern "C" fn(Status, *mut *const c_char) -> Status,
}

/// The loaded and initialized CUDA driver. Its existence proves that driver calls do not panic.
#[derive(Clone, Copy)]
pub struct Driver {
    version: u32,
    imitation: Imitation,
    symbols: Symbols,
}

/// One CUDA device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Number in this process; `CUDA_VISIBLE_DEVICES` renumbers devices.
    pub ordinal: usize,
    /// Marketing name, such as `NVIDIA H100 80GB HBM3`.
    pub name: String,
    /// Compute capability, `(9, 0)` for Hopper.
    pub compute_capability: (u32, u32),
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Maximum shared memory of a block in bytes, for kernels that request more than 48 KiB.
    pub shared_memory_per_block_bytes: u32,
}

impl Driver {
    /// The minimum CUDA version, `1000 * major + 10 * minor`: that of R535.
    pub const MINIMUM_VERSION: u32 = 12_020;

    /// The version whose graphs record launches that start before earlier work has ended: 12.3, and one for its mistakes.
    const LAUNCHES_EARLY_SINCE: u32 = 12_040;

    /// The version that introduced `cuCtxRecordEvent` and `cuCtxWaitEvent`.
    const ORDERS_CONTEXTS_SINCE: u32 = 12_050;

    /// Finds, loads and initializes the driver. Never panics.
    ///
    /// # Errors
    /// [`CudaError::DriverNotFound`], [`CudaError::DriverTooOld`], [`CudaError::BrokenDriver`], [`CudaError::NoDevice`],
    /// [`CudaError::InvalidVariable`], or errors of `cuInit`.
    pub fn load() -> Result<Self, CudaError> {
        let files: &[&str] = if cfg!(windows) { &["nvcuda.dll"] } else { &["libcuda.so.1", "libcuda.so"] };
        Self::load_from(files)
    }

    fn load_from(files: &[&str]) -> Result<Self, CudaError> {
        let (library, file) = open_first(files)?;
        let version = read_version(&library, &file)?;
        if version < Self::MINIMUM_VERSION {
            return Err(CudaError::DriverTooOld { found: version, needed: Self::MINIMUM_VERSION });
        }
        let (imitation, symbols) = (Imitation::of_process()?, Symbols::look_up(&library, &file)?);
        let mut driver = Self { version, imitation, symbols };
        if imitation.driver.is_some_and(|imitated| imitated < Self::ORDERS_CONTEXTS_SINCE) {
            driver = driver.without_context_events();
        }
        if imitation.driver.unwrap_or(version) < Self::LAUNCHES_EARLY_SINCE {
            driver.symbols.launch_kernel_ex = None;
        }
        // Function pointers into the library are kept, and cudarc opens the same file, so it must never be unloaded.
        std::mem::forget(library);

        match result::init() {
            Ok(()) => Ok(driver),
            Err(DriverError(CUresult::CUDA_ERROR_NO_DEVICE)) => Err(CudaError::NoDevice {
                visible: env::var("CUDA_VISIBLE_DEVICES").map_or("not set".to_string(), |value| format!("{value:?}")),
            }),
            Err(error) => Err(driver.error("cuInit", error)),
        }
    }

    /// Returns the newest CUDA version that this driver supports, `(major, minor)`.
    pub fn version(&self) -> (u32, u32) {
        (self.version / 1000, self.version % 1000 / 10)
    }

    /// Returns the driver without the functions that drivers before CUDA 12.5 lack.
    pub(crate) fn without_context_events(self) -> Self {
        Self { symbols: Symbols { context_events: None, ..self.symbols }, ..self }
    }

    fn device_count(&self) -> Result<usize, CudaError> {
        let count = self.checked("cuDeviceGetCount", result::device::get_count())?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    /// Lists all devices, in CUDA's order.
    pub fn devices(&self) -> Result<Vec<DeviceInfo>, CudaError> {
        (0..self.device_count()?).map(|ordinal| self.device(ordinal)).collect()
    }

    /// Returns one device. `FIREBRICK_CUDA_CAPABILITY` and `FIREBRICK_CUDA_BLOCK_BYTES` make it an older or smaller one.
    pub fn device(&self, ordinal: usize) -> Result<DeviceInfo, CudaError> {
        let device = self.handle(ordinal)?;
        let attribute = |attribute| {
            // SAFETY: `device` came from cuDeviceGet.
            let value = unsafe { result::device::get_attribute(device, attribute) };
            Ok(u32::try_from(self.checked("cuDeviceGetAttribute", value)?).unwrap_or(0))
        };
        let mut compute_capability = (
            attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        let mut shared_memory_per_block_bytes =
            attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        self.imitation.apply(&mut compute_capability, &mut shared_memory_per_block_bytes)?;
        Ok(DeviceInfo {
            ordinal,
            name: self.checked("cuDeviceGetName", result::device::get_name(device))?,
            compute_capability,
            multiprocessors: attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            shared_memory_per_block_bytes,
        })
    }

    /// Returns a device's place on the PCI bus as Linux writes it, such as `0000:18:00.0`.
    pub fn bus_id(&self, ordinal: usize) -> Result<String, CudaError> {
        let device = self.handle(ordinal)?;
        let number = |attribute| {
            // SAFETY: the handle is valid.
            let value = unsafe { result::device::get_attribute(device, attribute) };
            self.checked("cuDeviceGetAttribute", value)
        };
        let domain = number(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID)?;
        let bus = number(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID)?;
        let slot = number(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID)?;
        Ok(format!("{domain:04x}:{bus:02x}:{slot:02x}.0"))
    }

    pub(crate) fn handle(&self, ordinal: usize) -> Result<CUdevice, CudaError> {
        let count = self.device_count()?;
        let number = c_int::try_from(ordinal).ok().filter(|_| ordinal < count);
        let number = number.ok_or(CudaError::NoSuchDevice { ordinal, count })?;
        self.checked("cuDeviceGet", result::device::get(number))
    }

    /// Records `event` after all work submitted to `context` so far, on any stream. Returns false, and records nothing, if the
    /// driver cannot order a stream against all other work of a context.
    ///
    /// # Safety
    /// Both handles must be alive, and `event` must have been created in `context`.
    pub(crate) unsafe fn record_context(&self, context: CUcontext, event: CUevent) -> Result<bool, CudaError> {
        let Some([record, _]) = self.symbols.context_events else { return Ok(false) };
        // SAFETY: the caller's promise.
        self.status("cuCtxRecordEvent", unsafe { record(context, event) }).map(|()| true)
    }

    /// Makes all work submitted to `context` from now on, to any stream, wait for `event`. Returns false, and does nothing, if the
    /// driver cannot order a stream against all other work of a context.
    ///
    /// # Safety
    /// Both handles must be alive, and `event` must have been created in `context`.
    pub(crate) unsafe fn make_context_wait(&self, context: CUcontext, event: CUevent) -> Result<bool, CudaError> {
        let Some([_, wait]) = self.symbols.context_events else { return Ok(false) };
        // SAFETY: the caller's promise.
        self.status("cuCtxWaitEvent", unsafe { wait(context, event) }).map(|()| true)
    }

    /// Returns whether kernels may start before earlier work has ended, on cards of compute capability 9.0 or later.
    pub fn launches_early(&self) -> bool {
        self.symbols.launch_kernel_ex.is_some()
    }

    /// Launches a kernel with attributes.
    ///
    /// # Safety
    /// The function must belong to a loaded module, what the configuration names must be alive, and there must be an address for each parameter.
    ///
    /// # Panics
    /// If [`Driver::launches_early`] is false.
    pub(crate) unsafe fn launch_with(
        &self,
        config: &LaunchConfig,
        function: CUfunction,
        addresses: &mut [*mut c_void],
    ) -> Result<(), CudaError> {
        let launch = self.symbols.launch_kernel_ex.expect("the caller has asked");
        // SAFETY: the caller's promise.
        let status = unsafe { launch(config, function, addresses.as_mut_ptr(), ptr::null_mut()) };
        self.status("cuLaunchKernelEx", status)
    }

    /// Returns the milliseconds between two recorded events.
    ///
    /// # Safety
    /// Both handles must be alive and created in one context.
    pub(crate) unsafe fn elapsed_ms(&self, start: CUevent, end: CUevent) -> Result<f32, CudaError> {
        let mut milliseconds = 0.0;
        // SAFETY: the handles are the caller's promise; the pointer is valid for a write.
        let status = unsafe { (self.symbols.event_elapsed_time)(&mut milliseconds, start, end) };
        self.status("cuEventElapsedTime", status).map(|()| milliseconds)
    }

    /// Returns the bytes of each of the `count` parameters of a kernel, or `None` if the driver cannot tell.
    ///
    /// # Safety
    /// The function must belong to a loaded module whose context is current.
    pub(crate) unsafe fn parameters(&self, function: CUfunction, count: usize) -> Option<Vec<usize>> {
        let parameter_info = self.symbols.func_get_param_info?;
        let size = |index| {
            let (mut offset, mut bytes) = (0, 0);
            // SAFETY: the function is the caller's promise; both pointers are valid for a write.
            let status = unsafe { parameter_info(function, index, &mut offset, &mut bytes) };
            (status == 0).then_some(bytes)
        };
        (0..count).map(size).collect()
    }

    /// Converts cudarc's result to ours, naming the call.
    pub(crate) fn checked<T>(&self, call: &'static str, result: Result<T, DriverError>) -> Result<T, CudaError> {
        result.map_err(|error| self.error(call, error))
    }

    fn error(&self, call: &'static str, error: DriverError) -> CudaError {
        self.error_of(call, error.0 as Status)
    }

    /// Returns `cuTensorMapEncodeTiled`.
    pub(crate) fn encode_tiled(&self) -> EncodeTiled {
        self.symbols.tensor_map_encode_tiled
    }

    pub(crate) fn status(&self, call: &'static str, status: Status) -> Result<(), CudaError> {
        if status == 0 { Ok(()) } else { Err(self.error_of(call, status)) }
    }

    fn error_of(&self, call: &'static str, code: Status) -> CudaError {
        let text = |function: unsafe extern "C" fn(Status, *mut *const c_char) -> Status| {
            let mut text = ptr::null();
            // SAFETY: the pointer is valid for a write; for an unknown code, the driver writes null.
            let status = unsafe { function(code, &mut text) };
            if status != 0 || text.is_null() {
                return "unknown to this driver".to_string();
            }
            // SAFETY: on success the driver returns a constant string that ends in a zero and lives as long as itself.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        };
        let (name, description) = (text(self.symbols.error_name), text(self.symbols.error_string));
        CudaError::Call { call, code, name, description }
    }
}

impl Symbols {
    fn look_up(library: &Library, file: &str) -> Result<Self, CudaError> {
        // SAFETY: the fields' types are the declarations of cuda.h, with CUresult as the 32-bit integer that it is in C.
        unsafe {
            let (record, wait) = (symbol(library, file, "cuCtxRecordEvent"), symbol(library, file, "cuCtxWaitEvent"));
            Ok(Self {
                launch_kernel_ex: symbol(library, file, "cuLaunchKernelEx").ok(),
                context_events: record.and_then(|record| Ok([record, wait?])).ok(),
                event_elapsed_time: symbol(library, file, "cuEventElapsedTime")?,
                func_get_param_info: symbol(library, file, "cuFuncGetParamInfo").ok(),
                tensor_map_encode_tiled: symbol(library, file, "cuTensorMapEncodeTiled")?,
                error_name: symbol(library, file, "cuGetErrorName")?,
                error_string: symbol(library, file, "cuGetErrorString")?,
            })
        }
    }
}

/// Looks up a function of the driver library.
///
/// # Safety
/// `F` is the type of the function that cuda.h declares under this name, and is not used after the library is unloaded.
unsafe fn symbol<F: Copy>(library: &Library, file: &str, name: &'static str) -> Result<F, CudaError> {
    // SAFETY: the caller's promise.
    let found = unsafe { library.get::<F>(name.as_bytes()) };
    found.map(|function| *function).map_err(|_| CudaError::BrokenDriver { library: file.to_string(), symbol: name })
}

/// Reads the CUDA version of a driver library before anything else is looked up in it, because an old driver lacks functions.
fn read_version(library: &Library, file: &str) -> Result<u32, CudaError> {
    const NAME: &str = "cuDriverGetVersion";
    let mut version: c_int = 0;
    // SAFETY: `CUresult cuDriverGetVersion(int *driverVersion)` in cuda.h; the pointer is valid for a write, and this call
    // is allowed before cuInit.
    let status = unsafe { symbol::<unsafe extern "C" fn(*mut c_int) -> Status>(library, file, NAME)?(&mut version) };
    match u32::try_from(version) {
        Ok(version) if status == 0 && version > 0 => Ok(version),
        _ => Err(CudaError::BrokenDriver { library: file.to_string(), symbol: NAME }),
    }
}

/// Opens the first of `files` that the loader can open, and returns it with its name.
fn open_first(files: &[&str]) -> Result<(Library, String), CudaError> {
    let mut searched = Vec::new();
    for file in files {
        match open_file(Path::new(file)) {
            Ok(library) => return Ok((library, (*file).to_owned())),
            Err(reason) if reason.contains(file) => searched.push(reason),
            Err(reason) => searched.push(format!("{file}: {reason}")),
        }
    }
    Err(CudaError::DriverNotFound { searched, where_looked: where_the_loader_looks() })
}

fn where_the_loader_looks() -> String {
    if cfg!(windows) {
        return "looked in the system folder and along PATH".to_string();
    }
    match env::var("LD_LIBRARY_PATH") {
        Ok(path) if !path.is_empty() => format!("looked in the system's library folders and LD_LIBRARY_PATH={path}"),
        _ => "looked in the system's library folders; LD_LIBRARY_PATH is not set".to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_driver_is_an_error_with_advice() {
        let error = Driver::load_from(&["libcuda_that_is_not_there.so.1"]).err().expect("there is no such file");
        let message = error.to_string();
        for part in ["libcuda_that_is_not_there.so.1", "library folders", "nvidia-driver", "backend = \"flex\""] {
            assert!(message.contains(part), "{part} is missing in: {message}");
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_library_that_is_no_driver_is_refused() {
        let error = Driver::load_from(&["libc.so.6"]).err().expect("libc is no CUDA driver");
        assert_eq!(error, CudaError::BrokenDriver { library: "libc.so.6".to_string(), symbol: "cuDriverGetVersion" });
    }

    #[test]
    fn loading_gives_devices_or_an_error() {
        match Driver::load() {
            Ok(driver) => {
                let devices = driver.devices().expect("a loaded driver lists its devices");
                let beyond = driver.device(devices.len()).expect_err("one past the last device");
                assert_eq!(beyond, CudaError::NoSuchDevice { ordinal: devices.len(), count: devices.len() });
                for device in devices {
                    assert!(device.multiprocessors > 0, "{device:?}");
                }
            }
            Err(error) => assert!(!error.to_string().is_empty()),
        }
    }
}
