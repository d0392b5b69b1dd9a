//! The loaded library, its handles on a device, and the plans built so far.
//!
//! Building a plan takes up to a few seconds, in which cuDNN mostly compiles on one core, so plans can be built in advance on other threads:
//! [`Cudnn::begin`]. Each pass has a handle, which builds its plans and runs them; the plans of both passes are built at the same time.
//!
//! Trade-off: a handle serves all streams of a context, one call at a time. Calls only submit work, which takes
//! microseconds, but a call waits while a plan of its pass is being built.

use std::collections::HashMap;
use std::panic::resume_unwind;
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};

use super::limits::{Version, takes_packed};
use super::plan::Plan;
use super::shape::{AttentionShape, Pass};
use super::sys::{Raw, Symbols};
use crate::context::Context;
use crate::driver::Driver;
use crate::error::CudaError;
use crate::libraries::Libraries;
use crate::stream::Stream;

/// cuDNN on one device, with the plans that were built so far.
pub struct Cudnn {
    // Dropped before the handles that the plans refer to: fields are dropped in order.
    plans: Mutex<HashMap<Key, Entry>>,
    pub(super) maker: Arc<Maker>,
}

type Key = (Pass, AttentionShape);

type Built = Result<Arc<Plan>, CudaError>;

/// A plan, or the thread that builds it.
enum Entry {
    Built(Built),
    Begun(JoinHandle<Built>),
}

/// Builds plans, on any thread.
pub(super) struct Maker {
    pub(super) context: Context,
    pub(super) symbols: Symbols,
    version: Version,
    /// Major compute capability.
    major: u32,
    forward: Mutex<Handle>,
    backward: Mutex<Handle>,
}

/// `cudnnHandle_t`, behind a lock: only one thread at a time may use it.
pub(super) struct Handle {
    pub(super) raw: Raw,
    context: Context,
    symbols: Symbols,
}

// SAFETY: a cuDNN handle may be used from any thread, but only from one at a time.
unsafe impl Send for Handle {}

impl Cudnn {
    /// Finds and loads cuDNN and creates handles for the device of the context. Takes about a second the first time.
    pub fn load(context: &Context) -> Result<Self, CudaError> {
        let (symbols, version) = load_library(context.driver())?;
        let major = context.driver().device(context.ordinal())?.compute_capability.0;
        let handle = || Handle::new(context, symbols).map(Mutex::new);
        let (forward, backward) = (handle()?, handle()?);
        let maker = Maker { context: context.clone(), symbols, version, major, forward, backward };
        Ok(Self { plans: Mutex::default(), maker: Arc::new(maker) })
    }

    /// Returns the major, minor and patch version of the library.
    pub fn version(&self) -> (u32, u32, u32) {
        let version = self.maker.version;
        (version.0, version.1, version.2)
    }

    /// Returns whether this version supports packed documents on this device.
    pub fn takes_packed(&self) -> bool {
        takes_packed(self.maker.version, self.maker.major)
    }

    /// Starts a thread for the forward plan of `forward` and one for the backward plan of `backward`, unless the plan
    /// exists or is being built. The call that requests a plan reports its error.
    pub fn begin(&self, forward: &AttentionShape, backward: &AttentionShape) {
        let mut plans = self.lock_plans();
        for key in [(Pass::Forward, forward.without_gradients()), (Pass::Backward, *backward)] {
            if plans.contains_key(&key) {
                continue;
            }
            let maker = self.maker.clone();
            // Without a thread, the call that requests the plan builds it.
            if let Ok(thread) = Builder::new().name("cuDNN plan".to_owned()).spawn(move || maker.make(key)) {
                plans.insert(key, Entry::Begun(thread));
            }
        }
    }

    /// Waits for plans that [`Cudnn::begin`] has started and that were not requested yet, because a process must not
    /// end while a thread is inside cuDNN.
    pub fn finish(&self) {
        let mut plans = self.lock_plans();
        for (_, entry) in plans.extract_if(|_, entry| matches!(entry, Entry::Begun(_))) {
            if let Entry::Begun(thread) = entry {
                // The result, even a panic, does not matter: the plan was not requested.
                drop(thread.join());
            }
        }
    }

    /// Returns the plan that computes output and statistics of `shape`. The first call builds it, which takes up to a
    /// few seconds.
    ///
    /// # Errors
    /// [`CudaError::CudnnUnsupported`] if cuDNN does not support this shape, [`CudaError::AttentionShape`] if the shape is
    /// invalid, or errors of cuDNN. The first two are cached; other errors may be temporary, and the next call tries again.
    pub fn forward_plan(&self, shape: &AttentionShape) -> Result<Arc<Plan>, CudaError> {
        self.made((Pass::Forward, shape.without_gradients()))
    }

    /// Returns the plan that computes the gradients of `shape`; the first call builds it.
    pub fn backward_plan(&self, shape: &AttentionShape) -> Result<Arc<Plan>, CudaError> {
        self.made((Pass::Backward, *shape))
    }

    fn made(&self, key: Key) -> Built {
        made(&mut self.lock_plans(), key, || self.maker.make(key))
    }

