//! Device failures in operations: operations return tensors, so a failure unwinds as a panic.
//!
//! The payload is [`DeviceFailure`]; the caller that runs a training step catches it ([`DeviceFailure::catch`]) and reports one clear error. CubeCL
//! works on threads of its own, on which a failed allocation is a panic; a hook keeps the message for the failure that follows.

use std::cell::Cell;
use std::panic::{self, AssertUnwindSafe};
use std::sync::{Mutex, PoisonError};

/// The last message of CubeCL's queue threads that the panic hook suppressed, or of an error of wgpu on them.
static SUPPRESSED: Mutex<Option<String>> = Mutex::new(None);

thread_local! {
    /// The message of a panic of CubeCL on this thread, which most often follows from one of the queue's.
    static OF_THIS_THREAD: Cell<Option<String>> = const { Cell::new(None) };
}

/// Why the device was lost; all later work on it fails.
static LOSS: Mutex<Option<String>> = Mutex::new(None);

/// Notes what a failure that follows will say.
pub(in crate::backends) fn note_message(message: String) {
    *SUPPRESSED.lock().unwrap_or_else(PoisonError::into_inner) = Some(message);
}

/// Notes that the device was lost.
#[cfg(feature = "wgpu")]
pub(in crate::backends) fn note_loss(reason: &str) {
    *LOSS.lock().unwrap_or_else(PoisonError::into_inner) = Some(format!("the device was lost: {reason}"));
}

/// Returns how the device was lost, if it was.
pub(in crate::backends) fn loss() -> Option<String> {
    LOSS.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

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

    /// Runs `work` and returns the failure that ended it, if any: one of ours, a panic of CubeCL on this thread, or what a lost device led to.
    /// Other panics continue.
    pub fn catch<T>(work: impl FnOnce() -> T) -> Result<T, Self> {
        panic::catch_unwind(AssertUnwindSafe(work)).map_err(|payload| match payload.downcast::<Self>() {
            Ok(failure) => *failure,
            Err(other) => {
                let lost = loss().map(|lost| (false, lost));
                let of_burn = || {
                    let message = OF_THIS_THREAD.take().map(|own| suppressed_message().unwrap_or(own))?;
                    Some((message.contains("memory"), message))
                };
                match lost.or_else(of_burn) {
                    Some((out_of_memory, message)) => {
                        Self { operation: "an operation of Burn", out_of_memory, message }
                    }
                    None => panic::resume_unwind(other),
                }
            }
        })
    }

    /// Installs a panic hook that suppresses failures which [`DeviceFailure::catch`] will report, and the messages of
    /// CubeCL's queue threads about failed allocations, which the failure's message repeats.
    pub fn quiet_hook() {
        static ONCE: std::sync::Once = std::sync::Once::new();
        ONCE.call_once(|| {
            let earlier = panic::take_hook();
            panic::set_hook(Box::new(move |info| {
                let is_queue = std::thread::current().name().is_some_and(|name| name.starts_with("DSD-"));
                let is_of_cubecl = is_queue || info.location().is_some_and(|place| place.file().contains("cubecl-"));
                let message = is_of_cubecl.then(|| info.payload_as_str().unwrap_or("CubeCL ended").to_owned());
                if is_queue {
                    note_message(message.unwrap_or_default());
                } else if is_of_cubecl {
                    OF_THIS_THREAD.set(message);
                } else {
                    OF_THIS_THREAD.set(None);
                    if !info.payload().is::<Self>() {
                        earlier(info);
                    }
                }
            }));
        });
    }
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
