//! Asking the machine: CPU and memory through sysinfo, NVIDIA cards through NVML.
//!
//! Not supported: cards of other makers (Burn's backends find those themselves), NUMA and PCI topology.

use std::env;
use std::thread;

use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};
use sysinfo::{CpuRefreshKind, ProcessRefreshKind, ProcessesToUpdate, System, get_current_pid};

use crate::{Cpu, Gpu, GpuSpec, Memory};

pub(crate) fn cpu(notes: &mut Vec<String>) -> Cpu {
    let logical_cores = thread::available_parallelism().map_or(1, usize::from);
    let physical_cores = System::physical_core_count().unwrap_or(logical_cores);
    Cpu {
        name: cpu_name(notes),
        logical_cores,
        // sysinfo counts the cores of the machine, also where this process may use only some of them.
        physical_cores: physical_cores.clamp(1, logical_cores),
        features: cpu_features(),
    }
}

fn cpu_name(notes: &mut Vec<String>) -> String {
    let name = system().and_then(|mut system| {
        system.refresh_cpu_list(CpuRefreshKind::nothing());
        system.cpus().first().map(|cpu| cpu.brand().trim().to_string()).filter(|name| !name.is_empty())
    });
    name.unwrap_or_else(|| {
        notes.push("the processor's name could not be read".to_string());
        env::consts::ARCH.to_string()
    })
}

fn cpu_features() -> Vec<String> {
    // The detection macros take literals only, so the list is spelled out here.
    #[cfg(target_arch = "x86_64")]
    let features = [
        ("avx", is_x86_feature_detected!("avx")),
        ("avx2", is_x86_feature_detected!("avx2")),
        ("fma", is_x86_feature_detected!("fma")),
        ("f16c", is_x86_feature_detected!("f16c")),
        ("avx512f", is_x86_feature_detected!("avx512f")),
        ("avx512bw", is_x86_feature_detected!("avx512bw")),
        ("avx512vnni", is_x86_feature_detected!("avx512vnni")),
        ("avx512bf16", is_x86_feature_detected!("avx512bf16")),
    ];
    #[cfg(target_arch = "aarch64")]
    let features = [
        ("neon", std::arch::is_aarch64_feature_detected!("neon")),
        ("fp16", std::arch::is_aarch64_feature_detected!("fp16")),
        ("bf16", std::arch::is_aarch64_feature_detected!("bf16")),
        ("i8mm", std::arch::is_aarch64_feature_detected!("i8mm")),
        ("sve", std::arch::is_aarch64_feature_detected!("sve")),
    ];
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let features: [(&str, bool); 0] = [];
    features.into_iter().filter(|(_, present)| *present).map(|(name, _)| name.to_string()).collect()
}

pub(crate) fn memory(notes: &mut Vec<String>) -> Memory {
    let Some(mut system) = system() else {
        notes.push("the host's memory could not be read: plan its use by hand".to_string());
        return Memory { total_bytes: 0, available_bytes: 0 };
    };
    system.refresh_memory();
    let machine = Memory { total_bytes: system.total_memory(), available_bytes: system.available_memory() };
    match cgroup(&mut system) {
        Some(limit) => within_limit(machine, limit, notes),
        None => machine,
    }
}

/// Limit of this process's cgroup, and the bytes of it that are in use and not mere file cache.
struct CgroupLimit {
    total_bytes: u64,
    used_bytes: u64,
}

fn cgroup(system: &mut System) -> Option<CgroupLimit> {
    let pid = get_current_pid().ok()?;
    system.refresh_processes_specifics(ProcessesToUpdate::Some(&[pid]), false, ProcessRefreshKind::nothing());
    let limits = system.process(pid)?.cgroup_limits()?;
    Some(CgroupLimit { total_bytes: limits.total_memory, used_bytes: limits.rss })
}