    fn lock_plans(&self) -> MutexGuard<'_, HashMap<Key, Entry>> {
        // A panic while the lock was held left the map usable: removed entries are built again.
        self.plans.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Cudnn {
    /// Waits for threads that build plans, because they refer to the handles.
    fn drop(&mut self) {
        self.finish();
    }
}

impl Maker {
    fn make(&self, (pass, shape): Key) -> Built {
        shape.check()?;
        shape.check_known_limits(pass, self.version, self.major)?;
        let handle = self.lock_handle(pass);
        let plan = self.context.with_current(|| {
            // SAFETY: the handle is alive and locked.
            unsafe { Plan::build(self.symbols, self.version, pass, shape, handle.raw) }
        });
        plan.map(Arc::new).map_err(|error| match error {
            // CUDNN_STATUS_NOT_SUPPORTED and its variants: the graph is valid, but cuDNN does not support it.
            CudaError::Cudnn { step, status: 3000..=3999, name, message } => CudaError::CudnnUnsupported {
                case: shape.describe(pass),
                reason: format!("cuDNN {} returned {name} while {step}: {message}", self.version),
            },
            other => other,
        })
    }

    /// Returns the handle that builds and runs the plans of a pass.
    pub(super) fn lock_handle(&self, pass: Pass) -> MutexGuard<'_, Handle> {
        let handle = match pass {
            Pass::Forward => &self.forward,
            Pass::Backward => &self.backward,
        };
        // The handle has no state of ours that a panic could have left inconsistent.
        handle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the plan of `key`: the existing one, that of the thread which builds it, or a new one. Errors that depend
/// only on the shape are cached as well; others, such as a lack of memory, are not, since a later call may succeed.
fn made(plans: &mut HashMap<Key, Entry>, key: Key, make: impl FnOnce() -> Built) -> Built {
    if let Some(Entry::Built(known)) = plans.get(&key) {
        return known.clone();
    }
    let built = match plans.remove(&key) {
        Some(Entry::Begun(thread)) => thread.join().unwrap_or_else(|panic| resume_unwind(panic)),
        _ => make(),
    };
    if matches!(built, Ok(_) | Err(CudaError::CudnnUnsupported { .. } | CudaError::AttentionShape { .. })) {
        plans.insert(key, Entry::Built(built.clone()));
    }
    built
}

fn load_library(driver: &Driver) -> Result<(Symbols, Version), CudaError> {
    let cudnn = Libraries::find(driver)?.cudnn()?;
    let symbols = Symbols::look_up(cudnn)?;
    // SAFETY: has no arguments and accesses no device.
    let version = Version::unpack(unsafe { (symbols.get_version)() });
    Ok((symbols, version))
}

impl Handle {
    fn new(context: &Context, symbols: Symbols) -> Result<Self, CudaError> {
        let mut raw = ptr::null_mut();
        context.with_current(|| {
            // SAFETY: the pointer is valid for a write; the handle belongs to the context that is current here.
            let status = unsafe { (symbols.create)(&mut raw) };
            symbols.check(status, || "creating a handle".to_string())
        })?;
        Ok(Self { raw, context: context.clone(), symbols })
    }

    /// Sends later calls to `stream`.
    pub(super) fn set_stream(&self, stream: &Stream) -> Result<(), CudaError> {
        // SAFETY: both are alive, since they are borrowed; calls submitted earlier keep their stream.
        let status = unsafe { (self.symbols.set_stream)(self.raw, stream.handle().cast()) };
        self.symbols.check(status, || "setting the stream".to_string())
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        let _ = self.context.with_current(|| {
            // SAFETY: created by cudnnCreate and destroyed once. The status is ignored: it is an error only if the driver is
            // already shutting down with the process.
            let _ = unsafe { (self.symbols.destroy)(self.raw) };
            Ok(())
        });
    }
}

#[cfg(test)]
mod tests {
    use super::super::shape::{Element, Layout};
    use super::*;

    /// Needs a driver and the libraries; returns early without them.
    #[test]
    fn without_cudnn_the_error_names_the_package() {
        let Ok(driver) = Driver::load() else { return };
        match load_library(&driver) {
            Ok((_, version)) => assert!(version.0 >= 8, "{version}"),
            Err(error) => assert!(error.to_string().contains("nvidia-cudnn"), "{error}"),
        }
    }

    fn key() -> Key {
        let layout = Layout::Uniform { documents: 1, length: 64 };
        let element = Element::Bf16;
        let (query_heads, key_value_heads, head_dim) = (2, 1, 64);
        let shape = AttentionShape { element, layout, query_heads, key_value_heads, head_dim, in_order: false };
        (Pass::Forward, shape)
    }

    #[test]
    fn refusals_are_kept_and_other_errors_are_not() {
        let unsupported = CudaError::CudnnUnsupported { case: String::new(), reason: String::new() };
        let invalid = CudaError::AttentionShape { reason: String::new() };
        let temporary = CudaError::OutOfMemory { requested_bytes: 1, free_bytes: 0, total_bytes: 1 };
        for (first, is_kept) in [(unsupported, true), (invalid, true), (temporary, false)] {
            let mut plans = HashMap::new();
            let mut calls = 0;
            for _ in 0..2 {
                let result = made(&mut plans, key(), || {
                    calls += 1;
                    Err(first.clone())
                });
                assert_eq!(result.err(), Some(first.clone()));
            }
            assert_eq!(calls, if is_kept { 1 } else { 2 }, "{first}");
        }
    }

    #[test]
    fn what_a_thread_has_begun_is_waited_for_and_kept() {
        let refusal = CudaError::CudnnUnsupported { case: "on a thread".to_owned(), reason: String::new() };
        let sent = refusal.clone();
        let mut plans = HashMap::from([(key(), Entry::Begun(std::thread::spawn(move || Err(sent))))]);
        for _ in 0..2 {
            let result = made(&mut plans, key(), || panic!("it was begun"));
            assert_eq!(result.err(), Some(refusal.clone()));
        }
        assert!(matches!(plans[&key()], Entry::Built(Err(_))));
    }
}
