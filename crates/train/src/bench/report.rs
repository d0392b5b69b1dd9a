//! The results of a benchmark: the fields of its JSON object, and the same as text.
//!
//! Trade-off: field names are stable, because files of results are compared across versions.

use std::fmt;

use firebrick_hwprofile::memory::MemoryLine;
use firebrick_hwprofile::roofline::{Bound, RateSource};
use firebrick_kernels::{BackendKind, GemmFormat, Recompute};
use firebrick_optim::OptimizerKind;
use firebrick_precision::{Format, QuantFormat};
use firebrick_trainer::config::to_name;
use firebrick_trainer::metrics::MemorySource;
use serde::Serialize;

use super::peaks::Peaks;
use super::spread::Spread;
use super::trace::{OperationTime, StepTrace};
use super::usage::UsageCost;

/// Model FLOPs utilization: progress (4 operations per parameter and token under LoRA, plus attention) over a rate.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Utilization {
    /// Fraction of the rate.
    pub share: f64,
    /// The rate, 1e12 operations per second.
    pub rate_tflops: f64,
    /// Where the rate is from.
    pub rate_source: RateSource,
    /// What the rate was measured or specified for.
    pub rate_name: String,
}

/// Everything that a benchmark measured, under the names of its JSON object.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct BenchReport {
    /// The model folder as typed.
    pub model: String,
    /// The backend.
    pub backend: BackendKind,
    /// The card or the processor.
    pub device: String,
    /// The format that was computed in, which may not be the requested one.
    pub compute: Format,
    /// What the GEMMs of the layers multiplied.
    pub gemms: GemmFormat,
    /// How the base was stored.
    pub base: QuantFormat,
    /// What layers computed again.
    pub recompute: Recompute,
    /// Whether what layers save waited in host memory.
    pub offload: bool,
    /// The optimizer.
    pub optimizer: OptimizerKind,
    /// Rank of the adapters.
    pub rank: usize,
    /// Numerator of their scale.
    pub alpha: f64,
    /// Tokens per row.
    pub seq: usize,
    /// Rows per step.
    pub micro_batch: usize,
    /// Processes that trained together, each with so many rows per step.
    pub ranks: usize,
    /// Documents per row.
    pub documents: usize,
    /// Tokens whose logits existed at a time.
    pub loss_chunk: usize,
    /// Timed steps.
    pub steps: usize,
    /// Steps before them.
    pub warmup: usize,
    /// Tokens per second at the median step, of all ranks together.
    pub tok_s: f64,
    /// Seconds per step.
    pub step_s: Spread,
    /// Seconds per step before the host waits for the loss: what it computes and hands to the device, and where it has to wait for room there.
    pub host_s: Spread,
    /// Seconds of reading and quantizing the weights.
    pub load_s: f64,
    /// Seconds from the start of the process to the end of the first step.
    pub first_step_s: f64,
    /// Seconds of the self-test; `None` if the backend has none.
    pub self_test_s: Option<f64>,
    /// Maximum memory in use after loading and after each step.
    pub peak_gib: f64,
    /// Who reports that number.
    pub peak_source: MemorySource,
    /// What the plan expected.
    pub planned_gib: f64,
    /// The same line by line.
    pub planned: Vec<MemoryLine>,
    /// Progress over the peak of the device.
    pub mfu: Utilization,
    /// Tokens per second if the step's work ran at the measured peaks, with arithmetic and memory traffic overlapped.
    pub roofline_tok_s: f64,
    /// Mean loss of the first step.
    pub loss_first: f32,
    /// Mean loss of the last timed step.
    pub loss_last: f32,
    /// The peak rates of the device, measured after the steps.
    pub peaks: Peaks,
    /// What it costs to sample the machine's usage meanwhile; `None` unless requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<UsageCost>,
    /// One more step, operation by operation; `None` unless requested.
    pub trace: Option<StepTrace>,
}

