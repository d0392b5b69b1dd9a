//! NVIDIA's cards: NVML's data, and what follows from it.
//!
//! `description` reads, `visible` selects, this file interprets. The last two are tested with recordings of NVML on other machines.
//! Trade-off: NVML's library is loaded at run time, so a missing driver is found out then and not when building.

mod conditions;
mod description;
mod visible;

use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;

use crate::gpu::Gpu;
use crate::spec::{AcceleratorSpec, Maker};

pub use conditions::{CardConditions, ConditionsReader};
pub use description::{CardDescription, NvmlDescription, SliceDescription, describe};
pub use visible::CudaEnvironment;

/// Returns the cards of this machine that CUDA shows to this process, in CUDA's order.
pub(crate) fn detect(notes: &mut Vec<String>) -> Vec<Gpu> {
    let described = Nvml::init().and_then(|nvml| describe(&nvml));
    match described {
        Ok(description) => gpus(&description, &CudaEnvironment::of_this_process(), notes),
        Err(error) => {
            notes.push(match error {
                NvmlError::LibloadingError(_) => {
                    let file = if cfg!(windows) { "nvml.dll" } else { "libnvidia-ml.so.1" };
                    format!("no NVIDIA card: the driver's {file} was not found")
                }
                NvmlError::DriverNotLoaded => "no NVIDIA card: the driver is installed but not loaded".to_owned(),
                other => format!("no NVIDIA card could be asked: {other}"),
            });
            Vec::new()
        }
    }
}

/// Returns the cards of a described machine that CUDA shows under these variables, in CUDA's order. Missing or unusual data becomes a note.
pub fn gpus(description: &NvmlDescription, environment: &CudaEnvironment, notes: &mut Vec<String>) -> Vec<Gpu> {
    notes.extend(description.unreadable.iter().cloned());
    if description.cards.is_empty() {
        notes.push("the NVIDIA driver is there, but it reports no card".to_owned());
        return Vec::new();
    }
    let shown = visible::visible(description, environment, notes);
    shown.iter().map(|seen| gpu(seen, description, notes)).collect()
}

fn gpu(seen: &visible::Visible<'_>, description: &NvmlDescription, notes: &mut Vec<String>) -> Gpu {
    let (card, slice) = (seen.card, seen.slice);
    let (name, uuid) = slice.map_or((&card.name, &card.uuid), |slice| (&slice.name, &slice.uuid));
    let [total, memory_free_bytes] = slice.map_or([card.memory_total_bytes, card.memory_free_bytes], |slice| {
        [slice.memory_total_bytes, slice.memory_free_bytes]
    });
    let spec = if slice.is_some() { None } else { spec(card) };
    match &spec {
        Some(spec) if spec.id == "unknown" => notes.push(format!(
            "{name} is not in the table of accelerators: its peaks follow from its compute capability, cores and clocks"
        )),
        Some(_) => {}
        None if slice.is_some() => notes.push(format!("{name} is a partition of a card: its peak rates are not known")),
        None => notes.push(format!("{name} is not in the table of accelerators: its peak rates are not known")),
    }
    if let (Some(limit), Some(default)) = (card.power_limit_mw, card.power_default_mw)
        && limit < default
    {
        notes.push(format!(
            "{} is limited to {} W of its {} W: peaks are not reached",
            card.name,
            limit / 1000,
            default / 1000
        ));
    }
    Gpu {
        index: card.index,
        uuid: Some(uuid.clone()),
        memory_free_bytes,
        driver_version: description.driver_version.clone(),
        compute_capability: card.compute_capability,
        clocks: Some(card.clocks),
        power_limit_w: card.power_limit_mw.map(|limit| f64::from(limit) / 1e3),
        pcie: card.pcie,
        is_partition: slice.is_some(),
        spec,
        ..Gpu::described(Maker::Nvidia, name, total)
    }
}

/// Returns the table's row, or else the spec that follows from the compute capability.
fn spec(card: &CardDescription) -> Option<AcceleratorSpec> {
    AcceleratorSpec::find(&card.name).copied().or_else(|| {
        AcceleratorSpec::of_unknown_card(&card.name, card.compute_capability?, card.clocks, card.memory_total_bytes)
    })
}
