//! Compiles a finished graph: tries the engines that cuDNN proposes, in its order, until one accepts the graph.

use super::descriptor::Descriptor;
use super::graph::{FinishedGraph, Source};
use super::limits::Version;
use super::shape::{AttentionShape, Pass};
use super::sys::{Attribute, Heuristic, Kind, Raw, Symbols, Type};
use super::{backward, forward};
use crate::error::CudaError;

/// A compiled attention call. There is one per shape. Every call needs a workspace of [`Plan::workspace_bytes`].
pub struct Plan {
    // Dropped before `_parts`, to which it refers: fields are dropped in order.
    pub(super) execution: Descriptor,
    _parts: Vec<Descriptor>,
    pub(super) bindings: Vec<(i64, Source)>,
    pub(super) pass: Pass,
    pub(super) shape: AttentionShape,
    pub(super) masked: f32,
    /// Bytes of our part of the workspace; cuDNN's follows.
    pub(super) own_workspace: usize,
    cudnn_workspace: usize,
    pub(super) lengths: Option<(usize, u32)>,
    pub(super) cleared: Option<(usize, usize)>,
}

impl Plan {
    /// Returns the bytes of device memory that each call needs in addition to its buffers, on a 256-byte boundary. No
    /// call leaves data there for another, so all plans of one stream can share it.
    pub fn workspace_bytes(&self) -> usize {
        self.own_workspace + self.cudnn_workspace
    }

    /// Builds the graph and compiles it with the first engine that accepts it.
    ///
    /// # Safety
    /// `handle` must be live and used by no other thread.
    pub(super) unsafe fn build(
        symbols: Symbols,
        version: Version,
        pass: Pass,
        shape: AttentionShape,
        handle: Raw,
    ) -> Result<Self, CudaError> {
        let (graph, own_workspace, lengths, cleared) = match pass {
            Pass::Forward => (forward::graph(symbols, version, shape)?, 0, None, None),
            Pass::Backward => {
                let backward = backward::graph(symbols, version, shape)?;
                (backward.graph, backward.workspace, backward.lengths, backward.cleared)
            }
        };
        let FinishedGraph { descriptor: graph, bindings, mut parts } =
            // SAFETY: the handle is the caller's promise.
            unsafe { graph.finish(handle)? };
        // SAFETY: the handle is the caller's promise.
        let (execution, engine) = unsafe { compile(symbols, &graph, handle)? };
        let cudnn_workspace = execution.integer(Attribute::ExecutionPlanWorkspaceSize)?;
        let cudnn_workspace = usize::try_from(cudnn_workspace).unwrap_or(0);
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

/// Requests engines from the heuristics and uses the first that compiles; returns the plan and its engine.
///
/// # Safety
/// `handle` must be live and used by no other thread.
unsafe fn compile(symbols: Symbols, graph: &Descriptor, handle: Raw) -> Result<(Descriptor, Descriptor), CudaError> {
    let mut refusal = None;
    for mode in [Heuristic::A, Heuristic::B, Heuristic::Fallback] {
        let engines = match candidates(symbols, graph, mode) {
            Ok(engines) => engines,
            Err(error) => {
                // The first rejection, that of the best guess, is the most informative.
                refusal.get_or_insert(error);
                continue;
            }
        };
        for engine in engines {
            // SAFETY: the handle is the caller's promise.
            match unsafe { compile_with(symbols, &engine, handle) } {
                Ok(plan) => return Ok((plan, engine)),
                Err(error) => _ = refusal.get_or_insert(error),
            }
        }
    }
    Err(refusal.unwrap_or_else(|| CudaError::Cudnn {
        step: "asking the heuristics for engines".to_string(),
        status: 3000,
        name: "CUDNN_STATUS_NOT_SUPPORTED".to_string(),
        message: "no engine was proposed; CUDNN_LOGLEVEL_DBG=2 makes cuDNN print why, often a missing libnvrtc"
            .to_string(),
    }))
}

fn candidates(symbols: Symbols, graph: &Descriptor, mode: Heuristic) -> Result<Vec<Descriptor>, CudaError> {
    let mut heuristics = Descriptor::new(symbols, Kind::EngineHeuristics, format!("the heuristics of mode {mode:?}"))?;
    heuristics.descriptor(Attribute::EngineHeuristicsOperationGraph, graph)?.choice(
        Attribute::EngineHeuristicsMode,
        Type::HeuristicMode,
        mode as i32,
    )?;
    heuristics.finish()?.list(Attribute::EngineHeuristicsResults, Kind::EngineConfig)
}

/// # Safety
/// `handle` must be live and used by no other thread.
unsafe fn compile_with(symbols: Symbols, engine: &Descriptor, handle: Raw) -> Result<Descriptor, CudaError> {
    let mut plan = Descriptor::new(symbols, Kind::ExecutionPlan, "the execution plan")?;
    // SAFETY: the handle is the caller's promise.
    unsafe { plan.handle(Attribute::ExecutionPlanHandle, handle)? };
    plan.descriptor(Attribute::ExecutionPlanEngineConfig, engine)?;
    plan.finish()
}
