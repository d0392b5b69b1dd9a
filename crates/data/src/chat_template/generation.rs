//! Rewrites a template's source for the engine: `{% generation %}` blocks become calls, and what a template makes or keeps
//! goes through filters that bound it.
//!
//! Reads the source as Jinja's own lexer does (texts, comments, raw blocks, strings inside tags), so that nothing that
//! only looks like a tag is touched; lines keep their numbers. Gives up custom delimiters, which no chat template has.

mod expression;

use minijinja::value::Kwargs;
use minijinja::{Error, State, Value};

use expression::{Expression, TooLong, Use};

/// Marks around a `{% generation %}` block while rendering: two code points that Unicode promises never to assign.
pub(crate) const BLOCK_START: char = '\u{FDD0}';
pub(crate) const BLOCK_END: char = '\u{FDD1}';

/// Text between tags that is written without paying, even in a loop.
const FREE_BYTES: usize = 128;
/// Tags that follow each other in an `if`, which the engine nests.
const MAX_BRANCHES: usize = 500;
/// Characters of a line, which the engine counts with 16 bits.
const LINE_CHARACTERS: usize = 65_000;

/// Why a template is refused before the engine sees it.
const EXPRESSION_TOO_LONG: &str = "an expression of too many operators or brackets";
const TOO_MANY_BRANCHES: &str = "an if of too many branches";
const NO_INCLUDES: &str = "a chat template is one file: nothing can be included, imported or extended";
const LINE_TOO_LONG: &str = "a line of more than 65,000 characters";
const TEXT_TOO_LONG: &str = "a long blank or raw text in a loop";

/// What a `{% generation %}` block became: its body between marks.
pub(crate) fn generation(state: &State<'_, '_>, arguments: Kwargs) -> Result<String, Error> {
    let body = arguments.get::<Value>("caller")?.call(state, &[])?;
    Ok(format!("{BLOCK_START}{body}{BLOCK_END}"))
}

/// The source that the engine gets, and whether it has generation blocks.
///
/// Error: something that cannot be bounded, with its line.
pub(crate) fn rewrite(source: &str) -> Result<(String, bool), String> {
    if let Some(line) = source.split('\n').position(|line| line.len() > LINE_CHARACTERS) {
        return Err(format!("{LINE_TOO_LONG} (template line {})", line + 1));
    }
    let mut writer =
        Writer { text: String::with_capacity(source.len() * 2), has_blocks: false, repeats: 0, branches: Vec::new() };
    let mut rest = source;
    let refused = |rest: &str, reason: &str| {
        let line = 1 + source[..source.len() - rest.len()].matches('\n').count();
        format!("{reason} (template line {line})")
    };
    while let Some(start) = next_tag(rest) {
        writer.plain(&rest[..start]).map_err(|reason| refused(rest, reason))?;
        rest = &rest[start..];
        let length = match &rest[..2] {
            "{#" => rest[2..].find("#}").map(|end| end + 4),
            "{{" => tag_length(rest, "}}"),
            _ => tag_length(rest, "%}"),
        };
        // A tag without an end: the engine says so, with the line.
        let Some(length) = length else { break };
        let is_raw = writer.tag(&rest[..length]).map_err(|reason| refused(rest, reason))?;
        rest = &rest[length..];
        if is_raw {
            let end = raw_length(rest);
            writer.raw(&rest[..end]).map_err(|reason| refused(rest, reason))?;
            rest = &rest[end..];
        }
    }
    writer.text.push_str(rest);
    Ok((writer.text, writer.has_blocks))
}

fn next_tag(text: &str) -> Option<usize> {
    let bytes = text.as_bytes();
    bytes.windows(2).position(|two| two[0] == b'{' && matches!(two[1], b'%' | b'{' | b'#'))
}

