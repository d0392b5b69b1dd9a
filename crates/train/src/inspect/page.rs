//! Writes the inspection as one self-contained HTML page: style inside, no script, no external resources.
//!
//! Every token is one element with its id as the title, so that boundaries can be seen and ids read. Trade-off: a page with long samples has some
//! megabytes.

use std::fmt::Write;

use super::{Inspection, SampleDocument, SampleRecord, SetView, notes};
use crate::page::{Block, Column, Page, Table};
use crate::plot::escape;
use firebrick_trainer::console::grouped;

const STYLE: &str = "\
:root { --loss: #b7e4c7; --loss2: #9fd9b4; --drop: #ffd4d4; --change: #ffe9b8 }
@media (prefers-color-scheme: dark) { :root { --loss: #1f5c3a; --loss2: #2a7049; --drop: #6b2626; --change: #5f4a15 } }
tr.drop td { background: var(--drop) } tr.change td { background: var(--change) }
.document { border-left: 3px solid var(--faint); padding-left: 0.8rem; margin: 0.6rem 0 }
i { font-style: normal; color: var(--faint); box-shadow: inset -1px 0 var(--edge) }
i:nth-of-type(even) { background: var(--edge) }
b { font-weight: normal; background: var(--loss) } b:nth-of-type(even) { background: var(--loss2) }
u { text-decoration: none } u::before { content: \"\\21b5\"; opacity: 0.5 }
.cut { text-decoration: line-through; opacity: 0.6 } .mark { background: var(--drop); padding: 0 0.3rem }
";

pub(super) fn render(inspection: &Inspection) -> String {
    let settings = inspection.settings.iter().map(|(key, value)| (*key, value.clone()));
    let mut blocks = vec![Block::Table(Table::of_pairs(settings))];
    for set in &inspection.sets {
        describe(&mut blocks, set);
        findings(&mut blocks, set);
        samples(&mut blocks, set);
    }
    Page { name: inspection.name.clone(), what: "data".to_owned(), style: STYLE, blocks }.render()
}

fn describe(blocks: &mut Vec<Block>, set: &SetView) {
    blocks.extend([Block::heading(set.title), Block::Text(set.location.clone())]);
    for source in &set.sources {
        let (diagnosis, name) = (&source.diagnosis, &source.name);
        let formats = format!("{}, {}", source.file_format, source.record_format);
        let [rows, kept, cut] = [diagnosis.rows, diagnosis.rows_kept, diagnosis.tokens_cut].map(|n| grouped(n as f64));
        let share = 100.0 * diagnosis.cut_share();
        let mut lines =
            vec![format!("{name} ({formats}): {rows} records, {kept} of them kept, {cut} tokens cut ({share:.1} %)")];
        lines.extend(notes(source));
        blocks.push(Block::Text(lines.join("\n")));
    }
    let histogram = set.histogram();
    let max = histogram.iter().map(|&(_, _, documents)| documents).max().unwrap_or(1).max(1);
    let row = |(from, to, documents): (usize, usize, usize)| {
        let bar = format!("0 {:.1}", 100.0 * documents as f64 / max as f64);
        ("", vec![format!("{from} to {to}"), grouped(documents as f64), bar])
    };
    let columns = vec![("tokens", Column::Text), ("documents", Column::Number), ("", Column::Bar)];
    let lengths = Table { columns, rows: histogram.into_iter().map(row).collect() };
    blocks.push(Block::Table(Table::of_pairs(set.measures())));
    blocks.extend([Block::Heading(3, "Lengths".to_owned()), Block::Table(lengths)]);
}

/// Adds the findings as a table, and their records.
fn findings(blocks: &mut Vec<Block>, set: &SetView) {
    let row = |row: super::FindingRow| {
        let class = if row.kind.is_drop() { "drop" } else { "change" };
        let percent = format!("{:.1} %", row.percent);
        (class, vec![grouped(row.count as f64), percent, row.kind.description().to_owned(), row.first])
    };
    let rows: Vec<_> = set.findings().into_iter().map(row).collect();
    if rows.is_empty() {
        return;
    }
    let (number, text) = (Column::Number, Column::Text);
    let columns = vec![("records", number), ("", number), ("what happened", text), ("first", text)];
    blocks.extend([Block::Heading(3, "Findings".to_owned()), Block::Table(Table { columns, rows })]);
    blocks.extend(set.records.iter().map(record));
}

fn record(record: &SampleRecord) -> Block {
    let title = format!("{}: {}", record.place, record.kind.description());
    let mut blocks = vec![Block::Text(record.detail.clone())];
    blocks.extend(record.document.as_ref().map(|one| document(one, record.cut_at)));
    blocks.push(Block::Verbatim(record.json.clone()));
    Block::Folded(title, blocks)
}

fn samples(blocks: &mut Vec<Block>, set: &SetView) {
    let legend = "<p><b>tokens</b><b> in the loss</b>, <i>other</i><i> tokens</i>; each has its id as a tooltip</p>";
    blocks.extend([Block::Heading(3, "Sample rows".to_owned()), Block::Html(legend.to_owned())]);
    for row in &set.rows {
        let (tokens, documents, row_len) = (row.tokens(), row.documents.len(), set.row_len);
        let title = format!("Row {}: {tokens} of {row_len} tokens, {documents} documents", row.number);
        blocks.push(Block::Heading(4, title));
        blocks.extend(row.documents.iter().map(|one| document(one, None)));
    }
    for (title, documents) in &set.documents {
        blocks.push(Block::Heading(3, title.clone()));
        blocks.extend(documents.iter().map(|one| document(one, None)));
    }
}

fn document(document: &SampleDocument, cut_at: Option<usize>) -> Block {
    let mut out = String::new();
    let mut add = |text: std::fmt::Arguments<'_>| out.write_fmt(text).expect("a string takes any text");
    let [len, in_loss] = [document.len, document.loss_tokens].map(|tokens| grouped(tokens as f64));
    let place = escape(&document.place);
    add(format_args!("<div class=\"document\">{place}: {len} tokens, {in_loss} in the loss<pre>"));
    if document.skipped > 0 {
        add(format_args!("… {} tokens … ", document.skipped));
    }
    for (index, token) in (document.skipped..).zip(&document.tokens) {
        let is_cut = cut_at.is_some_and(|cut| index >= cut);
        if cut_at == Some(index) {
            add(format_args!("<span class=\"mark\">cut here</span><span class=\"cut\">"));
        }
        let tag = if token.in_loss && !is_cut { 'b' } else { 'i' };
        // A line break at the end of a line would be invisible. The style draws a mark for it, which is not copied with the text.
        let text =
            if token.text.is_empty() { "▯".to_owned() } else { escape(&token.text).replace('\n', "<u></u>\n") };
        add(format_args!("<{tag} title={}>{text}</{tag}>", token.id));
    }
    if cut_at.is_some_and(|cut| cut < document.skipped + document.tokens.len()) {
        add(format_args!("</span>"));
    }
    if document.hidden() > 0 {
        add(format_args!(" … {} more tokens", document.hidden()));
    }
    add(format_args!("</pre></div>"));
    Block::Html(out)
}

#[cfg(test)]
pub(super) mod tests {
    use firebrick_data::{Diagnosis, FindingCount, FindingKind, LengthHistogram, PackReport, RecordPlace};

    use super::*;
    use crate::inspect::{SampleRow, SampleToken};
    use firebrick_trainer::run::data_sets::SourceReport;

    /// Returns two documents in a row, the first with this prompt.
    pub(in crate::inspect) fn inspection(prompt: &str) -> Inspection {
        let text = |text: &str| text.to_owned();
        let document = |len: usize, parts: &[(&str, bool)]| SampleDocument {
            place: format!("a.jsonl:{len}"),
            len,
            loss_tokens: len - 1,
            skipped: 0,
            tokens: (7..)
                .zip(parts)
                .map(|(id, &(part, in_loss))| SampleToken { id, text: text(part), in_loss })
                .collect(),
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
        let record = SampleRecord {
            kind: FindingKind::Truncated,
            place: text("a.jsonl:5"),
            detail: text("too long"),
            json: text("{\"text\": 1}"),
            document: Some(first.clone()),
            cut_at: Some(2),
        };
        let set = SetView {
            title: "training data",
            location: text("in memory"),
            sources: vec![source],
            packing,
            row_len: 16,
            documents: vec![(text("Longest documents"), vec![second.clone()])],
            rows: vec![SampleRow { number: 0, documents: vec![first, second] }],
            records: vec![record],
        };
        Inspection { name: text("run"), settings: vec![("model", text("folder"))], sets: vec![set] }
    }

    #[test]
    fn a_page_has_counts_tokens_and_findings() {
        let page = inspection("question").page();
        for outside in ["http", "//", "src=", "href=", "url(", "@import", "<script", "<link"] {
            assert!(!page.contains(outside), "{outside:?} in the page");
        }
        for part in [
            "1,200 records",
            "<td class=\"text\">2</td>",
            "(75.0 %)",
            "50.0 %",
            "3 to 3",
            "note: a remark",
            "<br/>\nkeys not read: functions (20 rows)",
            "<td class=\"text\">model</td><td class=\"text\">folder</td>",
            // Every token is an element with its id, and every document shows its place.
            "<i title=7>question</i><b title=8>ans</b><b title=9>wer</b>",
            "a.jsonl:3: 3 tokens, 2 in the loss",
            "Longest documents",
            // Findings are rows colored by what happened, with their records and the cut.
            "<tr class=\"drop\"><td class=\"number\">3</td><td class=\"number\">0.2 %</td>",
            "<tr class=\"change\">",
            "no &lt;role&gt;",
            "<b title=8>ans</b><span class=\"mark\">cut here</span><span class=\"cut\"><i title=9>wer</i></span>",
            "{&quot;text&quot;: 1}",
        ] {
            assert!(page.contains(part), "{part:?} is not in {page}");
        }
    }

    #[test]
    fn line_breaks_are_marked_and_stay_line_breaks() {
        let page = inspection("a\n\nb").page();
        assert!(page.contains("<i title=7>a<u></u>\n<u></u>\nb</i>"), "{page}");
        assert!(page.contains(r#"u::before { content: "\21b5""#), "{page}");
    }

    #[test]
    fn text_of_the_data_is_shown_and_not_interpreted() {
        let page = inspection("</pre><script>alert(\"1\")</script>&").page();
        assert!(page.contains("&lt;/pre&gt;&lt;script&gt;alert(&quot;1&quot;)&lt;/script&gt;&amp;"), "{page}");
        assert!(!page.contains("<script") && page.contains("a&lt;b.jsonl"));
    }
}
