//! Reads a template's source as Jinja's lexer does, and writes one in which the engine has nothing left to decide.
//!
//! Line ends become line feeds, white space around tags is trimmed here, every tag says that it trims nothing (`+`), text that looks like a tag is
//! raw, strings have Python's escapes, and slices are calls. `{% generation %}` blocks, which the engine does not know, become a `{% filter %}` that writes the body
//! between marks, around a `{% with %}` that ends the scope of what the body sets. (As the body of a `{% call %}`, which transformers uses, it would
//! not see every variable.) Lines keep their numbers: line feeds that are trimmed move into the next tag.
//!
//! The engine's parser and compiler recurse, so sources, tags and chains of `elif` have a maximum length. Not supported: custom delimiters, `\N{...}`.

use std::str::Chars;

use super::dict::{SUBSCRIPT, is_method};
use super::python_methods::SLICE;
use crate::text_marks::{BLOCK_END, BLOCK_START, is_space};

/// The function around dictionaries that a template writes.
pub(super) const DICT: &str = "firebrick_dict";
/// The filter that replaces `{% generation %}`.
pub(super) const FILTER: &str = "firebrick_generation";
/// Maximum bytes of a source. Published templates have up to 30 KiB.
const MAX_SOURCE: usize = 1 << 20;
/// Maximum bytes of a tag outside its strings: each can be a level of recursion. Published templates have up to 1 KiB.
const MAX_TAG: usize = 16 << 10;
/// Maximum number of `elif`, for the same reason.
const MAX_BRANCHES: usize = 1 << 10;
/// Words before a sign that is not between two values.
const OPERATORS: [&str; 8] = ["and", "or", "not", "in", "is", "if", "else", "elif"];

/// Closes a bracket after a value.
const SUBSCRIPT_END: &str = "] ";
/// Closes such a bracket in which there was a colon.
const SLICE_END: &str = "]  ";

/// Writes the body of a block between marks.
pub(super) fn generation(body: &str) -> String {
    format!("{BLOCK_START}{body}{BLOCK_END}")
}

/// Returns the source for the engine, and whether it has generation blocks. What Jinja cannot read stays: the engine reports its line. Errors: too long.
pub(super) fn rewrite(source: &str) -> Result<(String, bool), String> {
    if source.len() > MAX_SOURCE {
        return Err(format!("it has {} KiB, more than {}", source.len() >> 10, MAX_SOURCE >> 10));
    }
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let rest = source.strip_suffix('\n').unwrap_or(&source);
    let mut lexer = Lexer { rest, text: String::new(), has_blocks: false, at_line_start: true, lost: 0, branches: 0 };
    while let Some(start) = next_tag(lexer.rest) {
        if lexer.tag(start)?.is_none() {
            lexer.text.push_str(lexer.rest);
            return Ok((lexer.text, lexer.has_blocks));
        }
    }
    lexer.write_text(lexer.rest);
    Ok((lexer.text, lexer.has_blocks))
}

fn next_tag(text: &str) -> Option<usize> {
    text.as_bytes().windows(2).position(|two| two[0] == b'{' && matches!(two[1], b'%' | b'{' | b'#'))
}

struct Lexer<'a> {
    rest: &'a str,
    text: String,
    has_blocks: bool,
    /// Whether the last tag ended with a line feed, or there was none.
    at_line_start: bool,
    /// Line feeds that were trimmed since the last tag.
    lost: usize,
    branches: usize,
}

