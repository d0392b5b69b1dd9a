//! Tests forecasts of whole recipes on the machines of the table against measured speeds.

use firebrick_hwprofile::spec::{CardClocks, Maker};
use firebrick_hwprofile::{Gpu, HardwareProfile};
use firebrick_kernels::Answers;
#[cfg(feature = "flex")]
use serde_json::json;

use super::*;
use crate::config::GrpoSection;
use crate::plan::fixtures::Example;
#[cfg(feature = "flex")]
use crate::plan::fixtures::{full_rows, llama, read_recipe};
use crate::plan::{Plan, PlanInputs, PlanRequest};

const RECIPE: &str = include_str!("../../../../../configs/h100.toml");

fn plan(machine: &str, changes: &[&str], request: PlanRequest) -> Plan {
    let example = Example::of(RECIPE, machine, changes);
    Plan::resolve(PlanInputs { request: &request, ..example.inputs() }).unwrap()
}

#[test]
fn several_ranks_add_the_communication_that_they_do_not_hide() {
    let example = Example::of(RECIPE, "h100", &[]);
    let plan = |world_size| Plan::resolve(PlanInputs { world_size, ..example.inputs() }).unwrap();
    let forecast = |ranks| plan(ranks).forecast.unwrap();
    let (one, two, many) = (forecast(1), forecast(2), forecast(1024));
    assert_eq!(one.communication_seconds, None);
    let exposed = two.communication_seconds.as_ref().unwrap().value;
    let sum = two.step_seconds.value.lower - one.step_seconds.value.lower;
    assert!(exposed.lower > 0.0 && (sum / exposed.lower - 1.0).abs() < 1e-6, "{exposed:?}");
    // An adapter's gradients are 168 MiB. Even on 1,024 cards, summing them takes well below 1 % of a step.
    let share = |of: &Forecast| of.communication_seconds.as_ref().unwrap().value.upper / of.step_seconds.value.lower;
    assert!(share(&two) < share(&many) && share(&many) < 0.01, "{} {}", share(&two), share(&many));
    let text = plan(1024).to_string();
    assert!(text.contains("exposed communication") && text.contains("which is an assumption"), "{text}");
    assert!(text.contains("NCCL"), "{text}");
}

/// Returns the range of a step's time in which completions of `new` tokens are sampled after prompts of 128, by an 8B in NF4.
fn sampled(groups: usize, each: usize, new: usize, steps: u64) -> Range {
    let example = Example::on("h100", &[]);
    let (case, training) = (example.case(), example.training());
    let answers = Answers::in_groups(groups, each, [128, new], true);
    let spec = case.card().unwrap().spec;
    let rated = Rated { spec: spec.as_ref(), measured: None };
    sampling(&case, &training, Round { answers, new_tokens: new, steps }, rated).unwrap().value
}

#[test]
fn text_is_written_at_measured_speeds_of_the_range_of_a_round() {
    // docs/roofline.md: 256 new tokens after 128.
    for (sequences, measured) in [(1, [177.7, 208.2]), (64, [5237.0, 5478.0])] {
        let range = sampled(sequences, 1, 256, 1).divide(256.0 * sequences as f64);
        assert!(measured.iter().all(|rate| range.contains(*rate)), "{sequences} sequences: {range:?}");
    }
}

#[test]
fn sampling_takes_longer_for_longer_completions_and_is_divided_among_the_steps_of_a_round() {
    let [short, long, twice] = [(256, 1), (512, 1), (256, 2)].map(|(new, steps)| sampled(8, 8, new, steps));
    assert!(long.lower > 2.0 * short.lower && long.upper >= 2.0 * short.upper, "{short:?} {long:?}");
    assert!((twice.lower * 2.0 / short.lower - 1.0).abs() < 1e-9, "{twice:?}");
}