/// File cache counts against a cgroup but is given back on demand, so what is available is the limit less what is resident.
fn within_limit(machine: Memory, limit: CgroupLimit, notes: &mut Vec<String>) -> Memory {
    if limit.total_bytes == 0 || limit.total_bytes >= machine.total_bytes {
        return machine;
    }
    notes.push(format!(
        "a cgroup limits this process to {} of the machine's {} of memory",
        crate::memory::human_bytes(limit.total_bytes),
        crate::memory::human_bytes(machine.total_bytes)
    ));
    let left = limit.total_bytes.saturating_sub(limit.used_bytes);
    Memory { total_bytes: limit.total_bytes, available_bytes: machine.available_bytes.min(left) }
}

fn system() -> Option<System> {
    System::new().ok()
}

pub(crate) fn gpus(notes: &mut Vec<String>) -> Vec<Gpu> {
    let nvml = match Nvml::init() {
        Ok(nvml) => nvml,
        Err(error) => {
            notes.push(why_no_nvml(&error));
            return Vec::new();
        }
    };
    let driver_version = nvml.sys_driver_version().unwrap_or_else(|_| "unknown".to_string());
    let count = nvml.device_count().unwrap_or(0);
    if count == 0 {
        notes.push("the NVIDIA driver is there, but it reports no card".to_string());
    } else if let Ok(visible) = env::var("CUDA_VISIBLE_DEVICES") {
        notes.push(format!("CUDA_VISIBLE_DEVICES is {visible:?}: CUDA numbers the cards listed here by that"));
    }
    (0..count).filter_map(|index| gpu(&nvml, index, &driver_version, notes)).collect()
}

fn gpu(nvml: &Nvml, index: u32, driver_version: &str, notes: &mut Vec<String>) -> Option<Gpu> {
    match nvml.device_by_index(index).and_then(|device| described(&device, index, driver_version)) {
        Ok(gpu) => {
            if gpu.spec.is_none() {
                notes.push(format!("{} is not in the table of cards: its peak rates are not known", gpu.name));
            }
            Some(gpu)
        }
        Err(error) => {
            notes.push(format!("GPU {index} is there but cannot be asked: {error}"));
            None
        }
    }
}

fn described(device: &Device<'_>, index: u32, driver_version: &str) -> Result<Gpu, NvmlError> {
    let (name, memory) = (device.name()?, device.memory_info()?);
    let capability = device.cuda_compute_capability().ok();
    Ok(Gpu {
        index,
        memory_total_bytes: memory.total,
        memory_free_bytes: memory.free,
        driver_version: driver_version.to_string(),
        compute_capability: capability.and_then(|c| Some((u32::try_from(c.major).ok()?, u32::try_from(c.minor).ok()?))),
        spec: GpuSpec::find(&name).copied(),
        name,
    })
}

fn why_no_nvml(error: &NvmlError) -> String {
    match error {
        NvmlError::LibloadingError(_) => {
            let file = if cfg!(windows) { "nvml.dll" } else { "libnvidia-ml.so.1" };
            format!("no NVIDIA card: the driver's {file} was not found")
        }
        NvmlError::DriverNotLoaded => "no NVIDIA card: the driver is installed but not loaded".to_string(),
        other => format!("no NVIDIA card could be asked: {other}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn a_lower_cgroup_limit_counts_and_is_said() {
        let machine = Memory { total_bytes: 64 * GIB, available_bytes: 60 * GIB };
        let mut notes = Vec::new();
        let memory = within_limit(machine, CgroupLimit { total_bytes: 8 * GIB, used_bytes: GIB }, &mut notes);
        assert_eq!(memory, Memory { total_bytes: 8 * GIB, available_bytes: 7 * GIB });
        assert_eq!(notes, ["a cgroup limits this process to 8.00 GiB of the machine's 64.0 GiB of memory"]);
    }

    #[test]
    fn a_cgroup_without_a_limit_changes_nothing() {
        let machine = Memory { total_bytes: 64 * GIB, available_bytes: 60 * GIB };
        let mut notes = Vec::new();
        let unlimited = CgroupLimit { total_bytes: u64::MAX, used_bytes: GIB };
        assert_eq!(within_limit(machine, unlimited, &mut notes), machine);
        assert!(notes.is_empty());
    }
}
