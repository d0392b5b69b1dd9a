//! The page: facts, the recipe, answers, plots, samples with their rewards, the planned memory part by part, and every decision with its reason.

use firebrick_arch::counted;
use firebrick_hwprofile::forecast::Range;
use firebrick_hwprofile::human::human_range;
use firebrick_hwprofile::memory::human_bytes;
use firebrick_trainer::console::grouped;
use firebrick_trainer::plan::with_grouped_numbers;
use toml::Value;

use super::record::RunRecord;
use super::samples;
use crate::page::{Block, Column, Page, Table};
use crate::plot::{Axis, Plot, Reference, Scale, Series, short};

const GIB: f64 = (1u64 << 30) as f64;

pub(super) fn render(run: &RunRecord) -> String {
    let mut blocks = vec![Block::Table(Table::of_pairs(facts(run)))];
    let recipe = |text: &String| Block::Folded("The recipe".to_owned(), vec![Block::Verbatim(text.clone())]);
    blocks.extend(run.recipe.as_ref().map(recipe));
    blocks.extend(samples::answers(&run.samples()));
    let figures = |plots: Vec<Plot>| Block::Plots(plots.iter().map(Plot::figure).collect());
    blocks.extend([Block::heading("Training"), figures(training(run))]);
    blocks.extend(samples::blocks(&run.rounds, &run.reward_names()));
    let machine = machine(run);
    if machine.iter().any(|plot| !plot.figure().is_empty()) {
        blocks.extend([Block::heading("Machine"), figures(machine)]);
    }
    blocks.extend(memory(run));
    blocks.extend(decisions(run));
    Page { name: run.name.clone(), what: "report".to_owned(), style: samples::STYLE, blocks }.render()
}

/// Returns the numbers that a reader looks for first.
fn facts(run: &RunRecord) -> Vec<(&'static str, String)> {
    let words = |decision: &str| run.planned_word(decision);
    let change = |before: Option<f64>, after: Option<f64>, show: fn(f64) -> String| match (before, after) {
        (Some(before), Some(after)) => Some(format!("{} to {}", show(before), show(after))),
        (None, Some(after)) => Some(show(after)),
        (Some(before), None) => Some(format!("{} before training", show(before))),
        (None, None) => None,
    };
    // Without a summary what was logged: before the first step, and last.
    let logged = |key: &str, at: &str| run.series(key).into_iter().rfind(|(step, _)| (*step < 1.0) == (at == "before"));
    let of = |name: &str, when: &str| match &run.summary {
        Some(_) => run.summed(&format!("{name}_{when}")),
        None => logged(name, when).map(|(_, value)| value),
    };
    let held_out = |name: &str| (of(name, "before"), of(name, "after"));
    let [loss, reward, accuracy, exact] = ["eval_loss", "eval_reward", "token_accuracy", "exact_match"].map(held_out);
    let energy = |joules: f64| format!("{:.3} kWh of the accelerator while training", joules / 3.6e6);
    let percent: fn(f64) -> String = |share| format!("{:.1} %", 100.0 * share);
    let peak = run.series("memory").iter().map(|(_, bytes)| *bytes).fold(0.0, f64::max);
    let planned = run.planned(&["memory_bytes"]).map(|bytes| format!(", planned {}", human_bytes(bytes as u64)));
    let planned = planned.unwrap_or_default();
    let memory = (peak > 0.0).then(|| format!("{} at most{planned}", human_bytes(peak as u64)));
    let rows = [
        ("status", Some(status(run))),
        ("began", run.began.clone()),
        ("ended", run.summary.as_ref().and_then(|all| Some(all.get("ended")?.as_str()?.to_owned()))),
        ("model", words("model_folder")),
        ("backend", words("backend").map(|backend| with_compute(run, backend))),
        ("held-out loss", change(loss.0, loss.1, |loss| format!("{loss:.4}"))),
        ("held-out reward", change(reward.0, reward.1, |reward| format!("{reward:.4}"))),
        ("token accuracy", change(accuracy.0, accuracy.1, percent)),
        ("exact match", change(exact.0, exact.1, percent)),
        ("loss tokens", run.summed("loss_tokens").map(grouped)),
        ("tokens per second", speed(run)),
        ("sampled tokens per second", run.summed("sampled_per_s").map(grouped)),
        ("the same without sampling and rewards", run.summed("trained_per_s").map(grouped)),
        ("time", run.summed("wall_s").map(time)),
        ("memory", memory),
        ("energy", run.energy_j().map(energy)),
        ("lowered clocks", throttled(run)),
    ];
    rows.into_iter().filter_map(|(name, value)| Some((name, value?))).collect()
}

