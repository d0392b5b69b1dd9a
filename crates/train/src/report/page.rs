//! The page: facts, plots, the planned memory part by part, every decision with its reason, and the recipe.
//!
//! Trade-off: what a run did not record has no plot, rather than an empty one.

use firebrick_hwprofile::memory::human_bytes;
use firebrick_trainer::console::grouped;
use toml::Value;

use super::plot::{self, Planned, Plot, Series};
use super::record::RunRecord;
use crate::html::{add, escape, head};

const GIB: f64 = (1u64 << 30) as f64;

pub(super) fn render(run: &RunRecord) -> String {
    let mut out = head(&run.name, "report", plot::STYLE);
    table(&mut out, &facts(run));
    out.push_str("<h2>Training</h2>\n<div class=\"plots\">\n");
    training(run).iter().for_each(|plot| out.push_str(&plot.svg()));
    out.push_str("</div>\n");
    let machine: String = machine(run).iter().map(Plot::svg).collect();
    if !machine.is_empty() {
        add(&mut out, format_args!("<h2>Machine</h2>\n<div class=\"plots\">\n{machine}</div>\n"));
    }
    memory(&mut out, run);
    decisions(&mut out, run);
    if let Some(recipe) = &run.recipe {
        add(&mut out, format_args!("<details><summary>The recipe</summary><pre>{}</pre></details>\n", escape(recipe)));
    }
    out.push_str("</html>\n");
    out
}

fn table(out: &mut String, rows: &[(&str, String)]) {
    out.push_str("<table>\n");
    for (name, value) in rows {
        add(out, format_args!("<tr><td>{name}<td>{}\n", escape(value)));
    }
    out.push_str("</table>\n");
}

/// The numbers that a reader looks for first.
fn facts(run: &RunRecord) -> Vec<(&'static str, String)> {
    let words = |decision: &str| run.planned_word(decision);
    let change = |before: Option<f64>, after: Option<f64>, show: fn(f64) -> String| match (before, after) {
        (Some(before), Some(after)) => Some(format!("{} to {}", show(before), show(after))),
        (None, Some(after)) => Some(show(after)),
        (_, None) => None,
    };
    let held_out = |name: &str| (run.summed(&format!("{name}_before")), run.summed(&format!("{name}_after")));
    let [loss, accuracy, exact] = ["eval_loss", "token_accuracy", "exact_match"].map(held_out);
    let percent: fn(f64) -> String = |share| format!("{:.1} %", 100.0 * share);
    let rows = [
        ("status", Some(status(run))),
        ("model", words("model_folder")),
        ("backend", words("backend").map(|backend| with_compute(run, backend))),
        ("held-out loss", change(loss.0, loss.1, |loss| format!("{loss:.4}"))),
        ("token accuracy", change(accuracy.0, accuracy.1, percent)),
        ("exact match", change(exact.0, exact.1, percent)),
        ("loss tokens", run.summed("loss_tokens").map(grouped)),
        ("tokens per second", speed(run)),
        ("time", run.summed("wall_s").map(time)),
        ("memory", peak_memory(run)),
        ("energy", energy(run)),
        ("lowered clocks", throttled(run)),
    ];
    rows.into_iter().filter_map(|(name, value)| Some((name, value?))).collect()
}

fn status(run: &RunRecord) -> String {
    let of = run.planned(&["steps"]).map_or_else(String::new, |steps| format!(" of {steps}"));
    match (run.summed("steps"), run.last_step()) {
        (Some(steps), _) => format!("finished: {steps} steps"),
        (None, Some(step)) => format!("not finished: {step}{of} steps logged"),
        (None, None) => "no step was logged".to_owned(),
    }
}

fn with_compute(run: &RunRecord, backend: String) -> String {
    let compute = run.planned_word("compute").map_or_else(String::new, |compute| format!(", computes in {compute}"));
    let machine = run.plan.get("forecast").and_then(|forecast| forecast.get("machine")?.get("value")?.as_str());
    format!("{backend}{compute}{}", machine.map_or_else(String::new, |machine| format!(", {machine}")))
}

