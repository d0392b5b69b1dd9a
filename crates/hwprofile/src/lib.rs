#![doc = include_str!("../README.md")]

pub mod measure;
pub mod memory;
mod probe;
pub mod roofline;
mod table;

use serde::Serialize;

pub use table::GpuSpec;

/// What was found on this machine. A part that could not be asked is left out and named in `notes`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct HardwareProfile {
    /// The processor.
    pub cpu: Cpu,
    /// The host's memory.
    pub memory: Memory,
    /// NVIDIA cards, in NVML's order.
    pub gpus: Vec<Gpu>,
    /// What could not be found out, and why; in sentences to print.
    pub notes: Vec<String>,
}

/// The processor, as far as this process may use it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Cpu {
    /// Brand name.
    pub name: String,
    /// Hardware threads that this process may run on (affinity and cgroup quota counted in).
    pub logical_cores: usize,
    /// Cores, at most `logical_cores`.
    pub physical_cores: usize,
    /// Vector extensions that matter for matrix products, such as `avx2`, `avx512f`, `neon`.
    pub features: Vec<String>,
}

/// The host's memory, as far as this process may use it: a cgroup's limit counts where it is lower.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Memory {
    /// Bytes in all.
    pub total_bytes: u64,
    /// Bytes that can be allocated without swapping.
    pub available_bytes: u64,
}

/// One NVIDIA card.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Gpu {
    /// NVML's number: the order of the PCI bus, which `CUDA_VISIBLE_DEVICES` does not change.
    pub index: u32,
    /// Name that the driver reports, such as `NVIDIA H100 80GB HBM3`.
    pub name: String,
    /// Bytes of device memory.
    pub memory_total_bytes: u64,
    /// Bytes of it that are free now.
    pub memory_free_bytes: u64,
    /// Version of the NVIDIA driver.
    pub driver_version: String,
    /// `(9, 0)` for Hopper.
    pub compute_capability: Option<(u32, u32)>,
    /// Peak rates, where the card is in the table.
    pub spec: Option<GpuSpec>,
}

impl HardwareProfile {
    /// Looks at this machine: some milliseconds, no GPU work, no network. Never fails and never panics: what cannot be
    /// asked becomes a note.
    pub fn detect() -> Self {
        let mut notes = Vec::new();
        let (cpu, memory) = (probe::cpu(&mut notes), probe::memory(&mut notes));
        let gpus = probe::gpus(&mut notes);
        Self { cpu, memory, gpus, notes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn detection_finds_cores_and_memory_on_any_machine() {
        let profile = HardwareProfile::detect();
        assert!(profile.cpu.physical_cores > 0);
        assert!(profile.cpu.physical_cores <= profile.cpu.logical_cores);
        assert!(profile.memory.available_bytes > 0);
        assert!(profile.memory.available_bytes <= profile.memory.total_bytes);
        assert!(!profile.gpus.is_empty() || !profile.notes.is_empty(), "no GPU has a reason: {profile:?}");
    }

    #[test]
    fn a_profile_can_be_written_down() {
        let json = serde_json::to_value(HardwareProfile::detect()).expect("plain data");
        assert!(json["cpu"]["logical_cores"].as_u64() > Some(0));
        assert!(json["memory"]["total_bytes"].as_u64() > Some(0));
    }
}
