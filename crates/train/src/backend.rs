//! Which backend a run uses, and the one place where concrete backends are named.

use std::fmt;
use std::time::Instant;

use burn_tensor::DType;
use firebrick_hwprofile::HardwareProfile;
use firebrick_kernels::Kernels;
use serde::Serialize;

use crate::config::BackendChoice;
use crate::error::RunError;
use crate::plan::Chosen;

/// The four backends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum BackendKind {
    /// CPU, burn-flex.
    Flex,
    /// CPU, burn-candle.
    Candle,
    /// Vulkan, Metal, DirectX, WebGPU.
    Wgpu,
    /// NVIDIA.
    Cuda,
}

impl fmt::Display for BackendKind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Flex => "flex",
            Self::Candle => "candle",
            Self::Wgpu => "wgpu",
            Self::Cuda => "cuda",
        })
    }
}

impl BackendKind {
    /// Whether this binary holds the backend.
    pub fn is_compiled(self) -> bool {
        match self {
            Self::Flex => cfg!(feature = "flex"),
            Self::Candle => cfg!(feature = "candle"),
            Self::Wgpu => cfg!(feature = "wgpu"),
            Self::Cuda => cfg!(feature = "cuda"),
        }
    }

    /// Whether its tensors live in host memory.
    pub fn is_cpu(self) -> bool {
        matches!(self, Self::Flex | Self::Candle)
    }

    fn compiled() -> String {
        let all = [Self::Flex, Self::Candle, Self::Wgpu, Self::Cuda];
        let names: Vec<String> =
            all.into_iter().filter(|kind| kind.is_compiled()).map(|kind| kind.to_string()).collect();
        if names.is_empty() { "none".to_owned() } else { names.join(", ") }
    }

    /// Refuses a backend that is not in the binary or finds no device.
    fn check(self) -> Result<(), RunError> {
        if !self.is_compiled() {
            return Err(RunError::NotCompiled { wanted: self, compiled: Self::compiled() });
        }
        match self {
            Self::Flex | Self::Candle => Ok(()),
            #[cfg(feature = "wgpu")]
            Self::Wgpu => firebrick_kernels::probe::wgpu().map_err(|looked_for| RunError::NoDevice {
                wanted: self,
                looked_for,
                install:
                    "Install a Vulkan driver (on Debian: mesa-vulkan-drivers for Intel, AMD and software rendering)"
                        .to_owned(),
            }),
            #[cfg(feature = "cuda")]
            Self::Cuda => firebrick_kernels::probe::cuda().map_err(|looked_for| RunError::NoDevice {
                wanted: self,
                looked_for,
                install: "Install the NVIDIA driver and the CUDA toolkit".to_owned(),
            }),
            #[cfg(not(all(feature = "wgpu", feature = "cuda")))]
            _ => unreachable!("backends that are not compiled in were refused above"),
        }
    }
}

/// Turns the recipe's `backend` into one that works here, with the reason.
///
/// # Errors
/// A named backend that is not in this binary or finds no device.
pub fn choose(choice: BackendChoice, profile: &HardwareProfile) -> Result<Chosen<BackendKind>, RunError> {
    let named = match choice {
        BackendChoice::Auto => return choose_automatically(profile),
        BackendChoice::Cuda => BackendKind::Cuda,
        BackendChoice::Wgpu => BackendKind::Wgpu,
        BackendChoice::Candle => BackendKind::Candle,
        BackendChoice::Flex => BackendKind::Flex,
    };
    named.check()?;
    Ok(Chosen::new(named, "the recipe names it"))
}

fn choose_automatically(profile: &HardwareProfile) -> Result<Chosen<BackendKind>, RunError> {
    if let Some(card) = profile.gpus.first()
        && BackendKind::Cuda.check().is_ok()
    {
        return Ok(Chosen::new(BackendKind::Cuda, format!("found {}", card.name)));
    }
    if cfg!(target_os = "macos") && BackendKind::Wgpu.check().is_ok() {
        return Ok(Chosen::new(BackendKind::Wgpu, "macOS: the GPU through Metal"));
    }
    let cpu = if BackendKind::Flex.is_compiled() { BackendKind::Flex } else { BackendKind::Candle };
    let why = match profile.gpus.first() {
        Some(card) if !BackendKind::Cuda.is_compiled() => {
            format!("{} is there, but this binary has no cuda", card.name)
        }
        Some(card) => format!("{} is there, but CUDA cannot be used (--set backend=cuda says why)", card.name),
        None => "no NVIDIA card found; flex is the fastest CPU backend (benches/results)".to_owned(),
    };
    cpu.check()?;
    Ok(Chosen::new(cpu, why))
}

