//! The results as text: a table for the terminal, Markdown, and the sentences about the machine.
//!
//! Trade-off: numbers have three digits; the exact ones are in `matrix.json`.

use std::time::{SystemTime, UNIX_EPOCH};

use chrono::DateTime;
use firebrick_hwprofile::HardwareProfile;
use firebrick_hwprofile::memory::human_bytes;

use super::numbers::{percent, seconds_text, si};
use super::options::MatrixOptions;
use super::peer_text::{peer_markdown, peer_text};
use super::results::{BackendResults, MatrixResults, Outcome, Row, SCHEMA, Timing, VERSION};
use crate::html::add;

/// Results without rows: date, program and machine.
pub(super) fn begin(options: &MatrixOptions, profile: &HardwareProfile) -> MatrixResults {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let date =
        DateTime::from_timestamp(since.as_secs() as i64, 0).map(|date| date.format("%Y-%m-%d %H:%M UTC").to_string());
    let optimized = !cfg!(debug_assertions);
    let mut notes = Vec::new();
    if !optimized {
        notes.push("This build is not optimized: its times say nothing about the project.".to_owned());
    }
    MatrixResults {
        schema: SCHEMA.to_owned(),
        version: VERSION,
        program: env!("CARGO_PKG_VERSION").to_owned(),
        date: date.unwrap_or_default(),
        quick: options.quick,
        optimized,
        seconds: 0.0,
        machine: machine(profile),
        backends: Vec::new(),
        rows: Vec::new(),
        peers: None,
        notes,
    }
}

fn machine(profile: &HardwareProfile) -> Vec<String> {
    let cpu = &profile.cpu;
    let mut lines = vec![format!(
        "{}, {} threads on {} cores, {}; {} of memory",
        cpu.name,
        cpu.logical_cores,
        cpu.physical_cores,
        cpu.simd.name(),
        human_bytes(profile.memory.total_bytes)
    )];
    for gpu in &profile.gpus {
        let limit = gpu.power_limit_w.map_or_else(String::new, |watts| format!(", limited to {watts:.0} W"));
        let memory = human_bytes(gpu.memory_total_bytes);
        lines.push(format!("{}, {memory}, driver {}{limit}", gpu.name, gpu.driver_version));
    }
    lines
}

/// What else the processor was doing: other work makes times longer.
pub(super) fn load_note(when: &str, profile: &HardwareProfile) -> Option<String> {
    let text = std::fs::read_to_string("/proc/loadavg").ok()?;
    let load: f64 = text.split_whitespace().next()?.parse().ok()?;
    Some(format!("Load average {when}: {load:.2} on {} hardware threads.", profile.cpu.logical_cores))
}

/// A line about a case that has just run.
pub(super) fn progress(row: &Row) -> String {
    format!("{}: {}", row.key, outcome_words(row))
}

fn outcome_words(row: &Row) -> String {
    match &row.outcome {
        Outcome::Timed(Timing { seconds, .. }) => {
            format!("{} ({} of spread)", seconds_text(seconds.median), percent(seconds.relative_spread()))
        }
        Outcome::Wrong { what, error, tolerance } => {
            format!("WRONG: {what} differs from the reference by {error:.1e}, at most {tolerance:.1e} is rounding")
        }
        Outcome::Failed { message } => format!("FAILED: {message}"),
        Outcome::Skipped { reason } => format!("skipped: {reason}"),
    }
}

