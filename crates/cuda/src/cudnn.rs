//! Attention by cuDNN 9: forward and backward, causal, with grouped heads, for documents of one length or of many.
//!
//! cuDNN is given the whole of an attention call as a graph of elementary operations and answers with a fused kernel. Nothing
//! of it is needed to build; it is looked for and loaded when [`Cudnn::load`] is called.
//!
//! What it gives up: no dropout, no bias, no window, one head width for keys and values, 16-bit elements only. A call that cuDNN
//! does not do is [`CudaError::CudnnUnsupported`], so that the caller can compute it another way; that, too, is remembered for
//! each shape. One handle serves all streams of a context, one call at a time: calls only queue work, which takes
//! microseconds.

mod attention;
mod backward;
mod descriptor;
mod forward;
mod graph;
mod plan;
mod run;
mod shape;
mod sys;
mod version;

use std::collections::HashMap;
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

pub use plan::Plan;
pub use run::{BackwardPointers, ForwardPointers};
pub use shape::{AttentionShape, Element, Layout, Pass, RowStrides};
pub use version::Workarounds;

use crate::library::open_known;
use crate::{Context, CudaError};
use descriptor::Descriptor;
use plan::Target;
use sys::{Attribute, Kind, Raw, Symbols};
use version::Version;

/// cuDNN on one device, with the plans that were made so far.
pub struct Cudnn {
    context: Context,
    symbols: Symbols,
    version: Version,
    workarounds: Workarounds,
    /// Major compute capability.
    major: u32,
    // Before the handle, so that its plans are gone first: fields are dropped in order.
    plans: Mutex<HashMap<(Pass, AttentionShape), Built>>,
    handle: Mutex<Handle>,
}

/// What came of building a plan; refusals are remembered too.
type Built = Result<Arc<Plan>, CudaError>;

/// `cudnnHandle_t`; used by one thread at a time, which the lock around it sees to.
struct Handle {
    raw: Raw,
    context: Context,
    symbols: Symbols,
}

// SAFETY: a cuDNN handle may be used from any thread, only not from two at once.
unsafe impl Send for Handle {}

impl Cudnn {
    /// Finds and loads cuDNN and makes a handle for the context's device. Takes about a second the first time.
    ///
    /// # Errors
    /// [`CudaError::CudnnNotFound`], [`CudaError::BrokenCudnn`], or what cuDNN or the driver says.
    pub fn load(context: &Context) -> Result<Self, CudaError> {
        let (symbols, version) = load_library()?;
        let major = context.driver().device(context.ordinal())?.compute_capability.0;
        let handle = Handle::new(context, symbols)?;
        Ok(Self {
            context: context.clone(),
            symbols,
            version,
            workarounds: version.workarounds(),
            major,
            handle: Mutex::new(handle),
            plans: Mutex::default(),
        })
    }

    /// Major, minor and patch version of the library.
    pub fn version(&self) -> (u32, u32, u32) {
        (self.version.0, self.version.1, self.version.2)
    }

    /// What is done about faults of this version.
    pub fn workarounds(&self) -> Workarounds {
        self.workarounds
    }

    /// The same with other workarounds than those that the version is known to need.
    #[must_use]
    pub fn with_workarounds(self, workarounds: Workarounds) -> Self {
        self.plans.lock().unwrap_or_else(PoisonError::into_inner).clear();
        Self { workarounds, ..self }
    }

    /// The plan that computes output and statistics of `shape`; made on the first call, which takes up to some seconds. The
    /// gradients' strides and `deterministic` do not matter here.
    ///
    /// # Errors
    /// [`CudaError::CudnnUnsupported`] when cuDNN does not do this shape, [`CudaError::AttentionShape`] when nothing could, or
    /// what cuDNN says.
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
        // A panic while the lock was held left the map as it was: nothing half done is ever in it.
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        plans.entry((pass, shape)).or_insert_with(|| self.build(pass, shape).map(Arc::new)).clone()
    }

    fn build(&self, pass: Pass, shape: AttentionShape) -> Result<Plan, CudaError> {
        shape.check_known_limits(pass, self.version, self.major)?;
        let handle = self.lock_handle();
        let target = Target::Handle(handle.raw);
        self.context.with_current(|| {
            // SAFETY: the handle is alive and locked.
            unsafe { Plan::build(self.symbols, self.version, self.workarounds, pass, shape, &target) }
        })
    }

    fn lock_handle(&self) -> std::sync::MutexGuard<'_, Handle> {
        // A handle has no state of ours that a panic could have left half changed.
        self.handle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Bytes of workspace that a pass of `shape` needs on a device that need not be in this machine: plans the call for the device
/// that `description` stands for. It is the JSON text of cuDNN's device properties, such as cudnn-frontend's
/// `DeviceProperties::serialize` writes on a machine that has the device. Needs cuDNN 9.11 or newer, and the driver's library,
/// which cuDNN opens to compile. Takes about a second; nothing is remembered. What cuDNN is known to do wrongly on some devices
/// is refused only by [`Cudnn`], which knows the device.
///
/// # Errors
/// As for [`Cudnn::forward_plan`], and what cuDNN says about the description.
pub fn workspace_bytes_on(description: &str, pass: Pass, shape: &AttentionShape) -> Result<usize, CudaError> {
    described_workspace(description, pass, shape, None)
}

