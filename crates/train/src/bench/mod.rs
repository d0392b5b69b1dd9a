//! `train bench`: measures how fast this machine trains a model of this shape, on synthetic tokens.
//!
//! Runs QLoRA through the code of a run: recipe, plan, trainer, step. It leaves out what a run keeps off the step's path: loader, log, checkpoints,
//! evaluation. A step ends when its loss has been read, so steps do not overlap.
//! Not supported: full fine-tuning and dense bases, whose step has the same parts.

mod options;
mod report;
mod samples;
mod trace;

use std::sync::Arc;
use std::time::Instant;

use firebrick_arch::{ModelConfig, counted};
use firebrick_data::Batch;
use firebrick_hwprofile::HardwareProfile;
use firebrick_hwprofile::measure::ProcessClock;
use firebrick_hwprofile::peaks::processor_key;
use firebrick_hwprofile::roofline::{Rates, RooflineTime, model_flops_utilization};
use firebrick_kernels::{BackendKind, Kernels, step_work};
use firebrick_parallel::Ranks;
use firebrick_precision::FloatType;

use firebrick_trainer::RunError;
use firebrick_trainer::console::{Console, FailureReport, error_message};
use firebrick_trainer::hub::Need;
use firebrick_trainer::metrics::{MemoryMeter, MemorySource};
use firebrick_trainer::plan::{DataShape, Plan, PlanInputs, PlanRequest, choose_backend, command_format};
use firebrick_trainer::run::assemble::{self, WeightSource};
use firebrick_trainer::run::device::{catch_failure, dtype_of, self_test, tested, wait};
use firebrick_trainer::run::peaks::{Peaks, Probe};
use firebrick_trainer::run::step::{StepNumbers, Trainer};
use firebrick_trainer::run::together;
use firebrick_trainer::with_backend;

pub use options::BenchOptions;
pub use report::BenchReport;
use report::Utilization;
pub use samples::{Spread, Synthetic, timed};
use trace::StepTrace;
pub(crate) use trace::sums;

/// A benchmark to run, and where its progress goes.
struct Case<'a> {
    options: &'a BenchOptions,
    profile: &'a HardwareProfile,
    plan: &'a Plan,
    model: &'a ModelConfig,
    ranks: &'a Ranks,
    clock: ProcessClock,
    print: &'a dyn Fn(&str),
}

/// Plans, loads, steps and measures; each rank has its own tokens. `clock` was started first in `main`; `print` receives lines about the progress.
///
/// # Errors
/// Any error that stops a run of the same recipe, including a run that does not fit; a loss that is not finite.
pub fn bench(
    options: &BenchOptions,
    ranks: &Ranks,
    clock: ProcessClock,
    print: &dyn Fn(&str),
) -> Result<BenchReport, RunError> {
    let report = planned_and_measured(options, ranks, clock, print);
    match &report {
        Ok(_) => ranks.leave()?,
        Err(error) => ranks.fail(&error_message(error)),
    }
    report
}

fn planned_and_measured(
    options: &BenchOptions,
    ranks: &Ranks,
    clock: ProcessClock,
    print: &dyn Fn(&str),
) -> Result<BenchReport, RunError> {
    let profile = HardwareProfile::detect();
    let backend = choose_backend(options.backend, &profile)?.value;
    // On wgpu activations are f32 whatever a recipe says, and half formats mean matrix units.
    let usual = if backend == BackendKind::Wgpu { FloatType::F16 } else { command_format(None, backend, &profile)? };
    let config = options.recipe(usual)?;
    let need = if options.random_base { Need::Description } else { Need::Weights };
    let console = if ranks.is_main() { Console::VERBOSE } else { Console::QUIET };
    let folder = config.fetch_model_on(ranks, &[], need, console)?.folder;
    let model = config.read_model(&folder)?;
    let world_size = ranks.world_size();
    let documents = counted(options.documents, "document");
    let data = DataShape {
        rows: options.micro_batch * world_size * config.train.steps.unwrap_or(1) as usize,
        row_len: options.seq,
        longest_document: options.seq.div_ceil(options.documents),
        documents_per_row: options.documents,
        loss_tokens_per_row: options.seq,
        has_chats: false,
        report: format!("random tokens, {documents} per row, all in the loss"),
    };
    let request = PlanRequest::default();
    let inputs =
        PlanInputs { config: &config, profile: &profile, model: &model, data: &data, world_size, request: &request };
    let mut plan = Plan::resolve(inputs)?;
    plan.model_folder.value = folder;
    let BenchOptions { steps, warmup, micro_batch, seq, .. } = *options;
    print(&format!(
        "bench: times {} of {} of {seq} random tokens after {} that are not timed; nothing is saved",
        counted(steps, "step"),
        counted(micro_batch, "row"),
        counted(warmup, "step")
    ));
    let saved = ["saved to", "checkpoints", "evaluation", "copy to save", "held to save", "disk"];
    let plan_text = plan.to_string();
    let is_saved =
        |line: &str| line.strip_prefix("  ").is_some_and(|row| saved.iter().any(|name| row.starts_with(name)));
    let lines = plan_text.lines().filter(|line| !is_saved(line));
    print(&format!("plan for the benchmark\n{}\n", lines.collect::<Vec<_>>().join("\n")));
    let report = FailureReport::new(&plan, None);
    let case = Case { options, profile: &profile, plan: &plan, model: &model, ranks, clock, print };
    with_backend!(plan.backend.value, B => catch_failure(|| together::catch_loss(|| measure::<B>(&case))))
        .unwrap_or_else(|failure| Err(report.error(failure)))
}

