//! The inspection as one self-contained HTML page: style inside, no script, nothing that is fetched.
//!
//! Not supported: pages of a fraction of the rows; long samples make a long page.

use std::fmt::Write;

use super::{Inspection, SampleRow, SetView};

const STYLE: &str = "\
:root { color-scheme: light dark; --loss: #b7e4c7; --ink: #1b1b1b; --paper: #fff; --faint: #777; --bar: #5b8def }
@media (prefers-color-scheme: dark) {
  :root { --loss: #1f5c3a; --ink: #e6e6e6; --paper: #161616; --faint: #999; --bar: #4a74c9 }
}
body { margin: 2rem auto; max-width: 70rem; padding: 0 1rem; font: 15px/1.5 sans-serif; color: var(--ink);
  background: var(--paper) }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.5 monospace }
table { border-collapse: collapse } td { padding: 0 1rem 0 0; vertical-align: top }
td.bar { width: 24rem } td.bar div { height: 0.8rem; background: var(--bar) }
.document { border-left: 3px solid var(--faint); padding-left: 0.8rem; margin: 0.6rem 0 }
.context { color: var(--faint) } .loss { background: var(--loss) }
";

pub(super) fn render(inspection: &Inspection) -> String {
    let name = escape(&inspection.name);
    let mut out = format!(
        "<!doctype html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n<title>{name}: data</title>\n<style>\n{STYLE}</style>\n\
         <h1>{name}</h1>\n"
    );
    for set in &inspection.sets {
        describe(&mut out, set);
        let legend = "<span class=\"loss\">loss tokens</span>, <span class=\"context\">other tokens</span>";
        add(&mut out, format_args!("<h3>Sample rows</h3>\n<p>{legend}</p>\n"));
        for row in &set.samples {
            sample(&mut out, row, set.row_len);
        }
    }
    out.push_str("</html>\n");
    out
}

fn add(out: &mut String, text: std::fmt::Arguments<'_>) {
    out.write_fmt(text).expect("a string takes any text");
}

fn describe(out: &mut String, set: &SetView) {
    add(out, format_args!("<h2>{}</h2>\n<p>{}</p>\n", set.title, escape(&set.location)));
    for source in &set.sources {
        add(out, format_args!("<pre>{}</pre>\n", escape(&source.to_string())));
    }
    out.push_str("<table>\n");
    for (name, value) in set.measures() {
        add(out, format_args!("<tr><td>{name}<td>{}\n", escape(&value)));
    }
    out.push_str("</table>\n<h3>Lengths</h3>\n<table>\n<tr><td>tokens<td>documents<td>\n");
    let histogram = set.histogram();
    let max = histogram.iter().map(|&(_, _, documents)| documents).max().unwrap_or(1).max(1);
    for (from, to, documents) in histogram {
        let percent = 100.0 * documents as f64 / max as f64;
        add(
            out,
            format_args!(
                "<tr><td>{from} to {to}<td>{documents}<td class=\"bar\"><div style=\"width: {percent:.1}%\"></div>\n"
            ),
        );
    }
    out.push_str("</table>\n");
}

fn sample(out: &mut String, row: &SampleRow, row_len: usize) {
    let (tokens, documents) = (row.tokens(), row.documents.len());
    add(out, format_args!("<h4>Row {}: {tokens} of {row_len} tokens, {documents} documents</h4>\n", row.number));
    for document in &row.documents {
        add(
            out,
            format_args!(
                "<div class=\"document\">{} tokens, {} in the loss<pre>",
                document.tokens, document.loss_tokens
            ),
        );
        for piece in &document.pieces {
            let class = if piece.in_loss { "loss" } else { "context" };
            add(out, format_args!("<span class=\"{class}\">{}</span>", escape(&piece.text)));
        }
        out.push_str("</pre></div>\n");
    }
}

/// Text that a browser shows instead of interpreting it.
fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\n' | '\t' => out.push(character),
            _ if character.is_control() => out.extend(character.escape_default()),
            _ => out.push(character),
        }
    }
    out
}

#[cfg(test)]
pub(super) mod tests {
    use firebrick_data::{Diagnosis, LengthHistogram, PackReport};

    use super::*;
    use crate::console::SourceReport;
    use crate::inspect::{Piece, SampleDocument};

    /// Two documents in a row, the first with this prompt.
    pub(in crate::inspect) fn inspection(prompt: &str) -> Inspection {
        let piece = |text: &str, in_loss| Piece { text: text.to_owned(), in_loss };
        let pieces = vec![piece(prompt, false), piece("answer", true)];
        let first = SampleDocument { tokens: 3, loss_tokens: 2, pieces };
        let second = SampleDocument { tokens: 4, loss_tokens: 3, pieces: vec![piece("other", true)] };
        let mut lengths = LengthHistogram::default();
        [3, 4].iter().for_each(|&tokens| lengths.add(tokens));
        let packing = PackReport { documents: 2, rows: 1, tokens: 8, loss_tokens: 6, efficiency: 0.5, lengths };
        let text = |text: &str| text.to_owned();
        let diagnosis = Diagnosis { rows: 12, ..Diagnosis::default() };
        let source = SourceReport {
            name: text("a<b.jsonl"),
            file_format: text("jsonl"),
            record_format: text("chat"),
            diagnosis,
        };
        let set = SetView {
            title: "training data",
            location: text("in memory"),
            sources: vec![source],
            packing,
            row_len: 16,
            samples: vec![SampleRow { number: 0, documents: vec![first, second] }],
        };
        Inspection { name: text("run"), sets: vec![set] }
    }

    #[test]
    fn page_is_self_contained_and_has_the_counts() {
        let page = inspection("question").page();
        for outside in ["http", "//", "src=", "href=", "url(", "@import", "<script", "<link"] {
            assert!(!page.contains(outside), "{outside:?} in the page");
        }
        for part in ["12 records", "<td>2\n", "(75.0 %)", "50.0 %", "3 to 3", "class=\"loss\">answer</span>"] {
            assert!(page.contains(part), "{part:?} is not in {page}");
        }
    }

    #[test]
    fn text_of_the_data_is_shown_and_not_interpreted() {
        let page = inspection("</pre><script>alert(\"1\")</script>&").page();
        assert!(page.contains("&lt;/pre&gt;&lt;script&gt;alert(&quot;1&quot;)&lt;/script&gt;&amp;"), "{page}");
        assert!(!page.contains("<script") && page.contains("a&lt;b.jsonl"));
    }
}
