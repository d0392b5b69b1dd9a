//! Splits a source text into code and prose, so that a rule about code is not broken by a comment that mentions it, and
//! a rule about prose does not read identifiers.
//!
//! Trade-off: one pattern for Rust and for CUDA C++. A comment ends at its first `*/`, and a raw string has at most two
//! `#`.

use std::sync::LazyLock;

use regex::Regex;

/// Replaces every character of code in [`Source::prose`]: no phrase can reach across it.
pub(super) const CODE: char = '\u{1}';

/// Matches comments, raw strings, strings, and characters, but no lifetimes.
static PARTS: LazyLock<Regex> = LazyLock::new(|| {
    let comments = r"//[^\n]*|/\*.*?\*/";
    let strings = r###"\b[bc]?r"[^"]*"|\b[bc]?r#".*?"#|\b[bc]?r##".*?"##|"(?:\\.|[^"\\])*""###;
    pattern(&format!(r"(?s){comments}|{strings}|'(?:\\u\{{[^}}]*\}}|\\x..|\\.|[^\\'\n])'"))
});

/// One source text, split. `code` and `prose` have the line breaks of the text, so line numbers stay the same.
pub(super) struct Source {
    /// The text with comments, strings and characters replaced by blanks.
    pub(super) code: String,
    /// Comments and strings, without comment markers; everything else is [`CODE`].
    pub(super) prose: String,
    /// Contents of the string literals, in order, with their escapes unchanged.
    pub(super) strings: Vec<String>,
}

impl Source {
    /// Splits `text`.
    pub(super) fn read(text: &str) -> Self {
        let mut source = Self { code: String::with_capacity(text.len()), prose: String::new(), strings: Vec::new() };
        let mut end = 0;
        for part in PARTS.find_iter(text) {
            source.push_code(&text[end..part.start()]);
            source.push_literal(part.as_str());
            end = part.end();
        }
        source.push_code(&text[end..]);
        source
    }

    fn push_code(&mut self, code: &str) {
        self.code.push_str(code);
        self.prose.extend(covered(code, CODE));
    }

    fn push_literal(&mut self, literal: &str) {
        self.code.extend(covered(literal, ' '));
        if literal.starts_with('/') {
            for line in literal.split_inclusive('\n') {
                let words = line.trim_start_matches(|c: char| c.is_whitespace() || "/*!".contains(c));
                self.prose.extend(covered(&line[..line.len() - words.len()], ' '));
                self.prose.push_str(words);
            }
        } else if let (false, Some((_, rest))) = (literal.starts_with('\''), literal.split_once('"')) {
            let content = rest.rsplit_once('"').map_or(rest, |(content, _)| content);
            // A backslash before a line break continues the sentence.
            self.prose
                .extend([&CODE.to_string(), &content.replace("\\\n", " \n"), &CODE.to_string()].map(String::as_str));
            self.strings.push(content.to_owned());
        } else {
            self.prose.push(CODE);
        }
    }
}

/// Replaces every character of `text` except white space by `cover`.
fn covered(text: &str, cover: char) -> impl Iterator<Item = char> {
    text.chars().map(move |c| if c.is_whitespace() { c } else { cover })
}

/// Compiles a pattern that is part of this program.
pub(crate) fn pattern(text: &str) -> Regex {
    Regex::new(text).expect("a regular expression of this program")
}

/// Returns the line of the byte `at`, from 1.
pub(super) fn line_of(text: &str, at: usize) -> usize {
    text.as_bytes()[..at].iter().filter(|byte| **byte == b'\n').count() + 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_and_prose_have_the_lines_of_the_text() {
        let text = "//! One\n//! *two*.\nfn f<'a>(x: &'a str) { g(\"three \\\n four\", '\"', r#\"a \"b\"\"#, '\\'') }\n\
                    /* x\n * y\n */ h";
        let source = Source::read(text);
        let is_blank = |c: char| c.is_whitespace() || c == CODE;
        let prose: Vec<&str> = source.prose.split(is_blank).filter(|word| !word.is_empty()).collect();
        assert_eq!(prose, ["One", "two*.", "three", "four", "a", "\"b\"", "x", "y"]);
        let code: Vec<&str> = source.code.split_whitespace().collect();
        assert_eq!(code.join(" "), "fn f<'a>(x: &'a str) { g( , , , ) } h");
        assert_eq!(source.strings, ["three \\\n four", "a \"b\""]);
        assert!([source.code, source.prose].iter().all(|half| half.lines().count() == text.lines().count()));
    }
}
