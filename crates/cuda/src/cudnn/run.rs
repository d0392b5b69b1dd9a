//! Runs a plan: binds pointers to the tensors of its graph.

use std::ffi::c_void;
use std::hash::{Hash, Hasher};

use cudarc::driver::sys::{self as driver, CUdeviceptr};

use super::descriptor::Descriptor;
use super::graph::{ALIGNMENT, Source};
use super::library::Cudnn;
use super::plan::Plan;
use super::shape::Pass;
use super::sys::{Attribute, Kind, Raw};
use crate::error::CudaError;
use crate::stream::{Stream, same_device};

/// Buffers of a forward call. All addresses are on 16-byte boundaries, in memory of the plan's device.
#[derive(Clone, Copy, Debug)]
pub struct ForwardPointers {
    /// `[tokens, query_heads, head_dim]`, read.
    pub query: CUdeviceptr,
    /// `[tokens, key_value_heads, head_dim]`, read.
    pub key: CUdeviceptr,
    /// `[tokens, key_value_heads, head_dim]`, read.
    pub value: CUdeviceptr,
    /// `[tokens, query_heads, head_dim]`, written.
    pub output: CUdeviceptr,
    /// The natural logarithm of the sum of exponentials of each query's scaled, masked scores (log-sum-exp): `tokens * query_heads` f32 values in the
    /// order that [`super::AttentionShape::is_packed`] names, written. Rows after the last packed document are not.
    pub statistics: CUdeviceptr,
    /// The index of packed documents ([`super::AttentionShape::packed_index_len`]), read; ignored for uniform documents.
    pub index: CUdeviceptr,
    /// [`Plan::workspace_bytes`] bytes on a 256-byte boundary, overwritten; ignored if there are none.
    pub workspace: CUdeviceptr,
    /// The factor of the scores, usually `1 / sqrt(head_dim)`.
    pub scale: f32,
}

impl Hash for ForwardPointers {
    fn hash<H: Hasher>(&self, state: &mut H) {
        let Self { query, key, value, output, statistics, index, workspace, scale } = *self;
        ([query, key, value, output, statistics, index, workspace], scale.to_bits()).hash(state);
    }
}

/// Buffers of a backward call, with the same requirements.
#[derive(Clone, Copy, Debug, Hash)]
pub struct BackwardPointers {
    /// The buffers of the forward call, all of them read here, except `workspace`, which has the size for the backward plan.
    pub forward: ForwardPointers,
    /// `[tokens, query_heads, head_dim]`, read.
    pub output_gradient: CUdeviceptr,
    /// `[tokens, query_heads, head_dim]`, written.
    pub query_gradient: CUdeviceptr,
    /// `[tokens, key_value_heads, head_dim]`, written.
    pub key_gradient: CUdeviceptr,
    /// `[tokens, key_value_heads, head_dim]`, written.
    pub value_gradient: CUdeviceptr,
}

/// Scalars that cuDNN reads from the host while a call is submitted.
struct Scalars {
    scale: f32,
    one: f32,
    masked: f32,
}

impl Cudnn {
    /// Submits a forward plan, which computes output and statistics, to `stream`; the host does not wait.
    ///
    /// # Errors
    /// [`CudaError::DifferentDevices`], [`CudaError::AttentionShape`] for a misaligned pointer, or errors of cuDNN or the driver.
    ///
    /// # Safety
    /// Each pointer must refer to device memory of this context with `tokens` dense rows of the plan's shape. Outputs must not overlap
    /// anything else. All of it must stay allocated until the stream has done the work. The index must come from this plan's shape.
    ///
    /// # Panics
    /// If the plan is not a forward plan.
    pub unsafe fn forward(&self, stream: &Stream, plan: &Plan, pointers: &ForwardPointers) -> Result<(), CudaError> {
        assert_eq!(plan.pass, Pass::Forward, "a backward plan was given to Cudnn::forward");
        // SAFETY: the caller's promise; the sources of a forward plan are all in these pointers.
        unsafe { self.run(stream, plan, pointers, |_| None) }
    }

    /// Submits a backward plan, which computes the gradients, to `stream`; the host does not wait.
    ///
    /// # Safety
    /// The requirements of [`Self::forward`] must hold. Output and statistics must be those of the forward pass with
    /// the same scale and index; the statistics must be in the order of this plan's shape.
    ///
    /// # Panics
    /// If the plan is not a backward plan.
    pub unsafe fn backward(&self, stream: &Stream, plan: &Plan, pointers: &BackwardPointers) -> Result<(), CudaError> {
        assert_eq!(plan.pass, Pass::Backward, "a forward plan was given to Cudnn::backward");
        let gradient = |source| match source {
            Source::OutputGradient => Some(pointers.output_gradient),
            Source::QueryGradient => Some(pointers.query_gradient),
            Source::KeyGradient => Some(pointers.key_gradient),
            Source::ValueGradient => Some(pointers.value_gradient),
            _ => None,
        };
        // SAFETY: the caller's promise.
        unsafe { self.run(stream, plan, &pointers.forward, gradient) }
    }

