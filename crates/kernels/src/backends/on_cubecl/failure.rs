//! Device failures in operations: operations return tensors, so a failure unwinds as a panic.
//!
//! The payload is [`DeviceFailure`]; the caller that runs a training step catches it ([`DeviceFailure::catch`]) and reports one clear error. CubeCL
//! works on threads of its own, on which a failed allocation is a panic; a hook keeps the message for the failure that follows.

use std::panic::{self, AssertUnwindSafe, PanicHookInfo};
use std::sync::{Mutex, PoisonError};

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

/// Returns the last message of CubeCL's queue threads that the panic hook suppressed, once.
pub(in crate::backends) fn suppressed_message() -> Option<String> {
    SUPPRESSED.lock().unwrap_or_else(PoisonError::into_inner).take()
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
