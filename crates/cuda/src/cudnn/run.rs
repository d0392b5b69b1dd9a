//! Running a plan: binding pointers to the tensors of its graph.

use std::ffi::c_void;

use cudarc::driver::sys::{self as driver, CUdeviceptr};

use super::descriptor::Descriptor;
use super::graph::{ALIGNMENT, Source};
use super::plan::Plan;
use super::shape::Pass;
use super::sys::{Attribute, Kind, Raw};
use super::{Cudnn, Handle};
use crate::{CudaError, Stream};

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
    /// [`super::AttentionShape::statistics_len`] 32-bit floats, written.
    pub statistics: CUdeviceptr,
    /// What [`super::AttentionShape::packed_index`] made, read; not looked at for uniform documents.
    pub index: CUdeviceptr,
    /// [`Plan::workspace_bytes`] bytes on a 256-byte boundary, overwritten; not looked at if there are none.
    pub workspace: CUdeviceptr,
    /// What scores are multiplied with, usually `1 / sqrt(head_dim)`.
    pub scale: f32,
}

/// Buffers of a backward call, with the same demands.
#[derive(Clone, Copy, Debug)]
pub struct BackwardPointers {
    /// What the forward call was given, all of it read here; `workspace` has the bytes of the backward plan.
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

/// Scalars that cuDNN reads from the host while a call is queued.
struct Scalars {
    scale: f32,
    one: f32,
    masked: f32,
}

impl Cudnn {
    /// Queues output and statistics of a forward plan on `stream`; the host does not wait.
    ///
    /// # Errors
    /// [`CudaError::DifferentDevices`], [`CudaError::AttentionShape`] for a pointer off its boundary, or what cuDNN or the
    /// driver says.
    ///
    /// # Safety
    /// Each pointer is to memory of the plan's sizes, rows `tokens` of them and strides as in its shape, on this context's
    /// device; what is written overlaps nothing else; all of it stays allocated until the stream has done the work. The index
    /// is one that the shape of this plan made.
    pub unsafe fn forward(&self, stream: &Stream, plan: &Plan, pointers: &ForwardPointers) -> Result<(), CudaError> {
        assert_eq!(plan.pass, Pass::Forward, "a backward plan was given to Cudnn::forward");
        // SAFETY: handed on to the caller; the sources of a forward plan are all in these pointers.
        unsafe { self.run(stream, plan, pointers, |_| None) }
    }

    /// Queues the gradients of a backward plan on `stream`; the host does not wait.
    ///
    /// # Errors
    /// As for [`Self::forward`].
    ///
    /// # Safety
    /// As for [`Self::forward`]; output and statistics are those of the forward pass with the same scale and index.
    pub unsafe fn backward(&self, stream: &Stream, plan: &Plan, pointers: &BackwardPointers) -> Result<(), CudaError> {
        assert_eq!(plan.pass, Pass::Backward, "a forward plan was given to Cudnn::backward");
        let gradient = |source| match source {
            Source::OutputGradient => Some(pointers.output_gradient),
            Source::QueryGradient => Some(pointers.query_gradient),
            Source::KeyGradient => Some(pointers.key_gradient),
            Source::ValueGradient => Some(pointers.value_gradient),
            _ => None,
        };
        // SAFETY: handed on to the caller.
        unsafe { self.run(stream, plan, &pointers.forward, gradient) }
    }

    /// # Safety
    /// As for [`Self::forward`] and [`Self::backward`].
    unsafe fn run(
        &self,
        stream: &Stream,
        plan: &Plan,
        pointers: &ForwardPointers,
        gradient: impl Fn(Source) -> Option<CUdeviceptr>,
    ) -> Result<(), CudaError> {
        let (first, second) = (self.context.ordinal(), stream.context().ordinal());
        if first != second {
            return Err(CudaError::DifferentDevices { call: "cudnnBackendExecute", first, second });
        }
        let scalars = Scalars { scale: pointers.scale, one: 1.0, masked: plan.masked };
        let pack = pack(self, plan, pointers, &scalars, gradient)?;
        let handle = self.lock_handle();
        self.context.with_current(|| {
            handle.set_stream(stream)?;
            // SAFETY: the workspace has the plan's bytes, as the caller promised.
            unsafe { self.prepare(stream, plan, pointers.workspace)? };
            // SAFETY: the handle is alive and locked; the pointers are the caller's promise; the scalars outlive this call, in
            // which cuDNN reads them.
            unsafe { plan.execution.execute(handle.raw, &pack) }
        })
    }

    /// Writes what cuDNN wants to find in our part of the workspace.
    ///
    /// # Safety
    /// `workspace` has the plan's bytes; the context is current.
    unsafe fn prepare(&self, stream: &Stream, plan: &Plan, workspace: CUdeviceptr) -> Result<(), CudaError> {
        let driver = self.context.driver();
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

/// The variant pack: numbers of tensors and where their data is.
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
    let mut pack = Descriptor::new(cudnn.symbols, Kind::VariantPack, "the variant pack")?;
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
        let reason = format!("the address of {source:?} is {device:#x}, and must be on a {ALIGNMENT}-byte boundary");
        return Err(CudaError::AttentionShape { reason });
    }
    Ok(device as Raw)
}

impl Handle {
    /// Sends what follows to `stream`.
    fn set_stream(&self, stream: &Stream) -> Result<(), CudaError> {
        // SAFETY: both are alive, since they are borrowed; calls queued earlier keep their stream.
        let status = unsafe { (self.symbols.set_stream)(self.raw, stream.handle().cast()) };
        self.symbols.check(status, || "setting the stream".to_string())
    }
}
