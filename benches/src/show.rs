//! Shows the results: a table for the terminal, Markdown, one HTML page, and a roofline per backend as SVG.
//!
//! Trade-off: numbers have three digits and plots do not zoom; the exact numbers are in `matrix.json`, those of a point in its tooltip.

use std::collections::BTreeMap;

use firebrick_train::page::{Block, Column, Page, Table};
use firebrick_train::plot::{Axis, Plot, Reference, Scale, Series};

use crate::numbers::{percent, round, seconds_text, si};
use crate::results::{BackendResults, Key, MatrixResults, Outcome, PeerResults, PeerRow, Row, Timing};

const STYLE: &str = "\
tr.bad td:nth-child(5) { color: var(--c1); font-weight: 600 } tr.skipped td { color: var(--faint) }
tr.bad td:nth-child(5), tr.skipped td:nth-child(5) { text-align: left; white-space: normal }
tr.slower td.bar div { background: var(--c1) }
";

/// The name of the memory traffic peak among those of other programs.
const MEMORY: &str = "memory";

/// Subjects that share a color, with its name in the key.
const FAMILIES: [(&str, &[&str]); 7] = [
    ("GEMM", &["gemm"]),
    ("attention", &["attention"]),
    ("norm, rotary, gated", &["norm", "rotary", "gated"]),
    ("cross entropy", &["cross_entropy"]),
    ("quantize, dequantize", &["quantize", "dequantize"]),
    ("optimizer", &["optimizer"]),
    ("training step", &["step"]),
];

/// Formats a line about a case that has just run.
pub(crate) fn progress(row: &Row) -> String {
    format!("{}: {}", row.key, outcome_words(row))
}