/// Tries every operation of a run on small input before it trusts the device with it. The seconds that took; `None` where the
/// backend has nothing to try.
///
/// # Errors
/// [`RunError::SelfTestFailed`] names the operation.
pub fn self_test<B: Kernels>(
    backend: BackendKind,
    device: &B::Device,
    dtype: DType,
    head_dim: usize,
) -> Result<Option<f64>, RunError> {
    let started = Instant::now();
    B::self_test(device, dtype, head_dim).map_err(|problem| RunError::SelfTestFailed { backend, problem })?;
    // Only CUDA has operations that a driver can break in silence; the others inherit the empty test.
    Ok((backend == BackendKind::Cuda).then(|| started.elapsed().as_secs_f64()))
}

/// Returns once everything queued on the device is done.
///
/// # Errors
/// [`RunError::DeviceFailed`] where some of it failed.
pub fn wait<B: Kernels>(device: &B::Device) -> Result<(), RunError> {
    B::sync(device).map_err(|error| RunError::DeviceFailed {
        operation: "waiting for the device".to_owned(),
        message: error.to_string(),
        advice: "Start it again.".to_owned(),
    })
}

/// What ended a piece of device work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The operation.
    pub operation: String,
    /// Whether memory ran out: a smaller run may work.
    pub out_of_memory: bool,
    /// The library's own message.
    pub message: String,
}

/// Runs device work. A device that could not do an operation unwinds from it; that ends here, as a [`Failure`]. Other panics go
/// on: they are bugs.
///
/// # Errors
/// What the device said.
pub fn catch_failure<T>(work: impl FnOnce() -> T) -> Result<T, Failure> {
    #[cfg(feature = "cuda")]
    {
        use std::sync::Once;

        use firebrick_kernels::backend::DeviceFailure;

        static QUIET: Once = Once::new();
        QUIET.call_once(DeviceFailure::quiet_hook);
        DeviceFailure::catch(work).map_err(|failure| Failure {
            operation: failure.operation.to_owned(),
            out_of_memory: failure.out_of_memory,
            message: failure.message,
        })
    }
    #[cfg(not(feature = "cuda"))]
    {
        Ok(work())
    }
}

/// As [`catch_failure`], for work that saves nothing and has no plan to fall back on.
///
/// # Errors
/// What `work` returns, or [`RunError::DeviceFailed`].
pub fn device_work<T>(work: impl FnOnce() -> Result<T, RunError>) -> Result<T, RunError> {
    catch_failure(work).unwrap_or_else(|Failure { operation, out_of_memory, message }| {
        let advice = if out_of_memory {
            "Give it less to do at once, take --nf4, or free memory of the device."
        } else {
            "Start it again."
        };
        Err(RunError::DeviceFailed { operation, message, advice: advice.to_owned() })
    })
}

/// Runs `$body` with `$B` standing for the backend's type. A kind that is not compiled in was refused when it was chosen.
#[macro_export]
macro_rules! with_backend {
    ($kind:expr, $B:ident => $body:expr) => {
        match $kind {
            #[cfg(feature = "flex")]
            $crate::backend::BackendKind::Flex => {
                type $B = ::firebrick_kernels::backend::Flex;
                $body
            }
            #[cfg(feature = "candle")]
            $crate::backend::BackendKind::Candle => {
                type $B = ::firebrick_kernels::backend::Candle;
                $body
            }
            #[cfg(feature = "wgpu")]
            $crate::backend::BackendKind::Wgpu => {
                type $B = ::firebrick_kernels::backend::Wgpu;
                $body
            }
            #[cfg(feature = "cuda")]
            $crate::backend::BackendKind::Cuda => {
                type $B = ::firebrick_kernels::backend::Cuda;
                $body
            }
            #[allow(unreachable_patterns, reason = "reachable in builds that leave a backend out")]
            other => unreachable!("backend {other} is not compiled in and was refused when it was chosen"),
        }
    };
}