impl BenchReport {
    /// The host's share of a step.
    fn host_side(&self) -> String {
        let seconds = self.host_s.median;
        let launches =
            self.trace.iter().flat_map(|trace| &trace.operations).map(|operation| operation.calls).sum::<usize>();
        let each = match launches {
            0 => String::new(),
            _ => format!(", {:.1} µs for each of {launches} launches", seconds / launches as f64 * 1e6),
        };
        format!("{seconds:.4} s of a step until all was queued{each}")
    }
}

impl fmt::Display for BenchReport {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { backend, device, seq, micro_batch, documents, steps, warmup, .. } = self;
        let (compute, recompute) = (self.compute, to_name(&self.recompute));
        writeln!(formatter, "benchmark of {} on {backend} ({device})", self.model)?;
        let line = |name: &str, text: String| format!("  {name:<12} {text}");
        let lines = [
            line(
                "case",
                format!(
                    "{micro_batch} rows of {seq} tokens in {documents} document(s), {compute} on {}, recompute {recompute}, offload {}",
                    self.base, self.offload
                ),
            ),
            line("tokens/s", {
                let ranks = if self.ranks == 1 { String::new() } else { format!(" of {} ranks together", self.ranks) };
                format!("{:.0}{ranks} (median of {steps} steps after {warmup})", self.tok_s)
            }),
            line("step", {
                let Spread { min, median, max, .. } = self.step_s;
                format!("{median:.4} s (from {min:.4} to {max:.4})")
            }),
            line("host", self.host_side()),
            line("start", {
                let (load_s, first_s) = (self.load_s, self.first_step_s);
                format!("{load_s:.2} s to load; the first step ended {first_s:.2} s after the process started")
            }),
            line("memory", {
                let (peak, planned) = (self.peak_gib, self.planned_gib);
                format!("maximum {peak:.2} GiB ({}); the plan expected {planned:.2} GiB", to_name(&self.peak_source))
            }),
            line("utilization", {
                let Utilization { share, rate_tflops, rate_source, rate_name } = &self.mfu;
                let (percent, source) = (100.0 * share, to_name(rate_source));
                format!("{percent:.1} % of {rate_tflops:.3} TFLOP/s ({source}: {rate_name})")
            }),
            line("peaks", {
                let Peaks { gemm_tflops, copy_tb_s, .. } = self.peaks;
                let part = 100.0 * self.tok_s / self.roofline_tok_s;
                format!(
                    "GEMM {gemm_tflops:.3} TFLOP/s, memory {copy_tb_s:.3} TB/s: at most {:.0} tokens/s; reached {part:.1} %",
                    self.roofline_tok_s
                )
            }),
            line("loss", format!("{:.4}, then {:.4}", self.loss_first, self.loss_last)),
        ];
        write!(formatter, "{}", lines.join("\n"))?;
        if let Some(usage) = &self.usage {
            write!(formatter, "\n{usage}")?;
        }
        match &self.trace {
            Some(trace) if trace.operations.is_empty() => {
                write!(formatter, "\n  trace        {backend} cannot measure the time of single operations")
            }
            Some(trace) => write!(formatter, "\n{trace}"),
            None => Ok(()),
        }
    }
}

impl fmt::Display for StepTrace {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            formatter,
            "  {:<36} {:>6} {:>9} {:>7} {:>14} {:>6}",
            "operation", "calls", "ms", "step", "rate", "peak"
        )?;
        for operation in &self.operations {
            writeln!(formatter, "{operation}")?;
        }
        write!(formatter, "  idle {:.1} % of the untraced step", 100.0 * self.idle.unwrap_or(0.0))
    }
}

impl fmt::Display for OperationTime {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rate = match self.bound {
            Bound::Math => format!("{:.1} TFLOP/s", self.tflops),
            Bound::Memory => format!("{:.0} GB/s", self.gb_s),
        };
        let (share, of_peak) = (100.0 * self.share, 100.0 * self.roofline_share);
        let name = match self.gemm {
            Some([m, n, k]) => format!("{} {m} x {n} x {k}", self.name),
            None => self.name.to_owned(),
        };
        write!(formatter, "  {name:<36} {:>6} {:>9.3} {share:>5.1} % {rate:>14} {of_peak:>4.0} %", self.calls, self.ms)
    }
}