/// Formats a line about another program's case.
pub(crate) fn peer_progress(row: &PeerRow) -> String {
    format!("{}: {} {}", row.key, row.peer, seconds_text(row.seconds.median))
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

/// Formats the results for a terminal.
pub(crate) fn terminal(results: &MatrixResults) -> String {
    let mut out = format!("bench-matrix of {}, {:.0} s\n", results.date, results.seconds);
    out.extend(results.machine.iter().chain(&peak_lines(results)).map(|line| format!("  {line}\n")));
    out.push_str(&as_text(&case_table(results, |_| true)));
    out.extend(summary_notes(results).iter().map(|note| note.clone() + "\n"));
    if let Some(peers) = &results.peers {
        let lines: String = introduction(peers, results).iter().map(|line| line.clone() + "\n").collect();
        out.push_str(&format!("\n{lines}{}", as_text(&peer_table(peers, results))));
    }
    out
}

/// Formats the results as Markdown.
pub(crate) fn markdown(results: &MatrixResults) -> String {
    let kind = if results.quick { "short run" } else { "whole run" };
    let MatrixResults { date, seconds, program, .. } = results;
    let mut out = format!("# bench-matrix, {date}\n\n{kind}, {seconds:.0} s, version {program}.\n\n");
    let lines = |lines: &[String]| lines.iter().map(|line| format!("- {line}\n")).collect::<String>();
    out.push_str(&lines(&[results.machine.clone(), peak_lines(results), summary_notes(results)].concat()));
    for BackendResults { backend, device, .. } in &results.backends {
        let table = case_table(results, |row| row.key.backend == *backend);
        out.push_str(&format!("\n## {backend}: {device}\n\n{}", as_markdown(&table)));
    }
    if let Some(peers) = &results.peers {
        let (lines, table) = (lines(&introduction(peers, results)), peer_table(peers, results));
        out.push_str(&format!("\n## Other programs\n\n{lines}\n{}", as_markdown(&table)));
    }
    out
}

/// Formats the results as one self-contained HTML page.
pub(crate) fn page(results: &MatrixResults) -> String {
    let kind = if results.quick { "Short run" } else { "Whole run" };
    let MatrixResults { date, seconds, program, .. } = results;
    let text = |text: &str| Block::Text(text.to_owned());
    let title = "Every time is of a result that was compared with its reference in this run.";
    let figures = |plots: Vec<Plot>| Block::Plots(plots.iter().map(Plot::figure).collect());
    let mut blocks = vec![
        Block::Text(format!("{date}. {kind} of {seconds:.0} s, version {program}. {title}")),
        Block::List([results.machine.clone(), summary_notes(results)].concat()),
        Block::heading("Rooflines"),
        text(
            "The lines are peaks that were measured in this run: a streaming pass, and the fastest GEMM of each format.",
        ),
        figures(results.backends.iter().map(|backend| roofline(results, backend)).collect()),
        Block::heading("Cost against work"),
        figures(costs(results)),
    ];
    let shared = shared_table(results);
    if !shared.rows.is_empty() {
        let what = "A longer bar is faster: throughput relative to the fastest backend.";
        blocks.extend([Block::heading("Backends on the same work"), text(what), Block::Table(shared)]);
    }
    if let Some(peers) = &results.peers {
        let what = "Its time over ours: above 1 Firebrick is faster. Bars are logarithmic, from a tenth to ten times.";
        blocks.extend([Block::heading("Other programs"), Block::List(introduction(peers, results)), text(what)]);
        blocks.push(Block::Table(peer_table(peers, results)));
    }
    blocks.extend([Block::heading("All cases"), Block::Table(case_table(results, |_| true))]);
    Page { name: "bench-matrix".to_owned(), what: date.clone(), style: STYLE, blocks }.render()
}

/// Builds the table of cases, one row each: its description, then its numbers.
fn case_table(results: &MatrixResults, wanted: impl Fn(&Row) -> bool) -> Table {
    let texts = ["backend", "operation", "format", "sizes"].map(|name| (name, Column::Text));
    let numbers = ["time", "throughput", "rate", "of the roofline"].map(|name| (name, Column::Number));
    let row = |row: &Row| {
        let class = match row.outcome {
            Outcome::Timed(_) => "",
            Outcome::Skipped { .. } => "skipped",
            Outcome::Wrong { .. } | Outcome::Failed { .. } => "bad",
        };
        (class, Vec::from(cells(results, row)))
    };
    Table { columns: [texts, numbers].concat(), rows: results.rows.iter().filter(|row| wanted(row)).map(row).collect() }
}

fn cells(results: &MatrixResults, row: &Row) -> [String; 8] {
    let Key { backend, subject, pass, what, format, sizes } = &row.key;
    let sizes: Vec<String> = sizes.iter().map(|(name, size)| format!("{name} {size}")).collect();
    let (backend, format) = (backend.clone(), format.clone());
    let (name, place) = (format!("{subject} {pass}"), format!("{what}; {}", sizes.join(", ")));
    let Some(Timing { seconds, .. }) = row.timing() else {
        return [backend, name, format, place, outcome_words(row), String::new(), String::new(), String::new()];
    };
    let time = format!("{} ± {}", seconds_text(seconds.median), percent(0.5 * seconds.relative_spread()));
    let throughput = format!("{} {}/s", si(row.work.units / seconds.median), row.work.unit);
    let rate =
        row.flops_per_s().filter(|&rate| rate > 0.0).map_or_else(String::new, |rate| format!("{}FLOP/s", si(rate)));
    let share = results.roofline_share(row).filter(|_| row.has_roofline()).map_or_else(String::new, percent);
    [backend, name, format, place, time, throughput, rate, share]
}

/// Builds the table of the same work on several backends.
fn shared_table(results: &MatrixResults) -> Table {
    let mut cases: BTreeMap<Key, Vec<(&Row, f64)>> = BTreeMap::new();
    for row in &results.rows {
        let anywhere = Key { backend: String::new(), ..row.key.clone() };
        cases.entry(anywhere).or_default().extend(row.timing().map(|timing| (row, timing.seconds.median)));
    }
    let mut rows = Vec::new();
    for (key, timed) in cases.into_iter().filter(|(_, timed)| timed.len() > 1) {
        let fastest = timed.iter().map(|(_, median)| *median).fold(f64::INFINITY, f64::min);
        for (index, (row, median)) in timed.into_iter().enumerate() {
            let name = if index == 0 { key.to_string().trim_start_matches('/').to_owned() } else { String::new() };
            let (share, bar) = (fastest / median, format!("0 {:.1}", 100.0 * fastest / median));
            rows.push(("", vec![name, row.key.backend.clone(), bar, seconds_text(median), percent(share)]));
        }
    }
    let kinds = [Column::Text, Column::Text, Column::Bar, Column::Number, Column::Number];
    Table { columns: ["case", "backend", "", "time", "of the fastest"].into_iter().zip(kinds).collect(), rows }
}

/// Builds the table of other programs next to ours.
fn peer_table(peers: &PeerResults, results: &MatrixResults) -> Table {
    let row = |peer: &PeerRow| {
        let ours = results.rows.iter().find(|row| row.key == peer.key)?.timing()?.seconds.median;
        let ratio = peer.seconds.median / ours;
        // A tenth is the left end, ten times the right one, 1 the middle.
        let end = 50.0 + 50.0 * ratio.log10().clamp(-1.0, 1.0);
        let bar = format!("{:.1} {:.1}", end.min(50.0), (end - 50.0).abs());
        let times = [peer.seconds.median, ours].map(seconds_text);
        let numbers = times.into_iter().chain([format!("{ratio:.2}"), bar]);
        let class = if ratio < 1.0 { "slower" } else { "" };
        Some((class, [peer.key.to_string(), peer.peer.clone()].into_iter().chain(numbers).collect::<Vec<_>>()))
    };
    let texts = ["case", "program"].map(|name| (name, Column::Text));
    let numbers = ["its time", "our time", "its time / ours"].map(|name| (name, Column::Number));
    let columns = texts.into_iter().chain(numbers).chain([("", Column::Bar)]).collect();
    Table { columns, rows: peers.rows.iter().filter_map(row).collect() }
}

fn introduction(peers: &PeerResults, results: &MatrixResults) -> Vec<String> {
    let versions: Vec<String> = peers.versions.iter().map(|(name, version)| format!("{name} {version}")).collect();
    let found = (!versions.is_empty()).then(|| format!("Other programs on {}: {}.", peers.device, versions.join(", ")));
    found.into_iter().chain(peak_ratios(peers, results)).chain(peers.notes.iter().cloned()).collect()
}

/// Builds the table of PyTorch's peaks over ours.
fn peak_ratios(peers: &PeerResults, results: &MatrixResults) -> Option<String> {
    let backend = results.compared_backend()?;
    let ratio = |(name, &theirs): (&String, &f64)| {
        let (ours, unit) = match backend.flops_per_s.get(name) {
            Some(&ours) => (ours, "FLOP/s"),
            None => (Some(backend.bytes_per_s).filter(|_| name == MEMORY)?, "B/s"),
        };
        Some(format!("{name} {:.2} ({}{unit}, ours {}{unit})", theirs / ours, si(theirs), si(ours)))
    };
    let ratios: Vec<String> = peers.peaks.iter().filter_map(ratio).collect();
    (!ratios.is_empty()).then(|| format!("PyTorch's peaks over ours on {}: {}.", backend.backend, ratios.join(", ")))
}

/// Returns head and rows as text, without the bars.
fn texts(table: &Table) -> Vec<Vec<&str>> {
    let shown: Vec<usize> = (0..table.columns.len()).filter(|&column| table.columns[column].1 != Column::Bar).collect();
    let head = shown.iter().map(|&column| table.columns[column].0).collect();
    let rows = table.rows.iter().map(|(_, cells)| shown.iter().map(|&column| cells[column].as_str()).collect());
    std::iter::once(head).chain(rows).collect()
}

fn as_text(table: &Table) -> String {
    let rows = texts(table);
    let length = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0).min(60);
    let widths: Vec<usize> = (0..rows[0].len()).map(length).collect();
    let line = |row: &Vec<&str>| {
        let cells: Vec<String> = row.iter().zip(&widths).map(|(cell, &width)| format!("{cell:<width$}")).collect();
        cells.join("  ").trim_end().to_owned() + "\n"
    };
    rows.iter().map(line).collect()
}

