//! Matrix products by cuBLASLt.
//!
//! Callers speak row-major; `column_major.rs` turns a product into what the library computes fastest. A product is described and
//! its algorithm chosen once, and the plan is kept under its shape, its types and the alignment of its addresses, so that a call
//! costs a look-up and a launch. What it gives up: batches (one product a call), and fused activations.

mod column_major;
mod descriptors;
mod matmul;
mod plan;
mod pointers;
mod symbols;
mod tune;
mod workspace;

use std::collections::HashMap;
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

pub use matmul::{ElementType, Epilogue, Matmul, Operand, Scaling};
pub use plan::Plan;
pub use pointers::{Alignment, Pointers};
pub use tune::Tuning;

use crate::{Context, CudaError, Stream};
use column_major::Key;
use plan::{Call, Scratch};
use symbols::{Opaque, Symbols};
use workspace::Workspace;

/// cuBLASLt on one device, with a workspace and the plans made so far.
///
/// All threads may use it. The workspace is one, so all products must go to one stream, or to streams ordered by events: that is
/// part of [`BlasLt::run`]'s contract. Streams that run at the same time need a `BlasLt` each.
pub struct BlasLt {
    // Destroyed in this order: the plans know the handle, the handle may know the workspace.
    plans: Mutex<HashMap<Key, Arc<Plan>>>,
    handle: Handle,
    workspace: Workspace,
}

impl BlasLt {
    /// Opens the library and makes a handle, with 64 MiB of workspace from Hopper on and 16 MiB before.
    ///
    /// # Errors
    /// [`CudaError::BlasLtNotFound`], [`CudaError::BrokenBlasLt`], or what driver and library say.
    pub fn new(context: &Context) -> Result<Self, CudaError> {
        let (major, _) = context.driver().device(context.ordinal())?.compute_capability;
        // More splits of a long reduction, and stream-K kernels on Hopper, need more than cuBLAS' own default of 32 MiB.
        Self::with_workspace(context, if major >= 9 { 64 << 20 } else { 16 << 20 })
    }

    /// As [`BlasLt::new`], with a workspace of so many bytes.
    ///
    /// # Errors
    /// As [`BlasLt::new`].
    pub fn with_workspace(context: &Context, bytes: usize) -> Result<Self, CudaError> {
        let symbols = Symbols::load(context.driver())?;
        let handle = Handle::new(symbols, context)?;
        Ok(Self { plans: Mutex::default(), handle, workspace: Workspace::new(context, bytes)? })
    }

    /// The context that it works in.
    pub fn context(&self) -> &Context {
        &self.handle.context
    }

    /// Bytes of its workspace.
    pub fn workspace_bytes(&self) -> usize {
        self.workspace.bytes()
    }

    /// The plan for a product whose addresses are so aligned: from the cache, or made and kept. The algorithm is the library's
    /// first choice until [`BlasLt::tune`] finds a better one.
    ///
    /// # Errors
    /// [`CudaError::InvalidMatmul`]; [`CudaError::BlasLt`], above all where no algorithm fits.
    pub fn plan(&self, matmul: &Matmul, alignment: Alignment) -> Result<Arc<Plan>, CudaError> {
        let key = Key { matmul: *matmul, alignment };
        // Held while a plan is made, so that two threads do not make it twice. A panic leaves the map whole.
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(plan) = plans.get(&key) {
            return Ok(plan.clone());
        }
        matmul.check()?;
        let make = || {
            // SAFETY: the handle lives as long as `self`, and `with_current` makes its context current.
            unsafe { Plan::new(self.handle.symbols, self.handle.handle, &key, self.scratch()) }
        };
        let plan = Arc::new(self.context().with_current(make)?);
        plans.insert(key, plan.clone());
        Ok(plan)
    }

