//! `train bench`: how fast this machine trains a model of this shape, on synthetic tokens.
//!
//! QLoRA through the code of a run: recipe, plan, trainer, step. Left out is what a run keeps off the step's path: the loader, the
//! log, checkpoints, evaluation. A step ends when its loss has been read, so steps do not overlap.
//! Not supported: full fine-tuning and dense bases, whose step has the same parts.

mod generation;
#[cfg(feature = "flex")]
pub mod matrix;
mod measure;
mod options;
mod peaks;
mod probe;
mod report;
mod spread;
mod step;
mod synthetic;
mod trace;
mod usage;

use firebrick_arch::ModelConfig;
use firebrick_hwprofile::HardwareProfile;
use firebrick_hwprofile::measure::ProcessClock;
use firebrick_hwprofile::roofline::{RateSource, Rates, RooflineTime, model_flops_utilization};
use firebrick_hwprofile::spec::MathFormat;
use firebrick_kernels::{BackendKind, step_work};
use firebrick_parallel::Ranks;
use firebrick_precision::Format;
use firebrick_trainer::RunError;
use firebrick_trainer::console::{Console, FailureReport, error_message};
use firebrick_trainer::hub::Need;
use firebrick_trainer::plan::{DataShape, Plan, PlanInputs, PlanRequest};
use firebrick_trainer::run::device::catch_failure;
use firebrick_trainer::run::together;
use firebrick_trainer::with_backend;

pub use generation::{GenerationOptions, GenerationReport, GenerationSpeed, bench_generation};
use measure::{Measured, measure};
pub use options::BenchOptions;
pub use peaks::Peaks;
pub use probe::measure_peaks;
pub use report::{BenchReport, Utilization};
pub use spread::{Spread, timed};
use step::Case;
pub use trace::{OperationTime, StepTrace};
pub use usage::UsageCost;

/// Bytes of a GiB.
const GIB: f64 = (1u64 << 30) as f64;

/// Plans, loads, steps and measures, each rank with tokens of its own. `clock` was started first in `main`; `print` gets lines about the
/// progress.
///
/// # Errors
/// Whatever stops a run of the same recipe, including a run that does not fit; a loss that is not finite.
pub fn bench(
    options: &BenchOptions,
    ranks: &Ranks,
    clock: ProcessClock,
    print: &dyn Fn(&str),
) -> Result<BenchReport, RunError> {
    let report = measured(options, ranks, clock, print);
    match &report {
        Ok(_) => ranks.leave()?,
        Err(error) => ranks.fail(&error_message(error)),
    }
    report
}

fn measured(
    options: &BenchOptions,
    ranks: &Ranks,
    clock: ProcessClock,
    print: &dyn Fn(&str),
) -> Result<BenchReport, RunError> {
    let config = options.recipe()?;
    let need = if options.random_base { Need::Description } else { Need::Weights };
    let console = if ranks.is_main() { Console::VERBOSE } else { Console::QUIET };
    let folder = config.fetch_model_on(ranks, &[], need, console)?.folder;
    let model = ModelConfig::read(&folder)?;
    let profile = HardwareProfile::detect();
    let data = DataShape {
        rows: options.micro_batch * ranks.world_size() * config.train.steps.unwrap_or(1) as usize,
        row_len: options.seq,
        longest_document: options.seq.div_ceil(options.documents),
        documents_per_row: options.documents,
        loss_tokens_per_row: options.seq,
        has_chats: false,
        report: format!("random tokens, {} per row, all in the loss", documents(options.documents)),
    };
    let request = PlanRequest::default();
    let world_size = ranks.world_size();
    let inputs =
        PlanInputs { config: &config, profile: &profile, model: &model, data: &data, world_size, request: &request };
    let mut plan = Plan::resolve(inputs)?;
    plan.model_folder.value = folder;
    print(&format!("plan for the benchmark\n{plan}"));
    let report = FailureReport::new(&plan, None);
    let case = Case { options, plan: &plan, model: &model, ranks, clock, print };
    let measured =
        with_backend!(plan.backend.value, B => catch_failure(|| together::catch_loss(|| measure::<B>(&case))))
            .unwrap_or_else(|failure| Err(report.error(failure)))?;
    Ok(result(options, &profile, &model, &plan, measured))
}

