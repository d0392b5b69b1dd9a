//! Rule `words`: comments, messages, documents and test names are plain technical English with American spelling.
//!
//! Rationale: a reader should understand each sentence at the first reading. Idioms that only this project uses, and two spellings of one word, cost
//! every reader a moment each time. The list in `table` keeps them out once they are gone. The rule reads comments, string literals, Markdown, and
//! function names of four or more words, which are sentences (tests), but no inline code and no code blocks. Identifiers have a separate list.
//!
//! Trade-off: a list cannot judge a sentence. Only phrases that are wrong nearly everywhere are on it.

mod table;

use std::collections::BTreeMap;

use regex::{Regex, RegexSet};

use self::table::{EXEMPT, IDENTIFIERS, PER, PHRASES, UNIT};
use super::Finding;
use super::text::{CODE, Source, line_of, pattern};

/// A compiled table: a set that finds which entries occur, and each entry.
struct Patterns {
    any: RegexSet,
    each: Vec<(Regex, &'static str)>,
}

impl Patterns {
    fn new(table: &'static [(&str, &str)], source: impl Fn(&str) -> String) -> Self {
        let sources: Vec<String> = table.iter().map(|(text, _)| source(text)).collect();
        let each = sources.iter().zip(table).map(|(source, (_, instead))| (pattern(source), *instead)).collect();
        Self { any: RegexSet::new(&sources).expect("each of them was compiled"), each }
    }

    /// Calls `report` with the place, the text and the advice of every match.
    fn for_each(&self, text: &str, mut report: impl FnMut(usize, &str, &str)) {
        for index in self.any.matches(text) {
            let (pattern, instead) = &self.each[index];
            pattern.find_iter(text).for_each(|found| report(found.start(), found.as_str(), instead));
        }
    }
}

/// Both lists, ready to search.
pub(super) struct Words {
    phrases: Patterns,
    identifiers: Patterns,
}

impl Words {
    /// Compiles the lists.
    pub(super) fn new() -> Self {
        let phrase = |text: &str| {
            let text = text.replace("UNIT", UNIT).replace("(PER)", &format!("({PER})")).replace(' ', "[ \\t\\r\\n]+");
            // A list with ` ?` means a blank that may be missing.
            format!("(?i-u)\\b(?:{})\\b", text.replace("[ \\t\\r\\n]+?", "[ \\t\\r\\n]*"))
        };
        let identifier = |text: &str| format!("(?-u){text}");
        Self { phrases: Patterns::new(PHRASES, phrase), identifiers: Patterns::new(IDENTIFIERS, identifier) }
    }

    /// Checks the file at `path`. `source` is its split text if it is Rust or CUDA C++.
    pub(super) fn check(&self, path: &str, text: &str, source: Option<&Source>) -> Vec<Finding> {
        if EXEMPT.iter().any(|(name, _)| path == *name || (name.ends_with('/') && path.starts_with(name))) {
            return Vec::new();
        }
        // Findings in the order of the text, one per place.
        let mut found: BTreeMap<(usize, String), String> = BTreeMap::new();
        if let Some(prose) = prose_of(path, text, source) {
            self.phrases.for_each(&prose, |at, phrase, instead| {
                let phrase = phrase.split_whitespace().collect::<Vec<_>>().join(" ");
                let message = format!("\"{phrase}\": write {instead}");
                found.insert((line_of(&prose, at), phrase), message);
            });
        }
        if let Some(source) = source {
            self.identifiers.for_each(&source.code, |at, _, instead| {
                let (line, name) = (line_of(&source.code, at), identifier_at(&source.code, at));
                found.insert((line, name.to_owned()), format!("identifier `{name}`: write {instead}"));
            });
        }
        found.into_iter().map(|((line, _), message)| Finding::new("words", path, line, message)).collect()
    }
}

/// Returns the whole identifier around the byte `at`.
fn identifier_at(code: &str, at: usize) -> &str {
    let is_name = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'_';
    let bytes = code.as_bytes();
    let start = bytes[..at].iter().rposition(|byte| !is_name(byte)).map_or(0, |before| before + 1);
    let end = bytes[at..].iter().position(|byte| !is_name(byte)).map_or(bytes.len(), |length| at + length);
    &code[start..end]
}

/// Returns the prose of a file, with its line breaks; `None` for kinds of files without prose.
fn prose_of(path: &str, text: &str, source: Option<&Source>) -> Option<String> {
    if let Some(source) = source {
        let mut lines: Vec<String> = source.prose.lines().map(str::to_owned).collect();
        for (index, name) in sentence_names(&source.code) {
            lines[index].push(CODE);
            lines[index].push_str(&name.replace('_', " "));
            lines[index].push(CODE);
        }
        return Some(without_code(&lines.join("\n")));
    }
    let name = path.rsplit('/').next().unwrap_or(path);
    match name.rsplit_once('.').map(|(_, extension)| extension) {
        Some("md") => Some(without_code(text)),
        Some("toml" | "py" | "sh" | "yml" | "yaml") => Some(text.replace('#', " ")),
        None if path.starts_with(".ci/") => Some(text.replace('#', " ")),
        _ => None,
    }
}

/// Finds function names of four or more words, each with the index of its line.
fn sentence_names(code: &str) -> impl Iterator<Item = (usize, &str)> {
    code.lines().enumerate().filter_map(|(index, line)| {
        let (_, after) = line.split_once("fn ")?;
        let name = after.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).next()?;
        (name.matches('_').count() >= 3).then_some((index, name))
    })
}

