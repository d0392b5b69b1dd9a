//! The cost of a run on an accelerator: the time of a step as a range, and tokens per second, time, energy and money that follow from it.
//!
//! ```text
//! lower = max(arithmetic, memory traffic, host traffic)    at the maker's peaks, everything overlaps: no implementation is faster
//! upper = (arithmetic + memory traffic + host traffic) x 1.25   arithmetic and memory at the rates that a good library and copies were
//!                                                           measured at, nothing overlaps, and an allowance for what is not counted;
//!         or launches x the host's time for one, if that is longer: with few tokens the card waits for the host
//! ```
//!
//! The allowance, the time of a launch and the shares of attention and memory come from this framework's own steps on one H100
//! (docs/roofline.md); on other accelerators they are an assumption.
//!
//! Trade-off: evaluation, checkpoints, loading and communication between devices are left out, and energy is the accelerator's alone at its
//! power limit.

use serde::Serialize;

use crate::peaks::MeasuredPeaks;
use crate::roofline::{Rates, RooflineTime, Work};
use crate::spec::{AcceleratorSpec, Link, MathFormat};

/// Rate of attention, forward and backward, relative to plain GEMMs: cuDNN was measured at 490 TFLOP/s where cuBLASLt reached 735.
pub const ATTENTION_SHARE: f64 = 490.0 / 735.0;

/// Share of the peak that 8-bit float GEMMs reach, relative to that of bf16 GEMMs. Including the quantization of their rows, which a step needs as
/// well, 1,307 of 1,979 TFLOP/s were measured, where bf16 reached 785 of 989 on the same H100. The fastest launch of the GEMM alone reached 1,520.
pub const FP8_SHARE: f64 = (1307.0 / 1979.0) / (785.0 / 989.0);

/// Maximum time of a step over the sum of its counted parts: launches, low-rank GEMMs and some passes over memory are not counted. All steps measured
/// on an H100 are below this round number; a test of the plan compares them.
pub const ALLOWANCE: f64 = 1.25;

/// Share of the memory bandwidth that copies reach: 2.88 to 2.92 of 3.35 TB/s on H100s (docs/roofline.md).
pub const MEMORY_SHARE: f64 = 2.9 / 3.35;

/// Maximum host time per launch, in seconds. Steps of 805 launches over 512 tokens took 10 to 11 ms, 13 µs per launch, on one host
/// (`h100-memory-used-again.json` in `benches/results/`); hosts differ by half. If batches are alike, launches are graphs and take 6 to 9 µs.
pub const LAUNCH_S: f64 = 20e-6;

/// What operations reach of an accelerator's peaks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shares {
    /// GEMMs, of the peak of their format.
    pub gemms: f64,
    /// Attention, forward and backward, of the rate of GEMMs.
    pub attention: f64,
}

impl Shares {
    /// This framework's kernels on wgpu in f32: GEMMs of 8,192 at 30.9 of 67 TFLOP/s on an H200 through Vulkan, attention at 9 (docs/backends.md).
    pub const WGPU: Self = Self { gemms: 30.9 / 67.0, attention: 9.0 / 30.9 };
    /// The same by matrix units: 139.6 of 989 TFLOP/s in float16, attention at 64.
    pub const WGPU_HALF: Self = Self { gemms: 150.0 / 989.0, attention: 64.0 / 150.0 };

    /// Returns those of a good library on an accelerator.
    pub fn of_library(spec: &AcceleratorSpec) -> Self {
        Self { gemms: spec.sustained_share().0, attention: ATTENTION_SHARE }
    }
}

/// The host's part of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct HostSide {
    /// Bytes that are copied to or from it.
    pub bytes: f64,
    /// Number of kernel launches; 0 if unknown.
    pub launches: f64,
}

/// A range from the best to the worst case.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Range {
    /// The smallest value.
    pub lower: f64,
    /// The largest value.
    pub upper: f64,
}

impl Range {
    /// Multiplies both ends by a factor.
    pub fn times(self, factor: f64) -> Self {
        Self { lower: self.lower * factor, upper: self.upper * factor }
    }

    /// Divides `factor` by both ends.
    pub fn divide(self, factor: f64) -> Self {
        Self { lower: factor / self.upper, upper: factor / self.lower }
    }

    /// Returns whether a value lies in it.
    pub fn contains(self, value: f64) -> bool {
        (self.lower..=self.upper).contains(&value)
    }
}

/// The lower bound that binds a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum StepBound {
    /// Arithmetic.
    Math,
    /// Traffic of the accelerator's memory.
    Memory,
    /// Traffic between host and accelerator.
    HostLink,
}