/// Loads the model and takes steps; then, on the warm card, measures the peak rates that the steps are compared with.
fn measure<B: Kernels>(case: &Case<'_>) -> Result<BenchReport, RunError> {
    let Case { options, plan, model, ranks, print, .. } = *case;
    let device = B::device_of(ranks.local_rank());
    together::end_when_lost(ranks, Arc::default());
    let (dtype, gemms) = (dtype_of(plan.compute.value), plan.gemms.value);
    let self_test_s = self_test(plan.backend.value, ranks.local_rank(), tested(&model.spec, dtype, gemms))?;
    if let Some(seconds) = self_test_s {
        print(&format!("self-test: every operation agrees with its reference ({seconds:.2} s)"));
    }
    let mut meter = MemoryMeter::new(plan.backend.value, ranks.local_rank());
    if let Some(carrier) = ranks.connect(plan.backend.value)? {
        print(&format!("{} ranks; gradients: {carrier}", ranks.world_size()));
    }
    let started = Instant::now();
    let source = if options.random_base { WeightSource::Synthetic } else { WeightSource::Folder };
    let mut trainer = assemble::trainer::<B>(plan, model, source, ranks.clone(), &device, &mut |_| ())?;
    // Random tokens contain no pairs of answers.
    trainer.settings.pairs = None;
    wait::<B>(&device)?;
    let load_s = started.elapsed().as_secs_f64();
    meter.sample();
    print(&format!("loaded in {load_s:.2} s"));

    let BenchOptions { micro_batch: rows, seq: row_len, documents, .. } = *options;
    let (vocab_size, seed) = (model.spec.vocab_size, plan.seed.value + ranks.rank() as u64);
    let mut batches = Synthetic { rows, row_len, documents, vocab_size, seed };
    let steps = timed_steps(case, &mut trainer, &mut batches, &mut meter)?;
    let step_s = Spread::of(steps.seconds.clone()).median;
    let traced = options.trace.then(|| {
        let batch = batches.next_batch();
        let (loss, operations) = B::trace(&device, || step(&mut trainer, &batch));
        loss.map(|_| operations)
    });
    let traced = traced.transpose()?;
    let peak = (meter.sample(), meter.source());
    // The buffers of the peak rates must not be added to those of training.
    drop(trainer);
    B::release_memory(&device);
    let peaks = Probe::of(plan.backend.value).peaks::<B>(&device, dtype, gemms)?;
    let trace = traced.map(|operations| StepTrace::new(&operations, step_s, &peaks));
    let report = report(case, steps, peak, peaks);
    Ok(BenchReport { load_s, self_test_s, trace, ..report })
}

/// Seconds of the steps after the warm-up, seconds until the host only waits for the loss, and the losses of all steps.
struct Steps {
    seconds: Vec<f64>,
    host_seconds: Vec<f64>,
    losses: Vec<f32>,
    first_step_s: f64,
}

