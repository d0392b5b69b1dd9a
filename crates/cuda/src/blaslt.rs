//! GEMMs by cuBLASLt.
//!
//! Callers use row-major matrices; `descriptors.rs` maps a GEMM to the library's column-major one. A GEMM is described
//! to the library once, and its algorithm is chosen once ([`BlasLt::choose`]). The plan is cached
//! under shape, types and alignment of its addresses, so that a call costs a lookup and a launch.
//!
//! Not supported: batches (one GEMM per call) and fused activations.

mod descriptors;
mod matmul;
mod plan;
mod pointers;
mod symbols;
mod tune;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::{Hash, Hasher};
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

pub use matmul::{ElementType, Matmul, Operand, Scaling};
pub use pointers::Pointers;
pub use tune::Measuring;

use crate::context::Context;
use crate::error::CudaError;
use crate::memory::DeviceBuffer;
use crate::stream::{Stream, same_device};
use descriptors::{Key, Workspace};
use plan::{Call, Plan};
use pointers::Alignment;
use symbols::{Algorithm, Opaque, Symbols};
use tune::{Choice, Choices};

/// The plans built so far, and the choices of their algorithms.
struct Plans {
    by_key: HashMap<Key, Choice>,
    choices: Choices,
    /// Whether parts of a sum are added in a separate step only.
    in_order: bool,
}

/// cuBLASLt on one device, with a workspace and the plans built so far.
///
/// It can be used from all threads. There is one workspace, so all GEMMs must go to one stream, or to streams ordered by
/// events: that is part of the contract of [`BlasLt::prepare`]. Streams that run concurrently need a `BlasLt` each.
pub struct BlasLt {
    // Dropped in this order: the plans know the handle, and the handle may know the workspace.
    plans: Mutex<Plans>,
    handle: Handle,
    workspace: DeviceBuffer,
}

impl BlasLt {
    /// Opens the library and creates a handle, with 64 MiB of workspace from Hopper on and 16 MiB before.
    pub fn new(context: &Context) -> Result<Self, CudaError> {
        let device = context.driver().device(context.ordinal())?;
        let capability = device.compute_capability;
        // More splits of a long reduction, and stream-K kernels on Hopper, need more than cuBLAS's default of 32 MiB.
        let workspace_bytes = if capability.0 >= 9 { 64 << 20 } else { 16 << 20 };
        let symbols = Symbols::load(context.driver())?;
        let handle = Handle::new(symbols, context, capability)?;
        let workspace = DeviceBuffer::new(context, workspace_bytes)?;
        let choices = Choices::new(symbols, &device, workspace_bytes);
        let plans = Plans { by_key: HashMap::new(), choices, in_order: false };
        Ok(Self { plans: Mutex::new(plans), handle, workspace })
    }

    /// Sets whether the parts of a divided sum may be added in a separate step only, whose order follows from the shape, from now on. Otherwise
    /// blocks may add them to an output in f32 as they end.
    pub fn add_in_order(&self, in_order: bool) {
        let plans = &mut *self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        if std::mem::replace(&mut plans.in_order, in_order) != in_order {
            plans.by_key.clear();
        }
    }

    /// Chooses the source of the algorithms of large GEMMs, from now on; at first it is [`Measuring::Off`].
    pub fn choose(&self, measuring: Measuring) {
        let Plans { by_key, choices, .. } = &mut *self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        if choices.measuring != measuring {
            choices.measuring = measuring;
            by_key.clear();
        }
    }

