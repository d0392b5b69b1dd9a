//! How much memory this process holds, now and at its peak.
//!
//! Linux counts pages per processor and adds up lazily, so a figure may be some hundred KiB off.

/// Bytes of this process in physical memory now. `None` where the system does not say.
pub fn process_resident_bytes() -> Option<u64> {
    resident()
}

/// Most bytes that this process ever had in physical memory. Only Linux says; `None` elsewhere.
pub fn process_peak_resident_bytes() -> Option<u64> {
    peak()
}

#[cfg(target_os = "linux")]
fn resident() -> Option<u64> {
    status_bytes("VmRSS:")
}

#[cfg(target_os = "linux")]
fn peak() -> Option<u64> {
    status_bytes("VmHWM:")
}

/// A line of `/proc/self/status`, which counts in units of 1024 bytes (proc_pid_status(5)).
#[cfg(target_os = "linux")]
fn status_bytes(key: &str) -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let value = status.lines().find_map(|line| line.strip_prefix(key))?;
    let kib: u64 = value.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

#[cfg(not(target_os = "linux"))]
fn resident() -> Option<u64> {
    use sysinfo::{ProcessRefreshKind, ProcessesToUpdate, System, get_current_pid};

    let pid = get_current_pid().ok()?;
    let mut system = System::new().ok()?;
    let what = ProcessRefreshKind::nothing().with_memory();
    system.refresh_processes_specifics(ProcessesToUpdate::Some(&[pid]), false, what);
    Some(system.process(pid)?.memory())
}

#[cfg(not(target_os = "linux"))]
fn peak() -> Option<u64> {
    None
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn the_peak_keeps_what_was_given_back() {
        const BYTES: usize = 64 << 20;
        let block = vec![1u8; BYTES];
        let during = process_resident_bytes().expect("Linux says");
        assert!(during >= BYTES as u64, "{during} bytes resident with {} written", block.len());
        drop(block);
        let peak = process_peak_resident_bytes().expect("Linux says");
        assert!(peak >= BYTES as u64, "peak {peak} forgot the {BYTES} bytes that were given back");
    }
}