/// Bytes of the tag at the start of `rest`, its end included. Ends inside strings and brackets do not count.
fn tag_length(rest: &str, end: &str) -> Option<usize> {
    let mut quote = None;
    let mut escaped = false;
    let mut balance = 0_isize;
    for (index, &byte) in rest.as_bytes().iter().enumerate().skip(2) {
        match quote {
            Some(_) if escaped => escaped = false,
            Some(_) if byte == b'\\' => escaped = true,
            Some(open) if byte == open => quote = None,
            Some(_) => {}
            None if balance == 0 && rest.as_bytes()[index..].starts_with(end.as_bytes()) => {
                return Some(index + end.len());
            }
            None => match byte {
                b'"' | b'\'' => quote = Some(byte),
                b'(' | b'[' | b'{' => balance += 1,
                b')' | b']' | b'}' => balance -= 1,
                _ => {}
            },
        }
    }
    None
}

/// Bytes before the tag that ends a raw block; all if there is none.
fn raw_length(text: &str) -> usize {
    let mut from = 0;
    while let Some(at) = text[from..].find("{%").map(|at| from + at) {
        let inside = text[at + 2..].trim_start_matches(['-', '+']).trim_start();
        if let Some(behind) = inside.strip_prefix("endraw")
            && behind.trim_start().trim_start_matches(['-', '+']).starts_with("%}")
        {
            return at;
        }
        from = at + 2;
    }
    text.len()
}

/// What was rewritten so far.
struct Writer {
    text: String,
    has_blocks: bool,
    /// How many blocks are open that may be written more than once.
    repeats: usize,
    /// Of each open `if`, how many branches it has.
    branches: Vec<usize>,
}

impl Writer {
    /// Text between tags. In a loop, a long one pays: a tag that writes nothing is put between two of its characters
    /// that no tag takes away.
    fn plain(&mut self, text: &str) -> Result<(), &'static str> {
        if self.repeats == 0 || text.len() < FREE_BYTES {
            self.text.push_str(text);
            return Ok(());
        }
        let stays = |byte: u8| byte.is_ascii_alphanumeric();
        match text.as_bytes().windows(2).position(|two| stays(two[0]) && stays(two[1])) {
            Some(at) => {
                self.text.push_str(&text[..=at]);
                self.text.push_str(&format!("{{{{ firebrick_text({}) }}}}", text.len()));
                self.text.push_str(&text[at + 1..]);
            }
            None if text.len() > 8 * FREE_BYTES => return Err(TEXT_TOO_LONG),
            None => self.text.push_str(text),
        }
        Ok(())
    }

    /// The text of a raw block, where nothing can be put.
    fn raw(&mut self, text: &str) -> Result<(), &'static str> {
        if self.repeats > 0 && text.len() > 8 * FREE_BYTES {
            return Err(TEXT_TOO_LONG);
        }
        self.text.push_str(text);
        Ok(())
    }

    /// A tag; whether it begins a raw block.
    fn tag(&mut self, tag: &str) -> Result<bool, &'static str> {
        if tag.starts_with("{#") {
            self.text.push_str(tag);
            return Ok(false);
        }
        let inside = body(tag);
        let (before, after) = (&tag[..inside.start], &tag[inside.end..]);
        let inside = &tag[inside];
        let keyword = inside.split_whitespace().next().unwrap_or_default();
        let keyword = keyword.split(|character: char| !character.is_ascii_alphabetic()).next().unwrap_or_default();
        let rewritten = match keyword {
            _ if tag.starts_with("{{") => whole(inside, Use::Written),
            "generation" if inside.trim() == "generation" => {
                self.has_blocks = true;
                self.repeats += 1;
                Ok(inside.replacen("generation", "call firebrick_generation()", 1))
            }
            "endgeneration" if inside.trim() == "endgeneration" => {
                self.repeats = self.repeats.saturating_sub(1);
                Ok(inside.replacen("endgeneration", "endcall", 1))
            }
            "raw" if inside.trim() == "raw" => {
                self.text.push_str(tag);
                return Ok(true);
            }
            "include" | "import" | "from" | "extends" => return Err(NO_INCLUDES),
            _ => {
                self.nest(keyword)?;
                statement(keyword, inside)
            }
        };
        for part in [before, &rewritten.map_err(|TooLong| EXPRESSION_TOO_LONG)?, after] {
            self.text.push_str(part);
        }
        Ok(false)
    }

    fn nest(&mut self, keyword: &str) -> Result<(), &'static str> {
        match keyword {
            "for" | "macro" | "call" | "block" => self.repeats += 1,
            "endfor" | "endmacro" | "endcall" | "endblock" => self.repeats = self.repeats.saturating_sub(1),
            "if" => self.branches.push(1),
            "elif" => self.branches.iter_mut().rev().take(1).for_each(|branches| *branches += 1),
            "endif" => drop(self.branches.pop()),
            _ => {}
        }
        let is_too_many = self.branches.last().is_some_and(|&branches| branches > MAX_BRANCHES);
        if is_too_many { Err(TOO_MANY_BRANCHES) } else { Ok(()) }
    }
}

