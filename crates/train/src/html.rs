//! What the HTML pages of this crate have in common: one file each, style inside, no script, nothing that is fetched; colors of the
//! reader's light or dark mode.
//!
//! Trade-off: no interaction beyond what a browser does by itself: folding, and tooltips.

use std::fmt::Write as _;

/// The style of every page; pages add their own rules.
pub(crate) const STYLE: &str = "\
:root { color-scheme: light dark; --ink: #1b1b1b; --paper: #fff; --faint: #5c5c5c; --edge: #e9e9e9; --bar: #5b8def }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e6e6; --paper: #161616; --faint: #b3b3b3; --edge: #2c2c2c; --bar: #4a74c9 } }
body { margin: 2rem auto; max-width: 70rem; padding: 0 1rem; font: 15px/1.5 sans-serif; color: var(--ink);
  background: var(--paper) }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.6 monospace }
table { border-collapse: collapse } td, th { padding: 0.1rem 1rem 0.1rem 0; vertical-align: top; text-align: left }
td:first-child, td.number { white-space: nowrap } td:last-child { overflow-wrap: anywhere }
td.bar { width: 24rem; vertical-align: middle } td.bar div { height: 0.8rem; background: var(--bar) }
td.number, th.number { text-align: right }
@media (max-width: 50rem) { td.bar { display: none } }
details { margin: 0.4rem 0 } summary { overflow-wrap: anywhere }
";

/// A page up to its heading.
pub(crate) fn head(name: &str, what: &str, own_style: &str) -> String {
    let name = escape(name);
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" content=\"width=device-width\">\n\
         <title>{name}: {what}</title>\n<style>\n{STYLE}{own_style}</style>\n<h1>{name}</h1>\n"
    )
}

/// Appends formatted text to a page or a table.
pub(crate) fn add(out: &mut String, text: std::fmt::Arguments<'_>) {
    out.write_fmt(text).expect("a string takes any text");
}

/// Text that a browser shows instead of interpreting it.
pub(crate) fn escape(text: &str) -> String {
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
