//! YAML recipes: a file's mappings, lists and scalars become the tree of a TOML file, with the places where they were typed.
//!
//! Scalars follow YAML 1.2's core schema. A key without a value, or with null, counts as absent, unless it is a section that means something by its
//! presence. An alias is the value of its anchor, and `<<` adds the keys of a mapping that are not there yet, as in YAML 1.1. Not supported: tags,
//! several documents, lists with null; each is an error with its line.

use std::borrow::Cow;
use std::collections::HashMap;
use std::iter::Peekable;
use std::ops::Range;

use saphyr_parser::{Event, Parser, ScalarStyle, Span, StrInput};
use toml::Spanned;
use toml::de::{DeArray, DeTable, DeValue};

/// Sections that mean something by their presence, so a section without keys still needs a value.
pub(super) const SECTIONS_BY_PRESENCE: [&str; 6] = ["bnb_4bit", "lora", "preference", "grpo", "mlflow", "wandb"];

/// The key of another program whose null means something else than its absence.
const TELLING_NULL: &str = "max_length";

/// Maximum depth of nested mappings and lists; a recipe has three levels.
const MAX_DEPTH: usize = 16;

/// Maximum size of what aliases copy, as [`size`] counts it, so that a small file cannot become a large one.
const MAX_COPIED: usize = 100_000;

/// An error in a YAML file.
#[derive(Debug, PartialEq, Eq)]
pub struct YamlError {
    /// The line, from 1.
    pub line: usize,
    /// A sentence.
    pub message: String,
}

/// Parses a YAML recipe. An empty file is an empty table, as in TOML.
pub(super) fn parse(text: &str) -> Result<Spanned<DeTable<'_>>, YamlError> {
    read(text, false)
}

/// Parses YAML of another program, which has a reader of version 1.1: `on` and `no` are booleans there. A number such as `.5` is left as the text that
/// it is, and a null of `max_length` as the text `null`.
pub fn parse_other(text: &str) -> Result<Spanned<DeTable<'_>>, YamlError> {
    read(text, true)
}

fn read(text: &str, lenient: bool) -> Result<Spanned<DeTable<'_>>, YamlError> {
    let starts = text.char_indices().map(|(byte, _)| byte).chain([text.len()]).collect();
    let events = Parser::new_from_str(text).peekable();
    let mut reader = Reader { events, text, starts, anchors: HashMap::new(), copied: 0, lenient };
    let mut tree = None;
    let tree = loop {
        let (event, span) = reader.next()?;
        match event {
            Event::StreamStart | Event::DocumentEnd => {}
            Event::StreamEnd => break tree.unwrap_or_else(DeTable::new),
            _ if tree.is_some() => {
                return Err(error(span, "a second document begins here; a recipe is one document"));
            }
            Event::DocumentStart(_) => {}
            Event::MappingStart(_, tag) => {
                untagged(tag.is_some(), span)?;
                tree = Some(reader.table(1)?);
            }
            _ => return Err(error(span, "a recipe is a list of `key: value` lines, and this is none")),
        }
    };
    Ok(Spanned::new(0..text.len(), tree))
}

struct Reader<'i> {
    events: Peekable<Parser<'i, StrInput<'i>>>,
    text: &'i str,
    /// Byte at which each character begins; the parser counts characters.
    starts: Vec<usize>,
    /// The values that have an anchor.
    anchors: HashMap<usize, Spanned<DeValue<'i>>>,
    /// Size of what aliases have copied so far.
    copied: usize,
    /// Whether the text is of another program.
    lenient: bool,
}

