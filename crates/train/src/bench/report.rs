//! What a bench found: the fields of its JSON object, and the same for people.

use std::fmt;

use firebrick_hwprofile::memory::MemoryLine;
use firebrick_hwprofile::roofline::RateSource;
use serde::Serialize;

use super::roofs::Roofs;
use super::trace::{Bound, OperationTime, StepTrace};
use crate::backend::BackendKind;
use crate::config::{ComputeDtype, Recompute};
use crate::memory_meter::MemorySource;
use crate::plan::word;

/// Seconds of repeated work.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    /// The least.
    pub min: f64,
    /// The middle one; of an even number, the mean of the two in the middle.
    pub median: f64,
    /// The most.
    pub max: f64,
}

impl Spread {
    /// # Panics
    /// Without any sample.
    pub(super) fn of(mut samples: Vec<f64>) -> Self {
        assert!(!samples.is_empty(), "a spread needs at least one sample");
        samples.sort_by(f64::total_cmp);
        let (low, high) = (samples[(samples.len() - 1) / 2], samples[samples.len() / 2]);
        Self { min: samples[0], median: 0.5 * (low + high), max: samples[samples.len() - 1] }
    }
}

/// Model FLOPs utilisation: progress (4 operations a parameter and token under LoRA, and attention) over a rate.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Utilisation {
    /// Part of the rate.
    pub share: f64,
    /// The rate, 1e12 operations a second.
    pub rate_tflops: f64,
    /// Where the rate is from.
    pub rate_source: RateSource,
    /// Whose rate it is.
    pub rate_name: String,
}

/// Everything that a bench found, under the names of its JSON object.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct BenchReport {
    /// The model folder as typed.
    pub model: String,
    /// Where it ran.
    pub backend: BackendKind,
    /// The card or the processor.
    pub device: String,
    /// The format that was computed in, which may not be the one asked for.
    pub compute: ComputeDtype,
    /// What blocks computed again.
    pub recompute: Recompute,
    /// Whether block inputs waited in host memory.
    pub offload: bool,
    /// As in a recipe.
    pub optimizer: String,
    /// Rank of the adapters.
    pub rank: usize,
    /// Numerator of their scale.
    pub alpha: f64,
    /// Tokens of a row.
    pub seq: usize,
    /// Rows of a step.
    pub micro_batch: usize,
    /// Documents of a row.
    pub documents: usize,
    /// Tokens whose logits were held at once.
    pub loss_chunk: usize,
    /// Steps that were timed.
    pub steps: usize,
    /// Steps before them.
    pub warmup: usize,
    /// Tokens a second at the median step.
    pub tok_s: f64,
    /// Seconds of a step.
    pub step_s: Spread,
    /// Seconds of reading and packing the weights.
    pub load_s: f64,
    /// Seconds from the start of the process to the end of the first step.
    pub first_step_s: f64,
    /// Seconds of the self-test; `None` where the backend has none.
    pub self_test_s: Option<f64>,
    /// Most memory in use after loading and after each step.
    pub peak_gib: f64,
    /// Whose figure that is.
    pub peak_source: MemorySource,
    /// What the plan expected.
    pub planned_gib: f64,
    /// The same line by line.
    pub planned: Vec<MemoryLine>,
    /// Progress over what the device could do.
    pub mfu: Utilisation,
    /// Tokens a second if the step's work ran at the measured roofs, arithmetic beside memory traffic.
    pub roof_tok_s: f64,
    /// Mean loss of the first step.
    pub loss_first: f32,
    /// Mean loss of the last timed step.
    pub loss_last: f32,
    /// What the device can do, measured after the steps.
    pub roofs: Roofs,
    /// One step more, taken apart; `None` unless asked for.
    pub trace: Option<StepTrace>,
}

impl fmt::Display for BenchReport {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { backend, device, seq, micro_batch, documents, steps, warmup, .. } = self;
        let (compute, recompute) = (word(&self.compute), word(&self.recompute));
        writeln!(formatter, "bench of {} on {backend} ({device})", self.model)?;
        let line = |name: &str, text: String| format!("  {name:<12} {text}");
        let lines = [
            line(
                "case",
                format!(
                    "{micro_batch} rows of {seq} tokens in {documents} document(s), {compute}, recompute {recompute}, offload {}",
                    self.offload
                ),
            ),
            line("tokens/s", format!("{:.0} (median of {steps} steps after {warmup})", self.tok_s)),
            line("step", {
                let Spread { min, median, max } = self.step_s;
                format!("{median:.4} s (from {min:.4} to {max:.4})")
            }),
            line("start", {
                let (load_s, first_s) = (self.load_s, self.first_step_s);
                format!("{load_s:.2} s to load; the first step ended {first_s:.2} s after the process began")
            }),
            line("memory", {
                let (peak, planned) = (self.peak_gib, self.planned_gib);
                format!("{peak:.2} GiB at most ({}); the plan expected {planned:.2} GiB", word(&self.peak_source))
            }),
            line("utilisation", {
                let Utilisation { share, rate_tflops, rate_source, rate_name } = &self.mfu;
                let (percent, source) = (100.0 * share, word(rate_source));
                format!("{percent:.1} % of {rate_tflops:.3} TFLOP/s ({source}: {rate_name})")
            }),
            line("roofs", {
                let Roofs { product_tflops, copy_tb_s, .. } = self.roofs;
                let part = 100.0 * self.tok_s / self.roof_tok_s;
                format!(
                    "products {product_tflops:.3} TFLOP/s, memory {copy_tb_s:.3} TB/s: at most {:.0} tokens/s, of which {part:.1} %",
                    self.roof_tok_s
                )
            }),
            line("loss", format!("{:.4}, then {:.4}", self.loss_first, self.loss_last)),
        ];
        write!(formatter, "{}", lines.join("\n"))?;
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
            "operation", "calls", "ms", "step", "rate", "roof"
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
        let (share, roof) = (100.0 * self.share, 100.0 * self.roof_share);
        let name = match self.product {
            Some([m, n, k]) => format!("{} {m} x {n} x {k}", self.name),
            None => self.name.to_owned(),
        };
        write!(formatter, "  {name:<36} {:>6} {:>9.3} {share:>5.1} % {rate:>14} {roof:>4.0} %", self.calls, self.ms)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_an_even_number_is_between_the_two_in_the_middle() {
        assert_eq!(Spread::of(vec![4.0, 1.0, 3.0, 2.0]), Spread { min: 1.0, median: 2.5, max: 4.0 });
        assert_eq!(Spread::of(vec![9.0, 1.0, 2.0]).median, 2.0);
    }
}