/// What is inside a tag, without the marks that trim around it.
fn body(tag: &str) -> std::ops::Range<usize> {
    let bytes = tag.as_bytes();
    let is_mark = |at: usize| matches!(bytes.get(at), Some(b'-' | b'+'));
    let start = if is_mark(2) { 3 } else { 2 };
    let end = tag.len() - 2;
    let end = if end > start && is_mark(end - 1) { end - 1 } else { end };
    start.min(end)..end
}

/// An expression on its own.
fn whole(text: &str, used: Use) -> Result<String, TooLong> {
    let mut expression = Expression::new(text)?;
    let tokens = expression.len();
    expression.bound(0, tokens, used)?;
    Ok(expression.rewritten())
}

/// What stands in a `{% %}`.
fn statement(keyword: &str, text: &str) -> Result<String, TooLong> {
    let mut tag = Expression::new(text)?;
    let tokens = tag.len();
    match keyword {
        "set" => return set(tag, text),
        "for" => {
            let Some(start) = tag.find(1, "in").map(|at| at + 1) else { return Ok(text.to_owned()) };
            let recursive = tag.find(start, "recursive").filter(|&at| at + 1 == tokens);
            let end = tag.find(start, "if").or(recursive).unwrap_or(tokens);
            tag.bound(start, end, Use::Tested)?;
            tag.wrap(start, end, ")|firebrick_looped");
            if end < tokens {
                tag.bound(end + 1, tokens, Use::Tested)?;
            }
        }
        "with" => drop(tag.bound(1.min(tokens), tokens, Use::Bound)?),
        _ => drop(tag.bound(1.min(tokens), tokens, Use::Tested)?),
    }
    Ok(tag.rewritten())
}

