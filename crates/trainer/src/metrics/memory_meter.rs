//! Measures the memory of a run: that of a card as its driver reports it, of the pools of wgpu, or of this process on a CPU.
//!
//! A reading is taken between steps. Memory pools keep what they allocated once, so a reading shows the peak inside a step too.
//! Trade-off: what a library allocates and frees within a step is missed, and on a card all processes count together, because
//! the driver does not report more in a container.

use firebrick_hwprofile::measure::process_peak_resident_bytes;
use firebrick_kernels::BackendKind;
use serde::Serialize;

/// The source of the number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum MemorySource {
    /// The driver: total minus free memory of the card, all processes.
    Driver,
    /// The backend's memory pools on the device.
    Pools,
    /// The system: physical memory of this process.
    Process,
}

/// Keeps the highest reading.
pub struct MemoryMeter {
    #[cfg(feature = "cuda")]
    card: Option<firebrick_cuda::Context>,
    backend: BackendKind,
    peak_bytes: u64,
}

impl MemoryMeter {
    /// Creates a meter of the memory that holds this backend's tensors, on the device of the rank with this number on its machine.
    pub fn new(backend: BackendKind, local_rank: usize) -> Self {
        let _ = local_rank;
        Self {
            #[cfg(feature = "cuda")]
            card: (backend == BackendKind::Cuda).then(|| card(local_rank)).flatten(),
            backend,
            peak_bytes: 0,
        }
    }

    /// Returns the source of the numbers.
    pub fn source(&self) -> MemorySource {
        #[cfg(feature = "cuda")]
        if self.card.is_some() {
            return MemorySource::Driver;
        }
        if self.backend.allocated_bytes().is_some() { MemorySource::Pools } else { MemorySource::Process }
    }

    /// Takes a reading and returns the maximum so far, in bytes; 0 if neither driver nor system reports it.
    pub fn sample(&mut self) -> u64 {
        self.peak_bytes = self.peak_bytes.max(self.read().unwrap_or(0));
        self.peak_bytes
    }

    fn read(&self) -> Option<u64> {
        #[cfg(feature = "cuda")]
        if let Some(card) = &self.card {
            let memory = card.memory().ok()?;
            return Some(memory.total_bytes - memory.free_bytes);
        }
        self.backend.allocated_bytes().or_else(process_peak_resident_bytes)
    }
}

#[cfg(feature = "cuda")]
fn card(local_rank: usize) -> Option<firebrick_cuda::Context> {
    use firebrick_kernels::MemoryOps;

    let driver = firebrick_cuda::Driver::load().ok()?;
    firebrick_cuda::Context::retain(&driver, firebrick_kernels::backends::Cuda::device_of(local_rank).index).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_on_the_cpu_reports_its_peak() {
        let mut meter = MemoryMeter::new(BackendKind::Flex, 0);
        assert_eq!(meter.source(), MemorySource::Process);
        let first = meter.sample();
        assert!(first > 0 || !cfg!(target_os = "linux"));
        assert!(meter.sample() >= first);
    }
}