impl<'a> Lexer<'a> {
    /// Rewrites the text up to the tag at `start`, and the tag. `None` if the tag has no end.
    fn tag(&mut self, start: usize) -> Result<Option<()>, String> {
        let (text, tag) = self.rest.split_at(start);
        let kind = tag.as_bytes()[1];
        let sign = tag[2..].chars().next().filter(|sign| matches!(sign, '-' | '+'));
        let inside = &tag[2 + usize::from(sign.is_some())..];
        self.write_trimmed(text, sign, kind == b'{');
        self.rest = tag;
        if kind == b'#' {
            return Ok(self.comment(inside));
        }
        if kind == b'%'
            && let Some((after, sign)) = word_tag(inside, "raw")
        {
            let found = self.raw(after, sign);
            if found.is_none() {
                self.rest = tag;
            }
            return Ok(found);
        }
        let Some((body, ended)) = self.body(inside, if kind == b'{' { "}}" } else { "%}" })? else { return Ok(None) };
        let lines = "\n".repeat(std::mem::take(&mut self.lost));
        let body = match body.trim() {
            _ if kind == b'{' => format!("{{{{ {lines}{body} }}}}"),
            "generation" => {
                self.has_blocks = true;
                format!("{{%+ {lines} filter {FILTER} +%}}{{%+ with +%}}")
            }
            "endgeneration" => format!("{{%+ {lines} endwith +%}}{{%+ endfilter +%}}"),
            _ => format!("{{%+ {lines}{body} +%}}"),
        };
        self.text.push_str(&body);
        self.skip(ended, kind == b'%');
        Ok(Some(()))
    }

    /// Writes the text before a tag without the white space that the tag trims.
    fn write_trimmed(&mut self, text: &str, sign: Option<char>, is_variable: bool) {
        let line = text.rfind('\n').map_or(0, |at| at + 1);
        let is_line = (line > 0 || self.at_line_start) && text[line..].chars().all(is_space);
        let trimmed = match sign {
            Some('-') => text.trim_end_matches(is_space),
            None if !is_variable && is_line => &text[..line],
            _ => text,
        };
        self.lost += text[trimmed.len()..].matches('\n').count();
        self.write_text(trimmed);
    }

    fn write_text(&mut self, text: &str) {
        // A brace at the end would become part of the next tag.
        if next_tag(text).is_some() || text.ends_with('{') {
            self.text.push_str("{%+ raw +%}");
            self.text.push_str(text);
            self.text.push_str("{%+ endraw +%}");
        } else {
            self.text.push_str(text);
        }
    }

