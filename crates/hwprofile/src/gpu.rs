//! A card or another accelerator that was found or named.
//!
//! Trade-off: one type for every maker; `None` for values that a maker's interface does not report.

use serde::{Deserialize, Serialize};

use crate::spec::{AcceleratorSpec, CardClocks, Feature, HardwareKind, Maker};

/// One accelerator.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Gpu {
    /// Number among its maker's cards; for NVIDIA NVML's, the order of the PCI bus, which `CUDA_VISIBLE_DEVICES` does not change.
    pub index: u32,
    /// Its maker.
    pub maker: Maker,
    /// Unique identifier of the card.
    pub uuid: Option<String>,
    /// Name that the driver reports, such as `NVIDIA H100 80GB HBM3`.
    pub name: String,
    /// Bytes of memory; of the host's if it is unified.
    pub memory_total_bytes: u64,
    /// Bytes of memory that are free now and that the accelerator may use.
    pub memory_free_bytes: u64,
    /// Whether the memory is the host's: it is then counted once.
    pub unified_memory: bool,
    /// Version of the driver.
    pub driver_version: String,
    /// `(9, 0)` for Hopper; NVIDIA only.
    pub compute_capability: Option<(u32, u32)>,
    /// Largest clocks, cores, memory bus.
    pub clocks: Option<CardClocks>,
    /// Power limit in force, W.
    pub power_limit_w: Option<f64>,
    /// Its slot, at full speed.
    pub pcie: Option<Pcie>,
    /// Whether it is a partition of a card (MIG).
    pub is_partition: bool,
    /// The maker's figures, or those that follow from its compute capability.
    pub spec: Option<AcceleratorSpec>,
}

/// A PCI Express slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pcie {
    /// Generation.
    pub generation: u32,
    /// Lanes.
    pub lanes: u32,
}

impl Gpu {
    /// Describes a card by name and memory alone, all of it free.
    pub fn described(maker: Maker, name: &str, memory_bytes: u64) -> Self {
        Self {
            index: 0,
            maker,
            uuid: None,
            name: name.to_owned(),
            memory_total_bytes: memory_bytes,
            memory_free_bytes: memory_bytes,
            unified_memory: false,
            driver_version: String::new(),
            compute_capability: None,
            clocks: None,
            power_limit_w: None,
            pcie: None,
            is_partition: false,
            spec: None,
        }
    }

    /// Returns its kind, by its compute capability, else by its row of the table; `None` if both are unknown.
    pub fn kind(&self) -> Option<HardwareKind> {
        let of_capability = self.compute_capability.map(HardwareKind::of_compute_capability);
        of_capability.or(self.spec.map(|spec| spec.kind))
    }

    /// Describes the accelerator of a table row, with all its memory free; of unified memory the part that a GPU may use.
    pub fn of_spec(spec: &AcceleratorSpec) -> Self {
        let mut gpu = Self::described(spec.maker, spec.name, spec.memory_bytes());
        gpu.unified_memory = spec.has(Feature::UnifiedMemory);
        if gpu.unified_memory {
            gpu.memory_free_bytes = unified_share(gpu.memory_total_bytes);
        }
        gpu.power_limit_w = spec.power_w.map(|power| power.value);
        gpu.spec = Some(*spec);
        gpu
    }
}

/// With at least this much unified memory, a GPU may use three quarters of it; with less, two thirds.
const LARGE_UNIFIED: u64 = 36 << 30;

/// Returns the part of unified memory that a GPU may use. wgpu does not report Metal's own figure (`recommendedMaxWorkingSetSize`), which depends on
/// the version of macOS too: 21.3 of 32 GiB on an M2 Max (ollama, issue 434), 107.5 of 128 GiB on an M5 Max with macOS 26. The result exceeds
/// neither; a limit that the user has raised (`iogpu.wired_limit_mb`) is not seen.
pub(crate) fn unified_share(total_bytes: u64) -> u64 {
    if total_bytes < LARGE_UNIFIED { total_bytes / 3 * 2 } else { total_bytes / 4 * 3 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unified_memory_is_not_all_for_the_gpu() {
        let mac = Gpu::of_spec(AcceleratorSpec::named("m4-max").unwrap());
        assert!(mac.unified_memory && mac.memory_free_bytes == 96 << 30 && mac.memory_total_bytes == 128 << 30);
        for (total, reported_mib) in [(32, 21_845), (128, 110_100)] {
            let share = unified_share(total << 30) >> 20;
            assert!((reported_mib * 4 / 5..=reported_mib).contains(&share), "{total} GiB: {share} MiB");
        }
        let card = Gpu::of_spec(AcceleratorSpec::named("h100").unwrap());
        assert_eq!((card.unified_memory, card.power_limit_w), (false, Some(700.0)));
        assert_eq!(card.memory_free_bytes, card.memory_total_bytes);
    }
}
