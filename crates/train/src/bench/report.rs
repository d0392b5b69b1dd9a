//! The results of a benchmark, as a JSON object and as text.

use std::fmt::{self, Display, Formatter};

use firebrick_arch::counted;
use firebrick_hwprofile::memory::MemoryLine;
use firebrick_hwprofile::roofline::{Bound, RateSource};
use firebrick_kernels::{BackendKind, GemmFormat, Recompute};
use firebrick_optim::OptimizerKind;
use firebrick_precision::{FloatType, QuantFormat};
use serde::Serialize;

use super::samples::Spread;
use super::trace::{OperationTime, StepTrace};
use firebrick_trainer::config::to_name;
use firebrick_trainer::metrics::MemorySource;
use firebrick_trainer::run::peaks::Peaks;

/// Model FLOPs utilization: progress (4 operations per parameter and token under LoRA, plus attention) over a rate.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Utilization {
    pub(super) share: f64,
    pub(super) rate_tflops: f64,
    pub(super) rate_source: RateSource,
    pub(super) rate_name: String,
}

/// All measurements of a benchmark, under the names of its JSON object.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct BenchReport {
    pub(super) model: String,
    pub(super) backend: BackendKind,
    pub(super) device: String,
    /// The format that was used, which may not be the requested one.
    pub(super) compute: FloatType,
    pub(super) gemms: GemmFormat,
    pub(super) base: QuantFormat,
    pub(super) recompute: Recompute,
    pub(super) offload: bool,
    pub(super) optimizer: OptimizerKind,
    pub(super) rank: usize,
    pub(super) alpha: f64,
    pub(super) seq: usize,
    pub(super) micro_batch: usize,
    pub(super) ranks: usize,
    pub(super) documents: usize,
    pub(super) loss_chunk: usize,
    pub(super) steps: usize,
    pub(super) warmup: usize,
    /// Tokens per second at the median step, of all ranks together.
    pub(super) tok_s: f64,
    pub(super) step_s: Spread,
    /// Seconds per step before the host waits for the loss: computing, handing work to the device, and waiting for room there.
    pub(super) host_s: Spread,
    pub(super) load_s: f64,
    /// Seconds from the start of the process to the end of the first step.
    pub(super) first_step_s: f64,
    /// Seconds of the self-test; `None` if the backend has none.
    pub(super) self_test_s: Option<f64>,
    /// Maximum memory in use after loading and after each step.
    pub(super) peak_gib: f64,
    pub(super) peak_source: MemorySource,
    pub(super) planned_gib: f64,
    pub(super) planned: Vec<MemoryLine>,
    pub(super) mfu: Utilization,
    /// Tokens per second if the step's work ran at the measured peaks, with arithmetic and memory traffic overlapped.
    pub(super) roofline_tok_s: f64,
    pub(super) loss_first: f32,
    pub(super) loss_last: f32,
    pub(super) peaks: Peaks,
    pub(super) trace: Option<StepTrace>,
}

impl Display for BenchReport {
    fn fmt(&self, out: &mut Formatter<'_>) -> fmt::Result {
        let Self { model, backend, device, compute, base, seq, micro_batch, documents, offload, .. } = self;
        let Self { steps, warmup, tok_s, load_s, first_step_s, peak_gib, planned_gib, roofline_tok_s, .. } = self;
        let recompute = to_name(&self.recompute);
        let gemms = if self.gemms == GemmFormat::F16 { " (GEMMs in float16)" } else { "" };
        writeln!(out, "benchmark of {model} on {backend} ({device})")?;
        writeln!(
            out,
            "  case         {} of {seq} tokens in {}, {compute}{gemms} on {base}, recompute {recompute}, offload {offload}",
            counted(*micro_batch, "row"),
            counted(*documents, "document")
        )?;
        let ranks = if self.ranks == 1 { String::new() } else { format!(" of {} ranks together", self.ranks) };
        writeln!(out, "  tokens/s     {tok_s:.0}{ranks} (median of {} after {warmup})", counted(*steps, "step"))?;
        let Spread { min, median, max, .. } = self.step_s;
        writeln!(out, "  step         {median:.4} s (from {min:.4} to {max:.4})")?;
        let host_s = self.host_s.median;
        let launches: usize = self.trace.iter().flat_map(|trace| &trace.operations).map(|one| one.calls).sum();
        let each = match launches {
            0 => String::new(),
            _ => format!(", {:.1} µs for each of {launches} launches", host_s / launches as f64 * 1e6),
        };
        writeln!(out, "  host         {host_s:.4} s of a step until all was queued{each}")?;
        writeln!(
            out,
            "  start        {load_s:.2} s to load; the first step ended {first_step_s:.2} s after the process started"
        )?;
        let source = to_name(&self.peak_source);
        writeln!(out, "  memory       maximum {peak_gib:.2} GiB ({source}); the plan expected {planned_gib:.2} GiB")?;
        let Utilization { share, rate_tflops, rate_source, rate_name } = &self.mfu;
        let (percent, source) = (100.0 * share, to_name(rate_source));
        writeln!(out, "  utilization  {percent:.1} % of {rate_tflops:.3} TFLOP/s ({source}: {rate_name})")?;
        let Peaks { gemm_tflops, copy_tb_s, .. } = self.peaks;
        let part = 100.0 * tok_s / roofline_tok_s;
        writeln!(
            out,
            "  peaks        GEMM {gemm_tflops:.3} TFLOP/s, memory {copy_tb_s:.3} TB/s: at most {roofline_tok_s:.0} tokens/s; reached {part:.1} %"
        )?;
        write!(out, "  loss         {:.4}, then {:.4}", self.loss_first, self.loss_last)?;
        match &self.trace {
            Some(trace) if trace.operations.is_empty() => {
                write!(out, "\n  trace        {backend} cannot measure the time of single operations")
            }
            Some(trace) => write!(out, "\n{trace}"),
            None => Ok(()),
        }
    }
}

impl Display for StepTrace {
    fn fmt(&self, out: &mut Formatter<'_>) -> fmt::Result {
        let [name, calls, ms, step, rate, peak] = ["operation", "calls", "ms", "step", "rate", "peak"];
        writeln!(out, "  {name:<36} {calls:>6} {ms:>9} {step:>7} {rate:>14} {peak:>6}")?;
        for OperationTime { name, gemm, calls, ms, share, tflops, gb_s, bound, roofline_share } in &self.operations {
            let rate = match bound {
                Bound::Math => format!("{tflops:.1} TFLOP/s"),
                Bound::Memory => format!("{gb_s:.0} GB/s"),
            };
            let (share, of_peak) = (100.0 * share, 100.0 * roofline_share);
            let name = gemm.map_or_else(|| (*name).to_owned(), |[m, n, k]| format!("{name} {m} x {n} x {k}"));
            writeln!(out, "  {name:<36} {calls:>6} {ms:>9.3} {share:>5.1} % {rate:>14} {of_peak:>4.0} %")?;
        }
        write!(out, "  idle {:.1} % of the untraced step", 100.0 * self.idle.unwrap_or(0.0))
    }
}