fn as_markdown(table: &Table) -> String {
    let line = |row: &Vec<&str>| {
        format!("|{}\n", row.iter().map(|cell| format!(" {} |", cell.replace('|', "/"))).collect::<String>())
    };
    let mut lines: Vec<String> = texts(table).iter().map(line).collect();
    let rule = table.columns.iter().map(|(_, kind)| match kind {
        Column::Text => "---|",
        Column::Number => "---:|",
        Column::Bar => "",
    });
    lines.insert(1, format!("|{}\n", rule.collect::<String>()));
    lines.concat()
}

/// Formats the measured peaks, one line per backend.
fn peak_lines(results: &MatrixResults) -> Vec<String> {
    let line = |backend: &BackendResults| {
        let rates: Vec<String> =
            backend.flops_per_s.iter().map(|(format, &rate)| format!("{format} {}FLOP/s", si(rate))).collect();
        let (name, device, bytes) = (&backend.backend, &backend.device, si(backend.bytes_per_s));
        format!("{name} on {device}: measured peaks {}, memory {bytes}B/s", rates.join(", "))
    };
    results.backends.iter().map(line).collect()
}

/// Returns the notes of the run, and those that follow from its rows.
fn summary_notes(results: &MatrixResults) -> Vec<String> {
    let [timed, wrong, failed, skipped] = results.counts();
    let counts =
        format!("{timed} cases were right and timed, {wrong} were wrong, {failed} failed, {skipped} were skipped.");
    std::iter::once(counts).chain(conditions_note(results)).chain(results.notes.iter().cloned()).collect()
}

