//! NVML's data about the cards of a machine, as plain data: the only place that calls NVML, and the format of recordings for tests.

use nvml_wrapper::enum_wrappers::device::Clock;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};
use serde::{Deserialize, Serialize};

use crate::gpu::Pcie;
use crate::spec::CardClocks;

/// All of NVML's answers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NvmlDescription {
    /// Version of the driver.
    pub driver_version: String,
    /// The cards that could be read, in the order of the PCI bus.
    pub cards: Vec<CardDescription>,
    /// The cards that could not, in sentences.
    pub unreadable: Vec<String>,
}

/// NVML's answers about one card.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CardDescription {
    /// NVML's number: the order of the PCI bus.
    pub index: u32,
    /// `GPU-` and a unique number.
    pub uuid: String,
    /// Name, such as `NVIDIA H100 80GB HBM3`.
    pub name: String,
    /// Bytes of memory.
    pub memory_total_bytes: u64,
    /// Bytes of it that are free.
    pub memory_free_bytes: u64,
    /// `[9, 0]` for Hopper.
    pub compute_capability: Option<(u32, u32)>,
    /// Maximum clocks, cores, width of the memory bus; 0 if NVML does not report it.
    pub clocks: CardClocks,
    /// Power limit in force, mW.
    pub power_limit_mw: Option<u32>,
    /// Power limit as shipped, mW.
    pub power_default_mw: Option<u32>,
    /// Its slot at full speed; it is slower when the card idles.
    pub pcie: Option<Pcie>,
    /// Whether the card is partitioned (MIG).
    pub mig_enabled: bool,
    /// Its partitions.
    pub slices: Vec<SliceDescription>,
}

/// A partition of a card.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SliceDescription {
    /// `MIG-` and a number.
    pub uuid: String,
    /// Name, such as `NVIDIA H100 80GB HBM3 MIG 1g.10gb`.
    pub name: String,
    /// Bytes of memory.
    pub memory_total_bytes: u64,
    /// Bytes of it that are free.
    pub memory_free_bytes: u64,
}

/// Reads everything.
///
/// # Errors
/// NVML's, if not even the number of cards can be read.
pub fn describe(nvml: &Nvml) -> Result<NvmlDescription, NvmlError> {
    let mut description = NvmlDescription {
        driver_version: nvml.sys_driver_version().unwrap_or_else(|_| "unknown".to_owned()),
        ..NvmlDescription::default()
    };
    for index in 0..nvml.device_count()? {
        match nvml.device_by_index(index).and_then(|device| card(&device, index)) {
            Ok(card) => description.cards.push(card),
            Err(error) => {
                description.unreadable.push(format!("GPU {index} is there but cannot be asked: {error}"));
            }
        }
    }
    Ok(description)
}

fn card(device: &Device<'_>, index: u32) -> Result<CardDescription, NvmlError> {
    let memory = device.memory_info()?;
    let capability = device.cuda_compute_capability().ok();
    let mig_enabled = device.mig_mode().is_ok_and(|mode| mode.current == 1);
    let pcie = device.max_pcie_link_gen().ok().zip(device.max_pcie_link_width().ok());
    Ok(CardDescription {
        index,
        uuid: device.uuid()?,
        name: device.name()?,
        memory_total_bytes: memory.total,
        memory_free_bytes: memory.free,
        compute_capability: capability.and_then(|c| Some((u32::try_from(c.major).ok()?, u32::try_from(c.minor).ok()?))),
        clocks: CardClocks {
            sm_mhz: device.max_clock_info(Clock::SM).unwrap_or(0),
            memory_mhz: device.max_clock_info(Clock::Memory).unwrap_or(0),
            cores: device.num_cores().unwrap_or(0),
            bus_bits: device.memory_bus_width().unwrap_or(0),
        },
        power_limit_mw: device.enforced_power_limit().ok(),
        power_default_mw: device.power_management_limit_default().ok(),
        pcie: pcie.map(|(generation, lanes)| Pcie { generation, lanes }),
        mig_enabled,
        slices: if mig_enabled { slices(device) } else { Vec::new() },
    })
}

fn slices(device: &Device<'_>) -> Vec<SliceDescription> {
    let most = device.mig_device_count().unwrap_or(0);
    let slice = |index| {
        let slice = device.mig_device_by_index(index).ok()?;
        let memory = slice.memory_info().ok()?;
        Some(SliceDescription {
            uuid: slice.uuid().ok()?,
            name: slice.name().ok()?,
            memory_total_bytes: memory.total,
            memory_free_bytes: memory.free,
        })
    };
    (0..most).filter_map(slice).collect()
}
