//! Memory of this process, now and at its peak, and its running time.
//!
//! Linux counts pages per processor and sums them lazily, so a value may be off by some hundred KiB.
//! Trade-off: other systems do not report the start of a process without further libraries, so there the time before `main` is left out.

use std::fs;
use std::time::{Duration, Instant};

use sysinfo::{ProcessRefreshKind, ProcessesToUpdate, System, get_current_pid};

/// Counts from the start of the process, dynamic linking included, if the system reports it; otherwise from its own creation.
#[derive(Clone, Copy, Debug)]
pub struct ProcessClock {
    created: Instant,
    before: Duration,
}

impl ProcessClock {
    /// Starts the clock; call it first in `main`.
    pub fn start() -> Self {
        // A container may see another machine's clock: a process this old is not at the start of its `main`.
        const OLDEST: Duration = Duration::from_secs(60);
        let before = process_age().filter(|&age| age < OLDEST).unwrap_or_default();
        Self { created: Instant::now(), before }
    }

    /// Returns the time since the process began, to a hundredth of a second.
    pub fn elapsed(&self) -> Duration {
        self.before + self.created.elapsed()
    }
}

/// `USER_HZ`, which is 100 on every architecture that Rust's standard library is built for.
const TICKS_PER_SECOND: f64 = 100.0;

/// Returns the time since the system started this process: `/proc/uptime` less field 22 of `/proc/self/stat` (proc_pid_stat(5)).
fn process_age() -> Option<Duration> {
    let uptime: f64 = fs::read_to_string("/proc/uptime").ok()?.split_whitespace().next()?.parse().ok()?;
    Duration::try_from_secs_f64(uptime - stat_ticks(22)? / TICKS_PER_SECOND).ok()
}

/// Returns the seconds of processor time of all threads of this process: fields 14 and 15 of `/proc/self/stat`. `None` on other systems than Linux.
pub fn process_cpu_seconds() -> Option<f64> {
    Some((stat_ticks(14)? + stat_ticks(15)?) / TICKS_PER_SECOND)
}

/// Reads a field of `/proc/self/stat`.
fn stat_ticks(field: usize) -> Option<f64> {
    let stat = fs::read_to_string("/proc/self/stat").ok()?;
    // Field 2 is the command in brackets and may contain spaces: fields are counted after it, starting with field 3.
    stat.rsplit_once(')')?.1.split_whitespace().nth(field - 3)?.parse().ok()
}

/// Returns the bytes of this process in physical memory now. `None` if the system does not report them.
pub fn process_resident_bytes() -> Option<u64> {
    status_bytes("VmRSS:").or_else(resident_elsewhere)
}

/// Returns the peak of this process's bytes in physical memory. Linux only; `None` elsewhere.
pub fn process_peak_resident_bytes() -> Option<u64> {
    status_bytes("VmHWM:")
}

/// Reads a line of `/proc/self/status`, which counts in units of 1024 bytes (proc_pid_status(5)).
fn status_bytes(key: &str) -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let value = status.lines().find_map(|line| line.strip_prefix(key))?;
    let kib: u64 = value.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

/// Asks a system without `/proc`.
fn resident_elsewhere() -> Option<u64> {
    let pid = get_current_pid().ok()?;
    let mut system = System::new().ok()?;
    let what = ProcessRefreshKind::nothing().with_memory();
    system.refresh_processes_specifics(ProcessesToUpdate::Some(&[pid]), false, what);
    Some(system.process(pid)?.memory())
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_older_than_its_clock_and_not_by_much() {
        let age = process_age().expect("Linux says");
        assert!(age < Duration::from_secs(3600), "{age:?}");
        let clock = ProcessClock::start();
        std::thread::sleep(Duration::from_millis(20));
        assert!(clock.elapsed() >= Duration::from_millis(20));
        let later = process_age().expect("Linux says");
        assert!((later.as_secs_f64() - age.as_secs_f64() - 0.02).abs() < 0.5, "{age:?} then {later:?}");
    }

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
