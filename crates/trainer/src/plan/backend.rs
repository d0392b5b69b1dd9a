//! Chooses the backend of a run: the one that the recipe names, or the fastest that works here. Also decides what depends on the backend: the format
//! of activations, and whether what layers save is offloaded.

use firebrick_hwprofile::spec::{Engine, HardwareKind};
use firebrick_hwprofile::{Gpu, HardwareProfile};
use firebrick_kernels::{BackendKind, Recompute};
use firebrick_precision::FloatType;

use crate::config::compute::Compute;
use crate::config::{Auto, BackendChoice};
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
    if let Auto::Given(backend) = choice {
        check(backend)?;
        return Ok(Chosen::new(backend, "the recipe names it"));
    }
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

/// Returns the backend for a named machine that is planned for; `None` if the profile describes this machine.
fn for_named_machine(choice: BackendChoice, profile: &HardwareProfile) -> Option<Chosen<BackendKind>> {
    profile.named?;
    let spec = profile.gpus.first()?.spec?;
    let name = spec.name;
    let (backend, why) = match spec.kind.engine() {
        Engine::Cuda => (BackendKind::Cuda, format!("what runs on {name}")),
        Engine::Wgpu => (BackendKind::Wgpu, format!("what runs on {name}: Burn drives it through Vulkan or Metal")),
        Engine::Cpu => (BackendKind::Flex, format!("what runs on {name}")),
        Engine::NoBackend => {
            let missing = match spec.kind {
                HardwareKind::Cdna3 | HardwareKind::Cdna4 => {
                    format!("{name} has no Vulkan driver, and HIP is missing here (docs/backends.md)")
                }
                _ => format!("Burn has no backend for {name}"),
            };
            (BackendKind::Cuda, format!("NO RUN: {missing}; planned as if backend cuda ran there"))
        }
    };
    let other = match choice {
        Auto::Given(named) if named != backend => format!(" (the recipe names {named})"),
        _ => String::new(),
    };
    Some(Chosen::new(backend, why + &other))
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
///
/// # Errors
/// bfloat16 on a card without it.
pub(super) fn activations(
    requested: Compute,
    backend: BackendKind,
    hardware: Option<HardwareKind>,
) -> Result<Chosen<FloatType>, RunError> {
    let format = requested.activations();
    match requested {
        Compute::Plain(_) => named_format(format, backend, hardware),
        // A card without 8-bit floats is refused where GEMMs are decided.
        Compute::Fp8 => Ok(compute_format(format, backend, hardware)),
        Compute::Auto => {
            let chosen = compute_format(format, backend, hardware);
            Ok(Chosen::new(chosen.value, format!("auto: {}", chosen.reason)))
        }
    }
}

/// Returns the format in which a command without a recipe computes: the named one, or the usual one of the backend and its card.
///
/// # Errors
/// bfloat16 by name, on a card without it.
pub fn command_format(
    named: Option<FloatType>,
    backend: BackendKind,
    profile: &HardwareProfile,
) -> Result<FloatType, RunError> {
    let hardware = profile.cuda_card().and_then(Gpu::kind);
    match named {
        Some(format) => named_format(format, backend, hardware).map(|_| format),
        None => Ok(compute_format(FloatType::Bf16, backend, hardware).value),
    }
}

/// Returns the format that a backend computes in when a user names this one, on a kind of card if that is known.
fn named_format(
    named: FloatType,
    backend: BackendKind,
    hardware: Option<HardwareKind>,
) -> Result<Chosen<FloatType>, RunError> {
    match hardware.filter(|kind| backend == BackendKind::Cuda && named == FloatType::Bf16 && !kind.has_bf16()) {
        Some(kind) => Err(RunError::Refused(format!(
            "compute = \"bfloat16\" (the default): cards of the kind {kind} have no bfloat16, which begins with compute capability 8.0. \
             Write compute = \"float16\", with which the loss is scaled, \"float32\" or \"auto\"; for a command without a recipe, \
             --dtype float16, or --compute float16 for bench"
        ))),
        None => Ok(compute_format(named, backend, hardware)),
    }
}

/// Returns the format that a backend computes in when `requested` is requested, on a kind of card if that is known.
pub fn compute_format(requested: FloatType, backend: BackendKind, hardware: Option<HardwareKind>) -> Chosen<FloatType> {
    match (backend, requested) {
        (BackendKind::Cuda, FloatType::F16) => Chosen::new(
            FloatType::F16,
            "norms, softmax and loss in f32; dynamic loss scaling as torch's GradScaler counts: from 65536, halved when \
             gradients overflow (that step is skipped), doubled after 2000 good steps",
        ),
        (BackendKind::Cuda, FloatType::Bf16) if hardware.is_some_and(|kind| !kind.has_bf16()) => {
            let half = compute_format(FloatType::F16, backend, hardware);
            let why = format!("cards before compute capability 8.0 have no bfloat16; {}", half.reason);
            Chosen::new(half.value, why)
        }
        (BackendKind::Cuda, requested) => Chosen::new(requested, "norms, softmax and loss in f32"),
        (_, FloatType::F32) => Chosen::recipe(FloatType::F32),
        (backend, _) => Chosen::new(FloatType::F32, format!("{backend} computes in f32")),
    }
}

/// Returns whether what layers save waits in host memory.
pub(super) fn offload(wanted: Option<bool>, recompute: Recompute, backend: BackendKind) -> Chosen<bool> {
    match (backend, recompute, wanted) {
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

#[cfg(test)]
mod tests {
    use firebrick_hwprofile::AcceleratorSpec;

    use super::*;

    #[test]
    fn a_card_without_bfloat16_refuses_it_by_name_and_takes_float16_by_itself() {
        let on = |kind, compute| activations(compute, BackendKind::Cuda, Some(kind));
        let [bf16, f16] = [FloatType::Bf16, FloatType::F16].map(Compute::Plain);
        let message = on(HardwareKind::Turing, bf16).unwrap_err().to_string();
        assert!(["Turing", "compute = \"float16\"", "float32"].iter().all(|part| message.contains(part)), "{message}");
        assert_eq!(on(HardwareKind::Turing, f16).unwrap().value, FloatType::F16);
        let auto = on(HardwareKind::Turing, Compute::Auto).unwrap();
        assert!(auto.value == FloatType::F16 && auto.reason.starts_with("auto: cards before"), "{}", auto.reason);
        for compute in [bf16, Compute::Auto] {
            assert_eq!(on(HardwareKind::Ampere, compute).unwrap().value, FloatType::Bf16);
        }
    }

    #[test]
    fn commands_without_a_recipe_compute_in_what_the_card_has() {
        let machine = |name| HardwareProfile::of_machine(AcceleratorSpec::named(name).unwrap());
        let (t4, h100) = (machine("t4"), machine("h100"));
        assert_eq!(command_format(None, BackendKind::Cuda, &t4).unwrap(), FloatType::F16);
        assert_eq!(command_format(None, BackendKind::Cuda, &h100).unwrap(), FloatType::Bf16);
        assert_eq!(command_format(None, BackendKind::Flex, &t4).unwrap(), FloatType::F32);
        assert!(command_format(Some(FloatType::Bf16), BackendKind::Cuda, &t4).is_err());
        for format in [FloatType::F16, FloatType::F32] {
            assert_eq!(command_format(Some(format), BackendKind::Cuda, &t4).unwrap(), format);
        }
    }
}