impl<'i> Reader<'i> {
    /// Reads the mapping whose start was just read.
    fn table(&mut self, depth: usize) -> Result<DeTable<'i>, YamlError> {
        let mut table = DeTable::new();
        let mut merged = Vec::new();
        loop {
            let (event, span) = self.next()?;
            let key = match event {
                Event::MappingEnd => {
                    for (key, value) in merged.into_iter().flat_map(DeTable::into_iter) {
                        if !table.contains_key(&**key.get_ref()) {
                            table.insert(key, value);
                        }
                    }
                    return Ok(table);
                }
                Event::Scalar(key, ScalarStyle::Plain, ..) if key == "<<" => {
                    let values = match self.value("<<", depth)?.into_inner() {
                        DeValue::Array(list) => list.into_iter().map(Spanned::into_inner).collect(),
                        value => vec![value],
                    };
                    for value in values {
                        let DeValue::Table(other) = value else {
                            return Err(error(span, "'<<' adds the keys of a mapping, or of a list of mappings"));
                        };
                        merged.push(other);
                    }
                    continue;
                }
                Event::Scalar(key, _, _, tag) => {
                    untagged(tag.is_some(), span)?;
                    key
                }
                _ => return Err(error(span, "a key must be a word")),
            };
            if table.contains_key(&*key) {
                return Err(error(span, &format!("the key '{key}' is there twice")));
            }
            let name = key.to_string();
            let telling: &[&str] = if self.lenient { &[TELLING_NULL] } else { &SECTIONS_BY_PRESENCE };
            let says_something = depth == 1 && telling.contains(&name.as_str());
            let next = self.events.peek();
            let is_null =
                matches!(next, Some(Ok((Event::Scalar(text, ScalarStyle::Plain, 0, None), _))) if is_null(text));
            if !says_something && is_null {
                self.events.next();
                continue;
            }
            let value = self.value(&name, depth)?;
            table.insert(Spanned::new(self.bytes(span), key), value);
        }
    }

    /// Reads the value of `key`, or of an element of its list.
    fn value(&mut self, key: &str, depth: usize) -> Result<Spanned<DeValue<'i>>, YamlError> {
        let (event, span) = self.next()?;
        if depth >= MAX_DEPTH {
            return Err(error(span, &format!("'{key}' is more than {MAX_DEPTH} levels deep; a recipe has three")));
        }
        let start = self.bytes(span).start;
        let (anchor, has_tag) = match &event {
            Event::Scalar(_, _, anchor, tag) => (*anchor, tag.is_some()),
            Event::MappingStart(anchor, tag) | Event::SequenceStart(anchor, tag) => (*anchor, tag.is_some()),
            _ => (0, false),
        };
        untagged(has_tag, span)?;
        let value = match event {
            Event::Scalar(text, style, ..) => {
                // The parser copies some scalars; a number is read from the place where it was typed.
                let typed = &self.text[self.bytes(span)];
                let text = if typed == text { Cow::Borrowed(typed) } else { text };
                scalar(key, text, style, self.lenient).map_err(|message| error(span, &message))?
            }
            Event::MappingStart(..) => DeValue::Table(self.table(depth + 1)?),
            Event::SequenceStart(..) => DeValue::Array(self.list(key, depth + 1)?),
            Event::Alias(name) => return self.copy(name, span),
            _ => return Err(error(span, "a value was expected")),
        };
        let end = match &value {
            DeValue::Table(table) => table.iter().map(|(_, value)| value.span().end).max().unwrap_or(start),
            DeValue::Array(list) => list.iter().map(|value| value.span().end).max().unwrap_or(start),
            _ => self.bytes(span).end,
        };
        let value = Spanned::new(start..end, value);
        if anchor > 0 {
            self.anchors.insert(anchor, value.clone());
        }
        Ok(value)
    }

    /// Returns the value that an alias names. A value that is still being read has no anchor yet.
    fn copy(&mut self, name: usize, span: Span) -> Result<Spanned<DeValue<'i>>, YamlError> {
        let Some(value) = self.anchors.get(&name) else {
            return Err(error(span, "an alias is of a value above it, not of one that it is in"));
        };
        self.copied += size(value.get_ref());
        match self.copied <= MAX_COPIED {
            true => Ok(value.clone()),
            false => Err(error(span, &format!("aliases copy at most {MAX_COPIED} values and letters in all"))),
        }
    }

    fn list(&mut self, key: &str, depth: usize) -> Result<DeArray<'i>, YamlError> {
        let mut list = DeArray::new();
        loop {
            if let Some(Ok((Event::SequenceEnd, _))) = self.events.peek() {
                self.events.next();
                return Ok(list);
            }
            list.push(self.value(key, depth)?);
        }
    }

    fn next(&mut self) -> Result<(Event<'i>, Span), YamlError> {
        match self.events.next() {
            Some(Ok(event)) => Ok(event),
            Some(Err(problem)) => Err(YamlError { line: problem.marker().line(), message: problem.info().to_owned() }),
            None => Err(YamlError { line: 1, message: "the file ends too early".to_owned() }),
        }
    }

    fn bytes(&self, span: Span) -> Range<usize> {
        let end = self.starts.len() - 1;
        self.starts[span.start.index().min(end)]..self.starts[span.end.index().min(end)]
    }
}