fn timed_steps<B: Kernels>(
    case: &Case<'_>,
    trainer: &mut Trainer<B>,
    batches: &mut Synthetic,
    meter: &mut MemoryMeter,
) -> Result<Steps, RunError> {
    let mut steps = Steps { seconds: Vec::new(), host_seconds: Vec::new(), losses: Vec::new(), first_step_s: 0.0 };
    for index in 0..case.options.warmup + case.options.steps {
        let batch = batches.next_batch();
        let (seconds, done) = timed(|| step(trainer, &batch));
        let (loss, host_seconds) = done?;
        if index == 0 {
            steps.first_step_s = case.clock.elapsed().as_secs_f64();
        }
        if index >= case.options.warmup {
            steps.seconds.push(seconds);
            steps.host_seconds.push(host_seconds);
        }
        steps.losses.push(loss);
        meter.sample();
        (case.print)(&format!("step {}: {seconds:.3} s, loss {loss:.4}", index + 1));
    }
    Ok(steps)
}

/// Takes one step to its end. Returns the mean loss, read back, and the seconds before the host waited for it.
fn step<B: Kernels>(trainer: &mut Trainer<B>, batch: &Batch) -> Result<(f32, f64), RunError> {
    let (host_s, outcome) = timed(|| trainer.step(std::slice::from_ref(batch)));
    let outcome = outcome?;
    let step = outcome.step;
    let numbers = outcome.read();
    let StepNumbers { loss, grad_norm, .. } = numbers;
    if loss.is_finite() && (grad_norm.is_finite() || numbers.was_skipped()) {
        Ok((loss, host_s))
    } else {
        let problem = format!("step {step}: loss is {loss}, gradient norm is {grad_norm}");
        Err(RunError::Refused(format!(
            "{problem}: the weights are damaged, or the compute format cannot hold their values"
        )))
    }
}

fn report(case: &Case<'_>, steps: Steps, (peak_bytes, peak_source): (u64, MemorySource), peaks: Peaks) -> BenchReport {
    const GIB: f64 = (1u64 << 30) as f64;
    let Case { options, profile, plan, model, .. } = *case;
    let (ranks, step_s) = (plan.world_size.value, Spread::of(steps.seconds));
    let tokens = (options.micro_batch * options.seq * ranks) as f64;
    let tok_s = tokens / step_s.median;
    let document_tokens = options.seq as f64 / options.documents as f64;
    let (rates, rate_name) = rates(profile, plan, &peaks);
    let work = step_work(&model.spec, &plan.training, 1, document_tokens);
    let flops_per_token = model.spec.model_flops_per_token(true, document_tokens);
    let mfu = Utilization {
        share: model_flops_utilization(flops_per_token, tok_s / ranks as f64, &rates),
        rate_tflops: rates.matmul_flops_per_s / 1e12,
        rate_source: rates.source,
        rate_name,
    };
    let device = match (plan.backend.value, profile.cuda_card()) {
        (BackendKind::Cuda, Some(card)) => card.name.clone(),
        (BackendKind::Flex | BackendKind::Candle, _) => processor_key(profile),
        (backend, _) => backend.to_string(),
    };
    BenchReport {
        model: options.model.display().to_string(),
        backend: plan.backend.value,
        device,
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
        ranks,
        documents: options.documents,
        loss_chunk: options.loss_chunk,
        steps: options.steps,
        warmup: options.warmup,
        tok_s,
        step_s,
        host_s: Spread::of(steps.host_seconds),
        load_s: 0.0,
        first_step_s: steps.first_step_s,
        self_test_s: None,
        peak_gib: peak_bytes as f64 / GIB,
        peak_source,
        planned_gib: plan.memory_bytes.value as f64 / GIB,
        planned: plan.memory.clone(),
        mfu,
        roofline_tok_s: tokens / RooflineTime::of(&work, &peaks.rates()).lower(),
        loss_first: steps.losses[0],
        loss_last: steps.losses[steps.losses.len() - 1],
        peaks,
        trace: None,
    }
}

/// Returns the rates that utilization is relative to: the maker's if the card is known and computes in a half format, else the measured ones.
fn rates(profile: &HardwareProfile, plan: &Plan, peaks: &Peaks) -> (Rates, String) {
    let spec = profile.cuda_card().and_then(|card| card.spec);
    let peak = spec.and_then(|spec| Some((spec, Rates::of_spec(&spec, spec.kind.half())?)));
    match peak {
        Some((spec, peak)) if plan.backend.value == BackendKind::Cuda && plan.compute.value != FloatType::F32 => {
            (peak, format!("{}, dense {}, {}", spec.name, spec.kind.half().name(), spec.rates.bf16.source()))
        }
        _ => (peaks.rates(), format!("a GEMM of {0} x {0} x {0} on this device", peaks.gemm_size)),
    }
}