/// Formats the card's clocks and power over the run, and the reasons for low clocks.
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

/// Builds the roofline of a backend as a separate file.
pub(crate) fn roofline_file(results: &MatrixResults, backend: &BackendResults) -> String {
    let plot = roofline(results, backend);
    Plot { title: format!("{} ({})", plot.title, results.date), ..plot }.file()
}

/// Plots every case of a backend as a point, below the measured peaks.
fn roofline(results: &MatrixResults, backend: &BackendResults) -> Plot {
    let kind = if backend.on_cpu { " (computes on the processor)" } else { "" };
    let series = |(name, subjects): (&str, &[&str])| {
        let is_ours = |row: &&Row| row.key.backend == backend.backend && subjects.contains(&row.key.subject.as_str());
        let point = |row: &Row| {
            let rate = row.flops_per_s().filter(|_| row.has_roofline())?;
            let share = results.roofline_share(row).map_or_else(String::new, percent);
            let note = format!("{}\n{}FLOP/s, {share} of the roofline", row.key, si(rate));
            Some(([row.work.flops / row.work.bytes, rate], note))
        };
        let (points, notes) = results.rows.iter().filter(is_ours).filter_map(point).unzip();
        Series { name: name.to_owned(), points, notes }
    };
    let mut peaks: Vec<(&String, f64)> = backend.flops_per_s.iter().map(|(format, &peak)| (format, peak)).collect();
    peaks.sort_by(|a, b| b.1.total_cmp(&a.1));
    let line = |(format, peak): (&String, f64)| Reference::Roofline {
        name: format!("{format} {}FLOP/s", si(peak)),
        slope: backend.bytes_per_s,
        peak,
    };
    let label = |value| round(&format!("{}FLOP/s", si(value)));
    Plot {
        title: format!("Roofline of {} on {}{kind}", backend.backend, backend.device),
        unit: "operations per second".to_owned(),
        size: [760.0, 430.0],
        x: Axis { title: "operations per byte".to_owned(), scale: Scale::Log, label: |value| round(&si(value)) },
        y: Axis { title: String::new(), scale: Scale::Log, label },
        series: FAMILIES.map(series).into(),
        references: peaks.into_iter().map(line).collect(),
    }
}

/// Plots the time against the size of the work, one plot per sweep.
fn costs(results: &MatrixResults) -> Vec<Plot> {
    type Lines = BTreeMap<String, Vec<[f64; 2]>>;
    let mut sweeps: BTreeMap<(&str, &str), Lines> = BTreeMap::new();
    for row in &results.rows {
        let (Some(axis), Some(timing)) = (&row.axis, row.timing()) else { continue };
        let Key { backend, subject, pass, format, .. } = &row.key;
        // Rows of attention have the same number of tokens at each length.
        let (per, unit) = if axis.name == "row length" { (row.work.units, " (per token)") } else { (1.0, "") };
        let lines = sweeps.entry((subject.as_str(), axis.name.as_str())).or_default();
        let line = lines.entry(format!("{backend} {pass} {format}{unit}")).or_default();
        line.push([axis.value, timing.seconds.median / per]);
    }
    let series = |(name, mut points): (String, Vec<[f64; 2]>)| {
        points.sort_by(|a, b| a[0].total_cmp(&b[0]));
        points.dedup_by(|a, b| a[0] == b[0]);
        (points.len() > 1).then_some(Series { name, points, notes: Vec::new() })
    };
    let plot = |((subject, axis), lines): ((&str, &str), Lines)| Plot {
        title: format!("{}: time against {axis}", subject.replace('_', " ")),
        unit: String::new(),
        size: [760.0, 430.0],
        x: Axis { title: axis.to_owned(), scale: Scale::Log, label: |value| round(&si(value)) },
        y: Axis { title: String::new(), scale: Scale::Log, label: |value| round(&seconds_text(value)) },
        series: lines.into_iter().filter_map(series).collect(),
        references: Vec::new(),
    };
    sweeps.into_iter().map(plot).collect()
}

