//! The results of the bench, as plain data for JSON and as the Markdown that is printed.
//!
//! Trade-off: saved reports have these field names, so a renamed field must be renamed in `results/` too.

use std::fmt;

use firebrick_hwprofile::HardwareProfile;
use firebrick_kernels::backends::BackendKind;
use firebrick_train::bench::Spread;
use serde::Serialize;

use crate::rate::Rates;
use crate::shapes::{Gemm, Part, Products};
use crate::step::{StepTimes, Workload};

/// A whole run of the bench.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Processor, and how much of it this process may use.
    pub machine: String,
    /// Steps that were timed on each backend.
    pub steps: usize,
    /// By recipe.
    pub recipes: Vec<RecipeReport>,
    /// One layer in two ways, where it was measured.
    pub block: Option<BlockReport>,
    /// What was left out, and why.
    pub notes: Vec<String>,
}

/// The steps of one recipe with their roofline.
#[derive(Debug, Serialize)]
pub struct RecipeReport {
    /// The recipe's name.
    pub recipe: String,
    /// Tokens of a step, without padding.
    pub tokens: usize,
    /// Padding tokens, computed but not counted in the rate.
    pub padding: usize,
    /// Tokens that count in the loss.
    pub loss_tokens: usize,
    /// Documents, paddings included.
    pub documents: usize,
    /// Milliseconds that the step's GEMMs need at the measured rate of each.
    pub roofline_ms: f64,
    /// Milliseconds that they would need at the highest rate of all.
    pub peak_roofline_ms: f64,
    /// 1e9 operations per second of a 1024³ GEMM, by backend.
    pub large_gflops_per_s: Vec<(String, f64)>,
    /// The parts of the roofline.
    pub parts: Vec<PartReport>,
    /// Steps on each backend.
    pub backends: Vec<BackendReport>,
    /// Every GEMM of the step.
    pub products: Vec<ProductReport>,
}

/// One part of the roofline.
#[derive(Debug, Serialize)]
pub struct PartReport {
    /// Which one.
    pub part: Part,
    /// GEMMs in a step.
    pub products: usize,
    /// 1e9 operations in a step.
    pub gflop: f64,
    /// Milliseconds at the measured rates.
    pub roofline_ms: f64,
}

/// Steps on one backend.
#[derive(Debug, Serialize)]
pub struct BackendReport {
    /// Which one.
    pub backend: BackendKind,
    /// Tokens without padding, in the loss or not, per second of the median step.
    pub tokens_per_s: f64,
    /// Milliseconds of a step.
    pub step_ms: Spread,
    /// Median step over roofline: 1 would be GEMMs and nothing else.
    pub step_over_roofline: f64,
    /// Mean loss of the first step and the last.
    pub losses: [f32; 2],
}

/// One GEMM of the step.
#[derive(Debug, Serialize)]
pub struct ProductReport {
    /// What it belongs to.
    pub part: Part,
    /// Its sizes.
    pub gemm: Gemm,
    /// How often a step runs it.
    pub count: usize,
    /// The highest rate measured, 1e9 operations per second; absent where it was too small to be timed.
    pub gflops_per_s: Option<f64>,
    /// The backend that reached it.
    pub backend: Option<BackendKind>,
}

/// One layer, forward and backward.
#[derive(Debug, Serialize)]
pub struct BlockReport {
    /// The recipe it was taken from.
    pub recipe: String,
    /// Milliseconds through the hand-written backward.
    pub hand_written_ms: Spread,
    /// Milliseconds through burn-autodiff over the reference bodies.
    pub autodiff_ms: Spread,
}

impl RecipeReport {
    /// Combines timings with the roofline.
    pub fn new(workload: &Workload, rates: &Rates, times: &[(BackendKind, StepTimes)]) -> Self {
        let products = workload.products();
        let roofline = rates.roofline(&products);
        let sum = |count: fn(&firebrick_data::Batch) -> usize| workload.micro_batches.iter().map(count).sum();
        let backend = |(backend, found): &(BackendKind, StepTimes)| BackendReport {
            backend: *backend,
            tokens_per_s: workload.tokens() as f64 / found.seconds.median,
            step_ms: found.seconds.times(1e3),
            step_over_roofline: found.seconds.median / roofline,
            losses: found.losses,
        };
        Self {
            recipe: workload.name.clone(),
            tokens: workload.tokens(),
            padding: sum(|batch| batch.padding),
            loss_tokens: sum(|batch| batch.loss_tokens()),
            documents: sum(|batch| batch.cu_seqlens.len() - 1),
            roofline_ms: 1e3 * roofline,
            peak_roofline_ms: 1e3 * products.flops() / rates.peak(),
            large_gflops_per_s: rates.large().map(|(name, rate)| (name.to_owned(), rate / 1e9)).collect(),
            parts: Part::ALL.into_iter().map(|part| PartReport::new(part, &products, rates)).collect(),
            backends: times.iter().map(backend).collect(),
            products: products.iter().map(|entry| ProductReport::new(entry, rates)).collect(),
        }
    }
}

