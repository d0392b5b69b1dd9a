//! This process: its memory, and the processor time that it used.
//!
//! Trade-off: processor time is read on Linux only.

use std::time::Instant;

use super::gauge::Gauge;
use super::reading::Sample;
use crate::measure::{process_cpu_seconds, process_resident_bytes};

/// Reads the process; stores the processor time of the last sample.
#[derive(Debug, Default)]
pub(super) struct ProcessSampler {
    last: Option<(Instant, f64)>,
}

impl ProcessSampler {
    pub(super) fn read(&mut self, sample: &mut Sample) {
        sample.set(Gauge::HostMemory, process_resident_bytes().map(|bytes| bytes as f64));
        let Some(used) = process_cpu_seconds() else { return };
        let now = Instant::now();
        if let Some((then, before)) = self.last.replace((now, used)) {
            let threads = std::thread::available_parallelism().map_or(1, usize::from) as f64;
            let seconds = now.duration_since(then).as_secs_f64();
            sample.set(Gauge::CpuUtil, Some(100.0 * (used - before) / (seconds * threads)));
        }
    }
}