/// The time of a step, in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct StepTime {
    /// The range from `lower` to `upper`.
    pub seconds: Range,
    /// Arithmetic at the peak.
    pub t_math: f64,
    /// Memory traffic at the peak.
    pub t_memory: f64,
    /// Host traffic at the peak rate of its link, in one direction at a time.
    pub t_host: f64,
    /// Host time of all launches.
    pub t_launch: f64,
    /// Share of the arithmetic peak that `upper` assumes.
    pub sustained_share: f64,
    /// The largest of the three.
    pub bound: StepBound,
}

impl StepTime {
    /// Does the same as [`of`](Self::of) on an accelerator with measured rates: `upper` uses these for arithmetic and memory, and `lower` uses the
    /// maker's peaks, or the measured rates if those are higher or the accelerator is unknown.
    pub fn at_measured(
        work: &Work,
        host: HostSide,
        spec: Option<&AcceleratorSpec>,
        format: MathFormat,
        measured: &MeasuredPeaks,
    ) -> Option<Self> {
        let reached = measured.rates(format, ATTENTION_SHARE)?;
        let without_share = measured.rates(format, 1.0)?;
        let best = spec
            .and_then(|spec| Rates::of_spec(spec, format))
            .map_or(without_share, |peak| peak.or_faster(without_share));
        let host_link = spec.and_then(|spec| spec.host_link);
        let share = reached.matmul_flops_per_s / best.matmul_flops_per_s;
        Some(Self::between(work, host, host_link, best, reached, share))
    }

    /// Estimates the time of `work` in `format` on an accelerator. `None`: it does not multiply that format.
    pub fn of(work: &Work, host: HostSide, spec: &AcceleratorSpec, format: MathFormat, shares: Shares) -> Option<Self> {
        let peak = Rates::of_spec(spec, format)?;
        let Shares { gemms, attention } = shares;
        let sustained = peak.at_shares(gemms, gemms * FP8_SHARE, gemms * attention, MEMORY_SHARE);
        Some(Self::between(work, host, spec.host_link, peak, sustained, gemms))
    }

    /// Estimates from the best rates with full overlap to the reached rates with none.
    fn between(
        work: &Work,
        host: HostSide,
        host_link: Option<Link>,
        best: Rates,
        reached: Rates,
        sustained_share: f64,
    ) -> Self {
        let (best, reached) = (RooflineTime::of(work, &best), RooflineTime::of(work, &reached));
        // A link's figure counts both directions.
        let t_host = host_link.map_or(0.0, |link| host.bytes / (link.gb_s.value * 1e9 / 2.0));
        let t_launch = host.launches * LAUNCH_S;
        let upper = (ALLOWANCE * (reached.upper() + t_host)).max(t_launch);
        let seconds = Range { lower: best.lower().max(t_host), upper };
        let bound = match seconds.lower {
            lower if lower == best.t_math => StepBound::Math,
            lower if lower == best.t_memory => StepBound::Memory,
            _ => StepBound::HostLink,
        };
        Self { seconds, t_math: best.t_math, t_memory: best.t_memory, t_host, t_launch, sustained_share, bound }
    }
}

/// The cost of a whole run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct RunCost {
    /// Tokens per second, padding included.
    pub tokens_per_s: Range,
    /// Seconds of training.
    pub seconds: Range,
    /// Energy of the accelerator at its power limit, kWh. `None`: its power is unknown.
    pub energy_kwh: Option<Range>,
    /// Money, in the unit of the price. `None`: no price.
    pub cost: Option<Range>,
}

