//! Forecasts the cost of a run on an accelerator whose peaks are known (time of a step, tokens per second, time, energy and money), and shows the
//! tuning of that hardware next to the recipe's.
//!
//! Trade-off: a row is assumed to contain between one document and the maximum of any row, so data with one odd row has a wider range.

use firebrick_hwprofile::AcceleratorSpec;
use firebrick_hwprofile::forecast::{ALLOWANCE, HostSide, Range, RunCost, Shares, StepBound, StepTime};
use firebrick_hwprofile::human::{human_energy, human_range, human_seconds};
use firebrick_hwprofile::memory::MemoryEstimate;
use firebrick_hwprofile::peaks::MeasuredPeaks;
use firebrick_hwprofile::roofline::Work;
use firebrick_hwprofile::scaling::{EIGHT_BY_400_GBIT, Links, Network, RankStep, Sharding, copies_slowed_by};
use firebrick_hwprofile::spec::{Engine, HardwareKind, MathFormat};
use firebrick_hwprofile::tuning::{FlashAttention, HardwareConfig, get_optimal_config};
use firebrick_kernels::{
    BackendKind, GemmFormat, TrainingShape, answering_launches, answering_work, cuda_launches, step_work,
};
use firebrick_parallel::BUCKET_BYTES;
use firebrick_precision::FloatType;
use serde::Serialize;

use crate::config::ZeroStage;
use crate::plan::answers::Round;
use crate::plan::{Chosen, fit};

/// The cost of a run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Forecast {
    /// Name of the accelerator.
    pub machine: Chosen<String>,
    /// Seconds per step.
    pub step_seconds: Chosen<Range>,
    /// Seconds per step in which a rank only communicates; part of `step_seconds`. `None` with one rank, under ZeRO-3, and if the table lacks the
    /// accelerator's links.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub communication_seconds: Option<Chosen<Range>>,
    /// Seconds per step for sampling, if every completion has the maximum length; part of `step_seconds`. `None` without `[grpo]`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sampling_seconds: Option<Chosen<Range>>,
    /// Tokens per second of all ranks, padding included.
    pub tokens_per_second: Chosen<Range>,
    /// Seconds of all steps.
    pub run_seconds: Chosen<Range>,
    /// kWh of the accelerators.
    pub energy_kwh: Chosen<Option<Range>>,
    /// Price of the run, in the currency of the hourly price.
    pub cost: Chosen<Option<Range>>,
    /// The attention implementation that runs there.
    pub attention: Chosen<String>,
    /// The format that the hardware prefers.
    pub precision: Chosen<String>,
    /// Rows of 4,096 tokens to start with there.
    pub micro_batch_start: Chosen<usize>,
    /// Row lengths and widths should be multiples of this to fill the hardware.
    pub padding: Chosen<String>,
}

impl Forecast {
    /// Returns name, value and reason of each line to print.
    pub(super) fn lines(&self) -> Vec<(&'static str, String, &str)> {
        let unknown = || "unknown".to_owned();
        let mut lines: Vec<(&'static str, String, &str)> = vec![
            ("machine", self.machine.value.clone(), &self.machine.reason),
            ("attention", self.attention.value.clone(), &self.attention.reason),
            ("precision there", self.precision.value.clone(), &self.precision.reason),
            ("micro-batch there", self.micro_batch_start.value.to_string(), &self.micro_batch_start.reason),
            ("padding there", self.padding.value.clone(), &self.padding.reason),
            ("step time", human_seconds(self.step_seconds.value), &self.step_seconds.reason),
            ("tokens/s", human_range(self.tokens_per_second.value), &self.tokens_per_second.reason),
            ("time of the run", human_seconds(self.run_seconds.value), &self.run_seconds.reason),
            ("energy", self.energy_kwh.value.map_or_else(unknown, human_energy), &self.energy_kwh.reason),
            ("cost", self.cost.value.map_or_else(unknown, human_range), &self.cost.reason),
        ];
        let parts = [("exposed communication", &self.communication_seconds), ("sampling", &self.sampling_seconds)];
        for (name, part) in parts {
            lines.extend(part.iter().map(|part| (name, human_seconds(part.value), part.reason.as_str())));
        }
        lines
    }
}

#[derive(Clone, Copy, Default)]
pub(super) struct RunLength {
    pub(super) steps: u64,
    pub(super) micro_batches: usize,
    pub(super) world_size: usize,
    pub(super) zero_stage: ZeroStage,
    /// Maximum number of documents in a row.
    pub(super) documents_per_row: usize,
    pub(super) price_per_hour: Option<f64>,
    /// What a rank samples; `None` if it learns from no completions.
    pub(super) round: Option<Round>,
}