fn status(run: &RunRecord) -> String {
    let of = run.planned(&["steps"]).map_or_else(String::new, |steps| format!(" of {}", grouped(steps)));
    match (run.summed("steps"), run.last_step()) {
        (Some(steps), _) => format!("finished: {}", counted(steps as u64, "step")),
        (None, Some(step)) => format!("not finished: {}{of} steps logged", grouped(step as f64)),
        (None, None) => "no step was logged".to_owned(),
    }
}

fn with_compute(run: &RunRecord, backend: String) -> String {
    let compute = run.planned_word("compute").map_or_else(String::new, |compute| format!(", computes in {compute}"));
    let machine = run.plan.get("forecast").and_then(|forecast| forecast.get("machine")?.get("value")?.as_str());
    format!("{backend}{compute}{}", machine.map_or_else(String::new, |machine| format!(", {machine}")))
}

fn speed(run: &RunRecord) -> Option<String> {
    let measured = grouped(run.summed("tokens_per_s")?);
    Some(match planned_speed(run) {
        Some(Reference::Between(from, to)) => {
            format!("{measured}, without padding; planned {} to {}, with padding", grouped(from), grouped(to))
        }
        _ => measured,
    })
}

fn planned_speed(run: &RunRecord) -> Option<Reference> {
    let end = |end| run.planned(&["forecast", "tokens_per_second", "value", end]);
    Some(Reference::Between(end("lower")?, end("upper")?))
}

fn time(seconds: f64) -> String {
    match seconds {
        s if s < 120.0 => format!("{s:.0} s"),
        s if s < 7200.0 => format!("{:.1} min", s / 60.0),
        s => format!("{:.2} h", s / 3600.0),
    }
}

fn throttled(run: &RunRecord) -> Option<String> {
    let (lines, reasons) = run.throttled();
    let reasons: Vec<String> = reasons.into_iter().collect();
    let [lines, logged] = [lines, run.series("loss").len()].map(|count| count as f64);
    (lines > 0.0).then(|| format!("in {} of {} logged steps: {}", grouped(lines), grouped(logged), reasons.join(", ")))
}

fn training(run: &RunRecord) -> Vec<Plot> {
    let one = |title, unit, key: &str, from_zero| plot_of(run, title, unit, &[("", key)], 1.0, from_zero);
    let speeds =
        [("", "tokens_per_s"), ("sampled", "sampled_per_s"), ("without sampling and rewards", "trained_per_s")];
    let mut speed = plot_of(run, "Tokens per second", "", &speeds, 1.0, true);
    speed.references.extend(planned_speed(run));
    let rewards = [("training", "reward"), ("held out", "eval_reward")];
    let shares = [
        ("cut", "completions/clipped_ratio"),
        ("groups of equal rewards", "frac_reward_zero_std"),
        ("clipped above", "clip_ratio/high_mean"),
    ];
    let drift =
        [("mean", "sampling/sampling_logp_difference/mean"), ("largest", "sampling/sampling_logp_difference/max")];
    let answers = [("token accuracy", "token_accuracy"), ("exact match", "exact_match")];
    let waits = [("for tensors from host memory", "restore_wait_ms"), ("for other ranks", "comm_wait_ms")];
    vec![
        by_ratio(plot_of(run, "Loss", "nats", &[("training", "loss"), ("held out", "eval_loss")], 1.0, false)),
        plot_of(run, "Reward", "", &rewards, 1.0, false),
        one("Tokens of a completion", "", "completions/mean_length", true),
        plot_of(run, "Shares of completions", "%", &shares, 100.0, true),
        one("Distance from the reference", "nats", "kl", true),
        one("Entropy", "nats per token", "entropy", true),
        plot_of(run, "Training and sampling differ by", "nats", &drift, 1.0, true),
        one("Learning rate", "", "lr", true),
        by_ratio(one("Gradient norm", "before clipping", "grad_norm", true)),
        speed,
        one("Time of a step", "ms", "ms", true),
        plot_of(run, "Accuracy on held-out data", "%", &answers, 100.0, true),
        one("Loss scale", "", "loss_scale", true),
        plot_of(run, "Waiting", "ms per step", &waits, 1.0, true),
    ]
}