/// Measured, and what the plan promised of it.
fn speed(run: &RunRecord) -> Option<String> {
    let measured = grouped(run.summed("tokens_per_s")?);
    Some(match planned_speed(run) {
        Planned::Between(from, to) => {
            format!("{measured}, without padding; planned {} to {}, with padding", grouped(from), grouped(to))
        }
        _ => measured,
    })
}

fn planned_speed(run: &RunRecord) -> Planned {
    let end = |end| run.planned(&["forecast", "tokens_per_second", "value", end]);
    match (end("lower"), end("upper")) {
        (Some(from), Some(to)) => Planned::Between(from, to),
        _ => Planned::Nothing,
    }
}

fn time(seconds: f64) -> String {
    match seconds {
        s if s < 120.0 => format!("{s:.0} s"),
        s if s < 7200.0 => format!("{:.1} min", s / 60.0),
        s => format!("{:.2} h", s / 3600.0),
    }
}

fn peak_memory(run: &RunRecord) -> Option<String> {
    let peak = run.series("memory").iter().map(|(_, bytes)| *bytes).fold(0.0, f64::max);
    let planned = run.planned(&["memory_bytes"]);
    (peak > 0.0).then(|| {
        let planned = planned.map_or_else(String::new, |bytes| format!(", planned {}", human_bytes(bytes as u64)));
        format!("{} at most{planned}", human_bytes(peak as u64))
    })
}

fn energy(run: &RunRecord) -> Option<String> {
    let joules = run.energy_j()?;
    Some(format!("{:.3} kWh of the accelerator while training", joules / 3.6e6))
}

fn throttled(run: &RunRecord) -> Option<String> {
    let (lines, reasons) = run.throttled();
    let reasons: Vec<String> = reasons.into_iter().collect();
    (lines > 0).then(|| format!("in {lines} of {} logged steps: {}", run.series("loss").len(), reasons.join(", ")))
}

/// Plots of what is learned and how fast.
fn training(run: &RunRecord) -> Vec<Plot> {
    let one = |title, unit, key: &str, from_zero| plot_of(run, title, unit, &[("", key)], 1.0, from_zero);
    let mut speed = one("Tokens per second", "", "tokens_per_s", true);
    speed.planned = planned_speed(run);
    let mut plots = vec![
        plot_of(run, "Loss", "nats", &[("training", "loss"), ("held out", "eval_loss")], 1.0, false),
        one("Learning rate", "", "lr", true),
        one("Gradient norm", "before clipping", "grad_norm", true),
        speed,
        one("Time of a step", "ms", "ms", true),
        plot_of(
            run,
            "Held out",
            "%",
            &[("token accuracy", "token_accuracy"), ("exact match", "exact_match")],
            100.0,
            true,
        ),
        one("Loss scale", "", "loss_scale", true),
    ];
    let waits = [("for tensors from host memory", "restore_wait_ms"), ("for other ranks", "comm_wait_ms")];
    plots.push(plot_of(run, "Waiting", "ms per step", &waits, 1.0, true));
    plots
}

/// Plots of the machine.
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
    memory.planned = run.planned(&["memory_bytes"]).map_or(Planned::Nothing, |bytes| Planned::Limit(bytes / GIB));
    vec![
        plot_of(run, "Utilization", "%", &utilization, 1.0, true),
        memory,
        plot_of(run, "Power", "W", &[("", "power_w")], 1.0, true),
        plot_of(run, "Temperature", "°C", &[("", "temperature_c")], 1.0, false),
        plot_of(run, "Clock of the multiprocessors", "MHz", &[("", "sm_mhz")], 1.0, true),
        plot_of(run, "Links", "GB/s", &links, 1.0, true),
    ]
}