    /// Prepares `D = alpha * op(A) op(B) + beta * C`, plus the bias if there is one, which is submitted later; `None` if D has no elements. If its
    /// algorithms are to be measured, that happens now, on the stream that `to_measure` returns.
    ///
    /// # Safety
    /// From now on until the prepared GEMM is submitted and done:
    /// - The addresses point to device memory of this context that is as large as `matmul` says (rows times `leading`, except
    ///   for the gap after the last row) and stays allocated until the stream has done the work.
    /// - Work that writes the inputs or uses D is ordered before this on the stream, and later uses are ordered after it.
    /// - D overlaps neither A nor B. C is D itself or does not overlap it.
    /// - Earlier GEMMs of this `BlasLt` were submitted to the same stream, or are ordered before this one by an event: they
    ///   share the workspace.
    ///
    /// # Errors
    /// [`CudaError::InvalidMatmul`], [`CudaError::DifferentDevices`], or errors of the library.
    pub unsafe fn prepare<'a>(
        &self,
        to_measure: impl FnOnce() -> &'a Stream,
        matmul: &Matmul,
        alpha: f32,
        beta: f32,
        pointers: Pointers,
    ) -> Result<Option<PreparedMatmul>, CudaError> {
        if matmul.m == 0 || matmul.n == 0 {
            return Ok(None);
        }
        let pointers = pointers.completed(beta);
        pointers.check(matmul)?;
        let call = Call { handle: self.handle.handle, workspace: self.workspace(), alpha, beta, pointers };
        // SAFETY: the caller's promise is the one that is required.
        let (plan, algorithm) = unsafe { self.plan(matmul, &call, to_measure) }?;
        Ok(Some(PreparedMatmul { context: self.handle.context.clone(), plan, algorithm, call }))
    }

    /// Returns the plan for a GEMM and its algorithm: cached, or built now, perhaps by trying algorithms on this call.
    ///
    /// # Safety
    /// The requirements of [`BlasLt::prepare`] must hold for this call, which is submitted afterwards.
    unsafe fn plan<'a>(
        &self,
        matmul: &Matmul,
        call: &Call,
        to_measure: impl FnOnce() -> &'a Stream,
    ) -> Result<(Arc<Plan>, Algorithm), CudaError> {
        let key = Key { matmul: *matmul, alignment: Alignment::of(&call.pointers) };
        // Locked while a plan is built, so that two threads do not build it twice. A panic leaves the map intact.
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        let Plans { by_key, choices, in_order } = &mut *plans;
        let choice = match by_key.entry(key) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => {
                matmul.check()?;
                matmul.check_device(self.handle.capability)?;
                let make = || {
                    // SAFETY: the handle lives as long as `self`, and `with_current` makes its context current.
                    unsafe { Plan::new(self.handle.symbols, self.handle.handle, &key, self.workspace(), *in_order) }
                };
                let (plan, proposed) = self.handle.context.with_current(make)?;
                new.insert(choices.first(&key, plan, proposed))
            }
        };
        if choice.is_due(call) {
            let stream = to_measure();
            same_device("cublasLtMatmul", &self.handle.context, stream.context())?;
            // SAFETY: the caller's promise; the call may be repeated, and `with_current` makes the context current.
            self.handle.context.with_current(|| unsafe { choices.measure(&key, choice, call, stream) })?;
        }
        Ok((choice.plan.clone(), choice.algorithm))
    }

    fn workspace(&self) -> Workspace {
        Workspace { address: self.workspace.address(), bytes: self.workspace.len_bytes() }
    }
}

/// A GEMM with its addresses and its algorithm. Two with equal hash input compute the same.
pub struct PreparedMatmul {
    context: Context,
    plan: Arc<Plan>,
    algorithm: Algorithm,
    call: Call,
}

impl PreparedMatmul {
    /// Submits it to the stream; the host does not wait.
    ///
    /// # Safety
    /// The requirements of [`BlasLt::prepare`] must hold, and the [`BlasLt`] that prepared it must be alive.
    pub unsafe fn submit(&self, stream: &Stream) -> Result<(), CudaError> {
        same_device("cublasLtMatmul", &self.context, stream.context())?;
        // SAFETY: the addresses, the handle and the workspace are the caller's promise, the stream is borrowed, and their context is made
        // current.
        self.context.with_current(|| unsafe { self.plan.submit(&self.algorithm, &self.call, stream) })
    }
}

impl Hash for PreparedMatmul {
    fn hash<H: Hasher>(&self, state: &mut H) {
        Arc::as_ptr(&self.plan).hash(state);
        self.algorithm.data.hash(state);
        (self.call.alpha.to_bits(), self.call.beta.to_bits(), self.call.pointers).hash(state);
    }
}

/// The library's own state on a device.
struct Handle {
    symbols: &'static Symbols,
    context: Context,
    handle: Opaque,
    capability: (u32, u32),
}

// SAFETY: a cublasLtHandle_t may be used from any thread, and by several at once (cuBLAS documentation, "Thread Safety").
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

impl Handle {
    fn new(symbols: &'static Symbols, context: &Context, capability: (u32, u32)) -> Result<Self, CudaError> {
        let mut handle = ptr::null_mut();
        context.with_current(|| {
            // SAFETY: the pointer is valid for a write, and a context is current.
            let status = unsafe { (symbols.create)(&mut handle) };
            symbols.checked("cublasLtCreate", status, || format!("a handle on GPU {}", context.ordinal()))
        })?;
        Ok(Self { symbols, context: context.clone(), handle, capability })
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // An error cannot be handled here: the driver may already be gone when the process ends.
        let _ = self.context.with_current(|| {
            // SAFETY: created by cublasLtCreate in this context and destroyed once.
            let _ = unsafe { (self.symbols.destroy)(self.handle) };
            Ok(())
        });
    }
}