fn documents(count: usize) -> String {
    if count == 1 { "one document".to_owned() } else { format!("{count} documents") }
}

/// The measurements, with what follows from them.
fn result(
    options: &BenchOptions,
    profile: &HardwareProfile,
    model: &ModelConfig,
    plan: &Plan,
    measured: Measured,
) -> BenchReport {
    let world_size = plan.world_size.value;
    let tokens = (options.micro_batch * options.seq * world_size) as f64;
    let tok_s = tokens / measured.step_s.median;
    let document_tokens = options.seq as f64 / options.documents as f64;
    let (rates, rate_name) = rates(profile, plan, &measured.peaks);
    let work = step_work(&model.spec, &plan.training, 1, document_tokens);
    let flops_per_token = model.spec.model_flops_per_token(true, document_tokens);
    BenchReport {
        model: options.model.display().to_string(),
        backend: plan.backend.value,
        device: device_name(profile, plan.backend.value),
        compute: plan.compute.value,
        gemms: plan.gemms.value,
        base: options.base,
        recompute: plan.recompute.value,
        offload: plan.offload.value,
        optimizer: plan.optimizer.value,
        rank: options.rank,
        alpha: options.alpha,
        seq: options.seq,
        micro_batch: options.micro_batch,
        ranks: world_size,
        documents: options.documents,
        loss_chunk: options.loss_chunk,
        steps: options.steps,
        warmup: options.warmup,
        tok_s,
        step_s: measured.step_s,
        host_s: measured.host_s,
        load_s: measured.load_s,
        first_step_s: measured.first_step_s,
        self_test_s: measured.self_test_s,
        peak_gib: measured.peak_bytes as f64 / GIB,
        peak_source: measured.peak_source,
        planned_gib: plan.memory_bytes.value as f64 / GIB,
        planned: plan.memory.clone(),
        mfu: Utilization {
            share: model_flops_utilization(flops_per_token, tok_s / world_size as f64, &rates),
            rate_tflops: rates.matmul_flops_per_s / 1e12,
            rate_source: rates.source,
            rate_name,
        },
        roofline_tok_s: tokens / RooflineTime::of(&work, &measured.peaks.rates()).lower(),
        loss_first: measured.loss_first,
        loss_last: measured.loss_last,
        peaks: measured.peaks,
        usage: measured.usage,
        trace: measured.trace,
    }
}

/// The rate that utilization is relative to: the maker's if the card is known and a half format runs on it, else the measured one.
fn rates(profile: &HardwareProfile, plan: &Plan, peaks: &Peaks) -> (Rates, String) {
    let spec = profile.cuda_card().and_then(|card| card.spec);
    let peak = spec.and_then(|spec| Some((spec, Rates::of_spec(&spec, MathFormat::Bf16)?)));
    match peak {
        Some((spec, peak)) if plan.backend.value == BackendKind::Cuda && plan.compute.value != Format::F32 => {
            (peak, format!("{}, dense bf16, {}", spec.name, spec.rates.bf16.source()))
        }
        _ => (Rates { source: RateSource::Measured, ..peaks.rates() }, peaks.gemm_name()),
    }
}

fn device_name(profile: &HardwareProfile, backend: BackendKind) -> String {
    match (backend, profile.cuda_card()) {
        (BackendKind::Cuda, Some(card)) => card.name.clone(),
        (BackendKind::Flex | BackendKind::Candle, _) => {
            format!("{}, {} threads", profile.cpu.name, profile.cpu.logical_cores)
        }
        _ => backend.to_string(),
    }
}
