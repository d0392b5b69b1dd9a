//! The inspection as text: colors on a terminal, markers elsewhere.
//!
//! Trade-off: long rows are cut; the HTML page has them complete.

use std::fmt::Write;

use super::{Inspection, SampleRow, SetView};

/// How loss tokens are marked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    /// Green and dim, by ANSI escapes.
    Colors,
    /// Between ⟦ and ⟧.
    Markers,
}

/// Characters of a row that are shown.
const SHOWN_CHARACTERS: usize = 4000;
/// Characters of the longest bar.
const BAR: usize = 40;

pub(super) fn render(inspection: &Inspection, style: Style) -> String {
    let mut out = format!("{}\n", inspection.name);
    for (key, value) in &inspection.settings {
        line(&mut out, format_args!("  {key:<18} {}", visible(value)));
    }
    for set in &inspection.sets {
        describe(&mut out, set, style);
        if !set.rows.is_empty() {
            let legend = match style {
                Style::Colors => "\x1b[32mloss tokens\x1b[0m and \x1b[2mother tokens\x1b[0m",
                Style::Markers => "⟦loss tokens⟧ and other tokens",
            };
            line(&mut out, format_args!("\n  sample rows: {legend}"));
        }
        for row in &set.rows {
            sample(&mut out, row, set.row_len, style);
        }
        for (title, documents) in &set.documents {
            line(&mut out, format_args!("\n  {title}"));
            for document in documents {
                let (place, len, in_loss) = (visible(&document.place), document.len, document.loss_tokens);
                line(&mut out, format_args!("    {place}: {len} tokens, {in_loss} in the loss"));
            }
        }
    }
    out
}

fn line(out: &mut String, text: std::fmt::Arguments<'_>) {
    writeln!(out, "{text}").expect("a string takes any text");
}

fn describe(out: &mut String, set: &SetView, style: Style) {
    line(out, format_args!("\n{}: {}", set.title, set.location));
    for source in &set.sources {
        let (diagnosis, name) = (&source.diagnosis, visible(&source.name));
        let formats = format!("{}, {}", source.file_format, source.record_format);
        let (rows, kept, cut) = (diagnosis.rows, diagnosis.rows_kept, 100.0 * diagnosis.cut_share());
        line(
            out,
            format_args!("  {name} ({formats}): {rows} records, {kept} of them kept, {cut:.1} % of the tokens cut"),
        );
        for remark in &source.remarks {
            line(out, format_args!("  note: {}", visible(remark)));
        }
        if let Some(unread) = diagnosis.unread_line() {
            line(out, format_args!("  {unread}"));
        }
        if let Some(warning) = diagnosis.loss_warning() {
            line(out, format_args!("  WARNING: {warning}"));
        }
    }
    for row in set.findings() {
        let text =
            format!("{} records ({:.1} %) {}; first {}", row.count, row.percent, row.kind.description(), row.first);
        let color = if row.kind.is_drop() { "31" } else { "33" };
        match style {
            Style::Colors => line(out, format_args!("  \x1b[{color}m{}\x1b[0m", visible(&text))),
            Style::Markers => line(out, format_args!("  {}", visible(&text))),
        }
    }
    for (name, value) in set.measures() {
        line(out, format_args!("  {name:<18} {value}"));
    }
    line(out, format_args!("\n  tokens          documents"));
    let histogram = set.histogram();
    let max = histogram.iter().map(|&(_, _, documents)| documents).max().unwrap_or(1).max(1);
    for (from, to, documents) in histogram {
        let bar = "#".repeat((documents * BAR).div_ceil(max));
        line(out, format_args!("  {:<15} {documents:>9} {bar}", format!("{from} to {to}")));
    }
}

fn sample(out: &mut String, row: &SampleRow, row_len: usize, style: Style) {
    line(
        out,
        format_args!("\n  row {}: {} of {row_len} tokens, {} documents", row.number, row.tokens(), row.documents.len()),
    );
    let mut left = SHOWN_CHARACTERS;
    for (index, document) in row.documents.iter().enumerate() {
        if left == 0 {
            line(out, format_args!("  … and {} more documents", row.documents.len() - index));
            return;
        }
        line(
            out,
            format_args!(
                "  {}: {} tokens, {} in the loss",
                visible(&document.place),
                document.len,
                document.loss_tokens
            ),
        );
        for (in_loss, text) in document.runs() {
            let shown: String = text.chars().take(left).collect();
            left -= shown.chars().count();
            let cut = if shown.len() < text.len() { "…" } else { "" };
            let shown = visible(&shown);
            out.push_str(&match (style, in_loss) {
                (Style::Colors, true) => format!("\x1b[32m{shown}{cut}\x1b[0m"),
                (Style::Colors, false) => format!("\x1b[2m{shown}{cut}\x1b[0m"),
                (Style::Markers, true) => format!("⟦{shown}{cut}⟧"),
                (Style::Markers, false) => format!("{shown}{cut}"),
            });
        }
        out.push('\n');
    }
}

/// Text that a terminal shows instead of interpreting it.
fn visible(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '\n' | '\t' => out.push(character),
            _ if character.is_control() => out.extend(character.escape_default()),
            _ => out.push(character),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inspect::page::tests::inspection;

    #[test]
    fn markers_surround_exactly_the_loss_tokens() {
        let text = inspection("<b>&\u{1b}[31m").text(Style::Markers);
        assert!(text.contains("<b>&\\u{1b}[31m⟦answer⟧"), "{text}");
        assert!(!text.contains('\u{1b}'), "no escape may reach the terminal");
        for part in [
            "1200 records",
            "a.jsonl:3: 3 tokens",
            "Longest documents",
            "3 records (0.2 %) cut at",
            "2 documents",
            "(75.0 %)",
            "50.0 %",
            "3 to 3",
            "4 to 4",
            "  keys not read: functions (20 rows), a\\u{1b} (3 rows)\n",
        ] {
            assert!(text.contains(part), "{part:?} is not in {text}");
        }
    }

    #[test]
    fn colors_surround_the_loss_tokens_and_long_rows_are_cut() {
        let text = inspection(&"x".repeat(9000)).text(Style::Colors);
        assert!(
            text.contains("\u{1b}[2mxxx") && text.contains("x…\u{1b}[0m") && text.contains("1 more documents"),
            "{text}"
        );
        let text = inspection("q").text(Style::Colors);
        assert!(text.contains("\u{1b}[32manswer\u{1b}[0m"), "{text}");
        assert!(text.contains("\u{1b}[31m3 records (0.2 %) dropped") && text.contains("\u{1b}[33m3 records"), "{text}");
    }
}
