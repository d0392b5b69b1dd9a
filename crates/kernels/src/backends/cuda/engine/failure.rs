//! Device failures in operations: operations return tensors, so a failure unwinds as a panic.
//!
//! The payload is [`DeviceFailure`]; the caller that runs a training step catches it ([`DeviceFailure::catch`]) and
//! reports one clear error. CubeCL itself only logs a failed allocation and returns a dead handle; the first operation
//! that requests its address detects that here. A failed request has two causes that look alike: out of memory, or an
//! earlier kernel that broke the context. [`failed_allocation`] distinguishes them by querying the driver.
//! Trade-off: an earlier kernel's error is reported by the operation that detected it, not by the one that caused it.

use std::panic::{self, AssertUnwindSafe, PanicHookInfo};
use std::sync::{Mutex, PoisonError};

use firebrick_cuda::{Context, CudaError, FailedLaunch};

/// The last message of CubeCL's queue threads that the panic hook suppressed.
static SUPPRESSED: Mutex<Option<String>> = Mutex::new(None);

/// A device failed in an operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceFailure {
    /// The operation.
    pub operation: &'static str,
    /// Whether memory ran out: a smaller run may work.
    pub out_of_memory: bool,
    /// The library's own message.
    pub message: String,
}

impl std::fmt::Display for DeviceFailure {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{}: {}", self.operation, self.message)
    }
}

impl std::error::Error for DeviceFailure {}

impl DeviceFailure {
    pub(crate) fn raise(self) -> ! {
        panic::panic_any(self)
    }

    /// Runs `work` and returns the failure that ended it, if any. Other panics continue.
    ///
    /// # Errors
    /// The failure that ended `work`.
    pub fn catch<T>(work: impl FnOnce() -> T) -> Result<T, Self> {
        panic::catch_unwind(AssertUnwindSafe(work)).map_err(|payload| match payload.downcast::<Self>() {
            Ok(failure) => *failure,
            Err(other) => panic::resume_unwind(other),
        })
    }

    /// Installs a panic hook that suppresses failures which [`DeviceFailure::catch`] will report, and the messages of
    /// CubeCL's queue threads about failed allocations, which the failure's message repeats.
    pub fn quiet_hook() {
        static ONCE: std::sync::Once = std::sync::Once::new();
        ONCE.call_once(|| {
            let earlier = panic::take_hook();
            panic::set_hook(Box::new(move |info| {
                if is_of_cubecl(info) {
                    *SUPPRESSED.lock().unwrap_or_else(PoisonError::into_inner) = Some(info.to_string());
                } else if !info.payload().is::<Self>() {
                    earlier(info);
                }
            }));
        });
    }
}

fn is_of_cubecl(info: &PanicHookInfo<'_>) -> bool {
    std::thread::current().name().is_some_and(|name| name.starts_with("DSD-"))
        || info.location().is_some_and(|place| place.file().contains("cubecl-runtime"))
}

/// Determines why CubeCL has no address for a tensor of `bytes` bytes. `problem` is CubeCL's answer, if any.
pub(super) fn failed_allocation(context: &Context, bytes: u64, problem: Option<String>) -> DeviceFailure {
    let suppressed = SUPPRESSED.lock().unwrap_or_else(PoisonError::into_inner).take();
    let detail = problem.or(suppressed).map(|text| format!(" (CubeCL: {text})")).unwrap_or_default();
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_caught_and_another_panic_is_not() {
        let failure = DeviceFailure { operation: "embed", out_of_memory: true, message: "no memory".to_owned() };
        let raised = failure.clone();
        assert_eq!(DeviceFailure::catch(move || raised.raise()), Err::<(), _>(failure));
        assert_eq!(DeviceFailure::catch(|| 3), Ok(3));
        assert!(panic::catch_unwind(|| DeviceFailure::catch(|| panic!("a bug"))).is_err());
    }
}
