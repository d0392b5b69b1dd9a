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