/// Replaces code blocks and inline code in `prose` by [`CODE`].
fn without_code(prose: &str) -> String {
    let (mut fenced, mut kept) = (false, String::with_capacity(prose.len()));
    for line in prose.lines() {
        let trimmed = line.trim_start();
        let fence = trimmed.starts_with("```");
        // A line of code ends the comment and any block that was left open.
        fenced = (fenced && !trimmed.starts_with(CODE)) ^ fence;
        if fenced || fence {
            kept.extend(line.chars().map(|_| CODE));
        } else {
            push_without_spans(&mut kept, line);
        }
        kept.push('\n');
    }
    kept
}

/// Appends `line` with every `...` between backticks replaced by [`CODE`].
fn push_without_spans(kept: &mut String, line: &str) {
    let mut rest = line;
    while let Some(open) = rest.find('`') {
        let Some(length) = rest[open + 1..].find('`') else { break };
        kept.push_str(&rest[..open]);
        kept.extend(std::iter::repeat_n(CODE, length + 2));
        rest = &rest[open + length + 2..];
    }
    kept.push_str(rest);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(path: &str, text: &str) -> Vec<String> {
        let source = path.ends_with(".rs").then(|| Source::read(text));
        Words::new().check(path, text, source.as_ref()).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_phrase_is_reported_with_its_line_and_what_to_write() {
        let found = found("a.rs", "//! Header.\n// It gives\n// up speed.\n");
        assert_eq!(found, ["a.rs:2: [words] \"gives up\": write `Trade-off: ...` or `Not supported: ...`"]);
    }

    #[test]
    fn rates_and_british_spellings_are_found_and_what_looks_like_them_is_not() {
        let words = Words::new();
        let count = |text: &str| words.check("a.md", text, None).len();
        let rates = ["4 bytes a token", "one tokenizer a thread", "12 MiB a layer", "0.5 a step", "tokens a second"];
        let british = ["quantised", "dequantisation", "tokenise", "Behaviour", "licences", "labelled", "optimiser"];
        rates.into_iter().chain(british).for_each(|text| assert_eq!(count(text), 1, "{text}"));
        let other = ["4 bytes per token", "gives the model a token", "in a row", "a step of 3 tokens"];
        let american = ["optimistic", "precise", "a specialist", "raised", "LICENSE-MIT", "normal is", "behavior"];
        other.into_iter().chain(american).for_each(|text| assert_eq!(count(text), 0, "{text}"));
    }

    #[test]
    fn strings_test_names_and_identifiers_are_read_and_other_code_is_not() {
        assert_eq!(found("a.rs", "fn f() { bail!(\"the colour\") }").len(), 1);
        assert_eq!(found("a.rs", "fn states_its_laws_in_full() {}").len(), 1);
        assert_eq!(found("a.rs", "fn quantise_rows() {}").len(), 1);
        assert!(found("a.rs", "struct BlockInitialiser;")[0].contains("`BlockInitialiser`"));
        assert_eq!(found("a.rs", "let laws = anew(roof, TokenIsEmpty);"), [""; 0]);
        assert_eq!(found("a.rs", "/// The `laws` of it.\n/// ```\n/// anew();\n/// ```\nfn f() {}"), [""; 0]);
        assert_eq!(found("a.md", "```sh\nlaws\n```\n"), [""; 0]);
        assert_eq!(found("CHANGELOG.md", "quantised anew"), [""; 0]);
        assert_eq!(found("tests/golden/README.md", "quantised anew"), [""; 0]);
    }
}
