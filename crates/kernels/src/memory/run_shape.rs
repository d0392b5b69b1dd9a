//! Announcements from a caller to a backend: how a run will use the device, and what the next pass brings.
//!
//! Trade-off: only CUDA uses them; the other backends prepare nothing.

use burn_tensor::{DType, backend::Backend};
use firebrick_arch::AttentionSpec;
use serde::{Deserialize, Serialize};

use crate::attention::Documents;

/// The planned use of the device by a run; by default it keeps and prepares nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RunShape {
    /// Bytes of converted frozen weights that may stay on the device between passes: for the forward, and for the backward.
    pub kept_bytes: [u64; 2],
    /// Choice of the library's algorithms for large GEMMs.
    pub gemm_algorithms: GemmAlgorithms,
    /// Maximum bytes of a pass on the device and in host memory, in addition to parameters, gradients and optimizer state.
    pub pass_bytes: [u64; 2],
    /// Tokens of that largest pass.
    pub pass_tokens: usize,
    /// Count and bytes of tensors that passes will [offload](crate::MemoryOps::offload); their memory is allocated while other work runs.
    pub offloaded: Vec<[usize; 2]>,
}

/// Choice of a library's algorithms for large GEMMs, if it has several.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GemmAlgorithms {
    /// The first that the library proposes.
    #[default]
    Library,
    /// The fastest in earlier measurements on this machine; the library's first if there are none.
    Kept,
    /// The fastest in earlier measurements, or in those of the first pass, which then takes seconds longer.
    Measured,
}

/// Announcement of upcoming work, for [`crate::MemoryOps::hint`].
#[derive(Debug)]
pub enum Hint<'a, B: Backend> {
    /// A pass over this many tokens is about to be uploaded, outside sections. Where pools keep buffers of exact sizes,
    /// buffers of passes with other token counts are freed if the device has too little memory left for this pass, or
    /// if the host's buffers exceed those of the largest pass in the [`RunShape`].
    Pass {
        /// Tokens of all rows.
        tokens: usize,
    },
    /// Forward and backward will attend inside these documents. Slow preparations start now; a pass prepares whatever is missing.
    Attention {
        /// The layer's attention.
        spec: &'a AttentionSpec,
        /// The compute format.
        dtype: DType,
        /// The documents.
        documents: &'a Documents<B>,
    },
    /// The forward is over: device memory of offloaded tensors is released, so that later work, which waits for their copies, can use it.
    ForwardDone,
    /// Whether tensor sizes differ in every pass from here on, as those of experts do. A backend that keeps memory for tensors of
    /// equal size then rounds sizes up, so that few different sizes occur.
    VaryingSizes(bool),
}

/// A measured kind of device time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceTime {
    /// Waits for restored tensors: the part of the copies that other work does not hide.
    RestoreWait,
    /// Waits for other ranks: communication that other work does not hide.
    RankWait,
    /// Operations between devices, including the parts that other work hides and waits for ranks that arrive later.
    Collectives,
}
