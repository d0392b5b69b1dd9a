//! Detection of processor and memory: sysinfo, and the standard library's feature detection.

use std::{env, thread};

use sysinfo::{CpuRefreshKind, ProcessRefreshKind, ProcessesToUpdate, System, get_current_pid};

use crate::{Cpu, Memory};

pub(crate) fn cpu(notes: &mut Vec<String>) -> Cpu {
    let logical_cores = thread::available_parallelism().map_or(1, usize::from);
    let physical_cores = System::physical_core_count().unwrap_or(logical_cores);
    let name = System::new().ok().and_then(|mut system| {
        system.refresh_cpu_list(CpuRefreshKind::nothing());
        system.cpus().first().map(|cpu| cpu.brand().trim().to_string()).filter(|name| !name.is_empty())
    });
    let name = name.unwrap_or_else(|| {
        notes.push("the processor's name could not be read".to_string());
        env::consts::ARCH.to_string()
    });
    Cpu {
        name,
        logical_cores,
        // sysinfo counts the cores of the machine, even if this process may use only some of them.
        physical_cores: physical_cores.clamp(1, logical_cores),
        simd: simd(),
    }
}

fn simd() -> &'static str {
    #[cfg(target_arch = "x86_64")]
    let levels = [
        ("AVX-512", is_x86_feature_detected!("avx512f")),
        ("AVX2", is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")),
        ("AVX", is_x86_feature_detected!("avx")),
    ];
    #[cfg(target_arch = "aarch64")]
    let levels = [
        ("SVE", std::arch::is_aarch64_feature_detected!("sve")),
        ("NEON", std::arch::is_aarch64_feature_detected!("neon")),
    ];
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let levels: [(&str, bool); 0] = [];
    levels.into_iter().find(|(_, present)| *present).map_or("baseline", |(name, _)| name)
}

pub(crate) fn memory(notes: &mut Vec<String>) -> Memory {
    let Ok(mut system) = System::new() else {
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

/// Limit of this process's cgroup, and its bytes in use without the file cache.
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

/// Applies a cgroup's limit. File cache counts against it but is freed on demand, so the limit less the resident bytes is available.
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