impl PartReport {
    fn new(part: Part, products: &Products, rates: &Rates) -> Self {
        Self {
            part,
            products: products.iter().filter(|&(of, ..)| of == part).map(|(.., count)| count).sum(),
            gflop: products.flops_of(part) / 1e9,
            roofline_ms: 1e3 * rates.roofline_of(products, part),
        }
    }
}

impl ProductReport {
    fn new((part, gemm, count): (Part, Gemm, usize), rates: &Rates) -> Self {
        let best = rates.best(gemm);
        Self {
            part,
            gemm,
            count,
            gflops_per_s: best.map(|(seconds, _)| gemm.flops() / seconds / 1e9),
            backend: best.map(|(_, backend)| backend),
        }
    }
}

/// The processor in words.
pub fn machine() -> String {
    let cpu = HardwareProfile::detect().cpu;
    let features = cpu.features.join(", ");
    format!("{}, {} threads on {} cores ({features})", cpu.name, cpu.logical_cores, cpu.physical_cores)
}

impl fmt::Display for Report {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(out, "# Training step and its roofline\n\n{}; {} steps per backend.", self.machine, self.steps)?;
        for recipe in &self.recipes {
            write!(out, "\n{recipe}")?;
        }
        if let Some(block) = &self.block {
            write!(out, "\n{block}")?;
        }
        for note in &self.notes {
            writeln!(out, "\n{note}")?;
        }
        Ok(())
    }
}

impl fmt::Display for RecipeReport {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { recipe, tokens, padding, loss_tokens, documents, roofline_ms, peak_roofline_ms, .. } = self;
        writeln!(
            out,
            "## {recipe}\n\n{tokens} tokens ({loss_tokens} in the loss) and {padding} of padding per step, in {documents} documents.\n"
        )?;
        writeln!(
            out,
            "| backend | tokens/s | step ms, median (min, max) | roofline ms | step / roofline | share of the roofline | loss |"
        )?;
        writeln!(out, "|---|---:|---:|---:|---:|---:|---:|")?;
        for row in &self.backends {
            let (BackendReport { backend, tokens_per_s, step_ms, step_over_roofline, .. }, [first, last]) =
                (row, row.losses);
            let share = 100.0 / step_over_roofline;
            writeln!(
                out,
                "| {backend} | {tokens_per_s:.0} | {step_ms} | {roofline_ms:.1} | {step_over_roofline:.2} | {share:.0} % \
                 | {first:.3} to {last:.3} |"
            )?;
        }
        writeln!(out, "\n| part of the roofline | GEMMs | GFLOP | roofline ms | GFLOP/s |\n|---|---:|---:|---:|---:|")?;
        for PartReport { part, products, gflop, roofline_ms } in self.parts.iter().filter(|part| part.products > 0) {
            let (name, rate) = (format!("{part:?}").to_lowercase(), 1e3 * gflop / roofline_ms);
            writeln!(out, "| {name} | {products} | {gflop:.2} | {roofline_ms:.2} | {rate:.0} |")?;
        }
        let large = self.large_gflops_per_s.iter().map(|(backend, rate)| format!("{backend} {rate:.0}"));
        let large = large.collect::<Vec<_>>().join(", ");
        writeln!(
            out,
            "\nA 1024³ GEMM, GFLOP/s: {large}. At the highest rate of any GEMM the roofline would be {peak_roofline_ms:.1} ms."
        )
    }
}

impl fmt::Display for BlockReport {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { recipe, hand_written_ms, autodiff_ms } = self;
        let ratio = autodiff_ms.median / hand_written_ms.median;
        writeln!(out, "## One layer of {recipe}, forward and backward, flex, dense frozen base with the adapter\n")?;
        writeln!(out, "| backward | ms, median (min, max) | relative to hand-written |\n|---|---:|---:|")?;
        writeln!(out, "| hand-written, flex's own operations | {hand_written_ms} | 1.00 |")?;
        writeln!(out, "| burn-autodiff over reference bodies | {autodiff_ms} | {ratio:.2} |")
    }
}
