//! The results as one self-contained HTML page: styles and drawings inside, no script, nothing that is fetched.
//!
//! Trade-off: the plots do not zoom; each point has its numbers as a tooltip, and the table below has them all.

use std::collections::BTreeMap;

use super::key::Key;
use super::numbers::{percent, seconds_text};
use super::peer_text::peer_html;
use super::plot::{COLORS, DRAWING, Series, cost, legend, roofline};
use super::results::{MatrixResults, Outcome, Row};
use super::text::{COLUMNS, cells, summary_notes};
use crate::html::{add, escape, head};

const STYLE: &str = "\
h1 { font-size: 1.6rem } h2 { font-size: 1.2rem; margin-top: 2.2rem } h3 { font-size: 1rem; font-weight: 600 }
ul { padding-left: 1.2rem } li { overflow-wrap: anywhere }
.scroll { overflow-x: auto } .scroll > svg { min-width: 30rem; width: 100%; height: auto; display: block }
.grid2 { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 32rem), 1fr)); gap: 1.2rem }
.grid2 > * { min-width: 0 }
.legend { display: flex; flex-wrap: wrap; gap: 0.2rem 1rem; font-size: 13px; padding: 0; list-style: none }
.legend i { display: inline-block; width: 0.7rem; height: 0.7rem; border-radius: 50%; margin-right: 0.35rem }
.bars { display: grid; grid-template-columns: max-content 1fr max-content; gap: 0.1rem 0.6rem; align-items: center; font-size: 13px }
.bars .case { grid-column: 1 / -1; margin-top: 0.5rem; color: var(--faint); overflow-wrap: anywhere }
.bars svg { width: 100%; height: 0.8rem; display: block }
table { font-size: 13px } th { border-bottom: 1px solid var(--ink) } td { border-bottom: 1px solid var(--edge) }
td:nth-child(n+5), th:nth-child(n+5) { text-align: right; white-space: nowrap }
tr.bad td:nth-child(5) { color: var(--c1); font-weight: 600; text-align: left; white-space: normal }
tr.skipped td { color: var(--faint) } tr.skipped td:nth-child(5) { text-align: left; white-space: normal }
";

pub(super) fn render(results: &MatrixResults) -> String {
    let kind = if results.quick { "Short run" } else { "Whole run" };
    let mut out = head("bench-matrix", &results.date, &[COLORS, DRAWING, STYLE].concat());
    add(
        &mut out,
        format_args!(
            "<p>{}. {kind} of {:.0} s, version {}. Every time is of a result that was compared with its reference in this run.</p>\n<ul>\n",
            results.date, results.seconds, results.program
        ),
    );
    for line in results.machine.iter().chain(&summary_notes(results)) {
        add(&mut out, format_args!("<li>{}</li>\n", escape(line)));
    }
    out.push_str("</ul>\n");
    rooflines(&mut out, results);
    costs(&mut out, results);
    bars(&mut out, results);
    if let Some(peers) = &results.peers {
        add(&mut out, format_args!("<h2>Other programs</h2>\n{}", peer_html(peers, results)));
    }
    table(&mut out, results);
    out.push_str("</html>\n");
    out
}

fn rooflines(out: &mut String, results: &MatrixResults) {
    out.push_str("<h2>Rooflines</h2>\n<p>The lines are peaks that were measured in this run: a streaming pass, and the fastest GEMM of each format.</p>\n");
    out.push_str("<ul class=\"legend\">\n");
    for (color, name) in legend(&results.rows) {
        add(out, format_args!("<li><i style=\"background: var(--c{color})\"></i>{name}</li>\n"));
    }
    out.push_str("</ul>\n<div class=\"grid2\">\n");
    for backend in &results.backends {
        if let Some(drawing) = roofline(results, backend) {
            let (name, device) = (escape(&backend.backend), escape(&backend.device));
            let kind = if backend.on_cpu { " (computes on the processor)" } else { "" };
            add(
                out,
                format_args!("<div><h3>{name}: {device}{kind}</h3>\n<div class=\"scroll\">{drawing}</div></div>\n"),
            );
        }
    }
    out.push_str("</div>\n");
}

/// Rows of a sweep, by what is swept and what else differs.
type Sweeps<'a> = BTreeMap<(String, String), BTreeMap<String, Vec<(f64, &'a Row)>>>;

fn costs(out: &mut String, results: &MatrixResults) {
    let mut sweeps: Sweeps<'_> = BTreeMap::new();
    for row in results.rows.iter().filter(|row| row.timing().is_some()) {
        let Some(axis) = &row.axis else { continue };
        let Key { backend, subject, pass, format, .. } = &row.key;
        let lines = sweeps.entry((subject.clone(), axis.name.clone())).or_default();
        lines.entry(format!("{backend} {pass} {format}")).or_default().push((axis.value, row));
    }
    out.push_str("<h2>Cost against work</h2>\n<div class=\"grid2\">\n");
    for ((subject, axis), lines) in sweeps {
        let series: Vec<Series> = lines.into_iter().filter_map(|(name, rows)| line(name, rows)).collect();
        let title = format!("{}: time against {axis}", subject.replace('_', " "));
        let Some(drawing) = cost(&title, &axis, &series) else { continue };
        add(out, format_args!("<div><h3>{title}</h3>\n<div class=\"scroll\">{drawing}</div>\n<ul class=\"legend\">\n"));
        for (index, series) in series.iter().enumerate() {
            let color = index % 8;
            add(out, format_args!("<li><i style=\"background: var(--c{color})\"></i>{}</li>\n", escape(&series.name)));
        }
        out.push_str("</ul></div>\n");
    }
    out.push_str("</div>\n");
}

