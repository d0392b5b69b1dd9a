//! Which backend a run uses, and the one place where concrete backends are named.

use std::fmt;

use firebrick_hwprofile::HardwareProfile;
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