/// `{% set target = value %}`, or the beginning of a block whose text becomes the value.
fn set(mut tag: Expression<'_>, text: &str) -> Result<String, TooLong> {
    let tokens = tag.len();
    let Some(value) = tag.find(1.min(tokens), "=").map(|at| at + 1) else {
        tag.bound(1.min(tokens), tokens, Use::Tested)?;
        return Ok(format!("{}|firebrick_bounded ", tag.rewritten().trim_end()));
    };
    let is_attribute = tag.find(1, ".").is_some_and(|at| at < value);
    let is_made = tag.bound(value, tokens, Use::Bound)?;
    if value == tokens {
        return Ok(text.to_owned());
    }
    if is_attribute {
        tag.wrap(value, tokens, ")|firebrick_attribute");
    } else if !is_made {
        tag.wrap(value, tokens, ")|firebrick_bounded");
    }
    Ok(tag.rewritten())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_tags_are_rewritten() {
        let sources = [
            "{# {% generation %} #}{{ '{% set a = 1 %}' }}{% raw %}{% set b = 2 %}{% endraw %}set c = 3",
            "{%- raw -%}endraw {% endraw {{ a * b }} {%- endraw -%} {{ {'a': b} }}",
        ];
        for source in sources {
            assert_eq!(rewrite(source), Ok((source.to_owned(), false)));
        }
    }

    #[test]
    fn sets_are_bounded_and_blocks_become_calls() {
        let source = "{%- set ns.a = b == '%}' -%}{%+ generation -%}x{%- endgeneration %}";
        let (rewritten, has_blocks) = rewrite(source).unwrap();
        assert_eq!(
            rewritten,
            "{%- set ns.a = (b == '%}')|firebrick_attribute -%}{%+ call firebrick_generation() -%}x{%- endcall %}"
        );
        assert!(has_blocks);
    }

    #[test]
    fn what_is_made_or_looped_over_is_bounded() {
        let cases = [
            ("{% set x = a ~ b %}", "{% set x = (a ~ b)|firebrick_made %}"),
            ("{% set x, y = a, b %}", "{% set x, y = (a, b)|firebrick_bounded %}"),
            ("{%set x=[a]-%}", "{%set x=([a])|firebrick_made-%}"),
            ("{% set x %}a = b{% endset %}", "{% set x|firebrick_bounded %}a = b{% endset %}"),
            ("{% set x | replace(a='b') %}{% endset %}", "{% set x | replace(a='b')|firebrick_bounded %}{% endset %}"),
            ("{%- for m in a[1:] if m.b -%}", "{%- for m in (a[1:])|firebrick_looped if m.b -%}"),
            ("{% for m in a recursive %}", "{% for m in (a)|firebrick_looped recursive %}"),
            ("{% if a + b == c %}", "{% if (a + b)|firebrick_made == c %}"),
            ("{% with a = [b], c = d %}", "{% with a = ([b])|firebrick_made, c = d %}"),
            ("{{- a + b -}}", "{{- a + b -}}"),
            ("{{-1}}", "{{-1}}"),
        ];
        for (source, expected) in cases {
            assert_eq!(rewrite(source).unwrap().0, expected);
        }
    }

    #[test]
    fn long_text_in_a_loop_pays_and_keeps_its_lines() {
        let text = format!("\n  {}\n", "word ".repeat(100));
        assert_eq!(rewrite(&text).unwrap().0, text);
        let source = format!("{{% for a in b %}}{text}{{% endfor %}}{text}");
        let rewritten = rewrite(&source).unwrap().0;
        assert!(rewritten.contains("\n  w{{ firebrick_text(504) }}ord word"), "{rewritten}");
        assert_eq!(rewritten.matches("firebrick_text").count(), 1);
        assert_eq!(rewritten.lines().count(), source.lines().count());
    }

    #[test]
    fn open_tags_stay_as_they_are() {
        for source in ["{% set x = 1", "{{ 'a", "{#", "{{", "{%%}", "{{}}", "{%-%}", "{{-}}", "{%--%}", "{", ""] {
            assert_eq!(rewrite(source).unwrap().0, source);
        }
    }

    #[test]
    fn what_cannot_be_bounded_is_refused_with_its_line() {
        let cases = [
            (format!("{{{{ {}1 }}}}", "1+".repeat(1000)), EXPRESSION_TOO_LONG, 1),
            (format!("\n{{% if a %}}{}", "{% elif b %}".repeat(1000)), TOO_MANY_BRANCHES, 2),
            ("a\n\n{% include 'a' %}".to_owned(), NO_INCLUDES, 3),
            (format!("{{% for a in b %}}{}", " ".repeat(10_000)) + "{% endfor %}", TEXT_TOO_LONG, 1),
            (format!("a\n{}\n", "b".repeat(70_000)), LINE_TOO_LONG, 2),
        ];
        for (source, reason, line) in cases {
            assert_eq!(rewrite(&source), Err(format!("{reason} (template line {line})")));
        }
    }
}
