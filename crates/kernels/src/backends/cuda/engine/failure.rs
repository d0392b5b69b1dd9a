//! Failures of CUDA in operations. CubeCL itself only logs a failed allocation and returns a dead handle; the first operation
//! that requests its address detects that here. A failed request has two causes that look alike: out of memory, or an
//! earlier kernel that broke the context. [`failed_allocation`] distinguishes them by querying the driver.
//! Trade-off: an earlier kernel's error is reported by the operation that detected it, not by the one that caused it.

use firebrick_cuda::{Context, CudaError, FailedLaunch};

use crate::backends::on_cubecl::{DeviceFailure, suppressed_message};

/// Determines why CubeCL has no address for a tensor of `bytes` bytes. `problem` is CubeCL's answer, if any.
pub(super) fn failed_allocation(context: &Context, bytes: u64, problem: Option<String>) -> DeviceFailure {
    let detail = problem.or_else(suppressed_message).map(|text| format!(" (CubeCL: {text})")).unwrap_or_default();
    let (out_of_memory, message) = match (context.synchronize(), context.memory()) {
        (Err(error), _) => {
            (error.is_out_of_memory(), format!("an earlier operation failed on the device: {error}{detail}"))
        }
        (Ok(()), Ok(memory)) if memory.free_bytes < bytes => {
            let (free, total) = (memory.free_bytes, memory.total_bytes);
            (true, format!("{bytes} bytes were requested, {free} of {total} are free{detail}"))
        }
        _ => (false, format!("CubeCL could not allocate {bytes} bytes although the device has them{detail}")),
    };
    DeviceFailure { operation: "allocating a tensor", out_of_memory, message }
}

/// Returns the value, or unwinds from `operation`.
pub(crate) fn check<T>(operation: &'static str, result: Result<T, CudaError>) -> T {
    result.unwrap_or_else(|error| {
        let out_of_memory = error.is_out_of_memory();
        DeviceFailure { operation, out_of_memory, message: error.to_string() }.raise()
    })
}

/// Unwinds from the operation whose launch failed, if one did.
pub(crate) fn check_launch(launched: Result<(), FailedLaunch>) {
    launched.unwrap_or_else(|FailedLaunch { name, error }| check(name, Err(error)));
}
