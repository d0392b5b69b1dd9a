//! From a finished graph to something that runs: engines that cuDNN proposes are tried in its order until one accepts.

use super::descriptor::Descriptor;
use super::graph::{FinishedGraph, Source};
use super::shape::{AttentionShape, Pass};
use super::sys::{Attribute, Heuristic, Kind, Raw, Symbols, Type};
use super::version::{Version, Workarounds};
use super::{backward, forward};
use crate::CudaError;

/// A compiled attention call. Made once for each shape; needs a workspace of [`Plan::workspace_bytes`] in every call.
pub struct Plan {
    // Before `_parts`: it refers to them, and fields are dropped in order.
    pub(super) execution: Descriptor,
    _parts: Vec<Descriptor>,
    pub(super) bindings: Vec<(i64, Source)>,
    pub(super) pass: Pass,
    pub(super) shape: AttentionShape,
    pub(super) masked: f32,
    /// Bytes of the workspace that are ours; cuDNN's follow.
    pub(super) own_workspace: usize,
    cudnn_workspace: usize,
    pub(super) lengths: Option<(usize, u32)>,
    pub(super) cleared: Option<(usize, usize)>,
}

/// What a plan is made for.
pub(super) enum Target<'a> {
    /// The device of a live handle.
    Handle(Raw),
    /// A device that need not be here, as a descriptor of its properties. Such a plan is not executed.
    Described(&'a Descriptor),
}

impl Plan {
    /// Bytes of device memory that each call needs beside its buffers, on a 256-byte boundary. Nothing is kept in it between
    /// calls, so all plans of one stream can share the largest.
    pub fn workspace_bytes(&self) -> usize {
        self.own_workspace + self.cudnn_workspace
    }

    /// The shape that it was built for; the gradients' strides of a forward plan are not those of the caller.
    pub fn shape(&self) -> &AttentionShape {
        &self.shape
    }

    /// The pass that it computes.
    pub fn pass(&self) -> Pass {
        self.pass
    }

    /// Builds the graph and compiles it with the first engine that accepts it.
    ///
    /// # Safety
    /// A handle in `target` is live and used by no other thread.
    pub(super) unsafe fn build(
        symbols: Symbols,
        version: Version,
        workarounds: Workarounds,
        pass: Pass,
        shape: AttentionShape,
        target: &Target<'_>,
    ) -> Result<Self, CudaError> {
        // SAFETY: handed on to the caller.
        let built = unsafe { Self::try_build(symbols, version, workarounds, pass, shape, target) };
        built.map_err(|error| match error {
            // CUDNN_STATUS_NOT_SUPPORTED and its kin: cuDNN understood, and does not do it.
            CudaError::Cudnn { step, status: 3000..=3999, name, message } => CudaError::CudnnUnsupported {
                case: shape.describe(pass),
                reason: format!("cuDNN {version} says {name} when {step}: {message}"),
            },
            other => other,
        })
    }

    /// # Safety
    /// As for [`Self::build`].
    unsafe fn try_build(
        symbols: Symbols,
        version: Version,
        workarounds: Workarounds,
        pass: Pass,
        shape: AttentionShape,
        target: &Target<'_>,
    ) -> Result<Self, CudaError> {
        let (graph, own_workspace, lengths, cleared) = match pass {
            Pass::Forward => (forward::graph(symbols, version, workarounds, shape)?, 0, None, None),
            Pass::Backward => {
                let backward = backward::graph(symbols, version, workarounds, shape)?;
                (backward.graph, backward.workspace, backward.lengths, backward.cleared)
            }
        };
        let FinishedGraph { descriptor: graph, bindings, mut parts } =
            graph.finish(|graph| target.bind_graph(graph))?;
        let (execution, engine) = compile(symbols, &graph, target)?;
        let cudnn_workspace = execution.integer(Attribute::ExecutionPlanWorkspaceSize)?;
        let cudnn_workspace = usize::try_from(cudnn_workspace).unwrap_or(0);
        let everything = pass == Pass::Backward && shape.is_packed() && workarounds.clear_workspace;
        let cleared = if everything { Some((0, own_workspace + cudnn_workspace)) } else { cleared };
        parts.splice(0..0, [engine, graph]);
        Ok(Self {
            execution,
            _parts: parts,
            bindings,
            pass,
            shape,
            masked: version.masked(),
            own_workspace,
            cudnn_workspace,
            lengths,
            cleared,
        })
    }
}