/// Returns the forecast of a run; `None` on a processor, and on an accelerator whose peaks are unknown.
pub(super) fn forecast(
    case: &fit::Case<'_>,
    training: &TrainingShape,
    estimate: &MemoryEstimate,
    extent: RunLength,
) -> Option<Forecast> {
    let card = case.card()?;
    let spec = card.spec;
    let measured = case.profile.measured_peaks(&case.backend.to_string(), &card.name);
    let rated = Rated { spec: spec.as_ref(), measured };
    let mut step = step_time(case, training, estimate, extent, rated)?;
    let communication = spec.as_ref().and_then(|spec| communication(case, training, &step, extent, spec));
    let sampling = extent.round.and_then(|round| sampling(case, training, round, rated));
    for Chosen { value, .. } in communication.iter().chain(&sampling) {
        step.seconds = Range { lower: step.seconds.lower + value.lower, upper: step.seconds.upper + value.upper };
    }
    let RunLength { steps, price_per_hour, .. } = extent;
    let world_size = extent.world_size as f64;
    let tokens = (training.micro_batch_size * training.row_len * extent.micro_batches) as f64 * world_size;
    let power = card.power_limit_w.or(spec.and_then(|spec| spec.power_w).map(|power| power.value));
    let run = RunCost::of(&step, steps, tokens, power.map(|watts| watts * world_size), price_per_hour);
    let config =
        get_optimal_config(case.hardware().or(spec.map(|spec| spec.kind)).unwrap_or(HardwareKind::OlderNvidia));
    let machine = spec.map_or_else(|| card.name.clone(), |spec| spec.name.to_owned());
    let energy_reason = match power {
        Some(watts) => format!("at the power limit of {watts:.0} W all the time, the accelerator alone"),
        None => format!("the power of {} is not stated", card.name),
    };
    let no_price = || "no price: --price-per-hour".to_owned();
    let cost_reason = price_per_hour.map_or_else(no_price, |price| format!("at {price} per hour"));
    Some(Forecast {
        machine: Chosen::new(machine, machine_reason(spec.as_ref(), measured, case.profile.named.is_some())),
        step_seconds: Chosen::new(step.seconds, step_reason(&step, spec.as_ref(), measured, config, case.backend)),
        communication_seconds: communication,
        sampling_seconds: sampling,
        tokens_per_second: Chosen::new(run.tokens_per_s, format!("{tokens} tokens per step, padding included")),
        run_seconds: Chosen::new(run.seconds, format!("{steps} steps, without evaluation, checkpoints and loading")),
        energy_kwh: Chosen::new(run.energy_kwh, energy_reason),
        cost: Chosen::new(run.cost, cost_reason),
        attention: attention(config, extent.documents_per_row),
        precision: Chosen::new(config.precision.to_lowercase(), config.notes.as_str()),
        micro_batch_start: Chosen::new(
            config.micro_batch_start,
            format!(
                "rows of 4,096 tokens to begin with in the memory of such hardware; the recipe has {}",
                training.micro_batch_size
            ),
        ),
        padding: Chosen::new(
            format!("{} x {}", config.padding.rows, config.padding.width),
            "multiples of rows and tokens that fill its matrix units (data.pad_to_multiple_of)",
        ),
    })
}

/// Returns the communication between ranks that the computation of a step does not hide, on machines of eight.
fn communication(
    case: &fit::Case<'_>,
    training: &TrainingShape,
    step: &StepTime,
    extent: RunLength,
    spec: &AcceleratorSpec,
) -> Option<Chosen<Range>> {
    let sharding = match extent.zero_stage {
        ZeroStage::NONE => Sharding::None,
        ZeroStage::STATE => Sharding::Zero1,
        ZeroStage::GRADIENTS => Sharding::Zero2,
        _ => return None,
    };
    if extent.world_size == 1 || case.backend != BackendKind::Cuda {
        return None;
    }
    let links = Links::of(spec, EIGHT_BY_400_GBIT)?;
    let [_, gradient_bytes] = training.trained_bytes(case.spec).map(|bytes| bytes as f64);
    let exposed = |seconds: f64| {
        let rank = RankStep {
            micro_batch_s: seconds / extent.micro_batches as f64,
            micro_batches: extent.micro_batches,
            gradient_bytes,
            bucket_bytes: training.lora.is_none().then_some(BUCKET_BYTES as f64),
        };
        rank.exposed(extent.world_size, &links, sharding)
    };
    let ends = [exposed(step.seconds.lower), exposed(step.seconds.upper)];
    // A longer computation hides more communication.
    let range = Range { lower: ends[1].min(ends[0]), upper: ends[0].max(ends[1]) };
    let Network { per_machine, gb_s } = EIGHT_BY_400_GBIT;
    let between = match extent.world_size > per_machine {
        true => {
            format!(", {per_machine} ranks per machine and {gb_s} GB/s each between machines, which is an assumption")
        }
        false => String::new(),
    };
    let why = format!(
        "{:.3} GB of gradients over {} ranks{between}; docs/scaling.md has the model",
        gradient_bytes / 1e9,
        extent.world_size
    );
    Some(Chosen::new(range, why))
}

