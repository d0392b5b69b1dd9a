//! What a caller tells a backend ahead: how a run will use the device, and what the next pass brings.
//!
//! Trade-off: only CUDA listens; the other backends prepare nothing.

use burn_tensor::{DType, backend::Backend};
use firebrick_arch::AttentionSpec;
use serde::{Deserialize, Serialize};

use crate::attention::Documents;

/// What a run will do with its device, by its plan; the default keeps and prepares nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RunShape {
    /// Bytes of converted frozen weights that may stay on the device from one pass to the next: for the forward, and
    /// for the backward.
    pub kept_bytes: [u64; 2],
    /// How the library's algorithms for large GEMMs are chosen.
    pub gemm_algorithms: GemmAlgorithms,
    /// Bytes that a pass takes at most on the device and in host memory, in addition to parameters, gradients and
    /// optimizer state.
    pub pass_bytes: [u64; 2],
    /// Tokens of that pass.
    pub pass_tokens: usize,
    /// Count and bytes of tensors that passes will [offload](crate::MemoryOps::offload), for which memory is allocated
    /// while other work runs.
    pub offloaded: Vec<[usize; 2]>,
}

/// How a library's algorithms for large GEMMs are chosen, where it has several.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GemmAlgorithms {
    /// The first that the library proposes.
    #[default]
    Library,
    /// What was measured before on this machine; the library's first where nothing was.
    Kept,
    /// What was measured before, or is measured now: in the first pass, which takes seconds longer.
    Measured,
}

/// What a caller knows ahead; see [`crate::MemoryOps::hint`].
#[derive(Debug)]
pub enum Hint<'a, B: Backend> {
    /// A pass over this many tokens is about to be uploaded, outside of sections. Where pools keep buffers of exact
    /// sizes, what passes over other numbers of tokens left there is returned if the device has too little left for
    /// this pass, or the host's buffers are more than the largest pass of the [`RunShape`] needs.
    Pass {
        /// Of all rows.
        tokens: usize,
    },
    /// Forward and backward will attend inside these documents. What takes long to prepare starts now; a pass prepares
    /// what is missing.
    Attention {
        /// How a layer attends.
        spec: &'a AttentionSpec,
        /// The compute format.
        dtype: DType,
        /// The documents.
        documents: &'a Documents<B>,
    },
    /// The forward is over: what offloaded tensors still take on the device is let go, so that later work, which waits
    /// for their copies, can have the memory.
    ForwardDone,
    /// Whether tensors have other sizes in every pass from here on, as those of experts have. A backend that keeps
    /// memory for tensors of the same size rounds sizes up, so that few of them occur. See
    /// [`crate::with_varying_sizes`].
    VaryingSizes(bool),
}

/// Which time of the device is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceTime {
    /// Waits for restored tensors: what the copies cost beyond the work that they run next to.
    RestoreWait,
    /// Waits for other ranks: communication that no other work hides.
    RankWait,
    /// Operations between devices: what hides behind other work included, and waiting for ranks that come later.
    Collectives,
}
