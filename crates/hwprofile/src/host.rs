//! Detection of processor and memory: sysinfo, the standard library's feature detection, and sysfs for caches.
//!
//! Trade-off: caches are detected on Linux only, and NUMA nodes nowhere.

use std::path::Path;
use std::{env, fs, thread};

use sysinfo::{CpuRefreshKind, ProcessRefreshKind, ProcessesToUpdate, System, get_current_pid};

use crate::numa::processors_of;
use crate::{Cache, Cpu, Memory, SimdLevel};

pub(crate) fn cpu(notes: &mut Vec<String>) -> Cpu {
    let logical_cores = thread::available_parallelism().map_or(1, usize::from);
    let physical_cores = System::physical_core_count().unwrap_or(logical_cores);
    let features = cpu_features();
    Cpu {
        name: cpu_name(notes),
        logical_cores,
        // sysinfo counts the cores of the machine, even if this process may use only some of them.
        physical_cores: physical_cores.clamp(1, logical_cores),
        simd: SimdLevel::of(&features),
        features,
        caches: caches(Path::new("/sys/devices/system/cpu/cpu0/cache")),
    }
}

/// Reads the data caches of the first core, nearest first, from a folder like `/sys/devices/system/cpu/cpu0/cache`.
fn caches(root: &Path) -> Vec<Cache> {
    let Ok(entries) = fs::read_dir(root) else { return Vec::new() };
    let mut found: Vec<Cache> = entries.flatten().filter_map(|entry| cache(&entry.path())).collect();
    found.sort_unstable_by_key(|cache| cache.level);
    found
}

fn cache(folder: &Path) -> Option<Cache> {
    let text = |file| fs::read_to_string(folder.join(file)).ok().map(|text| text.trim().to_owned());
    if text("type")? == "Instruction" {
        return None;
    }
    let size = text("size")?;
    let (number, unit) = size.split_at(size.find(|c: char| !c.is_ascii_digit())?);
    let scale = match unit {
        "K" => 1 << 10,
        "M" => 1 << 20,
        _ => return None,
    };
    Some(Cache {
        level: text("level")?.parse().ok()?,
        bytes: number.parse::<u64>().ok()? * scale,
        shared_by: processors_of(&text("shared_cpu_list")?)?.len(),
    })
}

fn cpu_name(notes: &mut Vec<String>) -> String {
    let name = System::new().ok().and_then(|mut system| {
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
        ("avx512fp16", is_x86_feature_detected!("avx512fp16")),
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

    #[test]
    fn caches_of_a_core_are_read_without_those_for_instructions() {
        let root = tempfile::tempdir().unwrap();
        let write = |index: &str, values: [&str; 4]| {
            let folder = root.path().join(index);
            fs::create_dir(&folder).unwrap();
            for (file, value) in ["level", "type", "size", "shared_cpu_list"].into_iter().zip(values) {
                fs::write(folder.join(file), format!("{value}\n")).unwrap();
            }
        };
        write("index3", ["3", "Unified", "105M", "0-3,8-11"]);
        write("index0", ["1", "Data", "48K", "0,8"]);
        write("index1", ["1", "Instruction", "32K", "0,8"]);
        write("index2", ["2", "Unified", "2048K", "0,8"]);
        let found: Vec<_> = caches(root.path()).iter().map(|c| (c.level, c.bytes >> 10, c.shared_by)).collect();
        assert_eq!(found, [(1, 48, 2), (2, 2048, 2), (3, 105 << 10, 8)]);
        assert!(caches(&root.path().join("missing")).is_empty());
    }

    #[test]
    fn the_widest_vectors_name_the_level() {
        let level = |features: &[&str]| SimdLevel::of(&features.iter().map(ToString::to_string).collect::<Vec<_>>());
        assert_eq!(level(&["avx", "avx2", "fma", "avx512f"]), SimdLevel::Avx512);
        assert_eq!(level(&["avx", "avx2", "fma"]), SimdLevel::Avx2);
        assert_eq!(level(&["avx", "avx2"]), SimdLevel::Avx, "products need multiply-add");
        assert_eq!(level(&["neon", "sve"]), SimdLevel::Sve);
        assert_eq!(level(&["neon"]), SimdLevel::Neon);
        assert_eq!(level(&[]), SimdLevel::Baseline);
    }
}