    /// Continues after a tag with this sign at its end, without the white space that it trims.
    fn skip(&mut self, (after, sign): (&'a str, Option<char>), trims_line: bool) {
        let rest = match sign {
            Some('-') => after.trim_start_matches(is_space),
            None if trims_line => after.strip_prefix('\n').unwrap_or(after),
            _ => after,
        };
        let skipped = &after[..after.len() - rest.len()];
        self.lost += skipped.matches('\n').count();
        self.at_line_start = skipped.ends_with('\n');
        self.rest = rest;
    }

    fn comment(&mut self, inside: &'a str) -> Option<()> {
        let end = inside.find("#}")?;
        let sign = inside[..end].chars().next_back().filter(|sign| matches!(sign, '-' | '+'));
        self.lost += inside[..end].matches('\n').count();
        self.skip((&inside[end + 2..], sign), true);
        Some(())
    }

    fn raw(&mut self, after: &'a str, sign: Option<char>) -> Option<()> {
        self.skip((after, sign), false);
        let mut from = 0;
        loop {
            let at = from + self.rest[from..].find("{%")?;
            let sign = self.rest[at + 2..].chars().next().filter(|sign| matches!(sign, '-' | '+'));
            if let Some(ended) = word_tag(&self.rest[at + 2 + usize::from(sign.is_some())..], "endraw") {
                self.write_trimmed(&self.rest[..at], sign, false);
                self.skip(ended, true);
                return Some(());
            }
            from = at + 2;
        }
    }

    /// Returns what is inside a tag, rewritten, with the rest of the source after it and the sign at its end.
    fn body(&mut self, inside: &'a str, end: &str) -> Result<Option<(String, Ended<'a>)>, String> {
        let (mut body, mut rest, mut bytes) = (Body::default(), inside, 0);
        loop {
            if body.brackets.is_empty()
                && let Some(ended) = ended(rest, end).filter(|(_, sign)| end == "%}" || *sign != Some('+'))
            {
                return Ok(Some((body.text, ended)));
            }
            let Some(first) = rest.chars().next() else { return Ok(None) };
            let word = rest.find(|next: char| !next.is_alphanumeric() && next != '_').unwrap_or(rest.len());
            let mut length = word.max(first.len_utf8());
            if matches!(first, '"' | '\'') {
                let Some((string, taken)) = self.string(rest, first) else { return Ok(None) };
                body.push_string(&rest[..taken], string, &rest[taken..]);
                // Strings may be long.
                (length, bytes) = (taken, bytes + 2);
            } else if is_space(first) {
                body.text.push(if first == '\n' { first } else { ' ' });
                bytes += length;
            } else if body.push(&rest[..length], word > 0).is_some() {
                self.branches += usize::from(&rest[..length] == "elif");
                bytes += length;
            } else {
                return Ok(None);
            }
            if bytes > MAX_TAG || self.branches > MAX_BRANCHES {
                let kib = MAX_TAG >> 10;
                return Err(format!("a tag has more than {kib} KiB besides its strings, or {MAX_BRANCHES} `elif`"));
            }
            rest = &rest[length..];
        }
    }

    /// Returns the string literal at the start of `rest` for the engine, and its length in the source.
    fn string(&mut self, rest: &str, quote: char) -> Option<(String, usize)> {
        let (mut string, mut characters) = (quote.to_string(), rest[1..].chars());
        loop {
            match characters.next()? {
                end if end == quote => break,
                '\\' => {
                    let Some(escaped) = unescape(&mut characters) else {
                        // An escape that the engine refuses, too.
                        string.push_str("\\u!");
                        continue;
                    };
                    self.lost += usize::from(escaped.is_empty());
                    for character in escaped {
                        match character {
                            '\n' => string.push_str("\\n"),
                            '\\' => string.push_str("\\\\"),
                            character if character == quote => string.extend(['\\', quote]),
                            character => string.push(character),
                        }
                    }
                }
                character => string.push(character),
            }
        }
        string.push(quote);
        Some((string, rest.len() - characters.as_str().len()))
    }
}

/// The inside of a tag, rewritten so far.
#[derive(Default)]
struct Body {
    text: String,
    /// What closes each open bracket, and where that is.
    brackets: Vec<(&'static str, usize)>,
    /// Whether a value has just ended, so that a sign or a bracket continues its expression.
    after_value: bool,
}

impl Body {
    /// Appends a word, a number, or one character of an operator. `None` if it is a bracket that closes nothing.
    fn push(&mut self, token: &str, is_word: bool) -> Option<()> {
        if token == ":"
            && let Some((end, start)) = self.brackets.last_mut().filter(|(end, _)| *end == SUBSCRIPT_END)
        {
            self.text.replace_range(*start..=*start, &format!(".{SLICE}("));
            *end = SLICE_END;
        }
        let in_slice = matches!(token, ":" | "]") && self.brackets.last().is_some_and(|(end, _)| *end == SLICE_END);
        if in_slice && self.text.trim_end().ends_with(['(', ',']) {
            self.text.push_str("none");
        }
        let start = self.text.len();
        let written = match token {
            ":" if in_slice => ",",
            "]" if in_slice => self.brackets.pop().map(|_| ")")?,
            // A sign before a value changes nothing, and the engine does not know it.
            "+" if !self.after_value => "",
            "{" => {
                self.brackets.push(("})", start));
                self.text.extend([" ", DICT]);
                "({"
            }
            "(" | "[" => {
                let of_list = if self.after_value { SUBSCRIPT_END } else { "]" };
                self.brackets.push((if token == "(" { ")" } else { of_list }, start));
                token
            }
            ")" | "]" | "}" => self.brackets.pop().filter(|(end, _)| end.starts_with(token))?.0,
            _ => token,
        };
        self.text.push_str(written);
        self.after_value = matches!(token, ")" | "]" | "}") || is_word && !OPERATORS.contains(&token);
        Some(())
    }