/// [`workspace_bytes_on`] with other workarounds than the version's own, if any.
fn described_workspace(
    description: &str,
    pass: Pass,
    shape: &AttentionShape,
    workarounds: Option<Workarounds>,
) -> Result<usize, CudaError> {
    shape.check()?;
    let shape = if pass == Pass::Forward { shape.without_gradients() } else { *shape };
    let (symbols, version) = load_library()?;
    let workarounds = workarounds.unwrap_or(version.workarounds());
    let mut device = Descriptor::new(symbols, Kind::DeviceProperties, "the described device")?;
    device.text(Attribute::DevicePropertiesJson, description)?;
    let device = device.finish()?;
    let target = Target::Described(&device);
    // SAFETY: there is no handle in this target.
    let plan = unsafe { Plan::build(symbols, version, workarounds, pass, shape, &target) };
    plan.map(|plan| plan.workspace_bytes())
}

/// Opens the library, which is never unloaded.
fn load_library() -> Result<(Symbols, Version), CudaError> {
    // Its files are named alike for every CUDA, so there is none to leave out.
    let opened = open_known("cuDNN", |_| true);
    let (library, file) = opened.map_err(|(searched, package)| CudaError::CudnnNotFound { searched, package })?;
    let symbols = Symbols::look_up(&library, &file)?;
    std::mem::forget(library);
    // SAFETY: takes nothing and touches no device.
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
}

impl Drop for Handle {
    fn drop(&mut self) {
        let _ = self.context.with_current(|| {
            // SAFETY: made by cudnnCreate and destroyed once. The status is dropped: it is an error only when the driver is
            // already shutting down with the process.
            let _ = unsafe { (self.symbols.destroy)(self.raw) };
            Ok(())
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An H100 SXM as cuDNN 9.14 describes it.
    const H100: &str = r#"{"maxGridSize":[2147483647,65535,65535],"maxBlockSize":[1024,1024,64],"regsPerBlock":65536,
        "multiProcessorCount":132,"warpSize":32,"maxSharedMemoryPerBlock":49152,"maxSharedMemoryPerBlockOptin":232448,
        "reservedSharedMemoryPerBlock":1024,"maxRegistersPerSM":65536,"maxCtasPerSM":32,"maxThreadsPerBlock":1024,
        "maxThreadsPerSM":2048,"pciDeviceId":0,"isTccDriver":0,"supportCoopLaunch":1,"smClockRateKHz":1980000,
        "memClockRateKHz":2619000,"l2CacheSize":52428800,"deviceName":"NVIDIA H100 80GB HBM3","deviceVer":900,
        "driverVer":13000,"totalGlobalMem":85029158912,"cudaDeviceId":0}"#;

    /// The kinds of calls that training makes. Says something only where cuDNN and a driver's library are installed; needs no
    /// GPU.
    #[test]
    fn cudnn_accepts_every_graph_for_hopper() {
        match load_library() {
            Ok((_, version)) if version >= Version(9, 11, 0) => {}
            _ => return,
        }
        if let Err(CudaError::DriverNotFound { .. }) = crate::Driver::load() {
            return;
        }
        let mut refused = Vec::new();
        for (layout, query_heads, key_value_heads, head_dim, element, deterministic) in [
            (Layout::Uniform { documents: 2, length: 4096 }, 8, 2, 128, Element::Bf16, false),
            (Layout::Uniform { documents: 3, length: 200 }, 8, 8, 256, Element::Bf16, true),
            (Layout::Packed { documents: 16, longest: 1024, tokens: 4096 }, 8, 2, 128, Element::Bf16, false),
            (Layout::Packed { documents: 16, longest: 1024, tokens: 4096 }, 4, 4, 64, Element::F16, true),
            (Layout::Packed { documents: 16, longest: 512, tokens: 4096 }, 8, 1, 72, Element::Bf16, false),
        ] {
            let mut strides = RowStrides::contiguous(query_heads, key_value_heads, head_dim);
            let joined = (query_heads + 2 * key_value_heads) * head_dim;
            (strides.query, strides.key, strides.value) = (joined, joined, joined);
            let shape =
                AttentionShape { element, layout, query_heads, key_value_heads, head_dim, strides, deterministic };
            let other = Workarounds { clear_workspace: true, wide_offsets: true, padded_accumulators: true };
            for (pass, workarounds) in [
                (Pass::Forward, None),
                (Pass::Forward, Some(other)),
                (Pass::Backward, None),
                (Pass::Backward, Some(other)),
            ] {
                if let Err(error) = described_workspace(H100, pass, &shape, workarounds) {
                    refused.push(error.to_string());
                }
            }
        }
        assert!(refused.is_empty(), "{} refused:\n{}", refused.len(), refused.join("\n"));
    }

    #[test]
    fn without_cudnn_the_error_names_the_package() {
        match load_library() {
            Ok((_, version)) => assert!(version.0 >= 8, "{version}"),
            Err(error) => assert!(error.to_string().contains("libcudnn9"), "{error}"),
        }
    }
}
