//! The timed part of a benchmark, on one backend.
//!
//! Trade-off: one process measures one case; the peak rates come after the steps, when the card is warm.

use std::sync::Arc;
use std::time::Instant;

use firebrick_data::Batch;
use firebrick_kernels::{Kernels, TracedOperation};
use firebrick_trainer::RunError;
use firebrick_trainer::metrics::{MemoryMeter, MemorySource};
use firebrick_trainer::run::assemble::{self, WeightSource};
use firebrick_trainer::run::device::{dtype_of, head_dim, self_test, wait};
use firebrick_trainer::run::step::Trainer;
use firebrick_trainer::run::together;

use super::peaks::{Peaks, Probe};
use super::spread::Spread;
use super::step::{Case, step};
use super::synthetic::Synthetic;
use super::trace::StepTrace;
use super::usage::UsageCost;

/// The measurements.
pub(super) struct Measured {
    pub(super) step_s: Spread,
    pub(super) host_s: Spread,
    pub(super) load_s: f64,
    pub(super) first_step_s: f64,
    pub(super) self_test_s: Option<f64>,
    pub(super) peak_bytes: u64,
    pub(super) peak_source: MemorySource,
    pub(super) loss_first: f32,
    pub(super) loss_last: f32,
    pub(super) peaks: Peaks,
    pub(super) usage: Option<UsageCost>,
    pub(super) trace: Option<StepTrace>,
}

/// Loads, steps, and measures the peak rates that the steps are compared with.
///
/// # Errors
/// As [`super::bench`].
pub(super) fn measure<B: Kernels>(case: &Case<'_>) -> Result<Measured, RunError> {
    let Case { options, plan, ranks, print, .. } = *case;
    let device = B::device_of(ranks.local_rank());
    together::end_when_lost(ranks, Arc::default());
    let dtype = dtype_of(plan.compute.value);
    let self_test_s = self_test::<B>(plan.backend.value, &device, dtype, plan.gemms.value, head_dim(&case.model.spec))?;
    if let Some(seconds) = self_test_s {
        print(&format!("self-test: every operation agrees with its reference ({seconds:.2} s)"));
    }
    let mut meter = MemoryMeter::new(plan.backend.value, ranks.local_rank());
    if let Some(carrier) = ranks.connect::<B>(&device)? {
        print(&format!("{} ranks; gradients: {carrier}", ranks.world_size()));
    }
    let started = Instant::now();
    let source = if options.random_base { WeightSource::Synthetic } else { WeightSource::Folder };
    let mut trainer = assemble::trainer::<B>(plan, case.model, source, ranks.clone(), &device, &mut |_| ())?;
    // Random tokens are no pairs of answers.
    trainer.pairs = None;
    wait::<B>(&device)?;
    let load_s = started.elapsed().as_secs_f64();
    meter.sample();
    print(&format!("loaded in {load_s:.2} s"));

    let mut batches = batches(case);
    let steps = timed_steps(case, &mut trainer, &mut batches, &mut meter)?;
    let step_s = Spread::of(steps.seconds);
    let usage =
        options.usage.then(|| UsageCost::measure(case, &mut trainer, &mut batches, step_s.median)).transpose()?;
    let traced = options.trace.then(|| traced_step(&mut trainer, &batches.next_batch(), &device)).transpose()?;
    let (peak_bytes, peak_source) = (meter.sample(), meter.source());
    // The buffers of the peak rates must not be added to those of training.
    drop(trainer);
    B::release_memory(&device);
    let peaks = Peaks::measure::<B>(&device, dtype, plan.gemms.value, Probe::of(plan.backend.value.is_cpu()))?;
    Ok(Measured {
        step_s,
        host_s: Spread::of(steps.host_seconds),
        load_s,
        first_step_s: steps.first_step_s,
        self_test_s,
        peak_bytes,
        peak_source,
        loss_first: steps.losses[0],
        loss_last: steps.losses[steps.losses.len() - 1],
        usage,
        trace: traced.map(|operations| StepTrace::new(&operations, step_s.median, &peaks)),
        peaks,
    })
}

fn batches(case: &Case<'_>) -> Synthetic {
    Synthetic {
        rows: case.options.micro_batch,
        row_len: case.options.seq,
        documents: case.options.documents,
        vocab_size: case.model.spec.vocab_size,
        seed: case.plan.seed.value + case.ranks.rank() as u64,
    }
}

struct Steps {
    /// Seconds of the steps after the warm-up.
    seconds: Vec<f64>,
    /// Seconds of them until the host had nothing left to do but to wait for the loss.
    host_seconds: Vec<f64>,
    /// Mean loss of every step.
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
        let started = Instant::now();
        let (loss, host_seconds) = step(trainer, &batch)?;
        let seconds = started.elapsed().as_secs_f64();
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

fn traced_step<B: Kernels>(
    trainer: &mut Trainer<B>,
    batch: &Batch,
    device: &B::Device,
) -> Result<Vec<TracedOperation>, RunError> {
    let (loss, operations) = B::trace(device, || step(trainer, batch));
    loss.map(|_| operations)
}