    /// Appends a string that is `literal` in the source, before `rest`.
    fn push_string(&mut self, literal: &str, mut string: String, rest: &str) {
        let is_subscript =
            self.brackets.last().is_some_and(|(end, _)| *end == SUBSCRIPT_END) && self.text.ends_with('[');
        if is_subscript && is_method(&literal[1..literal.len() - 1]) && rest.starts_with(']') {
            string.insert(1, SUBSCRIPT);
        }
        self.text.push_str(&string);
        self.after_value = true;
    }
}

/// The source after a tag, and the sign at the tag's end.
type Ended<'a> = (&'a str, Option<char>);

/// Returns the rest after the end of a tag, if it is here.
fn ended<'a>(text: &'a str, end: &str) -> Option<Ended<'a>> {
    let sign = text.chars().next().filter(|sign| matches!(sign, '-' | '+'));
    Some((text[usize::from(sign.is_some())..].strip_prefix(end)?, sign))
}

/// Returns the rest after a tag of one word, if `inside` begins with that.
fn word_tag<'a>(inside: &'a str, word: &str) -> Option<Ended<'a>> {
    let after = inside.trim_start_matches(is_space).strip_prefix(word)?.trim_start_matches(is_space);
    ended(after, "%}").filter(|(_, sign)| word == "endraw" || *sign != Some('+'))
}

/// Reads an escape of Python after its backslash: nothing for a line feed, and the backslash too if this is no escape. `None` if Python refuses it.
fn unescape(characters: &mut Chars<'_>) -> Option<Vec<char>> {
    let first = characters.next()?;
    let character = match first {
        '\n' => return Some(Vec::new()),
        '\\' | '\'' | '"' => first,
        'a' => '\u{7}',
        'b' => '\u{8}',
        'f' => '\u{c}',
        'n' => '\n',
        'r' => '\r',
        't' => '\t',
        'v' => '\u{b}',
        '0'..='7' => {
            let mut code = first.to_digit(8)?;
            for _ in 0..2 {
                let Some(digit) = characters.clone().next().and_then(|next| next.to_digit(8)) else { break };
                code = code * 8 + digit;
                characters.next();
            }
            char::from_u32(code)?
        }
        'x' | 'u' | 'U' => {
            let digits = match first {
                'x' => 2,
                'u' => 4,
                _ => 8,
            };
            let code = (0..digits).try_fold(0_u32, |code, _| Some(code << 4 | characters.next()?.to_digit(16)?))?;
            char::from_u32(code)?
        }
        'N' => return None,
        other => return Some(vec!['\\', other]),
    };
    Some(vec![character])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_become_filters_and_keep_their_trimming() {
        let source = "a {%- generation -%}\n x{%+ endgeneration %}\n{{ '{% generation %}' }}";
        let expected = "a{%+  filter firebrick_generation +%}{%+ with +%}x{%+ \n endwith +%}{%+ endfilter +%}\
                        {{ \n '{% generation %}'  }}";
        assert_eq!(rewrite(source), Ok((expected.to_owned(), true)));
    }

    #[test]
    fn what_has_no_end_stays_for_the_engine_to_refuse() {
        for source in ["{% set x = 1", "{{ 'a", "{#", "{{", "{{ (1 }}", "{{ 1) }}", "{% raw %}", "{%-", ""] {
            assert_eq!(rewrite(source).unwrap().0, source);
        }
    }

    #[test]
    fn long_sources_are_refused_and_long_strings_are_not() {
        let elif = "{% elif 1 %}".repeat(MAX_BRANCHES + 1);
        for source in [&"x".repeat(MAX_SOURCE + 1), &format!("{{{{ {}1 }}}}", "-".repeat(MAX_TAG)), &elif] {
            assert!(rewrite(source).is_err());
        }
        assert!(rewrite(&format!("{{{{ '{}' }}}}", "x".repeat(MAX_TAG * 4))).is_ok());
    }
}
