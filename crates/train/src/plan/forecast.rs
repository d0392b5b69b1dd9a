//! What a run will cost on an accelerator whose peaks are known: time of a step, tokens per second, time, energy and money, and the tuning
//! of that hardware next to the recipe's.
//!
//! Trade-off: a row is taken to hold between one document and the most that any row holds, so data with one odd row has a wider range.

use firebrick_hwprofile::forecast::{ALLOWANCE, HostSide, Range, RunCost, StepBound, StepTime};
use firebrick_hwprofile::human::{human_energy, human_range, human_seconds};
use firebrick_hwprofile::memory::MemoryEstimate;
use firebrick_hwprofile::peaks::MeasuredPeaks;
use firebrick_hwprofile::scaling::{EIGHT_BY_400_GBIT, Links, Network, RankStep, Sharding};
use firebrick_hwprofile::spec::{HardwareKind, MathFormat};
use firebrick_hwprofile::tuning::{Engine, FlashAttention, HardwareConfig, get_optimal_config};
use firebrick_hwprofile::{AcceleratorSpec, Gpu};
use firebrick_kernels::{BackendKind, TrainingShape, cuda_launches, step_work};
use firebrick_parallel::BUCKET_BYTES;
use firebrick_precision::Format;
use serde::Serialize;

use crate::plan::chosen::Chosen;
use crate::plan::fit;

/// What a run will cost.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Forecast {
    /// Name of the accelerator.
    pub machine: Chosen<String>,
    /// Seconds per step.
    pub step_seconds: Chosen<Range>,
    /// Seconds per step in which a rank only communicates and computes nothing; part of `step_seconds`. `None` with one rank, where the
    /// accelerator's links are not in the table, and under ZeRO-3.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub communication_seconds: Option<Chosen<Range>>,
    /// Tokens per second of all ranks, padding included.
    pub tokens_per_second: Chosen<Range>,
    /// Seconds of all steps.
    pub run_seconds: Chosen<Range>,
    /// kWh of the accelerators.
    pub energy_kwh: Chosen<Option<Range>>,
    /// Money.
    pub cost: Chosen<Option<Range>>,
    /// Attention that runs there.
    pub attention: Chosen<String>,
    /// Format that the hardware prefers.
    pub precision: Chosen<String>,
    /// Rows of 4,096 tokens to start with there.
    pub micro_batch_start: Chosen<usize>,
    /// Multiples that rows and widths fill the hardware with.
    pub padding: Chosen<String>,
}

impl Forecast {
    /// Name, value and reason of each line, to print.
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
        if let Some(exposed) = &self.communication_seconds {
            lines.push(("exposed communication", human_seconds(exposed.value), &exposed.reason));
        }
        lines
    }
}

/// The length of a run.
#[derive(Clone, Copy)]
pub(super) struct Extent {
    /// Optimizer steps.
    pub(super) steps: u64,
    /// Micro-batches per step.
    pub(super) micro_batches: usize,
    /// Processes that train together.
    pub(super) world_size: usize,
    /// What they divide: `train.zero_stage`.
    pub(super) zero_stage: u8,
    /// The most documents in a row.
    pub(super) documents_per_row: usize,
    /// Price of the machine per hour.
    pub(super) price_per_hour: Option<f64>,
}

