//! The backends, one file or folder each: which Burn type it is, and what it overrides. `kind.rs` names them, and `planning/` states
//! what each needs.
//!
//! Trade-off: the memory of every backend is stated whether or not it is compiled in, so that a plan can be made without it.

#[cfg(feature = "candle")]
mod candle;
#[cfg(feature = "cuda")]
pub mod cuda;
#[cfg(feature = "flex")]
mod flex;
mod kind;
mod planning;
#[cfg(feature = "wgpu")]
mod wgpu;

#[cfg(feature = "candle")]
pub use candle::Candle;
#[cfg(feature = "cuda")]
pub use cuda::{Cuda, DeviceFailure};
#[cfg(feature = "flex")]
pub use flex::Flex;
pub use kind::{BackendKind, UnknownBackend};
pub use planning::{converted_weights_bytes, estimate, fp8_refusal};
#[cfg(feature = "wgpu")]
pub use wgpu::Wgpu;

use burn_tensor::DType;

use crate::linear::GemmFormat;
#[cfg(feature = "cuda")]
use crate::memory::MemoryOps;
use crate::{CommError, Communicator};

impl BackendKind {
    /// Whether the backend computes in float16 here. CPU backends could, slower than in f32.
    pub fn computes_in_f16(self) -> bool {
        match self {
            Self::Flex | Self::Candle => false,
            #[cfg(feature = "wgpu")]
            Self::Wgpu => wgpu::has_f16(),
            #[cfg(not(feature = "wgpu"))]
            Self::Wgpu => false,
            Self::Cuda => true,
        }
    }

    /// Looks for a device, without the panic of a backend that starts and finds none. A CPU is always there.
    ///
    /// # Errors
    /// What was looked for, in the library's words.
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

    /// Keeps the threads of this process, those that it will start included, on the processors near the device of a
    /// rank, and with them pinned memory, which the system allocates near the thread that asks for it. Returns what was
    /// done, for the log; `None` where the device is not near one part of the machine, or the system does not say
    /// which.
    pub fn stay_near(self, local_rank: usize) -> Option<String> {
        let _ = local_rank;
        match self {
            #[cfg(feature = "cuda")]
            Self::Cuda => cuda::stay_near(local_rank),
            _ => None,
        }
    }

    /// Runs every operation that training in these formats uses once on small random input, on the device of a rank,
    /// against the reference body on the CPU. `Err` names the operation that is wrong: a broken driver must not train
    /// on zeros. `None`: this backend has nothing to test.
    pub fn self_test(
        self,
        local_rank: usize,
        dtype: DType,
        gemms: GemmFormat,
        head_dim: usize,
    ) -> Option<Result<(), String>> {
        let _ = (local_rank, dtype, gemms, head_dim);
        match self {
            #[cfg(feature = "cuda")]
            Self::Cuda => Some(cuda::self_test(&Cuda::device_of(local_rank), dtype, gemms, head_dim)),
            _ => None,
        }
    }

    /// Connects the devices of all ranks, where the backend has a library for that. Every rank calls it once, before
    /// the first collective. Returns what carries tensors between ranks, for the log.
    ///
    /// # Errors
    /// [`CommError::NoLibrary`], or as [`Communicator::all_reduce_sum`].
    pub fn connect(self, ranks: &Communicator, local_rank: usize) -> Result<String, CommError> {
        let _ = (ranks, local_rank);
        match self {
            #[cfg(feature = "cuda")]
            Self::Cuda => cuda::connect(ranks, &Cuda::device_of(local_rank)),
            _ => Ok("host memory and TCP, summed in rank order".to_owned()),
        }
    }

    /// Bytes that this thread's memory pools hold on the device. `None` where no pools are kept, or the driver reports
    /// the card's memory.
    pub fn allocated_bytes(self) -> Option<u64> {
        match self {
            #[cfg(feature = "wgpu")]
            Self::Wgpu => wgpu::allocated_bytes(),
            _ => None,
        }
    }

    /// How many devices this process can use with this backend; of backends that use one alone, that one.
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
