//! `train bench`: how fast this machine trains a model of this shape, on tokens made up for it.
//!
//! QLoRA through the code of a run: recipe, plan, trainer, step. Left out is what a run keeps off the step's path: the loader,
//! the log, checkpoints, evaluation. A step has ended when its loss has been read, so none overlaps the next. Gives up: full
//! training and dense bases, whose step has the same parts.

mod measure;
mod options;
mod report;
mod roofs;
mod synthetic;
mod trace;

use firebrick_hwprofile::HardwareProfile;
use firebrick_hwprofile::measure::ProcessClock;
use firebrick_hwprofile::roofline::{RateSource, Rates, RoofTime, model_flops_utilisation, step_work};
use firebrick_model::LlamaConfig;

use crate::backend::{BackendKind, catch_failure};
use crate::config::RunConfig;
use crate::error::RunError;
use crate::failure::FailureReport;
use crate::plan::{DataShape, Plan, PlanInputs, model_shape, word};
use crate::with_backend;

use measure::{Case, Measured, measure};
pub use options::{BenchOptions, ComputeFormat};
pub use report::{BenchReport, Spread, Utilisation};
pub use roofs::Roofs;
pub use trace::{Bound, OperationTime, StepTrace};

/// Bytes of a GiB.
const GIB: f64 = (1u64 << 30) as f64;

/// Plans, loads, steps and measures. `clock` was started first in `main`; `say` is told what goes on.
///
/// # Errors
/// Whatever stops a run of the same recipe, a run that does not fit among them; a loss that is not finite.
pub fn bench(options: &BenchOptions, clock: ProcessClock, say: &dyn Fn(&str)) -> Result<BenchReport, RunError> {
    let config = options.recipe()?;
    let model = LlamaConfig::read(&config.model_folder()?)?;
    let profile = HardwareProfile::detect();
    let data = DataShape {
        rows: options.micro_batch * config.train.steps.unwrap_or(1) as usize,
        row_len: options.seq,
        report: format!("random tokens, {} to a row, all trained", documents(options.documents)),
    };
    let inputs = PlanInputs { config: &config, profile: &profile, model: &model, data: &data };
    let plan = Plan::resolve(inputs)?;
    say(&format!("plan for the bench\n{plan}"));
    let report = FailureReport::new(&inputs, plan.backend.value, None);
    let case = Case { options, config: &config, plan: &plan, model: &model, clock, say };
    let measured = with_backend!(plan.backend.value, B => catch_failure(|| measure::<B>(&case)))
        .unwrap_or_else(|failure| Err(report.error(failure)))?;
    Ok(result(options, &config, &profile, &model, &plan, measured))
}

fn documents(count: usize) -> String {
    if count == 1 { "one document".to_owned() } else { format!("{count} documents") }
}

/// What was measured, with what follows from it.
fn result(
    options: &BenchOptions,
    config: &RunConfig,
    profile: &HardwareProfile,
    model: &LlamaConfig,
    plan: &Plan,
    measured: Measured,
) -> BenchReport {
    let tokens = (options.micro_batch * options.seq) as f64;
    let tok_s = tokens / measured.step_s.median;
    let (shape, document_tokens) = (model_shape(model), options.seq as f64 / options.documents as f64);
    let (rates, rate_name) = rates(profile, plan, &measured.roofs);
    let work = step_work(&shape, &plan.training_shape, 1, document_tokens);
    BenchReport {
        model: options.model.display().to_string(),
        backend: plan.backend.value,
        device: device_name(profile, plan.backend.value),
        compute: plan.compute_dtype.value,
        recompute: plan.recompute.value,
        offload: plan.offload.value,
        optimizer: word(&config.train.optimizer),
        rank: options.rank,
        alpha: options.alpha,
        seq: options.seq,
        micro_batch: options.micro_batch,
        documents: options.documents,
        loss_chunk: options.loss_chunk,
        steps: options.steps,
        warmup: options.warmup,
        tok_s,
        step_s: measured.step_s,
        load_s: measured.load_s,
        first_step_s: measured.first_step_s,
        self_test_s: measured.self_test_s,
        peak_gib: measured.peak_bytes as f64 / GIB,
        peak_source: measured.peak_source,
        planned_gib: plan.memory_bytes.value as f64 / GIB,
        planned: plan.memory.clone(),
        mfu: Utilisation {
            share: model_flops_utilisation(&shape, true, document_tokens, tok_s, &rates),
            rate_tflops: rates.matmul_flops_per_s / 1e12,
            rate_source: rates.source,
            rate_name,
        },
        roof_tok_s: tokens / RoofTime::of(&work, &measured.roofs.rates()).lower(),
        loss_first: measured.loss_first,
        loss_last: measured.loss_last,
        roofs: measured.roofs,
        trace: measured.trace,
    }
}

/// The rate that utilisation is held against: the maker's where the card is known and a half format runs on it, else what was
/// just measured.
fn rates(profile: &HardwareProfile, plan: &Plan, roofs: &Roofs) -> (Rates, String) {
    let spec = profile.gpus.first().and_then(|card| card.spec);
    match spec {
        Some(spec) if plan.backend.value == BackendKind::Cuda && plan.training_shape.fused => {
            (Rates::of_spec(&spec), format!("{}, dense bf16, {}", spec.name, spec.source))
        }
        _ => (Rates { source: RateSource::Measured, ..roofs.rates() }, roofs.product_name()),
    }
}

fn device_name(profile: &HardwareProfile, backend: BackendKind) -> String {
    match (backend, profile.gpus.first()) {
        (BackendKind::Cuda, Some(card)) => card.name.clone(),
        (BackendKind::Flex | BackendKind::Candle, _) => {
            format!("{}, {} threads", profile.cpu.name, profile.cpu.logical_cores)
        }
        _ => word(&backend),
    }
}