/// A plot of keys of the metrics, each with the name of its line and times a factor.
fn plot_of(
    run: &RunRecord,
    title: &'static str,
    unit: &'static str,
    keys: &[(&str, &str)],
    factor: f64,
    from_zero: bool,
) -> Plot {
    let series = |(name, key): &(&str, &str)| {
        let points = run.series(key).into_iter().map(|(step, value)| (step, value * factor)).collect();
        Series { name: if name.is_empty() { title.to_owned() } else { (*name).to_owned() }, points }
    };
    Plot { title, unit, series: keys.iter().map(series).collect(), planned: Planned::Nothing, from_zero }
}

/// The parts of the planned memory as bars.
fn memory(out: &mut String, run: &RunRecord) {
    let Some(lines) = run.plan.get("memory").and_then(Value::as_array) else { return };
    let bytes = |line: &Value| line.get("bytes").and_then(Value::as_integer).unwrap_or(0);
    let largest = lines.iter().map(bytes).max().unwrap_or(0).max(1);
    out.push_str("<h2>Memory, as planned</h2>\n<table>\n");
    for line in lines {
        let text = |key| escape(line.get(key).and_then(Value::as_str).unwrap_or(""));
        let percent = 100.0 * bytes(line) as f64 / largest as f64;
        add(
            out,
            format_args!(
                "<tr><td>{}<td class=\"number\">{}<td class=\"bar\"><div style=\"width: {percent:.1}%\"></div><td>{}\n",
                text("what"),
                human_bytes(bytes(line).unsigned_abs()),
                text("why")
            ),
        );
    }
    out.push_str("</table>\n");
}

/// Every decision of the plan with its value and reason.
fn decisions(out: &mut String, run: &RunRecord) {
    let row = |name: &str, decision: &Value| -> Option<String> {
        let value = decision.get("value")?;
        let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let reason = decision.get("reason").and_then(Value::as_str)?;
        Some(format!("<tr><td>{}<td>{}<td>{}\n", escape(name), escape(&value), escape(reason)))
    };
    let nested = run.plan.get("forecast").and_then(Value::as_table);
    let rows: String =
        run.plan.iter().chain(nested.into_iter().flatten()).filter_map(|(name, value)| row(name, value)).collect();
    if !rows.is_empty() {
        add(
            out,
            format_args!(
                "<details><summary>Every decision of the plan, with its reason</summary><table>\n{rows}</table></details>\n"
            ),
        );
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
                    [[memory]]\nwhat = \"base weights\"\nbytes = 4000000000\nwhy = \"NF4\"\n\
                    [forecast.tokens_per_second]\nreason = \"peaks\"\n[forecast.tokens_per_second.value]\nlower = 10000.0\nupper = 20000.0\n";
        RunRecord {
            name: "my <run>".to_owned(),
            lines,
            plan: plan.parse().unwrap(),
            summary: Some(
                serde_json::json!({"steps": 50, "tokens_per_s": 15_000.0, "wall_s": 40.0, "eval_loss_before": 3.5,
                "eval_loss_after": 0.25}),
            ),
            recipe: Some("name = \"<b>\"".to_owned()),
        }
    }

    #[test]
    fn a_page_is_self_contained_and_shows_text_of_the_run_as_text() {
        let page = render(&run());
        for outside in ["http", "//", "src=", "href=", "url(", "@import", "<script", "<link"] {
            assert!(!page.contains(outside), "{outside:?} in the page");
        }
        assert!(
            page.contains("my &lt;run&gt;") && page.contains("a &lt;card&gt;") && page.contains("&lt;b&gt;"),
            "{page}"
        );
    }

    #[test]
    fn a_finished_run_has_its_facts_and_what_was_planned_of_them() {
        let page = render(&run());
        for part in [
            "finished: 50 steps",
            "3.5000 to 0.2500",
            "15,000, without padding; planned 10,000 to 20,000, with padding",
            "12.1 GiB at most, planned 13.0 GiB",
            "0.007 kWh",
            "in 50 of 50 logged steps: power cap",
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
        run.plan.insert("steps".to_owned(), "value = 200\nreason = \"x\"".parse::<toml::Table>().unwrap().into());
        assert!(render(&run).contains("not finished: 50 of 200 steps logged"));
        run.lines.clear();
        assert!(render(&run).contains("no step was logged"));
    }
}
