//! The backends, one file or folder each, with their Burn types and the operations they override. `kind.rs` names them,
//! `planning/` states the memory that each needs, and `self_test.rs` is what a backend runs before it is trusted.

#[cfg(feature = "candle")]
mod candle;
#[cfg(feature = "cuda")]
pub mod cuda;
#[cfg(feature = "flex")]
mod flex;
mod kind;
#[cfg(any(feature = "cuda", feature = "wgpu"))]
mod on_cubecl;
mod planning;
#[cfg(any(feature = "cuda", feature = "wgpu"))]
mod self_test;
#[cfg(feature = "wgpu")]
mod wgpu;

#[cfg(feature = "candle")]
pub use candle::Candle;
#[cfg(feature = "cuda")]
pub use cuda::Cuda;
#[cfg(feature = "flex")]
pub use flex::Flex;
pub use kind::{BackendKind, SelfTest, UnknownBackend};
#[cfg(any(feature = "cuda", feature = "wgpu"))]
pub use on_cubecl::DeviceFailure;
pub use planning::{PLANNED_SHARED_BYTES, converted_weights_bytes, estimate, fp8_refusal};
#[cfg(feature = "wgpu")]
pub use wgpu::Wgpu;

use burn_tensor::DType;

#[cfg(feature = "cuda")]
use crate::memory::MemoryOps;
use crate::{CommError, Communicator};

/// Implements traits of operations for a backend by their own bodies alone.
#[cfg(any(feature = "flex", feature = "candle", feature = "wgpu"))]
macro_rules! by_default {
    ($backend:ty: $($operations:ident),+ $(,)?) => {
        $(impl $crate::$operations for $backend {})+
    };
}
#[cfg(any(feature = "flex", feature = "candle", feature = "wgpu"))]
pub(crate) use by_default;

impl BackendKind {
    /// Returns why the backend does not multiply by [`GemmFormat::F16`](crate::GemmFormat::F16) on this machine; `None` if it does.
    pub fn half_gemms_refusal(self) -> Option<&'static str> {
        match self {
            #[cfg(feature = "wgpu")]
            Self::Wgpu => wgpu::refusals().gemms.as_deref(),
            _ => Some("its GEMMs multiply in the format of activations"),
        }
    }

    /// Returns why attention does not multiply by [`GemmFormat::F16`](crate::GemmFormat::F16) where GEMMs do; `None` if it does.
    pub fn half_attention_refusal(self) -> Option<&'static str> {
        match self {
            #[cfg(feature = "wgpu")]
            Self::Wgpu => wgpu::refusals().attention.as_deref(),
            _ => None,
        }
    }

    /// Returns the maximum bytes of a tensor on this machine's device, if the backend has such a limit.
    pub fn largest_tensor_bytes(self) -> Option<u64> {
        match self {
            #[cfg(feature = "wgpu")]
            Self::Wgpu => wgpu::largest_tensor_bytes(),
            _ => None,
        }
    }

    /// Looks for a device, and avoids the panic of a backend that starts without one. A CPU is always found.
    ///
    /// # Errors
    /// Describes the devices that were looked for, in the library's words.
    pub fn probe(self) -> Result<(), String> {
        match self {
            Self::Flex | Self::Candle if self.is_compiled() => Ok(()),
            #[cfg(feature = "wgpu")]
            Self::Wgpu => wgpu::probe(),
            #[cfg(feature = "cuda")]
            Self::Cuda => cuda::probe(),
            _ => Err(format!("this build does not have the backend {self}")),
        }
    }

    /// Pins the threads of this process, including future ones, to the processors near the device of a rank. Pinned
    /// memory follows, because the system allocates it near the requesting thread. Returns a description for the log;
    /// `None` if the device is not near one part of the machine, or the system does not report which.
    pub fn stay_near(self, local_rank: usize) -> Option<String> {
        let _ = local_rank;
        match self {
            #[cfg(feature = "cuda")]
            Self::Cuda => cuda::stay_near(local_rank),
            _ => None,
        }
    }

    /// Returns why the device of a rank cannot compute with activations of this format, and in which it can; `None` if it can. Takes no time.
    pub fn format_refusal(self, local_rank: usize, dtype: DType) -> Option<String> {
        let _ = (local_rank, dtype);
        match self {
            #[cfg(feature = "cuda")]
            Self::Cuda => cuda::format_refusal(&Cuda::device_of(local_rank), dtype),
            _ => None,
        }
    }

    /// Runs every operation of a run once, on small random input on the device of a rank, against the reference body on the CPU.
    /// `Err` names the operation that is wrong: a broken driver must not train on zeros. `None`: this backend has nothing to test.
    pub fn self_test(self, local_rank: usize, test: SelfTest) -> Option<Result<(), String>> {
        let _ = (local_rank, test);
        match self {
            #[cfg(feature = "cuda")]
            Self::Cuda => Some(cuda::self_test(&Cuda::device_of(local_rank), test)),
            #[cfg(feature = "wgpu")]
            Self::Wgpu => Some(wgpu::self_test(test)),
            _ => None,
        }
    }

    /// Connects the devices of all ranks, if the backend has a library for that. Every rank calls it once, before the
    /// first collective. Returns a description of the transport between ranks, for the log.
    pub fn connect(self, ranks: &Communicator, local_rank: usize) -> Result<String, CommError> {
        let _ = (ranks, local_rank);
        match self {
            #[cfg(feature = "cuda")]
            Self::Cuda => cuda::connect(ranks, &Cuda::device_of(local_rank)),
            _ => Ok("host memory and TCP, summed in rank order".to_owned()),
        }
    }

    /// Returns the bytes that this thread's memory pools hold on the device; `None` if there are no pools, or the driver reports the card's memory.
    pub fn allocated_bytes(self) -> Option<u64> {
        match self {
            #[cfg(feature = "wgpu")]
            Self::Wgpu => wgpu::allocated_bytes(),
            _ => None,
        }
    }

    /// Returns the number of devices that this process can use with this backend; 1 for backends that use a single device.
    pub fn devices(self) -> usize {
        match self {
            #[cfg(feature = "cuda")]
            Self::Cuda => cuda::device_count(),
            _ => 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_backend_that_is_not_compiled_in_finds_no_device() {
        for kind in BackendKind::ALL.into_iter().filter(|kind| !kind.is_compiled()) {
            assert!(kind.probe().unwrap_err().contains(kind.name()));
        }
    }
}
