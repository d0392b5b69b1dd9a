//! Roofline bounds on the time of some work: the time of its arithmetic, and the time of its memory traffic, at given rates.
//!
//! ```text
//! t_math   = GEMM operations / GEMM rate + those in FP8 / their rate + attention operations / attention rate
//! t_memory = bytes moved / bandwidth
//! lower    = max(t_math, t_memory)    everything overlaps: no implementation is faster
//! upper    = t_math + t_memory        nothing overlaps: a good implementation is not slower
//! ```
//!
//! Trade-off: launch overheads, caches and communication between devices are left out. A bound is as good as its rates: use measured ones if there is
//! time to measure. `firebrick-kernels` counts the work of a training step.

use serde::Serialize;

use crate::spec::{AcceleratorSpec, MathFormat};

/// Origin of rates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RateSource {
    /// Timed on this machine.
    Measured,
    /// The maker's peak: real rates are lower.
    Spec,
}

/// Rates of a device per second.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Rates {
    /// Operations per second in GEMMs.
    pub matmul_flops_per_s: f64,
    /// Operations per second in GEMMs of 8-bit floats; equal to the other GEMMs if the device has none.
    pub fp8_flops_per_s: f64,
    /// Operations per second in the GEMMs of attention.
    pub attention_flops_per_s: f64,
    /// Bytes per second to and from memory.
    pub bytes_per_s: f64,
    /// Origin of the numbers.
    pub source: RateSource,
}

impl Rates {
    /// Returns the maker's peaks in `format`, attention included. `None`: the accelerator has no such unit.
    pub fn of_spec(spec: &AcceleratorSpec, format: MathFormat) -> Option<Self> {
        let flops = spec.rate(format)?.value * 1e12;
        Some(Self {
            matmul_flops_per_s: flops,
            fp8_flops_per_s: spec.rate(MathFormat::Fp8).map_or(flops, |rate| rate.value * 1e12),
            attention_flops_per_s: flops,
            bytes_per_s: spec.bandwidth_tb_s.value * 1e12,
            source: RateSource::Spec,
        })
    }

    /// Returns the higher of each pair of rates, as a limit that no implementation exceeds.
    pub fn or_faster(self, other: Self) -> Self {
        Self {
            matmul_flops_per_s: self.matmul_flops_per_s.max(other.matmul_flops_per_s),
            fp8_flops_per_s: self.fp8_flops_per_s.max(other.fp8_flops_per_s),
            attention_flops_per_s: self.attention_flops_per_s.max(other.attention_flops_per_s),
            bytes_per_s: self.bytes_per_s.max(other.bytes_per_s),
            source: self.source,
        }
    }

    /// Scales each kind of arithmetic and the bandwidth by a share.
    pub fn at_shares(self, matmul: f64, fp8: f64, attention: f64, memory: f64) -> Self {
        Self {
            matmul_flops_per_s: self.matmul_flops_per_s * matmul,
            fp8_flops_per_s: self.fp8_flops_per_s * fp8,
            attention_flops_per_s: self.attention_flops_per_s * attention,
            bytes_per_s: self.bytes_per_s * memory,
            source: self.source,
        }
    }
}

/// Operations and bytes of some work.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Work {
    /// Operations in GEMMs of the compute format.
    pub matmul_flops: f64,
    /// Operations in GEMMs of 8-bit floats.
    pub fp8_flops: f64,
    /// Operations in the GEMMs of attention.
    pub attention_flops: f64,
    /// Bytes to and from memory.
    pub bytes: f64,
}

impl Work {
    /// Returns the fraction of the operations that are in GEMMs of 8-bit floats.
    pub fn fp8_share(&self) -> f64 {
        self.fp8_flops / (self.matmul_flops + self.fp8_flops + self.attention_flops)
    }
}

/// The resource that limits some work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Bound {
    /// Arithmetic.
    Math,
    /// Memory traffic.
    Memory,
}

/// The roofline time of a piece of work.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct RooflineTime {
    /// Seconds of arithmetic.
    pub t_math: f64,
    /// Seconds of memory traffic.
    pub t_memory: f64,
}

impl RooflineTime {
    /// Computes the time of `work` at `rates`.
    pub fn of(work: &Work, rates: &Rates) -> Self {
        Self {
            t_math: work.matmul_flops / rates.matmul_flops_per_s
                + work.fp8_flops / rates.fp8_flops_per_s
                + work.attention_flops / rates.attention_flops_per_s,
            t_memory: work.bytes / rates.bytes_per_s,
        }
    }

    /// Returns the time in seconds if arithmetic hides all traffic, or the other way round.
    pub fn lower(&self) -> f64 {
        self.t_math.max(self.t_memory)
    }

    /// Returns the time in seconds if nothing overlaps.
    pub fn upper(&self) -> f64 {
        self.t_math + self.t_memory
    }

    /// Returns the resource with the longer time.
    pub fn bound(&self) -> Bound {
        if self.t_math >= self.t_memory { Bound::Math } else { Bound::Memory }
    }
}

/// Computes the model FLOPs utilization: progress per second over the peak rate of the matrix unit. `flops_per_token` are the operations that MFU
/// counts (`firebrick_arch::ModelSpec::model_flops_per_token`: recomputation is not progress), `tokens_per_s` counts all tokens.
pub fn model_flops_utilization(flops_per_token: f64, tokens_per_s: f64, rates: &Rates) -> f64 {
    flops_per_token * tokens_per_s / rates.matmul_flops_per_s
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bounds_are_the_larger_part_and_the_sum_of_both() {
        let rates = Rates {
            fp8_flops_per_s: 20.0,
            matmul_flops_per_s: 10.0,
            attention_flops_per_s: 5.0,
            bytes_per_s: 2.0,
            source: RateSource::Measured,
        };
        let time =
            RooflineTime::of(&Work { matmul_flops: 16.0, fp8_flops: 8.0, attention_flops: 5.0, bytes: 8.0 }, &rates);
        assert_eq!((time.t_math, time.t_memory, time.bound()), (3.0, 4.0, Bound::Memory));
        assert_eq!((time.lower(), time.upper()), (4.0, 7.0));
    }
}
