//! Chooses the backend of a run: the one that the recipe names, or the fastest that works here. Also decides what depends on the backend: the format
//! of activations, and whether what layers save is offloaded.
//!
//! Trade-off: a backend is probed by opening its device, which takes some milliseconds.

use firebrick_hwprofile::HardwareProfile;
use firebrick_hwprofile::spec::{Engine, HardwareKind};
use firebrick_kernels::BackendKind;
use firebrick_precision::FloatType;

use crate::config::compute::Compute;
use crate::config::{BackendChoice, RunConfig};
use crate::error::RunError;
use crate::plan::Chosen;

/// Turns the recipe's `backend` into one that works here, with the reason; for a named machine, into the one that would run on it.
///
/// # Errors
/// A named backend that is not in this binary or finds no device.
pub fn choose_backend(choice: BackendChoice, profile: &HardwareProfile) -> Result<Chosen<BackendKind>, RunError> {
    if let Some(chosen) = for_named_machine(choice, profile) {
        return Ok(chosen);
    }
    match choice {
        BackendChoice::Auto => choose_automatically(profile),
        BackendChoice::Named(backend) => {
            check(backend)?;
            Ok(Chosen::new(backend, "the recipe names it"))
        }
    }
}

/// Returns the backend for a named machine that is planned for; `None` if the profile describes this machine.
fn for_named_machine(choice: BackendChoice, profile: &HardwareProfile) -> Option<Chosen<BackendKind>> {
    profile.named?;
    let spec = profile.gpus.first()?.spec?;
    let (backend, why) = match spec.kind.engine() {
        Engine::Cuda => (BackendKind::Cuda, format!("what runs on {}", spec.name)),
        Engine::Wgpu => {
            (BackendKind::Wgpu, format!("what runs on {}: Burn drives it through Vulkan or Metal", spec.name))
        }
        Engine::Cpu => (BackendKind::Flex, format!("what runs on {}", spec.name)),
        Engine::NoBackend => (
            BackendKind::Cuda,
            format!("NO RUN: Burn has no backend for {}; planned as if backend cuda ran there", spec.name),
        ),
    };
    let other = match choice {
        BackendChoice::Named(named) if named != backend => format!(" (the recipe names {named})"),
        _ => String::new(),
    };
    Some(Chosen::new(backend, why + &other))
}

fn choose_automatically(profile: &HardwareProfile) -> Result<Chosen<BackendKind>, RunError> {
    if let Some(card) = profile.cuda_card()
        && check(BackendKind::Cuda).is_ok()
    {
        return Ok(Chosen::new(BackendKind::Cuda, format!("found {}", card.name)));
    }
    if cfg!(target_os = "macos") && check(BackendKind::Wgpu).is_ok() {
        return Ok(Chosen::new(BackendKind::Wgpu, "macOS: the GPU through Metal"));
    }
    let cpu = if BackendKind::Flex.is_compiled() { BackendKind::Flex } else { BackendKind::Candle };
    let why = match profile.cuda_card() {
        Some(card) if !BackendKind::Cuda.is_compiled() => {
            format!("found {}, but this binary was built without cuda", card.name)
        }
        Some(card) => format!("found {}, but CUDA cannot be used (--set backend=cuda shows why)", card.name),
        None => "no NVIDIA card found; flex is the fastest CPU backend (benches/results)".to_owned(),
    };
    check(cpu)?;
    Ok(Chosen::new(cpu, why))
}

/// Lists the backends in this program, for messages.
pub fn compiled_names() -> String {
    let names: Vec<&str> =
        BackendKind::ALL.into_iter().filter(|kind| kind.is_compiled()).map(BackendKind::name).collect();
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

/// Refuses a backend that is not in the binary or finds no device.
fn check(backend: BackendKind) -> Result<(), RunError> {
    if !backend.is_compiled() {
        return Err(RunError::Refused(format!(
            "backend `{backend}` is not in this program, which contains {}. Use one of these, or a program that contains it: those \
             of a release have flex, wgpu and, except on macOS, cuda; from the sources, `cargo xtask train` builds what a recipe needs",
            compiled_names()
        )));
    }
    let advice = match backend {
        // The message of the driver itself names what to install.
        BackendKind::Cuda => "For the CPU: --set backend=flex",
        _ => {
            "Install a Vulkan driver (on Debian: mesa-vulkan-drivers for Intel, AMD and software rendering), or train on the CPU with \
             --set backend=flex"
        }
    };
    let no_device = |looked_for: String| format!("backend `{backend}` finds no device here: {looked_for}. {advice}");
    backend.probe().map_err(|looked_for| RunError::Refused(no_device(looked_for)))
}

/// Returns the format of activations: the one that the recipe names, or for "auto" one that the device has.
pub(super) fn activations(
    requested: Compute,
    backend: BackendKind,
    hardware: Option<HardwareKind>,
) -> Chosen<FloatType> {
    let chosen = match (requested, hardware) {
        (Compute::Auto, Some(HardwareKind::OlderNvidia)) if backend == BackendKind::Cuda => {
            let half = compute_format(FloatType::F16, backend);
            let why = format!("cards before compute capability 8.0 have no bfloat16; {}", half.reason);
            Chosen::new(half.value, why)
        }
        _ => compute_format(requested.activations(), backend),
    };
    if requested == Compute::Auto { Chosen::new(chosen.value, format!("auto: {}", chosen.reason)) } else { chosen }
}

/// Returns the format that a backend computes in when `requested` is requested.
pub fn compute_format(requested: FloatType, backend: BackendKind) -> Chosen<FloatType> {
    match (backend, requested) {
        (_, FloatType::F16) if backend.computes_in_f16() => Chosen::new(
            FloatType::F16,
            "norms, softmax and loss in f32; dynamic loss scaling as torch's GradScaler counts: from 65536, halved when \
             gradients overflow (that step is skipped), doubled after 2000 good steps",
        ),
        (BackendKind::Wgpu, FloatType::F16) => Chosen::new(FloatType::F32, "this device has no float16 shaders"),
        (BackendKind::Cuda, requested) => Chosen::new(requested, "norms, softmax and loss in f32"),
        (_, FloatType::F32) => Chosen::recipe(FloatType::F32),
        (backend, _) => Chosen::new(FloatType::F32, format!("{backend} computes in f32")),
    }
}

/// Returns whether what layers save waits in host memory.
pub(super) fn offload(config: &RunConfig, backend: BackendKind) -> Chosen<bool> {
    match (backend, config.recompute(), config.train.offload) {
        (BackendKind::Cuda, recompute, None | Some(true)) if recompute.may_offload() => {
            Chosen::new(true, "what layers save waits in pinned host memory, copied while other work runs")
        }
        (BackendKind::Cuda, recompute, Some(false)) if recompute.may_offload() => Chosen::recipe(false),
        (BackendKind::Cuda, ..) => {
            Chosen::new(false, "layers save too much for the bus: recompute = \"full\" or \"projections\" is offloaded")
        }
        (backend, _, Some(true)) => {
            Chosen::new(false, format!("{backend} leaves what layers save where it is, whatever the recipe says"))
        }
        (backend, ..) => Chosen::new(false, format!("{backend} leaves what layers save where it is")),
    }
}
