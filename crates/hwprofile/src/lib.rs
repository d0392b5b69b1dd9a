#![doc = include_str!("../README.md")]

mod adapter;
mod amd;
mod cpu;
mod display;
pub mod forecast;
mod gpu;
mod host;
pub mod human;
pub mod measure;
pub mod memory;
mod numa;
pub mod nvidia;
pub mod peaks;
pub mod roofline;
pub mod scaling;
pub mod spec;
mod throttle;
pub mod tuning;
pub mod usage;

use std::path::Path;

use serde::Serialize;

use peaks::MeasuredPeaks;

pub use adapter::{Adapter, AdapterKind};
pub use cpu::Cpu;
pub use gpu::{Gpu, Pcie};
pub use numa::NumaNode;
pub use spec::AcceleratorSpec;

/// The detected hardware of this machine, or the known facts about a named one. `notes` names the parts that could not be detected.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct HardwareProfile {
    /// Name of the machine in the table of accelerators; `None`: this machine.
    pub named: Option<&'static str>,
    /// The processor.
    pub cpu: Cpu,
    /// The host's memory.
    pub memory: Memory,
    /// Accelerators; NVIDIA's first, in the order in which CUDA shows them to this process.
    pub gpus: Vec<Gpu>,
    /// wgpu's adapters, if they were requested.
    pub adapters: Vec<Adapter>,
    /// Peaks that were measured on this machine before, for its present devices and drivers.
    pub measured: Vec<MeasuredPeaks>,
    /// Failures of detection with their reasons, in sentences to print.
    pub notes: Vec<String>,
}

/// The host's memory that this process may use: a lower cgroup limit counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Memory {
    /// Bytes in all.
    pub total_bytes: u64,
    /// Bytes that can be allocated without swapping.
    pub available_bytes: u64,
}

impl HardwareProfile {
    /// Detects this machine: some milliseconds, no GPU work, no network. Never fails and never panics: everything that cannot be detected becomes a
    /// note.
    pub fn detect() -> Self {
        Self::with(Vec::new())
    }

    fn with(adapters: Vec<Adapter>) -> Self {
        let mut notes = Vec::new();
        let (cpu, memory) = (host::cpu(&mut notes), host::memory(&mut notes));
        let mut gpus = nvidia::detect(&mut notes);
        gpus.extend(amd::detect(Path::new(amd::SYSFS), &mut notes));
        adapter::add(&mut gpus, &adapters, memory, &mut notes);
        let stored = peaks::cache_folder().map(|folder| MeasuredPeaks::load_all(&folder, &mut notes));
        let mut profile = Self { named: None, cpu, memory, gpus, adapters, measured: Vec::new(), notes };
        profile.measured = stored.into_iter().flatten().filter(|peaks| peaks.is_of(&profile)).collect();
        profile
    }

    /// Returns the measured peaks of a backend on a device, if there are any. For a processor `device` is its [`peaks::processor_key`].
    pub fn measured_peaks(&self, backend: &str, device: &str) -> Option<&MeasuredPeaks> {
        self.measured.iter().find(|peaks| peaks.backend == backend && peaks.device == device)
    }

    /// Does the same as [`detect`](Self::detect) with wgpu's adapters, which show Apple's and other GPUs. Loads the graphics drivers, which may take
    /// a second; finds nothing more if this binary was built without wgpu.
    pub fn detect_with_adapters() -> Self {
        Self::with(adapter::adapters())
    }

    /// Describes a machine by these facts alone, with all its memory free.
    pub fn described(cores: usize, memory_bytes: u64, gpus: Vec<Gpu>) -> Self {
        Self {
            named: None,
            cpu: Cpu::described(cores),
            memory: Memory { total_bytes: memory_bytes, available_bytes: memory_bytes },
            gpus,
            adapters: Vec::new(),
            measured: Vec::new(),
            notes: Vec::new(),
        }
    }

    /// Describes a machine with one accelerator of the table. Its host is unknown: 16 cores and four times the accelerator's memory are assumed, or
    /// the accelerator's own memory if that is unified.
    pub fn of_machine(spec: &'static AcceleratorSpec) -> Self {
        const CORES: usize = 16;
        let gpu = Gpu::of_spec(spec);
        let memory = if gpu.unified_memory { gpu.memory_total_bytes } else { 4 * gpu.memory_total_bytes };
        let mut profile = Self::described(CORES, memory, vec![gpu]);
        profile.named = Some(spec.id);
        profile.notes.push(format!(
            "the host of {} is not known: {CORES} cores and {} of memory are assumed",
            spec.name,
            memory::human_bytes(memory)
        ));
        profile
    }

    /// Returns the first NVIDIA card, which is CUDA's device 0.
    pub fn cuda_card(&self) -> Option<&Gpu> {
        self.gpus.iter().find(|gpu| gpu.maker == spec::Maker::Nvidia)
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
        let json = serde_json::to_value(HardwareProfile::detect_with_adapters()).expect("plain data");
        assert!(json["cpu"]["logical_cores"].as_u64() > Some(0));
        assert!(json["memory"]["total_bytes"].as_u64() > Some(0));
    }

    #[test]
    fn a_named_machine_says_what_is_assumed_about_its_host() {
        for spec in AcceleratorSpec::all() {
            let machine = HardwareProfile::of_machine(spec);
            assert_eq!((machine.named, machine.gpus.len()), (Some(spec.id), 1));
            assert!(machine.notes[0].contains("assumed"), "{machine:?}");
            assert_eq!(machine.cuda_card().is_some(), spec.maker == spec::Maker::Nvidia);
        }
        let mac = HardwareProfile::of_machine(AcceleratorSpec::named("m4-max").unwrap());
        assert_eq!(mac.memory.total_bytes, mac.gpus[0].memory_total_bytes, "unified memory is counted once");
    }
}