/// The forecast of a run; `None` on a processor, and on an accelerator whose peaks are not known.
pub(super) fn forecast(
    case: &fit::Case<'_>,
    training: &TrainingShape,
    estimate: &MemoryEstimate,
    extent: Extent,
) -> Option<Forecast> {
    let card = case.card()?;
    let spec = card.spec;
    let measured = case.profile.measured_peaks(&case.backend.to_string(), &card.name);
    let mut step = step_time(case, training, estimate, extent, Rated { spec: spec.as_ref(), measured })?;
    let communication = spec.as_ref().and_then(|spec| communication(case, training, &step, extent, spec));
    if let Some(Chosen { value, .. }) = &communication {
        step.seconds = Range { lower: step.seconds.lower + value.lower, upper: step.seconds.upper + value.upper };
    }
    let Extent { steps, price_per_hour, .. } = extent;
    let world_size = extent.world_size as f64;
    let tokens = (training.micro_batch_size * training.row_len * extent.micro_batches) as f64 * world_size;
    let power = card.power_limit_w.or(spec.and_then(|spec| spec.power_w).map(|power| power.value));
    let run = RunCost::of(&step, steps, tokens, power.map(|watts| watts * world_size), price_per_hour);
    let config =
        get_optimal_config(case.hardware().or(spec.map(|spec| spec.kind)).unwrap_or(HardwareKind::OlderNvidia));
    let machine = spec.map_or_else(|| card.name.clone(), |spec| spec.name.to_owned());
    Some(Forecast {
        machine: Chosen::new(machine, machine_reason(spec.as_ref(), measured, case.profile.named.is_some())),
        step_seconds: Chosen::new(step.seconds, step_reason(&step, spec.as_ref(), measured, config, case.backend)),
        communication_seconds: communication,
        tokens_per_second: Chosen::new(run.tokens_per_s, format!("{tokens} tokens per step, padding included")),
        run_seconds: Chosen::new(run.seconds, format!("{steps} steps, without evaluation, checkpoints and loading")),
        energy_kwh: Chosen::new(run.energy_kwh, energy_reason(card, power)),
        cost: Chosen::new(run.cost, cost_reason(price_per_hour)),
        attention: Chosen::new(config.attention_here.to_owned(), attention_reason(config)),
        precision: Chosen::new(format!("{:?}", config.precision).to_lowercase(), config.notes),
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

/// What the computation of a step does not hide of the communication between its ranks, on machines of eight.
fn communication(
    case: &fit::Case<'_>,
    training: &TrainingShape,
    step: &StepTime,
    extent: Extent,
    spec: &AcceleratorSpec,
) -> Option<Chosen<Range>> {
    let sharding = match extent.zero_stage {
        0 => Sharding::None,
        1 => Sharding::Zero1,
        2 => Sharding::Zero2,
        _ => return None,
    };
    if extent.world_size == 1 || case.backend != BackendKind::Cuda {
        return None;
    }
    let links = Links::of(spec, EIGHT_BY_400_GBIT)?;
    let gradient_bytes = size_of::<f32>() as f64 * training.trained_parameters(case.spec) as f64;
    let exposed = |seconds: f64| {
        let rank = RankStep {
            micro_batch_s: seconds / extent.micro_batches as f64,
            micro_batches: extent.micro_batches,
            gradient_bytes,
            weight_bytes: 0.0,
            blocks: case.spec.layers.len(),
            bucket_bytes: training.lora.is_none().then_some(BUCKET_BYTES as f64),
        };
        rank.on(extent.world_size, &links, sharding).exposed
    };
    let ends = [exposed(step.seconds.lower), exposed(step.seconds.upper)];
    // What computes longer hides more.
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

/// What is known of an accelerator's rates.
#[derive(Clone, Copy)]
struct Rated<'a> {
    spec: Option<&'a AcceleratorSpec>,
    measured: Option<&'a MeasuredPeaks>,
}

/// The range of a step: from rows of many documents, whose attention is short, to rows of one.
fn step_time(
    case: &fit::Case<'_>,
    training: &TrainingShape,
    estimate: &MemoryEstimate,
    extent: Extent,
    rated: Rated<'_>,
) -> Option<StepTime> {
    let copied = estimate.host_bytes().saturating_sub(training.start_bytes(case.spec));
    let host = HostSide {
        bytes: 2.0 * copied as f64 * extent.micro_batches as f64,
        launches: match case.backend {
            BackendKind::Cuda => cuda_launches(case.spec, training, extent.micro_batches),
            _ => 0.0,
        },
    };
    let format = if training.compute == Format::F32 { MathFormat::F32 } else { MathFormat::Bf16 };
    let with_documents = |tokens: f64| {
        let work = step_work(case.spec, training, extent.micro_batches, tokens);
        let at_measured =
            rated.measured.and_then(|peaks| StepTime::at_measured(&work, host, rated.spec, format, peaks));
        at_measured.or_else(|| StepTime::of(&work, host, rated.spec?, format))
    };
    let shortest = with_documents(training.row_len as f64 / extent.documents_per_row.max(1) as f64)?;
    let longest = with_documents(training.longest_document.min(training.row_len) as f64)?;
    let seconds = Range { lower: shortest.seconds.lower, upper: longest.seconds.upper.max(shortest.seconds.upper) };
    Some(StepTime { seconds, ..shortest })
}

fn machine_reason(spec: Option<&AcceleratorSpec>, measured: Option<&MeasuredPeaks>, is_named: bool) -> String {
    let origin = if is_named { "--for" } else { "found here" };
    let documented = spec.map(|spec| {
        let unverified = spec.unverified();
        let doubt =
            if unverified.is_empty() { String::new() } else { format!("; NOT VERIFIED: {}", unverified.join(", ")) };
        format!(
            "{} TFLOP/s dense bf16 ({}), {} TB/s ({}){doubt}",
            spec.rates.bf16.value,
            spec.rates.bf16.source(),
            spec.bandwidth_tb_s.value,
            spec.bandwidth_tb_s.source()
        )
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
        (Some(_), _) => "measured on this machine, and its copies".to_owned(),
        (None, Some(spec)) => spec.sustained_share().1,
        (None, None) => unreachable!("a forecast rests on one of them"),
    };
    let other_kernels = match config.engine {
        _ if measured.is_some() => "",
        Engine::Cuda => "",
        Engine::NoBackend => "; no backend exists for it here",
        Engine::Wgpu | Engine::Cpu if backend == BackendKind::Wgpu => {
            ", which wgpu's kernels do not reach: expect more"
        }
        Engine::Wgpu | Engine::Cpu => "",
    };
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

fn energy_reason(card: &Gpu, power: Option<f64>) -> String {
    match power {
        Some(watts) => format!("at the power limit of {watts:.0} W all the time, the accelerator alone"),
        None => format!("the power of {} is not stated", card.name),
    }
}

fn cost_reason(price: Option<f64>) -> String {
    match price {
        Some(price) => format!("at {price} per hour"),
        None => "no price: --price-per-hour".to_owned(),
    }
}

fn attention_reason(config: &HardwareConfig) -> String {
    match config.use_flash_attention {
        FlashAttention::None => format!("docs/hardware.md names no FlashAttention for {:?}", config.kind),
        version => format!("docs/hardware.md names FlashAttention {version:?} for {:?}", config.kind),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use firebrick_arch::ModelConfig;
    use firebrick_hwprofile::HardwareProfile;
    use firebrick_hwprofile::peaks::MeasuredGemm;
    use firebrick_hwprofile::spec::{CardClocks, Maker};

    use super::*;
    use crate::config::RunConfig;
    use crate::plan::fit::tests::Example;
    use crate::plan::{DataShape, Plan, PlanInputs, PlanRequest, shapes};

    const LLAMA_8B: &str = r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256,
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "max_position_embeddings": 131072, "rope_theta": 500000.0, "rms_norm_eps": 1e-5,
        "hidden_act": "silu", "tie_word_embeddings": false}"#;

    /// The recipe for one H100.
    const RECIPE: &str = include_str!("../../../../configs/h100.toml");

    fn plan(machine: &str, changes: &[&str], request: PlanRequest) -> Plan {
        plan_of(RECIPE, machine, changes, request)
    }

    fn plan_of(recipe: &str, machine: &str, changes: &[&str], request: PlanRequest) -> Plan {
        plan_of_ranks(recipe, machine, changes, request, 1)
    }

    fn plan_of_ranks(recipe: &str, machine: &str, changes: &[&str], request: PlanRequest, ranks: usize) -> Plan {
        let changes: Vec<String> = changes.iter().map(ToString::to_string).collect();
        let config = RunConfig::from_toml(recipe, Path::new("recipe.toml"), &changes).unwrap();
        let model = ModelConfig::parse(LLAMA_8B, Path::new("config.json")).unwrap();
        let profile = HardwareProfile::of_machine(AcceleratorSpec::named(machine).unwrap());
        let data = full_rows();
        let inputs = PlanInputs {
            config: &config,
            profile: &profile,
            model: &model,
            data: &data,
            world_size: ranks,
            request: &request,
        };
        Plan::resolve(inputs).unwrap()
    }

    #[test]
    fn several_ranks_add_the_communication_that_they_do_not_hide() {
        let forecast = |ranks| plan_of_ranks(RECIPE, "h100", &[], PlanRequest::default(), ranks).forecast.unwrap();
        let (one, two, many) = (forecast(1), forecast(2), forecast(1024));
        assert_eq!(one.communication_seconds, None);
        let exposed = two.communication_seconds.as_ref().unwrap().value;
        let sum = two.step_seconds.value.lower - one.step_seconds.value.lower;
        assert!(exposed.lower > 0.0 && (sum / exposed.lower - 1.0).abs() < 1e-6, "{exposed:?}");
        // An adapter's gradients are 168 MiB. Even on 1,024 cards their sum takes well below 1 % of a step.
        let share =
            |of: &Forecast| of.communication_seconds.as_ref().unwrap().value.upper / of.step_seconds.value.lower;
        assert!(share(&two) < share(&many) && share(&many) < 0.01, "{} {}", share(&two), share(&many));
        let text = plan_of_ranks(RECIPE, "h100", &[], PlanRequest::default(), 1024).to_string();
        assert!(text.contains("exposed communication") && text.contains("which is an assumption"), "{text}");
        assert!(text.contains("NCCL"), "{text}");
    }

    /// Rows of one document each.
    fn full_rows() -> DataShape {
        DataShape {
            rows: 4800,
            row_len: 4096,
            longest_document: 4096,
            documents_per_row: 1,
            has_chats: false,
            report: "full".to_owned(),
        }
    }

    fn forecast_of(machine: &str, changes: &[&str]) -> Forecast {
        plan(machine, changes, PlanRequest::default()).forecast.expect("every row of the table has peaks")
    }

    #[test]
    fn the_recipe_for_an_h100_is_planned_two_to_three_times_faster_on_an_h100_than_on_an_a100() {
        let (h100, a100) = (forecast_of("h100", &[]).step_seconds.value, forecast_of("a100", &[]).step_seconds.value);
        let at_measured_rates = a100.upper / h100.upper;
        assert!((2.0..3.0).contains(&at_measured_rates), "{at_measured_rates}");
        // The peaks alone promise more: 989.4 / 312 = 3.17 where arithmetic is everything.
        let at_the_peaks = a100.lower / h100.lower;
        assert!((3.0..3.2).contains(&at_the_peaks), "{at_the_peaks}");
    }

    #[test]
    fn ranges_are_printed_in_units_that_users_read() {
        let forecast = forecast_of("h100", &[]);
        let lines = forecast.lines();
        let value = |name: &str| lines.iter().find(|(line, _, _)| *line == name).unwrap().1.clone();
        assert!(value("step time").contains(" to ") && value("step time").ends_with(" s"), "{}", value("step time"));
        assert!(value("tokens/s").contains(" to ") && value("tokens/s").contains(','), "{}", value("tokens/s"));
        assert_eq!(value("cost"), "unknown");
    }

    #[test]
    fn speeds_measured_on_an_h100_lie_in_their_ranges() {
        // docs/roofline.md, one document per row.
        let measured = [
            (8, "full", "bf16", 12_855.0),
            (1, "selective", "bf16", 15_289.0),
            (2, "none", "bf16", 16_002.0),
            (3, "selective", "bf16", 16_153.0),
            (4, "selective", "bf16", 16_373.0),
            (5, "selective", "bf16", 16_487.0),
            (3, "selective", "fp8", 21_822.0),
            (8, "full", "fp8", 17_592.0),
        ];
        for (rows, recompute, compute, tokens_per_s) in measured {
            let compute = format!("compute={compute}");
            let (rows, recompute) = (format!("train.micro_batch_size={rows}"), format!("train.recompute={recompute}"));
            let changes = ["train.gradient_accumulation=1", "train.grad_checkpointing=", &rows, &recompute, &compute];
            let range = forecast_of("h100", &changes).tokens_per_second.value;
            assert!(
                range.contains(tokens_per_s),
                "{rows}, {recompute}, {compute}: {tokens_per_s} outside of {range:?}"
            );
        }
    }

    #[test]
    fn peaks_measured_here_take_the_place_of_a_library_s_and_the_plan_says_so() {
        let config = RunConfig::from_toml(RECIPE, Path::new("recipe.toml"), &[]).unwrap();
        let model = ModelConfig::parse(LLAMA_8B, Path::new("config.json")).unwrap();
        let mut machine = HardwareProfile::of_machine(AcceleratorSpec::named("h100").unwrap());
        machine.measured.push(MeasuredPeaks {
            backend: "cuda".to_owned(),
            device: machine.gpus[0].name.clone(),
            driver: String::new(),
            measured_at: 0,
            gemm_size: 8192,
            gemms: vec![MeasuredGemm { format: MathFormat::Bf16, tflops: 400.0 }],
            copy_tb_s: 2.0,
        });
        let data = full_rows();
        let request = PlanRequest::default();
        let inputs = PlanInputs {
            config: &config,
            profile: &machine,
            model: &model,
            data: &data,
            world_size: 1,
            request: &request,
        };
        let measured = Plan::resolve(inputs).unwrap().forecast.unwrap();
        let documented = forecast_of("h100", &[]);
        assert_eq!(
            measured.step_seconds.value.lower, documented.step_seconds.value.lower,
            "no implementation is faster"
        );
        assert!(measured.step_seconds.value.upper > 1.5 * documented.step_seconds.value.upper);
        assert!(measured.machine.reason.contains("measured here by profile --measure: bf16 400 TFLOP/s, 2.00 TB/s"));
        assert!(measured.step_seconds.reason.contains("40 % of the peak (measured on this machine"));
    }

    #[test]
    fn every_machine_of_the_table_answers_with_reasons() {
        for spec in AcceleratorSpec::all() {
            let request = PlanRequest { force: true, price_per_hour: Some(2.0), machine: Some(spec), local_ranks: 1 };
            let plan = plan(spec.id, &["train.micro_batch_size=1"], request);
            let forecast = plan.forecast.as_ref().expect("known peaks");
            for (name, value, reason) in forecast.lines() {
                assert!(!value.is_empty() && !reason.is_empty(), "{}: {name}", spec.name);
            }
            let seconds = forecast.step_seconds.value;
            assert!(0.0 < seconds.lower && seconds.lower <= seconds.upper, "{}: {seconds:?}", spec.name);
            assert_eq!(forecast.energy_kwh.value.is_some(), spec.power_w.is_some(), "{}", spec.name);
            let cost = forecast.cost.value.expect("a price was given");
            assert!((cost.lower / (forecast.run_seconds.value.lower / 1800.0) - 1.0).abs() < 1e-9);
            assert!(plan.to_string().contains("step time") && plan.to_toml().contains("[forecast.step_seconds]"));
        }
    }

    /// A machine with an NVIDIA card that no table has.
    fn unknown_card(compute_capability: (u32, u32), clocks: CardClocks) -> HardwareProfile {
        let (name, bytes) = ("NVIDIA Card of Tomorrow", 80 << 30);
        let spec = AcceleratorSpec::of_unknown_card(name, compute_capability, clocks, bytes);
        let card =
            Gpu { compute_capability: Some(compute_capability), spec, ..Gpu::described(Maker::Nvidia, name, bytes) };
        HardwareProfile::described(16, 256 << 30, vec![card])
    }

    /// The forecast of the recipe of `fit`'s tests on a machine.
    fn forecast_on(profile: HardwareProfile) -> Option<Forecast> {
        let mut example = Example::new(&[], 80, 256);
        example.profile = profile;
        let (case, trained) = (example.case(), example.trained());
        let training = shapes::training(&example.config, Format::Bf16, BackendKind::Cuda, &example.data, &trained);
        let (estimate, _) = fit::check(&case, &training, 1, true).unwrap();
        let extent = Extent {
            steps: 100,
            micro_batches: 1,
            world_size: 1,
            zero_stage: 0,
            documents_per_row: 1,
            price_per_hour: None,
        };
        forecast(&case, &training, &estimate, extent)
    }

    #[test]
    fn a_card_that_no_table_has_is_forecast_from_its_compute_capability_and_clocks() {
        // Those of an H100.
        let clocks = CardClocks { sm_mhz: 1830, memory_mhz: 2619, cores: 16_896, bus_bits: 5120 };
        let of = |capability, clocks| forecast_on(unknown_card(capability, clocks));
        let known = forecast_on(HardwareProfile::of_machine(AcceleratorSpec::named("h100").unwrap())).unwrap();
        let unknown = of((9, 0), clocks).expect("its rates follow");
        let [known_s, unknown_s] = [&known, &unknown].map(|forecast| forecast.step_seconds.value);
        assert!((unknown_s.lower / known_s.lower - 1.0).abs() < 0.03, "{known_s:?} {unknown_s:?}");
        assert!(unknown.step_seconds.reason.contains("smallest share of an accelerator of this maker"));
        assert_eq!(unknown.precision, known.precision, "a Hopper's tuning");
        let half = CardClocks { sm_mhz: 915, ..clocks };
        let slower = of((9, 0), half).unwrap().step_seconds.value.lower / unknown_s.lower;
        assert!((1.9..2.1).contains(&slower), "half the clock takes twice as long: {slower}");
        let ampere = of((8, 0), clocks).unwrap();
        assert_ne!(ampere.precision, known.precision, "the capability decides, not the clocks");
        assert_eq!(of((9, 0), CardClocks::default()), None, "a silent driver");
        assert_eq!(of((7, 5), clocks), None, "no bf16 products");
    }

    #[test]
    fn a_machine_without_a_backend_says_that_no_run_can_be_made_there() {
        for machine in ["tpu-v5p", "gaudi3"] {
            let plan = plan(machine, &[], PlanRequest::default());
            assert!(plan.backend.reason.starts_with("NO RUN"), "{}", plan.backend.reason);
        }
        let amd = plan("mi300x", &[], PlanRequest::default());
        assert_eq!(amd.backend.value, BackendKind::Wgpu);
        assert!(amd.backend.reason.ends_with("(the recipe names cuda)"), "{}", amd.backend.reason);
        assert!(amd.memory_bytes.reason.contains("192 GiB free on the card"), "{}", amd.memory_bytes.reason);
    }

    #[test]
    fn the_recipes_for_one_machine_fit_on_it() {
        macro_rules! recipe {
            ($name:literal) => {
                include_str!(concat!("../../../../configs/", $name, ".toml"))
            };
        }
        let recipes = [
            (RECIPE, "h100"),
            (recipe!("h100-fp8"), "h100"),
            (recipe!("a100"), "a100"),
            (recipe!("a100"), "a100-40"),
            (recipe!("h200"), "h200"),
            (recipe!("b200"), "b200"),
            (recipe!("l4"), "l4"),
            (recipe!("rtx4090"), "rtx4090"),
            (recipe!("mi300x"), "mi300x"),
            (recipe!("apple"), "m4-max"),
        ];
        for (recipe, machine) in recipes {
            let plan = plan_of(recipe, machine, &[], PlanRequest::default());
            assert_eq!(plan.forced, None, "{machine}");
            assert!(plan.forecast.is_some(), "{machine}");
        }
    }

    #[test]
    #[cfg(feature = "flex")]
    fn the_recipe_for_a_processor_fits_into_the_memory_of_a_small_one() {
        let smollm = LLAMA_8B
            .replace("\"vocab_size\": 128256", "\"vocab_size\": 49152")
            .replace("\"hidden_size\": 4096", "\"hidden_size\": 576")
            .replace("\"intermediate_size\": 14336", "\"intermediate_size\": 1536")
            .replace("\"num_hidden_layers\": 32", "\"num_hidden_layers\": 30")
            .replace("\"num_attention_heads\": 32", "\"num_attention_heads\": 9")
            .replace("\"num_key_value_heads\": 8", "\"num_key_value_heads\": 3")
            .replace("\"tie_word_embeddings\": false", "\"tie_word_embeddings\": true");
        let changes = ["backend=flex".to_owned()];
        let recipe = include_str!("../../../../configs/cpu.toml");
        let config = RunConfig::from_toml(recipe, Path::new("recipe.toml"), &changes).unwrap();
        let model = ModelConfig::parse(&smollm, Path::new("config.json")).unwrap();
        let profile = HardwareProfile::described(4, 4 << 30, Vec::new());
        let data = DataShape { row_len: 512, longest_document: 512, ..full_rows() };
        let request = PlanRequest::default();
        let inputs = PlanInputs {
            config: &config,
            profile: &profile,
            model: &model,
            data: &data,
            world_size: 1,
            request: &request,
        };
        let plan = Plan::resolve(inputs).unwrap();
        // The recipe's own arithmetic says about 1 GB.
        assert!((700_000_000..1_500_000_000).contains(&plan.memory_bytes.value), "{}", plan.memory_bytes.value);
        assert_eq!((plan.forced, plan.forecast), (None, None), "a processor has no forecast");
    }

    #[test]
    fn a_forced_plan_prints_that_it_does_not_fit() {
        let request = PlanRequest { force: true, ..PlanRequest::default() };
        let text = plan("l4", &["train.recompute=none", "train.grad_checkpointing="], request).to_string();
        assert!(text.contains("!!!!!!!! DOES NOT FIT --force"), "{text}");
    }
}