#[test]
fn a_step_that_samples_takes_the_time_of_that_too() {
    let mut example = Example::of(RECIPE, "h100", &[]);
    let forecast = |plan: &Plan| plan.forecast.clone().unwrap();
    let without = example.plan();
    example.config.grpo = Some(GrpoSection::default());
    let with = example.plan();
    let sampling = forecast(&with).sampling_seconds.unwrap().value;
    let [before, after] = [&without, &with].map(|plan| forecast(plan).step_seconds.value.lower);
    assert!(sampling.lower > 0.0 && after > 0.99 * before + sampling.lower, "{before} {after}");
    assert!(with.to_string().contains("\n  sampling ") && !without.to_string().contains("\n  sampling "));
}

#[test]
fn packed_documents_are_planned_for_the_attention_that_takes_them() {
    let attention = |machine: &str, documents_per_row| {
        let mut example = Example::of(RECIPE, machine, &["train.micro_batch_size=1"]);
        example.data.documents_per_row = documents_per_row;
        example.plan().forecast.unwrap().attention.value
    };
    for (machine, takes_packed) in [("h100", true), ("b200", true), ("a100", false), ("5090", false), ("l4", false)] {
        assert!(attention(machine, 1).starts_with("cuDNN"), "{machine}");
        assert_eq!(attention(machine, 8).starts_with("cuDNN"), takes_packed, "{machine}");
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
    // The peaks alone promise more: 989.4 / 312 = 3.17 if arithmetic takes all the time.
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
fn a_plan_names_the_page_of_sources_instead_of_each() {
    for machine in ["h100", "b200", "a100"] {
        let (forecast, spec) = (forecast_of(machine, &[]), AcceleratorSpec::named(machine).unwrap());
        let lines: String = forecast.lines().into_iter().map(|(_, _, reason)| reason).collect();
        assert!(
            lines.contains("docs/hardware.md") && lines.contains(&spec.bandwidth_tb_s.value.to_string()),
            "{lines}"
        );
        for figure in [Some(spec.rates.bf16), Some(spec.bandwidth_tb_s), spec.sustained_bf16].into_iter().flatten() {
            assert!(!lines.contains(&figure.source()), "{machine}: {lines}");
        }
    }
}

#[test]
fn speeds_measured_on_an_h100_lie_in_their_ranges() {
    // docs/roofline.md, one document per row, in bf16; measured_steps.rs has other rows and FP8.
    let measured =
        [(1, "selective", 15_289.0), (2, "none", 16_002.0), (4, "selective", 16_373.0), (5, "selective", 16_487.0)];
    for (rows, recompute, tokens_per_s) in measured {
        let (rows, recompute) = (format!("train.micro_batch_size={rows}"), format!("train.recompute={recompute}"));
        let changes = ["train.gradient_accumulation=1", "train.grad_checkpointing=", &rows, &recompute, "compute=bf16"];
        let range = forecast_of("h100", &changes).tokens_per_second.value;
        assert!(range.contains(tokens_per_s), "{rows}, {recompute}: {tokens_per_s} outside of {range:?}");
    }
}

#[test]
fn peaks_measured_here_take_the_place_of_a_library_s_and_the_plan_says_so() {
    let mut example = Example::of(RECIPE, "h100", &[]);
    example.measure(&[(MathFormat::Bf16, 400.0)], 2.0);
    let measured = example.plan().forecast.unwrap();
    let documented = forecast_of("h100", &[]);
    assert_eq!(measured.step_seconds.value.lower, documented.step_seconds.value.lower, "no implementation is faster");
    assert!(measured.step_seconds.value.upper > 1.5 * documented.step_seconds.value.upper);
    assert!(measured.machine.reason.contains("measured here by profile --measure: bf16 400 TFLOP/s, 2.00 TB/s"));
    assert!(measured.step_seconds.reason.contains("40 % of the peak (measured on this machine"));
}

#[test]
fn every_machine_of_the_table_answers_with_reasons() {
    for spec in AcceleratorSpec::all() {
        let request =
            PlanRequest { force: true, price_per_hour: Some(2.0), machine: Some(spec), ..PlanRequest::default() };
        let compute = if spec.kind.has_bf16() { "compute=bfloat16" } else { "compute=float16" };
        let plan = plan(spec.id, &["train.micro_batch_size=1", compute], request);
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

/// Returns the forecast of an [`Example`] on a machine.
fn forecast_on(profile: HardwareProfile) -> Option<Forecast> {
    let example = Example { profile, ..Example::new(&[], 80, 256) };
    let (case, training) = (example.case(), example.training());
    let (estimate, _) = fit::check(&case, &training, 1, true).unwrap();
    let extent =
        RunLength { steps: 100, micro_batches: 1, world_size: 1, documents_per_row: 1, ..RunLength::default() };
    forecast(&case, &training, &estimate, extent)
}

#[test]
fn a_card_that_no_table_has_is_forecast_from_its_compute_capability_and_clocks() {
    // The clocks of an H100.
    let clocks = CardClocks { sm_mhz: 1830, memory_mhz: 2619, cores: 16_896, bus_bits: 5120 };
    let of = |capability: (u32, u32), clocks: CardClocks| {
        let (name, bytes) = ("NVIDIA Card of Tomorrow", 80 << 30);
        let spec = AcceleratorSpec::of_unknown_card(name, capability, clocks, bytes);
        let card = Gpu { compute_capability: Some(capability), spec, ..Gpu::described(Maker::Nvidia, name, bytes) };
        forecast_on(HardwareProfile::described(16, 256 << 30, vec![card]))
    };
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
    assert_eq!(of((7, 0), clocks), None, "older than what backend cuda runs on");
}

#[test]
fn a_machine_without_a_backend_says_that_no_run_can_be_made_there() {
    for machine in ["tpu-v5p", "gaudi3"] {
        let plan = plan(machine, &[], PlanRequest::default());
        assert!(plan.backend.reason.starts_with("NO RUN"), "{}", plan.backend.reason);
    }
    let amd = plan("mi300x", &[], PlanRequest::default());
    assert!(amd.backend.reason.starts_with("NO RUN") && amd.backend.reason.contains("HIP"), "{}", amd.backend.reason);
    assert!(amd.memory_bytes.reason.contains("192 GiB free on the card"), "{}", amd.memory_bytes.reason);
}

#[test]
fn the_recipes_for_one_machine_fit_on_it() {
    macro_rules! recipe {
        ($name:literal) => {
            include_str!(concat!("../../../../../configs/", $name, ".toml"))
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
        (recipe!("t4"), "t4"),
        (recipe!("rtx4090"), "rtx4090"),
        (recipe!("mi300x"), "mi300x"),
        (recipe!("apple"), "m4-max"),
    ];
    for (recipe, machine) in recipes {
        let plan = Example::of(recipe, machine, &[]).plan();
        assert_eq!(plan.forced, None, "{machine}");
        assert!(plan.forecast.is_some(), "{machine}");
    }
}

#[test]
#[cfg(feature = "flex")]
fn the_recipe_for_a_processor_fits_into_the_memory_of_a_small_one() {
    let smollm = json!({
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": true,
    });
    let mut example = Example {
        config: read_recipe(include_str!("../../../../../configs/cpu.toml"), &["backend=flex"]),
        profile: HardwareProfile::described(4, 4 << 30, Vec::new()),
        model: llama(&smollm),
        data: full_rows(512),
    };
    let plan = example.plan();
    // The recipe's own arithmetic says about 2.4 GB, or 1.1 where less is free.
    assert!((2_000_000_000..2_700_000_000).contains(&plan.memory_bytes.value), "{}", plan.memory_bytes.value);
    example.profile = HardwareProfile::described(4, 2 << 30, Vec::new());
    let small = example.plan();
    assert!((700_000_000..1_500_000_000).contains(&small.memory_bytes.value), "{}", small.memory_bytes.value);
    assert_eq!((plan.forced, plan.forecast), (None, None), "a processor has no forecast");
}

#[test]
fn a_forced_plan_prints_that_it_does_not_fit() {
    let request = PlanRequest { force: true, ..PlanRequest::default() };
    let text = plan("l4", &["train.recompute=none", "train.grad_checkpointing="], request).to_string();
    assert!(text.contains("!!!!!!!! DOES NOT FIT --force"), "{text}");
}