/// Returns the number of values in a value, itself included, and of bytes in its keys and texts.
fn size(value: &DeValue<'_>) -> usize {
    let inside: usize = match value {
        DeValue::String(text) => text.len(),
        DeValue::Array(list) => list.iter().map(|value| size(value.get_ref())).sum(),
        DeValue::Table(table) => table.iter().map(|(key, value)| key.get_ref().len() + size(value.get_ref())).sum(),
        _ => 0,
    };
    1 + inside
}

fn error(span: Span, message: &str) -> YamlError {
    YamlError { line: span.start.line(), message: message.to_owned() }
}

fn untagged(has_tag: bool, span: Span) -> Result<(), YamlError> {
    match has_tag {
        false => Ok(()),
        true => Err(error(span, "tags such as `!!str` are not read; put a string into quotes")),
    }
}

/// Parses a scalar by the core schema. Null is refused; anything but a number or a boolean is a string, and so is a number that TOML writes otherwise.
fn scalar<'i>(key: &str, text: Cow<'i, str>, style: ScalarStyle, lenient: bool) -> Result<DeValue<'i>, String> {
    if style != ScalarStyle::Plain {
        return Ok(DeValue::String(text));
    }
    match &*text {
        text if is_null(text) && lenient && key == TELLING_NULL => return Ok(DeValue::String("null".into())),
        text if is_null(text) => {
            return Err(format!(
                "'{key}' has no value: write `{key}: {{}}` for a section with its defaults, or remove the line"
            ));
        }
        "true" | "True" | "TRUE" => return Ok(DeValue::Boolean(true)),
        "false" | "False" | "FALSE" => return Ok(DeValue::Boolean(false)),
        "yes" | "Yes" | "YES" | "on" | "On" | "ON" if lenient => return Ok(DeValue::Boolean(true)),
        "no" | "No" | "NO" | "off" | "Off" | "OFF" if lenient => return Ok(DeValue::Boolean(false)),
        _ => {}
    }
    let is_number = text.starts_with(|first: char| first.is_ascii_digit() || "+-.".contains(first));
    if !is_number {
        return Ok(DeValue::String(text));
    }
    // Numbers of both languages are written alike, except for a decimal point without digits on both sides.
    match text {
        Cow::Borrowed(text) => match DeValue::parse(text).map(Spanned::into_inner) {
            Ok(number @ (DeValue::Integer(_) | DeValue::Float(_))) => Ok(number),
            _ if text.parse::<f64>().is_ok() && !lenient => Err(format!(
                "'{key}': write the number {text} with digits on both sides of the point and no leading zeros"
            )),
            _ => Ok(DeValue::String(Cow::Borrowed(text))),
        },
        owned => Ok(DeValue::String(owned)),
    }
}