/// Asks the heuristics for engines and takes the first that compiles; returns the plan and its engine.
fn compile(symbols: Symbols, graph: &Descriptor, target: &Target<'_>) -> Result<(Descriptor, Descriptor), CudaError> {
    let mut refusal = None;
    for mode in [Heuristic::A, Heuristic::B, Heuristic::Fallback] {
        let engines = match candidates(symbols, graph, mode, target) {
            Ok(engines) => engines,
            Err(error) => {
                // The first refusal is the one of the best guess; the fallbacks say less.
                refusal.get_or_insert(error);
                continue;
            }
        };
        for engine in engines {
            match compile_with(symbols, &engine, target) {
                Ok(plan) => return Ok((plan, engine)),
                Err(error) => _ = refusal.get_or_insert(error),
            }
        }
    }
    Err(refusal.unwrap_or_else(|| CudaError::Cudnn {
        step: "asking the heuristics for engines".to_string(),
        status: 3000,
        name: "CUDNN_STATUS_NOT_SUPPORTED".to_string(),
        message: "no engine was proposed; CUDNN_LOGLEVEL_DBG=2 makes cuDNN say why, often a missing libnvrtc"
            .to_string(),
    }))
}

fn candidates(
    symbols: Symbols,
    graph: &Descriptor,
    mode: Heuristic,
    target: &Target<'_>,
) -> Result<Vec<Descriptor>, CudaError> {
    let mut heuristics = Descriptor::new(symbols, Kind::EngineHeuristics, format!("the heuristics of mode {mode:?}"))?;
    heuristics.descriptor(Attribute::EngineHeuristicsOperationGraph, graph)?.choice(
        Attribute::EngineHeuristicsMode,
        Type::HeuristicMode,
        mode as i32,
    )?;
    target.bind_heuristics(&mut heuristics)?;
    heuristics.finish()?.list(Attribute::EngineHeuristicsResults, Kind::EngineConfig)
}

fn compile_with(symbols: Symbols, engine: &Descriptor, target: &Target<'_>) -> Result<Descriptor, CudaError> {
    let mut plan = Descriptor::new(symbols, Kind::ExecutionPlan, "the execution plan")?;
    target.bind_plan(&mut plan)?;
    plan.descriptor(Attribute::ExecutionPlanEngineConfig, engine)?;
    plan.finish()
}

impl Target<'_> {
    fn bind_graph(&self, graph: &mut Descriptor) -> Result<(), CudaError> {
        match self {
            // SAFETY: live, as the builder's caller promised.
            Self::Handle(handle) => unsafe { graph.handle(Attribute::OperationGraphHandle, *handle).map(|_| ()) },
            Self::Described(_) => Ok(()),
        }
    }

    fn bind_heuristics(&self, heuristics: &mut Descriptor) -> Result<(), CudaError> {
        match self {
            Self::Handle(_) => Ok(()),
            Self::Described(device) => {
                heuristics.descriptor(Attribute::EngineHeuristicsDeviceProperties, device).map(|_| ())
            }
        }
    }

    fn bind_plan(&self, plan: &mut Descriptor) -> Result<(), CudaError> {
        match self {
            // SAFETY: live, as the builder's caller promised.
            Self::Handle(handle) => unsafe { plan.handle(Attribute::ExecutionPlanHandle, *handle).map(|_| ()) },
            Self::Described(device) => plan.descriptor(Attribute::ExecutionPlanDeviceProperties, device).map(|_| ()),
        }
    }
}
