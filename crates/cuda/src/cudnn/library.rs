//! The loaded library, its handle on a device, and the plans made so far.
//!
//! Trade-off: one handle serves all streams of a context, one call at a time. Calls only submit work, which takes microseconds.

use std::collections::HashMap;
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::plan::Plan;
use super::shape::{AttentionShape, Pass};
use super::sys::{Raw, Symbols};
use super::version::Version;
use crate::context::Context;
use crate::error::CudaError;
use crate::library::{CUDNN, NotFound};
use crate::stream::Stream;

/// cuDNN on one device, with the plans that were made so far.
pub struct Cudnn {
    context: Context,
    symbols: Symbols,
    version: Version,
    /// Major compute capability.
    major: u32,
    // Dropped before the handle that the plans refer to: fields are dropped in order.
    plans: Mutex<HashMap<(Pass, AttentionShape), Built>>,
    handle: Mutex<Handle>,
}

/// The result of building a plan.
type Built = Result<Arc<Plan>, CudaError>;

/// `cudnnHandle_t`, behind a lock: only one thread at a time may use it.
pub(super) struct Handle {
    pub(super) raw: Raw,
    context: Context,
    symbols: Symbols,
}

// SAFETY: a cuDNN handle may be used from any thread, but only from one at a time.
unsafe impl Send for Handle {}

impl Cudnn {
    /// Finds and loads cuDNN and creates a handle for the device of the context. Takes about a second the first time.
    ///
    /// # Errors
    /// [`CudaError::CudnnNotFound`], [`CudaError::BrokenCudnn`], or errors of cuDNN or the driver.
    pub fn load(context: &Context) -> Result<Self, CudaError> {
        let (symbols, version) = load_library()?;
        let major = context.driver().device(context.ordinal())?.compute_capability.0;
        let handle = Handle::new(context, symbols)?;
        let context = context.clone();
        Ok(Self { context, symbols, version, major, handle: Mutex::new(handle), plans: Mutex::default() })
    }

    /// Major, minor and patch version of the library.
    pub fn version(&self) -> (u32, u32, u32) {
        (self.version.0, self.version.1, self.version.2)
    }

    /// The plan that computes output and statistics of `shape`. It is made in the first call, which takes up to a few seconds.
    /// The strides of the gradients and `deterministic` are ignored.
    ///
    /// # Errors
    /// [`CudaError::CudnnUnsupported`] if cuDNN does not support this shape, [`CudaError::AttentionShape`] if the shape is
    /// invalid, or errors of cuDNN. The first two are cached; other errors may be temporary, and the next call tries again.
    pub fn forward_plan(&self, shape: &AttentionShape) -> Result<Arc<Plan>, CudaError> {
        self.plan(Pass::Forward, shape)
    }

    /// The plan that computes the gradients of `shape`; see [`Self::forward_plan`].
    ///
    /// # Errors
    /// As for [`Self::forward_plan`].
    pub fn backward_plan(&self, shape: &AttentionShape) -> Result<Arc<Plan>, CudaError> {
        self.plan(Pass::Backward, shape)
    }

    fn plan(&self, pass: Pass, shape: &AttentionShape) -> Result<Arc<Plan>, CudaError> {
        shape.check()?;
        let shape = if pass == Pass::Forward { shape.without_gradients() } else { *shape };
        // A panic while the lock was held left the map intact: only complete results are inserted.
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        cached(&mut plans, (pass, shape), || self.build(pass, shape).map(Arc::new))
    }

    fn build(&self, pass: Pass, shape: AttentionShape) -> Result<Plan, CudaError> {
        shape.check_known_limits(pass, self.version, self.major)?;
        let handle = self.lock_handle();
        self.context.with_current(|| {
            // SAFETY: the handle is alive and locked.
            unsafe { Plan::build(self.symbols, self.version, pass, shape, handle.raw) }
        })
    }

    pub(super) fn lock_handle(&self) -> MutexGuard<'_, Handle> {
        // The handle has no state of ours that a panic could have left inconsistent.
        self.handle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn context(&self) -> &Context {
        &self.context
    }

    pub(super) fn symbols(&self) -> Symbols {
        self.symbols
    }
}

/// The cached result for `key`, or a new one. Errors that depend only on the shape are cached as well; an error such as a lack
/// of memory is not, since a later call may succeed.
fn cached<K: std::hash::Hash + Eq, P>(
    plans: &mut HashMap<K, Result<Arc<P>, CudaError>>,
    key: K,
    build: impl FnOnce() -> Result<Arc<P>, CudaError>,
) -> Result<Arc<P>, CudaError> {
    if let Some(known) = plans.get(&key) {
        return known.clone();
    }
    let built = build();
    if matches!(built, Ok(_) | Err(CudaError::CudnnUnsupported { .. } | CudaError::AttentionShape { .. })) {
        plans.insert(key, built.clone());
    }
    built
}

/// Opens the library, which is never unloaded.
fn load_library() -> Result<(Symbols, Version), CudaError> {
    // Its file names do not depend on the CUDA version, so all of them are tried.
    let not_found = |NotFound { searched, package }| CudaError::CudnnNotFound { searched, package };
    let (library, file) = CUDNN.open(|_| true).map_err(not_found)?;
    let symbols = Symbols::look_up(&library, &file)?;
    std::mem::forget(library);
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
    use super::*;

    #[test]
    fn without_cudnn_the_error_names_the_package() {
        match load_library() {
            Ok((_, version)) => assert!(version.0 >= 8, "{version}"),
            Err(error) => assert!(error.to_string().contains("libcudnn9"), "{error}"),
        }
    }

    #[test]
    fn plans_and_refusals_are_cached_and_other_errors_are_not() {
        let unsupported = CudaError::CudnnUnsupported { case: String::new(), reason: String::new() };
        let invalid = CudaError::AttentionShape { reason: String::new() };
        let temporary = CudaError::OutOfMemory { requested_bytes: 1, free_bytes: 0, total_bytes: 1 };
        for (first, is_cached) in
            [(Ok(Arc::new(1)), true), (Err(unsupported), true), (Err(invalid), true), (Err(temporary), false)]
        {
            let mut plans = HashMap::new();
            assert_eq!(cached(&mut plans, "shape", || first.clone()), first);
            let second = cached(&mut plans, "shape", || Ok(Arc::new(2)));
            assert_eq!(second, if is_cached { first } else { Ok(Arc::new(2)) });
        }
    }
}