fn is_null(text: &str) -> bool {
    matches!(text, "" | "~" | "null" | "Null" | "NULL")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(text: &str) -> (usize, String) {
        let YamlError { line, message } = parse(text).expect_err("it should be refused");
        (line, message)
    }

    #[test]
    fn scalars_mean_what_the_core_schema_says_and_keep_their_places() {
        let text = "# \u{e9}\na: 1\nb: -2e-4\nc: true\nd: 'true'\ne: é x\nf:\n  - 1.5\n  - \"two\"\ng: {h: 0x1F, j: 0.2}\ni: 1_0 rows\n";
        let tree = parse(text).unwrap();
        let get = |key: &str| tree.get_ref().get(key).unwrap();
        assert_eq!(get("a").get_ref().as_integer().unwrap().as_str(), "1");
        assert_eq!(get("b").get_ref().as_float().unwrap().as_str(), "-2e-4");
        assert_eq!((get("c").get_ref().as_bool(), get("d").get_ref().as_str()), (Some(true), Some("true")));
        assert_eq!(get("e").get_ref().as_str(), Some("é x"));
        assert_eq!(&text[get("e").span()], "é x");
        let list = get("f").get_ref().as_array().unwrap();
        assert_eq!((list.len(), list[1].get_ref().as_str()), (2, Some("two")));
        assert_eq!(
            get("g").get_ref().as_table().unwrap().get("h").unwrap().get_ref().as_integer().unwrap().radix(),
            16
        );
        assert!(get("g").get_ref().as_table().unwrap().get("j").unwrap().get_ref().is_float());
        assert_eq!(get("i").get_ref().as_str(), Some("1_0 rows"));
        assert_eq!(parse("# nothing\n").unwrap().get_ref().len(), 0);
    }

    #[test]
    fn aliases_and_merged_keys_are_values_of_their_anchors_and_cannot_grow_without_bound() {
        let text = "a: &x {b: 1, c: [.5, 1.]}\nd: {<<: *x, b: 2}\ne: *x\nf:\n  <<: [*x, {b: 3, g: 4}]\n";
        let tree = parse_other(text).unwrap();
        let get =
            |path: [&str; 2]| tree.get_ref().get(path[0])?.get_ref().as_table()?.get(path[1]).map(Spanned::get_ref);
        let number = |path| get(path).unwrap().as_integer().unwrap().as_str().to_owned();
        assert_eq!([["d", "b"], ["e", "b"], ["f", "b"], ["f", "g"]].map(number), ["2", "1", "1", "4"]);
        let list = get(["d", "c"]).unwrap().as_array().unwrap();
        assert_eq!((list[0].get_ref().as_str(), list[1].get_ref().as_str()), (Some(".5"), Some("1.")));
        let tree = parse("base: &base {b: 1}\nmine: &mine {<<: *base, c: [*base]}\nlast: *mine\n").unwrap();
        let last = tree.get_ref().get("last").unwrap().get_ref().as_table().unwrap();
        assert!(last.contains_key("b") && last.contains_key("c"));
        // Each list has the previous one ten times.
        let lists =
            (1..7).map(|level| format!("a{level}: &a{level} [{}]\n", vec![format!("*a{}", level - 1); 10].join(", ")));
        let laughs = format!("a0: &a0 [x]\n{}", lists.collect::<String>());
        assert!(refusal(&laughs).1.contains("at most 100000"));
    }

    #[test]
    fn only_plain_scalars_are_booleans_of_other_programs() {
        let tree = parse_other("a: on\nb: 'on'\nc: \"no\"\nd: No\n").unwrap();
        let get = |key: &str| tree.get_ref().get(key).unwrap().get_ref();
        assert_eq!((get("a").as_bool(), get("d").as_bool()), (Some(true), Some(false)));
        assert_eq!((get("b").as_str(), get("c").as_str()), (Some("on"), Some("no")));
        assert_eq!(parse("a: on\n").unwrap().get_ref().get("a").unwrap().get_ref().as_str(), Some("on"));
    }

    #[test]
    fn a_key_with_null_is_as_if_it_were_not_there() {
        let tree = parse("special_tokens:\na: null\nb:\n  c: ~\n  d: 1\ne: 'null'\n").unwrap();
        let keys: Vec<_> = tree.get_ref().keys().map(|key| key.get_ref().to_string()).collect();
        assert_eq!(keys, ["b", "e"]);
        assert_eq!(tree.get_ref().get("b").unwrap().get_ref().as_table().unwrap().len(), 1);
    }

    #[test]
    fn what_is_not_read_is_refused_with_its_line() {
        let cases = [
            ("a: 1\na: 2\n", 2, "twice"),
            ("a: 1\nlora:\n", 2, "has no value"),
            ("a: 1\npreference: null\n", 2, "has no value"),
            ("a: [1, null]\n", 1, "has no value"),
            ("a: &x [*x]\n", 1, "not of one that it is in"),
            ("a: {<<: 1}\n", 1, "the keys of a mapping"),
            ("a: !!str 1\n", 1, "tags"),
            ("- a\n", 1, "key: value"),
            ("a: 1\n---\nb: 2\n", 2, "second document"),
            ("a: .5\n", 1, "digits on both sides"),
            ("a: [1, 2\n", 2, ""),
        ];
        for (text, line, part) in cases {
            let (found, message) = refusal(text);
            assert!(found == line && message.contains(part), "{text:?}: line {found}: {message}");
        }
        let deep = format!("a: {}1{}\n", "[".repeat(40), "]".repeat(40));
        assert!(refusal(&deep).1.contains("levels deep"));
    }
}
