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
    /// Vector extensions that matter for matrix products, such as `avx2`, `avx512f`, `neon`.
    pub features: Vec<String>,
    /// The widest of them.
    pub simd: SimdLevel,
    /// Data caches of one core, nearest first; empty if the system does not report them.
    pub caches: Vec<Cache>,
}

/// A data cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Cache {
    /// 1 is nearest to the core.
    pub level: u8,
    /// Its size.
    pub bytes: u64,
    /// Hardware threads that share it.
    pub shared_by: usize,
}

/// The widest vectors that a processor multiplies and adds in one instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SimdLevel {
    /// The baseline of the architecture.
    Baseline,
    /// 128 bits on ARM.
    Neon,
    /// Vectors whose length the processor decides, on ARM.
    Sve,
    /// 256 bits, without multiply-add.
    Avx,
    /// 256 bits.
    Avx2,
    /// 512 bits.
    Avx512,
}

impl SimdLevel {
    /// Returns the level of a list of extensions.
    pub fn of(features: &[String]) -> Self {
        let has = |name: &&str| features.iter().any(|feature| feature == name);
        let levels = [
            (&["avx512f"][..], Self::Avx512),
            (&["avx2", "fma"], Self::Avx2),
            (&["avx"], Self::Avx),
            (&["sve"], Self::Sve),
            (&["neon"], Self::Neon),
        ];
        levels.into_iter().find(|(needed, _)| needed.iter().all(has)).map_or(Self::Baseline, |(_, level)| level)
    }

    /// Returns the name to print.
    pub fn name(self) -> &'static str {
        match self {
            Self::Baseline => "baseline",
            Self::Neon => "NEON",
            Self::Sve => "SVE",
            Self::Avx => "AVX",
            Self::Avx2 => "AVX2",
            Self::Avx512 => "AVX-512",
        }
    }
}

impl Cpu {
    /// Describes a processor by its number of cores alone.
    pub fn described(cores: usize) -> Self {
        Self {
            name: "a processor".to_owned(),
            logical_cores: cores,
            physical_cores: cores,
            features: Vec::new(),
            simd: SimdLevel::Baseline,
            caches: Vec::new(),
        }
    }
}