/// The cells of a row: what it is, then its numbers.
pub(super) fn cells(results: &MatrixResults, row: &Row) -> [String; 8] {
    let key = &row.key;
    let sizes: Vec<String> = key.sizes.iter().map(|(name, size)| format!("{name} {size}")).collect();
    let name = format!("{} {}", key.subject, key.pass);
    let place = format!("{}; {}", key.what, sizes.join(", "));
    let Some(timing) = row.timing() else {
        let none = String::new;
        return [key.backend.clone(), name, key.format.clone(), place, outcome_words(row), none(), none(), none()];
    };
    let rate = row.units_per_s().map_or_else(String::new, |rate| format!("{} {}/s", si(rate), row.work.unit));
    let share = results.roofline_share(row).filter(|_| has_roofline(row)).map_or_else(String::new, percent);
    let flops =
        row.flops_per_s().filter(|&rate| rate > 0.0).map_or_else(String::new, |rate| format!("{}FLOP/s", si(rate)));
    let median = seconds_text(timing.seconds.median);
    let time = format!("{median} ± {}", percent(0.5 * timing.seconds.relative_spread()));
    [key.backend.clone(), name, key.format.clone(), place, time, rate, flops, share]
}

/// Names of the columns of [`cells`].
pub(super) const COLUMNS: [&str; 8] =
    ["backend", "operation", "format", "sizes", "time", "throughput", "rate", "of the roofline"];

/// Whether the device's peaks bound a row: not what runs on the host or between ranks.
pub(super) fn has_roofline(row: &Row) -> bool {
    !matches!(row.key.subject.as_str(), "data" | "collective" | "generation") && row.work.flops > 0.0
}

/// The table for a terminal, with peaks before it and notes after it.
pub(super) fn terminal(results: &MatrixResults) -> String {
    let rows: Vec<[String; 8]> = results.rows.iter().map(|row| cells(results, row)).collect();
    let width = |column: usize| {
        let lengths = rows.iter().map(|row| row[column].chars().count());
        lengths.chain([COLUMNS[column].len()]).max().unwrap_or(0).min(60)
    };
    let widths: [usize; 8] = std::array::from_fn(width);
    let mut out = format!("bench-matrix of {}, {:.0} s\n", results.date, results.seconds);
    for line in results.machine.iter().chain(&peak_lines(results)) {
        add(&mut out, format_args!("  {line}\n"));
    }
    let mut line = |cells: [&str; 8]| {
        let cells: Vec<String> = cells.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        add(&mut out, format_args!("{}\n", cells.join("  ").trim_end()));
    };
    line(COLUMNS);
    for row in &rows {
        line(std::array::from_fn(|column| row[column].as_str()));
    }
    for note in summary_notes(results) {
        add(&mut out, format_args!("{note}\n"));
    }
    if let Some(peers) = &results.peers {
        add(&mut out, format_args!("\n{}", peer_text(peers, results)));
    }
    out
}

/// The results as Markdown.
pub(super) fn markdown(results: &MatrixResults) -> String {
    let kind = if results.quick { "short run" } else { "whole run" };
    let mut out = format!(
        "# bench-matrix, {}\n\n{kind}, {:.0} s, version {}.\n\n",
        results.date, results.seconds, results.program
    );
    for line in results.machine.iter().chain(&peak_lines(results)).chain(&summary_notes(results)) {
        add(&mut out, format_args!("- {line}\n"));
    }
    for backend in &results.backends {
        add(&mut out, format_args!("\n## {}: {}\n\n", backend.backend, backend.device));
        add(&mut out, format_args!("| {} |\n|---|---|---|---|---:|---:|---:|---:|\n", COLUMNS.join(" | ")));
        for row in results.rows.iter().filter(|row| row.key.backend == backend.backend) {
            add(&mut out, format_args!("| {} |\n", cells(results, row).map(|cell| cell.replace('|', "/")).join(" | ")));
        }
    }
    if let Some(peers) = &results.peers {
        add(&mut out, format_args!("\n## Other programs\n\n{}", peer_markdown(peers, results)));
    }
    out
}

/// The measured peaks, one line per backend.
pub(super) fn peak_lines(results: &MatrixResults) -> Vec<String> {
    let line = |backend: &BackendResults| {
        let rates: Vec<String> =
            backend.flops_per_s.iter().map(|(format, &rate)| format!("{format} {}FLOP/s", si(rate))).collect();
        let (name, device, bytes) = (&backend.backend, &backend.device, si(backend.bytes_per_s));
        format!("{name} on {device}: measured peaks {}, memory {bytes}B/s", rates.join(", "))
    };
    results.backends.iter().map(line).collect()
}