#[derive(Clone, Copy)]
struct Rated<'a> {
    spec: Option<&'a AcceleratorSpec>,
    measured: Option<&'a MeasuredPeaks>,
}

impl Rated<'_> {
    /// Returns the time of work in the formats of a run; `None` if no rate of its format is known.
    fn time(self, case: &fit::Case<'_>, training: &TrainingShape, work: &Work, host: HostSide) -> Option<StepTime> {
        let (format, wgpu) = match (case.backend, training.gemms) {
            (BackendKind::Wgpu, GemmFormat::F16) => (Some(MathFormat::F16), Some(Shares::WGPU_HALF)),
            (BackendKind::Wgpu, _) => (None, Some(Shares::WGPU)),
            _ => (None, None),
        };
        let format = format.unwrap_or(match training.compute {
            FloatType::F32 => MathFormat::F32,
            FloatType::F16 => MathFormat::F16,
            FloatType::Bf16 => MathFormat::Bf16,
        });
        let at_measured = self.measured.and_then(|peaks| StepTime::at_measured(work, host, self.spec, format, peaks));
        at_measured.or_else(|| {
            let spec = self.spec?;
            StepTime::of(work, host, spec, format, wgpu.unwrap_or_else(|| Shares::of_library(spec)))
        })
    }
}

/// Returns the range of a step: from rows of many documents, whose attention is short, to rows of one.
fn step_time(
    case: &fit::Case<'_>,
    training: &TrainingShape,
    estimate: &MemoryEstimate,
    extent: RunLength,
    rated: Rated<'_>,
) -> Option<StepTime> {
    let copied = estimate.host_bytes().saturating_sub(training.start_bytes(case.spec));
    let sharing = rated.spec.map_or(1.0, |spec| copies_slowed_by(spec, extent.world_size));
    let host = HostSide {
        bytes: sharing * 2.0 * copied as f64 * extent.micro_batches as f64,
        launches: match case.backend {
            BackendKind::Cuda => cuda_launches(case.spec, training, extent.micro_batches),
            _ => 0.0,
        },
    };
    let with_documents = |tokens: f64| {
        let work = step_work(case.spec, training, extent.micro_batches, tokens);
        rated.time(case, training, &work, host)
    };
    let shortest = with_documents(training.row_len as f64 / extent.documents_per_row.max(1) as f64)?;
    let longest = with_documents(training.longest_document.min(training.row_len) as f64)?;
    let seconds = Range { lower: shortest.seconds.lower, upper: longest.seconds.upper.max(shortest.seconds.upper) };
    Some(StepTime { seconds, ..shortest })
}

/// Returns the time of sampling in a step, if every completion has the maximum length.
fn sampling(case: &fit::Case<'_>, training: &TrainingShape, round: Round, rated: Rated<'_>) -> Option<Chosen<Range>> {
    let Round { answers, new_tokens, steps } = round;
    let launches = match case.backend {
        BackendKind::Cuda => answering_launches(case.spec, training, new_tokens),
        _ => 0.0,
    };
    let work = answering_work(case.spec, training, &answers, new_tokens);
    let time = rated.time(case, training, &work, HostSide { bytes: 0.0, launches })?;
    let bound = if time.bound == StepBound::Math { "arithmetic" } else { "memory traffic" };
    let shared = if steps > 1 { format!(", once in {steps} steps") } else { String::new() };
    let why = format!(
        "of a step: {} completions of up to {new_tokens} tokens on a rank{shared}; at least, at the peaks, {bound} where all are so long; \
         shorter ones take less",
        answers.prompts
    );
    Some(Chosen::new(time.seconds.times(1.0 / steps as f64), why))
}

/// The part of the time of copies to the host by which they slow the work that they run next to.
const SLOWED_BY_COPIES: f64 = 0.05;
/// Rates of machines whose own are unknown: operations and bytes per second of a processor, and of an accelerator.
const ASSUMED_RATES: [[f64; 2]; 2] = [[1e11, 2e10], [1e14, 1e12]];