fn machine(run: &RunRecord) -> Vec<Plot> {
    let utilization = [
        ("GPU", "gpu_util"),
        ("multiprocessors", "sm_util"),
        ("tensor cores", "tensor_util"),
        ("memory bandwidth", "dram_util"),
        ("memory in use of the time", "memory_busy"),
        ("processor", "cpu_util"),
    ];
    let links = [
        ("PCIe out", "pcie_tx_gb_s"),
        ("PCIe in", "pcie_rx_gb_s"),
        ("NVLink out", "nvlink_tx_gb_s"),
        ("NVLink in", "nvlink_rx_gb_s"),
    ];
    let memory = [("in use, at most", "memory"), ("pools", "allocated"), ("this process, on the host", "host_memory")];
    let mut memory = plot_of(run, "Memory", "GiB", &memory, 1.0 / GIB, true);
    memory.references.extend(run.planned(&["memory_bytes"]).map(|bytes| Reference::Limit(bytes / GIB)));
    vec![
        plot_of(run, "Utilization", "%", &utilization, 1.0, true),
        memory,
        plot_of(run, "Power", "W", &[("", "power_w")], 1.0, true),
        plot_of(run, "Temperature", "°C", &[("", "temperature_c")], 1.0, false),
        plot_of(run, "Clock of the multiprocessors", "MHz", &[("", "sm_mhz")], 1.0, true),
        plot_of(run, "Links", "GB/s", &links, 1.0, true),
    ]
}

/// Plots keys of the metrics, each with the name of its line and multiplied by a factor.
fn plot_of(run: &RunRecord, title: &str, unit: &str, keys: &[(&str, &str)], factor: f64, from_zero: bool) -> Plot {
    let series = |&(name, key): &(&str, &str)| {
        let name = if name.is_empty() { title } else { name }.to_owned();
        let points = run.series(key).into_iter().map(|(step, value)| [step, value * factor]).collect();
        Series { name, points, notes: Vec::new() }
    };
    let scale = if from_zero { Scale::FromZero } else { Scale::Linear };
    Plot {
        title: title.to_owned(),
        unit: unit.to_owned(),
        size: [560.0, 240.0],
        x: Axis { title: "step".to_owned(), scale: Scale::Linear, label: short },
        y: Axis { title: String::new(), scale, label: short },
        series: keys.iter().map(series).collect(),
        references: Vec::new(),
    }
}

/// Gives a plot a logarithmic axis if its values are positive and the largest is ten times the smallest: on a linear one the end of a steep fall is
/// flat.
fn by_ratio(mut plot: Plot) -> Plot {
    let values = || plot.series.iter().flat_map(|series| &series.points).map(|point| point[1]);
    let (low, high) = (values().fold(f64::INFINITY, f64::min), values().fold(0.0, f64::max));
    if low > 0.0 && high >= 10.0 * low {
        plot.y.scale = Scale::Log;
        plot.unit += ", log axis";
    }
    plot
}

fn memory(run: &RunRecord) -> Vec<Block> {
    let Some(lines) = run.plan.get("memory").and_then(Value::as_array) else { return Vec::new() };
    let bytes = |line: &Value| line.get("bytes").and_then(Value::as_integer).unwrap_or(0);
    let largest = lines.iter().map(bytes).max().unwrap_or(0).max(1);
    let row = |line: &Value| {
        let text = |key| line.get(key).and_then(Value::as_str).unwrap_or("").to_owned();
        let bar = format!("0 {:.1}", 100.0 * bytes(line) as f64 / largest as f64);
        let why = with_grouped_numbers(&text("why"));
        ("", vec![text("what"), human_bytes(bytes(line).unsigned_abs()), bar, why])
    };
    let columns = vec![("", Column::Text), ("", Column::Number), ("", Column::Bar), ("", Column::Text)];
    let table = Table { columns, rows: lines.iter().map(row).collect() };
    vec![Block::heading("Memory, as planned"), Block::Table(table)]
}

fn decisions(run: &RunRecord) -> Option<Block> {
    let row = |(name, decision): (&String, &Value)| {
        let (value, reason) = (decision.get("value")?, decision.get("reason").and_then(Value::as_str)?);
        Some(("", vec![name.clone(), decided(value), with_grouped_numbers(reason)]))
    };
    let nested = run.plan.get("forecast").and_then(Value::as_table);
    let rows: Vec<_> = run.plan.iter().chain(nested.into_iter().flatten()).filter_map(row).collect();
    let title = "Every decision of the plan, with its reason".to_owned();
    let table = Table { columns: vec![("", Column::Text); 3], rows };
    (!table.rows.is_empty()).then(|| Block::Folded(title, vec![Block::Table(table)]))
}