/// The notes of the run, and what follows from its rows.
pub(super) fn summary_notes(results: &MatrixResults) -> Vec<String> {
    let (wrong, failed) = (results.wrong().count(), results.failed().count());
    let skipped = results.rows.iter().filter(|row| matches!(row.outcome, Outcome::Skipped { .. })).count();
    let timed = results.rows.len() - wrong - failed - skipped;
    let mut notes = vec![format!(
        "{timed} cases were right and timed, {wrong} were wrong, {failed} failed, {skipped} were skipped."
    )];
    notes.extend(conditions_note(results));
    notes.extend(results.notes.iter().cloned());
    notes
}

/// The card's clocks and power over the run, and what held it down.
fn conditions_note(results: &MatrixResults) -> Option<String> {
    let conditions: Vec<_> = results.rows.iter().filter_map(|row| row.timing()?.conditions.as_ref()).collect();
    if conditions.is_empty() {
        return None;
    }
    let range = |values: Vec<u32>| match (values.iter().min(), values.iter().max()) {
        (Some(min), Some(max)) => format!("{min} to {max}"),
        _ => "not reported".to_owned(),
    };
    let clocks = range(conditions.iter().filter_map(|card| card.sm_mhz).collect());
    let memory = range(conditions.iter().filter_map(|card| card.memory_mhz).collect());
    let watts = range(conditions.iter().filter_map(|card| card.power_mw).map(|power| power / 1000).collect());
    let heat = range(conditions.iter().filter_map(|card| card.temperature_c).collect());
    let mut reasons: Vec<&str> =
        conditions.iter().flat_map(|card| &card.throttled_by).map(|reason| reason.name()).collect();
    reasons.sort_unstable();
    reasons.dedup();
    let held =
        if reasons.is_empty() { "never throttled".to_owned() } else { format!("throttled by {}", reasons.join(", ")) };
    Some(format!(
        "Card after each case: multiprocessors {clocks} MHz, memory {memory} MHz, {watts} W, {heat} degrees Celsius, {held}."
    ))
}

#[cfg(test)]
mod tests {
    use super::super::results::tests::results;
    use super::*;

    #[test]
    fn the_table_names_every_row_and_what_went_wrong() {
        let table = terminal(&results());
        for part in [
            "gemm forward",
            "a <b> & c; tokens 64",
            "WRONG: the result",
            "FAILED: no <memory>",
            "skipped: no time",
            "4 cases were right and timed, 1 were wrong, 1 failed, 1 were skipped",
            "a note",
            "f32 100 GFLOP/s",
        ] {
            assert!(table.contains(part), "{part:?} is not in {table}");
        }
        assert!(table.contains("100 %"), "a row on the roofline: {table}");
    }

    #[test]
    fn markdown_has_a_table_per_backend_with_as_many_cells_as_columns() {
        let text = markdown(&results());
        let tables = text.lines().filter(|line| line.starts_with('|'));
        let counts: Vec<usize> = tables.map(|line| line.matches('|').count()).collect();
        assert_eq!(counts.len(), 7 + 2 * 2);
        assert!(counts.iter().all(|&count| count == COLUMNS.len() + 1), "{counts:?}");
    }

    #[test]
    fn clocks_power_and_throttling_of_the_card_are_noted() {
        let mut results = results();
        assert_eq!(conditions_note(&results), None);
        if let Outcome::Timed(timing) = &mut results.rows[0].outcome {
            timing.conditions = Some(firebrick_hwprofile::nvidia::CardConditions {
                sm_mhz: Some(1980),
                memory_mhz: Some(2619),
                power_mw: Some(650_000),
                temperature_c: Some(50),
                throttled_by: [firebrick_hwprofile::usage::Throttle::PowerCap].into(),
            });
        }
        let note = conditions_note(&results).unwrap();
        assert!(
            note.contains("1980 to 1980 MHz") && note.contains("650 to 650 W") && note.contains("power cap"),
            "{note}"
        );
    }
}