impl RunCost {
    /// Computes the cost of `steps` steps of `tokens` tokens each; `price_per_hour` is that of the machine.
    pub fn of(step: &StepTime, steps: u64, tokens: f64, power_w: Option<f64>, price_per_hour: Option<f64>) -> Self {
        let seconds = step.seconds.times(steps as f64);
        Self {
            tokens_per_s: step.seconds.divide(tokens),
            seconds,
            energy_kwh: power_w.map(|watts| seconds.times(watts / 3.6e6)),
            cost: price_per_hour.map(|price| seconds.times(price / 3600.0)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peaks::MeasuredGemm;

    fn h100() -> &'static AcceleratorSpec {
        AcceleratorSpec::named("h100").unwrap()
    }

    fn step(work: &Work, bytes: f64, launches: f64) -> StepTime {
        let shares = Shares::of_library(h100());
        StepTime::of(work, HostSide { bytes, launches }, h100(), MathFormat::Bf16, shares).unwrap()
    }

    #[test]
    fn bounds_are_ordered_and_the_lower_one_is_the_largest_part() {
        let work = Work { matmul_flops: 989.4e12, fp8_flops: 0.0, attention_flops: 0.0, bytes: 3.35e12 / 2.0 };
        let on_card = step(&work, 0.0, 0.0);
        assert!((on_card.seconds.lower - 1.0).abs() < 1e-9 && (on_card.t_memory - 0.5).abs() < 1e-9);
        let at_measured_rate = ALLOWANCE * (989.4 / 794.5 + 0.5 / MEMORY_SHARE);
        assert!((on_card.seconds.upper - at_measured_rate).abs() < 1e-9, "{on_card:?}");
        assert_eq!(on_card.bound, StepBound::Math);
        let offloaded = step(&work, 128e9, 0.0);
        assert_eq!((offloaded.t_host, offloaded.bound), (2.0, StepBound::HostLink));
        assert!((offloaded.seconds.upper - on_card.seconds.upper - 2.0 * ALLOWANCE).abs() < 1e-9);
    }

    #[test]
    fn measured_rates_and_documents_bound_a_step() {
        let measured = MeasuredPeaks {
            backend: "cuda".to_owned(),
            device: "H100".to_owned(),
            driver: "1".to_owned(),
            measured_at: 0,
            gemm_size: 8192,
            gemms: vec![MeasuredGemm { format: MathFormat::Bf16, tflops: 494.7 }],
            copy_tb_s: 1.675,
        };
        let work = Work { matmul_flops: 989.4e12, fp8_flops: 0.0, attention_flops: 0.0, bytes: 3.35e12 };
        let step =
            StepTime::at_measured(&work, HostSide::default(), Some(h100()), MathFormat::Bf16, &measured).unwrap();
        assert!(
            (step.seconds.lower - 1.0).abs() < 1e-9 && (step.seconds.upper - ALLOWANCE * 4.0).abs() < 1e-9,
            "{step:?}"
        );
        assert!((step.sustained_share - 0.5).abs() < 1e-9);
        let unknown = StepTime::at_measured(&work, HostSide::default(), None, MathFormat::Bf16, &measured).unwrap();
        assert!((unknown.seconds.lower - 2.0).abs() < 1e-9, "nothing faster is known: {unknown:?}");
        assert!(StepTime::at_measured(&work, HostSide::default(), Some(h100()), MathFormat::F32, &measured).is_none());
    }

    #[test]
    fn a_step_of_few_tokens_takes_the_time_of_its_launches_at_most() {
        let work = Work { matmul_flops: 989.4e9, fp8_flops: 0.0, attention_flops: 0.0, bytes: 0.0 };
        let with = |launches| step(&work, 0.0, launches).seconds;
        let none = with(0.0);
        assert_eq!(with(1.0), none, "launches next to longer work cost nothing");
        assert_eq!(with(1000.0), Range { upper: 1000.0 * LAUNCH_S, ..none });
    }

    #[test]
    fn a_format_that_is_not_there_has_no_time() {
        let work = Work { matmul_flops: 1.0, fp8_flops: 0.0, attention_flops: 0.0, bytes: 1.0 };
        let older = AcceleratorSpec::named("a100").unwrap();
        assert_eq!(StepTime::of(&work, HostSide::default(), older, MathFormat::Fp8, Shares::of_library(older)), None);
        assert!(
            StepTime::of(&work, HostSide::default(), h100(), MathFormat::Fp8, Shares::of_library(h100())).is_some()
        );
    }

    #[test]
    fn a_run_costs_its_hours_times_price_and_power() {
        let work = Work { matmul_flops: 989.4e12, fp8_flops: 0.0, attention_flops: 0.0, bytes: 0.0 };
        let step = step(&work, 0.0, 0.0);
        let run = RunCost::of(&step, 7200, 1000.0, Some(700.0), Some(3.0));
        assert!((run.seconds.lower - 7200.0).abs() < 1e-6);
        assert!((run.tokens_per_s.upper - 1000.0).abs() < 1e-6 && run.tokens_per_s.lower < run.tokens_per_s.upper);
        assert!((run.energy_kwh.unwrap().lower - 1.4).abs() < 1e-9 && (run.cost.unwrap().lower - 6.0).abs() < 1e-9);
        let unknown = RunCost::of(&step, 1, 1.0, None, None);
        assert_eq!((unknown.energy_kwh, unknown.cost), (None, None));
        assert!(run.seconds.contains(8000.0) && !run.seconds.contains(7000.0));
    }
}