/// Writes a value of the plan: a number with its digits in groups, a range by its ends.
fn decided(value: &Value) -> String {
    let end = |name| value.get(name).and_then(Value::as_float);
    match (value, end("lower").zip(end("upper"))) {
        (Value::String(text), _) => text.clone(),
        (Value::Integer(number), _) if *number >= 0 => grouped(*number as f64),
        (_, Some((lower, upper))) => human_range(Range { lower, upper }),
        (other, None) => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run() -> RunRecord {
        let line = |step: u64| {
            serde_json::json!({"step": step, "loss": 3.0 / step as f64, "lr": 1e-4, "grad_norm": 0.5, "tokens_per_s": 15_000.0,
                "ms": 800.0, "memory": 13_000_000_000_u64, "gpu_util": 98.0, "tensor_util": 61.0, "power_w": 650.0,
                "energy_j": 500.0 * step as f64, "throttle": ["power_cap"]})
        };
        let mut lines: Vec<_> = (1..=50).map(line).collect();
        lines.push(serde_json::json!({"step": 50, "eval_loss": 0.25}));
        let plan = "[backend]\nvalue = \"cuda\"\nreason = \"a <card>\"\n[memory_bytes]\nvalue = 14000000000\nreason = \"sum\"\n\
                    [trained_parameters]\nvalue = 1217088\nreason = \"of 30000000\"\n\
                    [[memory]]\nwhat = \"base weights\"\nbytes = 4000000000\nwhy = \"NF4\"\n\
                    [forecast.tokens_per_second]\nreason = \"peaks\"\n[forecast.tokens_per_second.value]\nlower = 10000.0\nupper = 20000.0\n";
        RunRecord {
            name: "my <run>".to_owned(),
            lines,
            plan: plan.parse().unwrap(),
            summary: Some(
                serde_json::json!({"steps": 50, "tokens_per_s": 15_000.0, "wall_s": 40.0, "eval_loss_before": 3.5,
                "eval_loss_after": 0.25, "ended": "2026-07-30 12:34 UTC", "samples": [
                    {"prompt": "2 < 3?", "before": null, "after": "yes,\n3 > 2"}]}),
            ),
            recipe: Some("name = \"<b>\"".to_owned()),
            rounds: Vec::new(),
            began: Some("2026-07-30 11:00 UTC".to_owned()),
            state: serde_json::json!({"sample_prompts": ["2 < 3?"], "samples_before": ["no"]}),
        }
    }

    #[test]
    fn a_finished_run_has_its_facts_and_its_text_is_no_markup() {
        let page = render(&run());
        for part in [
            "my &lt;run&gt;",
            "a &lt;card&gt;",
            "&lt;b&gt;",
            "NF4",
            "base weights",
            "finished: 50 steps",
            "3.5000 to 0.2500",
            "15,000, without padding; planned 10,000 to 20,000, with padding",
            "12.1 GiB at most, planned 13.0 GiB",
            "0.007 kWh",
            "in 50 of 50 logged steps: power cap",
            "2026-07-30 12:34 UTC",
            "<figcaption>Loss<span>, nats, log axis</span>",
            "<figcaption>Gradient norm<span>, before clipping</span>",
            ">1,217,088</td><td class=\"text\">of 30,000,000</td>",
            ">tokens_per_second</td><td class=\"text\">10,000 to 20,000</td>",
            "2 &lt; 3?</td><td class=\"text\">was not asked</td><td class=\"text\">yes,\n3 &gt; 2</td>",
        ] {
            assert!(page.contains(part), "{part:?} is not in {page}");
        }
        for plot in ["Loss", "Learning rate", "Gradient norm", "Tokens per second", "Utilization", "Memory", "Power"] {
            assert!(page.contains(&format!("<figcaption>{plot}<span>")), "{plot}");
        }
        assert!(!page.contains("Loss scale") && !page.contains("Links"), "what was not recorded has no plot");
    }

    #[test]
    fn a_run_that_was_stopped_says_how_far_it_came() {
        let mut run = run();
        run.summary = None;
        run.plan.insert("steps".to_owned(), "value = 2000\nreason = \"x\"".parse::<toml::Table>().unwrap().into());
        run.lines.insert(0, serde_json::json!({"step": 0, "eval_loss": 3.25}));
        let page = render(&run);
        for part in ["not finished: 50 of 2,000 steps", "2026-07-30 11:00 UTC", "3.2500 to 0.2500", ">no</td>"] {
            assert!(page.contains(part), "{part:?} is not in {page}");
        }
        run.lines.clear();
        assert!(render(&run).contains("no step was logged"));
    }
}
