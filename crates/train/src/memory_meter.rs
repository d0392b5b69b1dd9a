//! How much memory a run holds, asked where it counts: from the driver for a card, from the system for this process elsewhere.
//!
//! A reading is taken when asked for, between steps. Pools keep what they once took, so that shows the peak inside a step too;
//! what a library allocates and frees within a step is missed. On a card all processes count together: the driver does not say
//! more in a container.

use firebrick_hwprofile::measure::process_peak_resident_bytes;
use serde::Serialize;

use crate::backend::BackendKind;

/// Whose figure it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum MemorySource {
    /// Total less free memory of the card, all processes.
    Driver,
    /// Physical memory of this process.
    Process,
}

/// Keeps the highest reading.
pub struct MemoryMeter {
    #[cfg(feature = "cuda")]
    card: Option<firebrick_cuda::Context>,
    peak_bytes: u64,
}

impl MemoryMeter {
    /// A meter for the memory where this backend's tensors live, on its default device.
    pub fn new(backend: BackendKind) -> Self {
        #[cfg(not(feature = "cuda"))]
        let _ = backend;
        Self {
            #[cfg(feature = "cuda")]
            card: (backend == BackendKind::Cuda).then(card).flatten(),
            peak_bytes: 0,
        }
    }

    /// Whose figures these are.
    pub fn source(&self) -> MemorySource {
        #[cfg(feature = "cuda")]
        if self.card.is_some() {
            return MemorySource::Driver;
        }
        MemorySource::Process
    }

    /// Reads once more, and returns the highest figure so far, in bytes; 0 where nobody says.
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
        process_peak_resident_bytes()
    }
}

/// The card that CubeCL takes by default.
#[cfg(feature = "cuda")]
fn card() -> Option<firebrick_cuda::Context> {
    let driver = firebrick_cuda::Driver::load().ok()?;
    firebrick_cuda::Context::retain(&driver, 0).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_on_the_cpu_knows_its_peak() {
        let mut meter = MemoryMeter::new(BackendKind::Flex);
        assert_eq!(meter.source(), MemorySource::Process);
        let first = meter.sample();
        assert!(first > 0 || !cfg!(target_os = "linux"));
        assert!(meter.sample() >= first);
    }
}
