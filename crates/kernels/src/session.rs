//! The protocol between a run and its backend: how the run will use the device, what the next pass brings, and in which order device work runs.

use burn_tensor::{DType, backend::Backend};
use firebrick_arch::AttentionSpec;
use serde::{Deserialize, Serialize};

use crate::attention::documents::Documents;
use crate::gemm_format::GemmFormat;
use crate::memory::host::Readback;

/// A run on a device.
pub trait Session: Backend {
    /// Announces how a run will use the device, before its model is built. Backends that prepare nothing ignore it.
    fn open(device: &Self::Device, shape: &RunShape) {
        let _ = (device, shape);
    }

    /// Announces what comes next, so that a backend can prepare for it; most ignore it.
    fn hint(device: &Self::Device, hint: Hint<'_, Self>) {
        let _ = (device, hint);
    }

    /// Runs a stretch of work in which only operations of `Kernels` touch the device.
    ///
    /// A backend with its own stream synchronizes with other work on the device only at the edges of a section, not around each
    /// operation. Sections may nest; only the outermost synchronizes. Ordinary Burn operations belong in [`Session::pause`].
    ///
    /// Other threads may use Burn on the device at any time, with three limits. They must not receive a tensor that an unfinished section created.
    /// The section must not receive a tensor that they changed in place after it began. A tensor that a section may update in place (parameters,
    /// optimizer state, sums, inputs of a backward) must be kept as a clone by a thread that reads it until the values have arrived.
    fn section<R>(device: &Self::Device, work: impl FnOnce() -> R) -> R {
        let _ = device;
        work()
    }

    /// Runs ordinary Burn operations inside a section, ordered after everything before them and before everything after them.
    fn pause<R>(device: &Self::Device, work: impl FnOnce() -> R) -> R {
        let _ = device;
        work()
    }

    /// Runs `work`, during which no parameter changes, as while a model writes text. A backend may then use what it has computed from parameters in
    /// all of its sections.
    fn unchanged<R>(device: &Self::Device, work: impl FnOnce() -> R) -> R {
        let _ = device;
        work()
    }

    /// Returns unused pool memory to the driver, and drops converted weights that stay.
    fn release_memory(device: &Self::Device) {
        Self::memory_cleanup(device);
    }

    /// Returns the device milliseconds since the last call with the same `of`, to be read later as one number; `None` if not measured.
    fn device_time(device: &Self::Device, of: DeviceTime) -> Option<Readback> {
        let _ = (device, of);
        None
    }
}

/// The planned use of the device by a run; by default it keeps and prepares nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RunShape {
    /// Bytes of converted frozen weights that may stay on the device between passes: for the forward, and for the backward.
    pub kept_bytes: [u64; 2],
    /// Format of GEMMs, for the operations whose arguments do not name it.
    pub gemms: GemmFormat,
    /// Choice of the library's algorithms for large GEMMs.
    pub gemm_algorithms: GemmAlgorithms,
    /// Maximum bytes of a pass on the device and in host memory, in addition to parameters, gradients and optimizer state.
    pub pass_bytes: [u64; 2],
    /// Tokens of that largest pass.
    pub pass_tokens: usize,
    /// Whether the same steps have the same bits in every run on this machine: sums have a fixed order, and no kernel is chosen by measured times,
    /// which `gemm_algorithms` could ask for. Ignored where that always holds.
    pub deterministic: bool,
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

/// Announcement of upcoming work, for [`Session::hint`].
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
    /// The sizes of tensors change from here on, outside sections, as between training and evaluation or sampling: memory that waits for tensors of
    /// the sizes before is freed where it may be much. Converted weights stay, and so does pinned memory of the host.
    NewSizes,
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