/// Returns the modeled seconds of a micro-batch, to compare runs of one machine that save, copy and convert different things.
pub(super) fn compared_seconds(case: &fit::Case<'_>, training: &TrainingShape, documents_per_row: usize) -> f64 {
    let extent = RunLength { micro_batches: 1, world_size: case.ranks, documents_per_row, ..RunLength::default() };
    let card = case.card();
    let spec = card.and_then(|card| card.spec);
    let measured = card.and_then(|card| case.profile.measured_peaks(&case.backend.to_string(), &card.name));
    let rated = Rated { spec: spec.as_ref(), measured };
    match step_time(case, training, &case.estimate(training), extent, rated) {
        Some(step) => {
            let busy = step.seconds.upper / ALLOWANCE - step.t_host;
            busy.max(step.t_host) + SLOWED_BY_COPIES * step.t_host
        }
        None => {
            let work = step_work(case.spec, training, 1, training.row_len as f64 / documents_per_row.max(1) as f64);
            let [operations, bytes] = ASSUMED_RATES[usize::from(card.is_some())];
            (work.matmul_flops + work.fp8_flops + work.attention_flops) / operations + work.bytes / bytes
        }
    }
}

fn machine_reason(spec: Option<&AcceleratorSpec>, measured: Option<&MeasuredPeaks>, is_named: bool) -> String {
    let origin = if is_named { "--for" } else { "found here" };
    let documented = spec.map(|spec| {
        let unverified = spec.unverified();
        let doubt =
            if unverified.is_empty() { String::new() } else { format!("; NOT VERIFIED: {}", unverified.join(", ")) };
        let (rate, half, bandwidth) = (spec.rates.bf16.value, spec.kind.half().name(), spec.bandwidth_tb_s.value);
        format!("{rate} TFLOP/s dense {half}, {bandwidth} TB/s, whose sources docs/hardware.md names{doubt}")
    });
    let measured = measured.map(|peaks| {
        let gemms: Vec<String> =
            peaks.gemms.iter().map(|gemm| format!("{} {:.0}", gemm.format.name(), gemm.tflops)).collect();
        format!("measured here by profile --measure: {} TFLOP/s, {:.2} TB/s", gemms.join(", "), peaks.copy_tb_s)
    });
    let rates: Vec<String> = measured.into_iter().chain(documented).collect();
    format!("{origin}: {}", rates.join("; "))
}

fn step_reason(
    step: &StepTime,
    spec: Option<&AcceleratorSpec>,
    measured: Option<&MeasuredPeaks>,
    config: &HardwareConfig,
    backend: BackendKind,
) -> String {
    let bound = match step.bound {
        StepBound::Math => "arithmetic",
        StepBound::Memory => "memory traffic",
        StepBound::HostLink => "copies to the host",
    };
    let origin = match (measured, spec) {
        (Some(_), _) => "measured on this machine, and its copies",
        (None, _) if backend == BackendKind::Wgpu => {
            "the share that wgpu's kernels were measured at on an H200 through Vulkan"
        }
        (None, Some(spec)) => spec.sustained_share().1,
        (None, None) => unreachable!("a forecast rests on one of them"),
    };
    let has_backend = measured.is_some() || config.kind.engine() != Engine::NoBackend;
    let other_kernels = if has_backend { "" } else { "; no backend exists for it here" };
    let time = |seconds: f64| human_seconds(Range { lower: seconds, upper: seconds });
    let launches = if step.t_launch >= step.seconds.upper {
        format!("; the host launches for {}, which is longer", time(step.t_launch))
    } else {
        String::new()
    };
    format!(
        "at least, at the peaks, {bound} ({} of arithmetic, {} of memory traffic, {} of copies); at most {ALLOWANCE} times all in turn, \
         GEMMs at {:.0} % of the peak ({origin}){other_kernels}{launches}",
        time(step.t_math),
        time(step.t_memory),
        time(step.t_host),
        100.0 * step.sustained_share
    )
}

/// Returns the attention implementation. Rows that are one document each, without padding, have one length.
fn attention(config: &HardwareConfig, documents_per_row: usize) -> Chosen<String> {
    let why = match config.use_flash_attention {
        FlashAttention::None => format!("docs/hardware.md names no fused attention for {}", config.kind),
        version => format!("docs/hardware.md names {version} for {}", config.kind),
    };
    let here = if documents_per_row > 1 { &config.packed_attention_here } else { &config.attention_here };
    Chosen::new(here.clone(), why)
}

#[cfg(test)]
mod tests;
