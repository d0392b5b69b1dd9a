//! What the bench found, as plain data for JSON and as the Markdown that is printed.

use std::fmt;

use firebrick_hwprofile::HardwareProfile;
use firebrick_train::backend::BackendKind;
use serde::Serialize;

use crate::rate::Rates;
use crate::shapes::{Gemm, Part, Products};
use crate::spread::Spread;
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
    /// One block in two ways, where it was measured.
    pub block: Option<BlockReport>,
    /// What was left out, and why.
    pub notes: Vec<String>,
}

/// The steps of one recipe beside their roof.
#[derive(Debug, Serialize)]
pub struct RecipeReport {
    /// The recipe's name.
    pub recipe: String,
    /// Tokens of a step, without padding.
    pub tokens: usize,
    /// Padding tokens, computed but not counted.
    pub padding: usize,
    /// Tokens that count in the loss.
    pub trained_tokens: usize,
    /// Documents, paddings included.
    pub documents: usize,
    /// Milliseconds that the step's products need at the measured rate of each.
    pub roof_ms: f64,
    /// Milliseconds that they would need at the highest rate of all.
    pub peak_roof_ms: f64,
    /// 1e9 operations per second of a 1024³ product, by backend.
    pub large_gflops_per_s: Vec<(String, f64)>,
    /// What the roof is made of.
    pub parts: Vec<PartReport>,
    /// Steps on each backend.
    pub backends: Vec<BackendReport>,
    /// Every product of the step.
    pub products: Vec<ProductReport>,
}

/// One part of the roof.
#[derive(Debug, Serialize)]
pub struct PartReport {
    /// Which one.
    pub part: Part,
    /// Products in a step.
    pub products: usize,
    /// 1e9 operations in a step.
    pub gflop: f64,
    /// Milliseconds at the measured rates.
    pub roof_ms: f64,
}

/// Steps on one backend.
#[derive(Debug, Serialize)]
pub struct BackendReport {
    /// Which one.
    pub backend: BackendKind,
    /// Tokens without padding, trained or not, per second of the median step.
    pub tokens_per_s: f64,
    /// Milliseconds of a step.
    pub step_ms: Spread,
    /// Median step over roof: 1 would be products and nothing else.
    pub step_over_roof: f64,
    /// Mean loss of the first step and the last.
    pub losses: [f32; 2],
}

/// One product of the step.
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

/// One block, forward and backward.
#[derive(Debug, Serialize)]
pub struct BlockReport {
    /// The recipe it was taken from.
    pub recipe: String,
    /// Milliseconds through the hand-written backward.
    pub hand_written_ms: Spread,
    /// Milliseconds through burn-autodiff over the decomposed ops.
    pub autodiff_ms: Spread,
}

impl RecipeReport {
    /// Puts timings beside the roof.
    pub fn new(workload: &Workload, rates: &Rates, times: &[(BackendKind, StepTimes)]) -> Self {
        let products = workload.products();
        let roof = rates.roof(&products);
        let sum = |count: fn(&firebrick_data::Batch) -> usize| workload.micro_batches.iter().map(count).sum();
        let backend = |(backend, found): &(BackendKind, StepTimes)| BackendReport {
            backend: *backend,
            tokens_per_s: workload.tokens() as f64 / found.seconds.median,
            step_ms: milliseconds(found.seconds),
            step_over_roof: found.seconds.median / roof,
            losses: found.losses,
        };
        Self {
            recipe: workload.name.clone(),
            tokens: workload.tokens(),
            padding: sum(|batch| batch.padding),
            trained_tokens: sum(|batch| batch.trained_tokens()),
            documents: sum(|batch| batch.cu_seqlens.len() - 1),
            roof_ms: 1e3 * roof,
            peak_roof_ms: 1e3 * products.flops() / rates.peak(),
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
            roof_ms: 1e3 * rates.roof_of(products, part),
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

/// Seconds as milliseconds.
pub fn milliseconds(seconds: Spread) -> Spread {
    Spread { median: 1e3 * seconds.median, min: 1e3 * seconds.min, max: 1e3 * seconds.max }
}

/// The processor in words.
pub fn machine() -> String {
    let cpu = HardwareProfile::detect().cpu;
    let features = cpu.features.join(", ");
    format!("{}, {} threads on {} cores ({features})", cpu.name, cpu.logical_cores, cpu.physical_cores)
}

impl fmt::Display for Report {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(out, "# Training step beside its roof\n\n{}; {} steps a backend.", self.machine, self.steps)?;
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
        let Self { recipe, tokens, padding, trained_tokens, documents, roof_ms, peak_roof_ms, .. } = self;
        writeln!(
            out,
            "## {recipe}\n\n{tokens} tokens ({trained_tokens} trained) and {padding} of padding a step, in {documents} documents.\n"
        )?;
        writeln!(
            out,
            "| backend | tokens/s | step ms, median (min, max) | roof ms | step / roof | roof's share | loss |"
        )?;
        writeln!(out, "|---|---:|---:|---:|---:|---:|---:|")?;
        for row in &self.backends {
            let (BackendReport { backend, tokens_per_s, step_ms, step_over_roof, .. }, [first, last]) =
                (row, row.losses);
            let share = 100.0 / step_over_roof;
            writeln!(
                out,
                "| {backend} | {tokens_per_s:.0} | {step_ms} | {roof_ms:.1} | {step_over_roof:.2} | {share:.0} % \
                 | {first:.3} to {last:.3} |"
            )?;
        }
        writeln!(out, "\n| part of the roof | products | GFLOP | roof ms | GFLOP/s |\n|---|---:|---:|---:|---:|")?;
        for PartReport { part, products, gflop, roof_ms } in self.parts.iter().filter(|part| part.products > 0) {
            let (name, rate) = (format!("{part:?}").to_lowercase(), 1e3 * gflop / roof_ms);
            writeln!(out, "| {name} | {products} | {gflop:.2} | {roof_ms:.2} | {rate:.0} |")?;
        }
        let large = self.large_gflops_per_s.iter().map(|(backend, rate)| format!("{backend} {rate:.0}"));
        let large = large.collect::<Vec<_>>().join(", ");
        writeln!(
            out,
            "\nA 1024³ product, GFLOP/s: {large}. At the highest rate of any product the roof would be {peak_roof_ms:.1} ms."
        )
    }
}

impl fmt::Display for BlockReport {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { recipe, hand_written_ms, autodiff_ms } = self;
        let ratio = autodiff_ms.median / hand_written_ms.median;
        writeln!(out, "## One block of {recipe}, forward and backward, flex, dense frozen base with the adapter\n")?;
        writeln!(out, "| backward | ms, median (min, max) | against hand-written |\n|---|---:|---:|")?;
        writeln!(out, "| hand-written, flex's own ops | {hand_written_ms} | 1.00 |")?;
        writeln!(out, "| burn-autodiff over decomposed ops | {autodiff_ms} | {ratio:.2} |")
    }
}

impl fmt::Display for Spread {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{:.1} ({:.1}, {:.1})", self.median, self.min, self.max)
    }
}