    /// Submits the product to the stream; the host does not wait. With no elements in D there is nothing to do.
    ///
    /// # Safety
    /// - The addresses point to device memory of this context that is as large as `matmul` says (rows times `leading`, but for
    ///   the gap after the last row) and stays so until the stream has done the work.
    /// - Work that writes the inputs or touches D is ordered before this on the stream, and later uses are ordered after it.
    /// - D overlaps neither A nor B; C is D itself or does not overlap it.
    /// - Earlier products of this `BlasLt` were submitted to the same stream, or are ordered before this one by an event: they
    ///   share the workspace.
    ///
    /// # Errors
    /// [`CudaError::InvalidMatmul`], [`CudaError::DifferentDevices`], or what the library says.
    pub unsafe fn run(
        &self,
        stream: &Stream,
        matmul: &Matmul,
        alpha: f32,
        beta: f32,
        pointers: Pointers,
    ) -> Result<(), CudaError> {
        if matmul.m == 0 || matmul.n == 0 {
            return Ok(());
        }
        let pointers = pointers.completed(beta);
        let plan = self.plan_for(stream, matmul, &pointers)?;
        let call = self.call(stream, alpha, beta, pointers);
        // SAFETY: handed on to the caller; handle, stream and workspace are borrowed, and their context is made current.
        self.context().with_current(|| unsafe { plan.submit(plan.chosen(), &call) })
    }

    /// Times the algorithms that the library proposes for this product, with alpha 1 and beta 0, and uses the fastest from now
    /// on. D is overwritten, and so is a bias gradient; the host waits. A product that was tuned before, in this or another
    /// `BlasLt::tune`, is not timed again: its first result is returned.
    ///
    /// Which one wins may differ from run to run, and with it the last bits of results.
    ///
    /// # Safety
    /// As [`BlasLt::run`].
    ///
    /// # Errors
    /// As [`BlasLt::run`].
    pub unsafe fn tune(&self, stream: &Stream, matmul: &Matmul, pointers: Pointers) -> Result<Tuning, CudaError> {
        if matmul.m == 0 || matmul.n == 0 {
            return Ok(Tuning::NONE);
        }
        // The alignment is that of the real addresses, C's included, so that the plan is the one that `run` will use.
        let beta = if pointers.c == 0 { 0.0 } else { 1.0 };
        let plan = self.plan_for(stream, matmul, &pointers.completed(beta))?;
        if let Some(tuning) = plan.tuning() {
            return Ok(tuning);
        }
        let call = self.call(stream, 1.0, 0.0, pointers.completed(0.0));
        // SAFETY: as in `run`.
        let tuning = self.context().with_current(|| unsafe { tune::measure(&plan, stream, &call) })?;
        plan.choose(tuning.chosen);
        Ok(*plan.tuning.get_or_init(|| tuning))
    }

    fn plan_for(&self, stream: &Stream, matmul: &Matmul, pointers: &Pointers) -> Result<Arc<Plan>, CudaError> {
        let (first, second) = (self.context().ordinal(), stream.context().ordinal());
        if first != second {
            return Err(CudaError::DifferentDevices { call: "cublasLtMatmul", first, second });
        }
        pointers.check(matmul)?;
        self.plan(matmul, Alignment::of(pointers))
    }

    fn call(&self, stream: &Stream, alpha: f32, beta: f32, pointers: Pointers) -> Call {
        let (handle, stream) = (self.handle.handle, stream.handle().cast());
        Call { handle, stream, scratch: self.scratch(), alpha, beta, pointers }
    }

    fn scratch(&self) -> Scratch {
        Scratch { address: self.workspace.address(), bytes: self.workspace.bytes() }
    }
}

/// The library's own state on a device.
struct Handle {
    symbols: &'static Symbols,
    context: Context,
    handle: Opaque,
}

// SAFETY: a cublasLtHandle_t may be used from any thread, and by several at once (cuBLAS documentation, "Thread Safety").
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

impl Handle {
    fn new(symbols: &'static Symbols, context: &Context) -> Result<Self, CudaError> {
        let mut handle = ptr::null_mut();
        context.with_current(|| {
            // SAFETY: the pointer is valid for a write, and a context is current.
            let status = unsafe { (symbols.create)(&mut handle) };
            symbols.checked("cublasLtCreate", status, || format!("a handle on GPU {}", context.ordinal()))
        })?;
        Ok(Self { symbols, context: context.clone(), handle })
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // Nothing can be done about an error: the driver may be gone already when the process ends.
        let _ = self.context.with_current(|| {
            // SAFETY: made by cublasLtCreate in this context and destroyed once.
            let _ = unsafe { (self.symbols.destroy)(self.handle) };
            Ok(())
        });
    }
}
