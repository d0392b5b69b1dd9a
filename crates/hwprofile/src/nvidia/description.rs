//! NVML's data about the cards of a machine, as plain data: the only place that calls NVML, and the format of recordings for tests.

use nvml_wrapper::enum_wrappers::device::Clock;
#[cfg(target_os = "linux")]
use nvml_wrapper::enum_wrappers::device::TopologyLevel;
use nvml_wrapper::enum_wrappers::nv_link::IntDeviceType;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};
use serde::{Deserialize, Serialize};

use crate::gpu::{PciPath, Pcie};
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
    /// Address on the PCI bus.
    pub bus_id: String,
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
    /// NVLinks that are up.
    pub nvlinks: Vec<NvLinkDescription>,
    /// The way over PCI to each other card.
    pub paths: Vec<PathDescription>,
    /// Whether the card is partitioned (MIG).
    pub mig_enabled: bool,
    /// Its partitions.
    pub slices: Vec<SliceDescription>,
}

/// One NVLink that is up.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NvLinkDescription {
    /// Version, 4 on Hopper.
    pub version: u32,
    /// Whether it leads to a switch.
    pub to_switch: bool,
    /// PCI address of the other end.
    pub remote_bus_id: Option<String>,
}

/// The way to another card.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PathDescription {
    /// NVML's number of the other card.
    pub to: u32,
    /// The path between the two.
    pub through: PciPath,
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
    let count = nvml.device_count()?;
    for index in 0..count {
        match nvml.device_by_index(index).and_then(|device| card(nvml, &device, index, count)) {
            Ok(card) => description.cards.push(card),
            Err(error) => {
                description.unreadable.push(format!("GPU {index} is there but cannot be asked: {error}"));
            }
        }
    }
    Ok(description)
}

fn card(nvml: &Nvml, device: &Device<'_>, index: u32, count: u32) -> Result<CardDescription, NvmlError> {
    let memory = device.memory_info()?;
    let capability = device.cuda_compute_capability().ok();
    let mig_enabled = device.mig_mode().is_ok_and(|mode| mode.current == 1);
    Ok(CardDescription {
        index,
        uuid: device.uuid()?,
        name: device.name()?,
        bus_id: device.pci_info().map(|pci| pci.bus_id).unwrap_or_default(),
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
        pcie: pcie(device).ok(),
        nvlinks: nvlinks(device),
        paths: (0..count).filter(|other| *other != index).filter_map(|other| path(nvml, device, other)).collect(),
        mig_enabled,
        slices: if mig_enabled { slices(device) } else { Vec::new() },
    })
}

fn pcie(device: &Device<'_>) -> Result<Pcie, NvmlError> {
    Ok(Pcie { generation: device.max_pcie_link_gen()?, lanes: device.max_pcie_link_width()? })
}

fn nvlinks(device: &Device<'_>) -> Vec<NvLinkDescription> {
    /// `NVML_NVLINK_MAX_LINKS`: 18 on Hopper and Blackwell.
    const MAX_LINKS: u32 = 18;
    let active = (0..MAX_LINKS).map(|link| (link, device.link_wrapper_for(link)));
    let active = active.filter(|(_, nvlink)| nvlink.is_active().unwrap_or(false));
    let described = active.map(|(link, nvlink)| NvLinkDescription {
        version: nvlink.version().unwrap_or(0),
        to_switch: matches!(nvlink.remote_device_type(link), Ok(IntDeviceType::Switch)),
        remote_bus_id: nvlink.remote_pci_info().ok().map(|pci| pci.bus_id),
    });
    described.collect()
}

#[cfg(target_os = "linux")]
fn path(nvml: &Nvml, device: &Device<'_>, to: u32) -> Option<PathDescription> {
    let other = nvml.device_by_index(to).ok()?;
    let through = match device.topology_common_ancestor(other).ok()? {
        TopologyLevel::Internal => PciPath::SameBoard,
        TopologyLevel::Single => PciPath::OneSwitch,
        TopologyLevel::Multiple => PciPath::Switches,
        TopologyLevel::HostBridge => PciPath::HostBridge,
        TopologyLevel::Node => PciPath::NumaNode,
        TopologyLevel::System => PciPath::System,
    };
    Some(PathDescription { to, through })
}

#[cfg(not(target_os = "linux"))]
fn path(_: &Nvml, _: &Device<'_>, _: u32) -> Option<PathDescription> {
    None
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
