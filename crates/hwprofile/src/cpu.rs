//! Description of a processor.
//!
//! Trade-off: fast and efficient cores are counted alike.

use serde::Serialize;

/// The processor, as far as this process may use it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Cpu {
    /// Brand name.
    pub name: String,
    /// Hardware threads that this process may use, within its affinity and cgroup quota.
    pub logical_cores: usize,
    /// Cores, at most `logical_cores`.
    pub physical_cores: usize,
    /// The widest vectors that it computes with: "AVX-512", "AVX2", "AVX", "SVE", "NEON", or "baseline".
    pub simd: &'static str,
}

impl Cpu {
    /// Describes a processor by its number of cores alone.
    pub fn described(cores: usize) -> Self {
        Self { name: "a processor".to_owned(), logical_cores: cores, physical_cores: cores, simd: "baseline" }
    }
}
