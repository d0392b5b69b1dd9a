//! Formats the inspection as text: with colors on a terminal, with markers elsewhere.

use firebrick_arch::counted;

use super::{Inspection, SampleDocument, SampleRow, SetView, notes};
use crate::plot::visible;

/// The marking of loss tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    /// Green and dim, by ANSI escapes.
    Colors,
    /// Between ⟦ and ⟧.
    Markers,
}

/// Maximum characters shown of a row.
const SHOWN_CHARACTERS: usize = 4000;
const BAR: usize = 40;

pub(super) fn render(inspection: &Inspection, style: Style) -> String {
    let mut out = format!("{}\n", inspection.name);
    for (key, value) in &inspection.settings {
        out += &format!("  {key:<18} {}\n", visible(value));
    }
    for set in &inspection.sets {
        describe(&mut out, set, style);
        if !set.rows.is_empty() {
            let legend = match style {
                Style::Colors => "\x1b[32mloss tokens\x1b[0m and \x1b[2mother tokens\x1b[0m",
                Style::Markers => "⟦loss tokens⟧ and other tokens",
            };
            out += &format!("\n  sample rows: {legend}\n");
        }
        for row in &set.rows {
            sample(&mut out, row, set.row_len, style);
        }
        for (title, documents) in &set.documents {
            out += &format!("\n  {title}\n");
            documents.iter().for_each(|document| describe_document(&mut out, "    ", document));
        }
    }
    out
}

fn describe(out: &mut String, set: &SetView, style: Style) {
    *out += &format!("\n{}: {}\n", set.title, set.location);
    for source in &set.sources {
        let (diagnosis, name) = (&source.diagnosis, visible(&source.name));
        let formats = format!("{}, {}", source.file_format, source.record_format);
        let (rows, cut) = (counted(diagnosis.rows, "record"), 100.0 * diagnosis.cut_share());
        let kept = diagnosis.rows_kept;
        *out += &format!("  {name} ({formats}): {rows}, {kept} of them kept, {cut:.1} % of the tokens cut\n");
        notes(source).for_each(|note| *out += &format!("  {}\n", visible(&note)));
    }
    for (kind, text) in set.findings() {
        let color = if kind.is_drop() { "31" } else { "33" };
        match style {
            Style::Colors => *out += &format!("  \x1b[{color}m{}\x1b[0m\n", visible(&text)),
            Style::Markers => *out += &format!("  {}\n", visible(&text)),
        }
    }
    for (name, value) in set.measures() {
        *out += &format!("  {name:<18} {value}\n");
    }
    out.push_str("\n  tokens          documents\n");
    let histogram = set.histogram();
    let max = histogram.iter().map(|&(_, _, documents)| documents).max().unwrap_or(1).max(1);
    for (from, to, documents) in histogram {
        let bar = "#".repeat((documents * BAR).div_ceil(max));
        *out += &format!("  {:<15} {documents:>9} {bar}\n", format!("{from} to {to}"));
    }
}

fn describe_document(out: &mut String, indent: &str, document: &SampleDocument) {
    let (place, len, in_loss) = (visible(&document.place), counted(document.len, "token"), document.loss_tokens);
    *out += &format!("{indent}{place}: {len}, {in_loss} in the loss\n");
}

fn sample(out: &mut String, row: &SampleRow, row_len: usize, style: Style) {
    let documents = counted(row.documents.len(), "document");
    *out += &format!("\n  row {}: {} of {row_len} tokens, {documents}\n", row.number, row.tokens());
    let mut left = SHOWN_CHARACTERS;
    for (index, document) in row.documents.iter().enumerate() {
        if left == 0 {
            *out += &format!("  … and {}\n", counted(row.documents.len() - index, "more document"));
            return;
        }
        describe_document(out, "  ", document);
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

#[cfg(test)]
mod tests {
    use firebrick_data::{Diagnosis, FindingCount, FindingKind, LengthHistogram, PackReport, RecordPlace};
    use firebrick_trainer::run::data_sets::SourceReport;

    use super::*;
    use crate::inspect::SampleToken;

    /// Returns two documents in a row, the first with this prompt.
    fn inspection(prompt: &str) -> Inspection {
        let text = |text: &str| text.to_owned();
        let document = |len: usize, parts: &[(&str, bool)]| SampleDocument {
            place: format!("a.jsonl:{len}"),
            len,
            loss_tokens: len - 1,
            tokens: parts.iter().map(|&(part, in_loss)| SampleToken { text: text(part), in_loss }).collect(),
        };
        let (first, second) =
            (document(3, &[(prompt, false), ("ans", true), ("wer", true)]), document(4, &[("other", true)]));
        let mut lengths = LengthHistogram::default();
        [3, 4].iter().for_each(|&tokens| lengths.add(tokens));
        let packing = PackReport { documents: 2, rows: 1, tokens: 8, loss_tokens: 6, efficiency: 0.5, lengths };
        let place = RecordPlace { path: "a.jsonl".into(), line: 5 };
        let found = |detail: &str| FindingCount { count: 3, first: vec![(place.clone(), text(detail))] };
        let findings =
            [(FindingKind::Truncated, found("too long")), (FindingKind::TemplateRefused, found("no <role>"))];
        let unread_keys = [(text("a\u{1b}"), 3), (text("functions"), 20)].into();
        let diagnosis = Diagnosis { rows: 1200, findings: findings.into(), unread_keys, ..Diagnosis::default() };
        let source = SourceReport {
            name: text("a<b.jsonl"),
            file_format: text("jsonl"),
            record_format: text("chat"),
            diagnosis,
            remarks: vec![text("a remark")],
        };
        let set = SetView {
            title: "training data",
            location: text("in memory"),
            sources: vec![source],
            packing,
            row_len: 16,
            documents: vec![(text("Longest documents"), vec![second.clone()])],
            rows: vec![SampleRow { number: 0, documents: vec![first, second] }],
        };
        Inspection { name: text("run"), settings: vec![("model", text("folder"))], sets: vec![set] }
    }

    #[test]
    fn markers_surround_exactly_the_loss_tokens() {
        let text = inspection("<b>&\u{1b}[31m").text(Style::Markers);
        assert!(text.contains("<b>&\\u{1b}[31m⟦answer⟧"), "{text}");
        assert!(!text.contains('\u{1b}'), "no escape may reach the terminal");
        for part in [
            "1,200 records",
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
    fn colors_surround_the_loss_tokens() {
        let text = inspection(&"x".repeat(9000)).text(Style::Colors);
        assert!(
            text.contains("\u{1b}[2mxxx") && text.contains("x…\u{1b}[0m") && text.contains("1 more document\n"),
            "{text}"
        );
        let text = inspection("q").text(Style::Colors);
        assert!(text.contains("\u{1b}[32manswer\u{1b}[0m"), "{text}");
        assert!(text.contains("\u{1b}[31m3 records (0.2 %) dropped") && text.contains("\u{1b}[33m3 records"), "{text}");
    }
}