    /// # Safety
    /// The requirements of [`Self::forward`] and [`Self::backward`] must hold.
    unsafe fn run(
        &self,
        stream: &Stream,
        plan: &Plan,
        pointers: &ForwardPointers,
        gradient: impl Fn(Source) -> Option<CUdeviceptr>,
    ) -> Result<(), CudaError> {
        same_device("cudnnBackendExecute", &self.maker.context, stream.context())?;
        let scalars = Scalars { scale: pointers.scale, one: 1.0, masked: plan.masked };
        let pack = pack(self, plan, pointers, &scalars, gradient)?;
        let handle = self.maker.lock_handle(plan.pass);
        self.maker.context.with_current(|| {
            handle.set_stream(stream)?;
            // SAFETY: the workspace has the plan's bytes, as the caller promised.
            unsafe { self.prepare(stream, plan, pointers.workspace)? };
            // SAFETY: the handle is alive and locked, and the pointers are the caller's promise. cuDNN reads the scalars during
            // this call, which they outlive.
            unsafe { plan.execution.execute(handle.raw, &pack) }
        })
    }

    /// Writes the values that cuDNN reads from our part of the workspace.
    ///
    /// # Safety
    /// `workspace` must have the plan's bytes, and the context must be current.
    unsafe fn prepare(&self, stream: &Stream, plan: &Plan, workspace: CUdeviceptr) -> Result<(), CudaError> {
        let driver = self.maker.context.driver();
        if let Some((at, length)) = plan.lengths {
            let (to, count) = (workspace + at as u64, plan.shape.documents());
            // SAFETY: this part of the workspace holds a 32-bit integer for each document.
            let written = unsafe { driver::cuMemsetD32Async(to, length, count, stream.handle()) };
            driver.checked("cuMemsetD32Async", written.result())?;
        }
        if let Some((at, bytes)) = plan.cleared {
            // SAFETY: this part of the workspace has that many bytes.
            let cleared = unsafe { driver::cuMemsetD8Async(workspace + at as u64, 0, bytes, stream.handle()) };
            driver.checked("cuMemsetD8Async", cleared.result())?;
        }
        Ok(())
    }
}

/// Builds the variant pack: the numbers of tensors and the addresses of their data.
fn pack(
    cudnn: &Cudnn,
    plan: &Plan,
    pointers: &ForwardPointers,
    scalars: &Scalars,
    gradient: impl Fn(Source) -> Option<CUdeviceptr>,
) -> Result<Descriptor, CudaError> {
    let (mut numbers, mut data) = (Vec::with_capacity(plan.bindings.len()), Vec::with_capacity(plan.bindings.len()));
    for &(number, source) in &plan.bindings {
        numbers.push(number);
        data.push(address(source, pointers, scalars, &gradient)?);
    }
    let workspace = pointers.workspace + plan.own_workspace as u64;
    let mut pack = Descriptor::new(cudnn.maker.symbols, Kind::VariantPack, "the variant pack")?;
    pack.integers(Attribute::VariantPackUniqueIds, &numbers)?
        .pointers(Attribute::VariantPackDataPointers, &data)?
        .pointers(Attribute::VariantPackWorkspace, &[workspace as Raw])?;
    pack.finish()
}

fn address(
    source: Source,
    pointers: &ForwardPointers,
    scalars: &Scalars,
    gradient: &impl Fn(Source) -> Option<CUdeviceptr>,
) -> Result<Raw, CudaError> {
    let scalar = |value: &f32| Ok(std::ptr::from_ref(value).cast_mut().cast::<c_void>());
    let device = match source {
        Source::Scale => return scalar(&scalars.scale),
        Source::One => return scalar(&scalars.one),
        Source::Masked => return scalar(&scalars.masked),
        Source::Query => pointers.query,
        Source::Key => pointers.key,
        Source::Value => pointers.value,
        Source::Output => pointers.output,
        Source::Statistics => pointers.statistics,
        Source::Index(at) => pointers.index + at as u64,
        Source::Workspace(at) => pointers.workspace + at as u64,
        Source::OutputGradient | Source::QueryGradient | Source::KeyGradient | Source::ValueGradient => {
            gradient(source).expect("only backward plans bind gradients")
        }
    };
    if device == 0 || !device.is_multiple_of(ALIGNMENT) {
        let reason = format!("the address of {source:?} is {device:#x}, expected a non-null multiple of {ALIGNMENT}");
        return Err(CudaError::AttentionShape { reason });
    }
    Ok(device as Raw)
}