#[cfg(test)]
mod tests {
    use firebrick_hwprofile::nvidia::CardConditions;
    use firebrick_hwprofile::usage::Throttle;
    use firebrick_train::bench::Spread;

    use super::*;
    use crate::results::tests::results;

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
        assert!(counts.iter().all(|&count| count == 9), "{counts:?}");
        assert!(text.contains("|---|---|---|---|---:|---:|---:|---:|\n"), "{text}");
    }

    #[test]
    fn the_page_has_rooflines_sweeps_bars_and_every_row() {
        let results = results();
        let page = page(&results);
        assert_eq!(page.matches("aria-label=\"Roofline of").count(), 2);
        assert!(page.contains("gemm: time against tokens") && page.contains("flex forward f32"));
        // The case of 64 tokens runs on flex and on wgpu, which takes ten times as long.
        assert!(page.contains("width: 100.0%") && page.contains("width: 10.0%"), "{page}");
        // Two tables with a head; the same work on two backends; all cases.
        assert_eq!(page.matches("<tr").count(), 2 + 2 + results.rows.len());
        assert!(page.contains("WRONG: the result") && page.contains("FAILED: no &lt;memory&gt;"));
        for outside in ["http", "//", "src=", "href=", "url(", "@import", "<script", "<link"] {
            assert!(!page.contains(outside), "{outside:?} in the page");
        }
    }

    #[test]
    fn every_timed_case_is_a_point_of_its_backend() {
        let results = results();
        let svg = |index: usize| roofline(&results, &results.backends[index]).svg();
        assert_eq!((svg(0).matches("<circle").count(), svg(1).matches("<circle").count()), (3, 1));
        assert!(svg(0).contains("f32 100 GFLOP/s") && svg(0).contains("a &lt;b&gt; &amp; c"), "{}", svg(0));
        assert!(roofline_file(&results, &results.backends[0]).contains(">GEMM<"));
    }

    #[test]
    fn clocks_power_and_throttling_of_the_card_are_noted() {
        let mut results = results();
        assert_eq!(conditions_note(&results), None);
        if let Outcome::Timed(timing) = &mut results.rows[0].outcome {
            timing.conditions = Some(CardConditions {
                sm_mhz: Some(1980),
                memory_mhz: Some(2619),
                power_mw: Some(650_000),
                temperature_c: Some(50),
                throttled_by: [Throttle::PowerCap].into(),
            });
        }
        let note = conditions_note(&results).unwrap();
        for part in ["1980 to 1980 MHz", "650 to 650 W", "power cap"] {
            assert!(note.contains(part), "{note}");
        }
    }

    #[test]
    fn other_programs_are_their_time_and_their_peaks_over_ours() {
        let mut results = results();
        let row =
            PeerRow { key: results.rows[0].key.clone(), peer: "pytorch".to_owned(), seconds: Spread::of(vec![2e-2]) };
        let peaks = [("f32".to_owned(), 9e10), (MEMORY.to_owned(), 1.1e10), ("bf16".to_owned(), 1.0)].into();
        let peers = PeerResults { rows: vec![row], peaks, notes: vec!["no unsloth".to_owned()], ..Default::default() };
        let line = peak_ratios(&peers, &results).unwrap();
        assert!(line.contains("on flex: f32 0.90 (90.0 GFLOP/s, ours 100 GFLOP/s)"), "{line}");
        assert!(line.ends_with("memory 1.10 (11.0 GB/s, ours 10.0 GB/s)."), "a format that only one has: {line}");
        assert_eq!(peak_ratios(&PeerResults::default(), &results), None);
        results.peers = Some(peers);
        let (text, markdown, page) = (terminal(&results), markdown(&results), page(&results));
        assert!(
            markdown.contains("| pytorch | 20.0 ms | 10.0 ms | 2.00 |") && text.contains("20.0 ms   10.0 ms"),
            "{text}"
        );
        assert!(page.contains("margin-left: 50.0%; width: 15.1%") && page.contains("<li>no unsloth</li>"), "{page}");
        assert!(text.contains("no unsloth") && markdown.contains("- no unsloth\n"));
    }
}