/// The times of a sweep; attention's are per token, since its rows hold the same tokens at each length. `None` for a single point.
fn line(name: String, mut rows: Vec<(f64, &Row)>) -> Option<Series> {
    rows.sort_by(|a, b| a.0.total_cmp(&b.0));
    rows.dedup_by(|a, b| a.0 == b.0);
    let time = |row: &Row| {
        let seconds = row.timing().map_or(f64::NAN, |timing| timing.seconds.median);
        if row.axis.as_ref().is_some_and(|axis| axis.name == "row length") { seconds / row.work.units } else { seconds }
    };
    let points: Vec<[f64; 2]> = rows.iter().map(|(value, row)| [*value, time(row)]).collect();
    let unit = if rows.iter().any(|(_, row)| row.axis.as_ref().is_some_and(|axis| axis.name == "row length")) {
        " (per token)"
    } else {
        ""
    };
    (points.len() > 1).then(|| Series { name: name + unit, points })
}

/// The same work on several backends.
fn bars(out: &mut String, results: &MatrixResults) {
    let mut cases: BTreeMap<String, Vec<&Row>> = BTreeMap::new();
    for row in results.rows.iter().filter(|row| row.timing().is_some()) {
        let anywhere = Key { backend: String::new(), ..row.key.clone() };
        cases.entry(anywhere.to_string()).or_default().push(row);
    }
    cases.retain(|_, rows| rows.len() > 1);
    if cases.is_empty() {
        return;
    }
    out.push_str("<h2>Backends on the same work</h2>\n<p>A longer bar is faster: throughput relative to the fastest backend.</p>\n<div class=\"bars\">\n");
    for (name, rows) in cases {
        add(out, format_args!("<div class=\"case\">{}</div>\n", escape(name.trim_start_matches('/'))));
        let median = |row: &Row| row.timing().map_or(f64::INFINITY, |timing| timing.seconds.median);
        let fastest = rows.iter().map(|row| median(row)).fold(f64::INFINITY, f64::min);
        for row in rows {
            let share = fastest / median(row);
            let color = results.backends.iter().position(|backend| backend.backend == row.key.backend).unwrap_or(0);
            let bar =
                format!("<svg><rect width=\"{:.1}%\" height=\"100%\" fill=\"var(--c{color})\"/></svg>", 100.0 * share);
            let text = format!("{} ({})", seconds_text(median(row)), percent(share));
            add(out, format_args!("<span>{}</span>{bar}<span>{text}</span>\n", escape(&row.key.backend)));
        }
    }
    out.push_str("</div>\n");
}

fn table(out: &mut String, results: &MatrixResults) {
    out.push_str("<h2>All cases</h2>\n<div class=\"scroll\"><table>\n<tr>");
    for column in COLUMNS {
        add(out, format_args!("<th>{column}</th>"));
    }
    out.push_str("</tr>\n");
    for row in &results.rows {
        let class = match row.outcome {
            Outcome::Timed(_) => "",
            Outcome::Skipped { .. } => " class=\"skipped\"",
            Outcome::Wrong { .. } | Outcome::Failed { .. } => " class=\"bad\"",
        };
        let cells = cells(results, row).map(|cell| format!("<td>{}</td>", escape(&cell))).concat();
        add(out, format_args!("<tr{class}>{cells}</tr>\n"));
    }
    out.push_str("</table></div>\n");
}

#[cfg(test)]
mod tests {
    use super::super::results::tests::results;
    use super::*;

    /// Names of the elements that are open at the end; a wrong end tag is an error.
    fn still_open(page: &str) -> Result<Vec<String>, String> {
        let mut open = Vec::new();
        for tag in page.split('<').skip(1) {
            let inside = tag.split('>').next().ok_or("a tag without end")?;
            let name = inside.split_whitespace().next().unwrap_or_default().trim_end_matches('/');
            if inside.starts_with('!') || inside.ends_with('/') {
                continue;
            }
            match name.strip_prefix('/') {
                None => open.push(name.to_owned()),
                Some(ended) => {
                    let last = open.pop().ok_or_else(|| format!("</{ended}> without a beginning"))?;
                    if last != ended {
                        return Err(format!("<{last}> is ended by </{ended}>"));
                    }
                }
            }
        }
        Ok(open)
    }

    #[test]
    fn every_element_is_ended_in_order() {
        assert_eq!(still_open("<a><b/></a><!doctype html><c d=\"e\">").unwrap(), ["c"]);
        assert!(still_open("<a><b></a></b>").is_err());
        let page = render(&results());
        let body = page[page.find("<h1>").unwrap()..].trim_end_matches("</html>\n");
        assert_eq!(still_open(body), Ok(Vec::new()));
        assert_eq!(body.matches('<').count(), body.matches('>').count(), "text is escaped");
    }

    #[test]
    fn page_is_self_contained() {
        let page = render(&results());
        for outside in ["http", "//", "src=", "href=", "url(", "@import", "<script", "<link"] {
            assert!(!page.contains(outside), "{outside:?} in the page");
        }
    }

    #[test]
    fn page_has_rooflines_sweeps_bars_and_every_row() {
        let results = results();
        let page = render(&results);
        assert_eq!(page.matches("aria-label=\"Roofline of").count(), 2);
        assert!(page.contains("gemm: time against tokens") && page.contains("flex forward f32"));
        // 64 tokens on flex and on wgpu, which takes ten times as long.
        assert!(page.contains("width=\"100.0%\"") && page.contains("width=\"10.0%\""), "{page}");
        assert_eq!(page.matches("<tr").count(), 1 + results.rows.len());
        assert!(page.contains("WRONG: the result") && page.contains("FAILED: no &lt;memory&gt;"));
    }
}
