//! Splits a source text into code, comments and literals, so that a rule about code is not broken by prose about it, and
//! a rule about prose does not read identifiers.
//!
//! Trade-off: a scanner of the lexical structure of Rust and of CUDA C++, not a parser. It knows raw strings, nested
//! comments, and lifetimes from characters; it does not expand macros.

/// Replaces every character of code in [`Source::prose`]: no phrase can reach across it.
pub(super) const CODE: char = '\u{1}';

/// One source text, split. `code` and `prose` have the line breaks of the text, so line numbers stay the same.
pub(super) struct Source {
    /// The text with comments, strings and characters replaced by blanks.
    pub(super) code: String,
    /// Comments and strings, without comment markers; everything else is [`CODE`].
    pub(super) prose: String,
    /// Contents of the string literals, in order. Escapes are left as they are written.
    pub(super) strings: Vec<String>,
}

impl Source {
    /// Splits `text`.
    pub(super) fn read(text: &str) -> Self {
        let chars: Vec<char> = text.chars().collect();
        let mut source = Self { code: String::with_capacity(text.len()), prose: String::new(), strings: Vec::new() };
        let mut at = 0;
        while at < chars.len() {
            let end = literal_end(&chars, at);
            if end == at {
                source.code.push(chars[at]);
                source.prose.push(if chars[at].is_whitespace() { chars[at] } else { CODE });
                at += 1;
            } else {
                let literal = &chars[at..end];
                source.code.extend(literal.iter().map(|c| if *c == '\n' { '\n' } else { ' ' }));
                match literal[0] {
                    '/' => push_comment(&mut source.prose, literal),
                    '\'' => source.prose.extend(literal.iter().map(|_| CODE)),
                    _ => push_string(&mut source, literal),
                }
                at = end;
            }
        }
        source
    }
}

/// Appends a comment to `prose`, its markers as blanks.
fn push_comment(prose: &mut String, comment: &[char]) {
    let mut at_line_start = true;
    for c in comment {
        let marker = at_line_start && matches!(c, '/' | '*' | '!');
        at_line_start = *c == '\n' || (at_line_start && (marker || c.is_whitespace()));
        prose.push(if marker { ' ' } else { *c });
    }
}

/// Appends a string literal to the prose and to the list of strings; a line that continues reads on without a break.
fn push_string(source: &mut Source, literal: &[char]) {
    let opening = literal.iter().position(|c| *c == '"').unwrap_or(0);
    let closing = literal.iter().rposition(|c| *c == '"').filter(|at| *at > opening).unwrap_or(literal.len());
    for (i, c) in literal.iter().enumerate() {
        let continues = *c == '\\' && literal.get(i + 1) == Some(&'\n');
        source.prose.push(match c {
            _ if continues => ' ',
            '\n' => '\n',
            _ if i <= opening || i >= closing => CODE,
            c => *c,
        });
    }
    source.strings.push(literal[opening + 1..closing].iter().collect());
}

/// `text` with comments, strings and characters replaced by blanks.
#[cfg(test)]
pub(super) fn code_only(text: &str) -> String {
    Source::read(text).code
}

/// `code` without the items under `#[cfg(test)]`, which become blanks.
pub(super) fn without_tests(code: &str) -> String {
    const MARKS: [&str; 3] = ["#[cfg(test)]", "#[cfg(all(test,", "#[cfg(any(test,"];
    let mut kept = code.as_bytes().to_vec();
    let mut from = 0;
    while let Some(start) = MARKS.iter().filter_map(|mark| code[from..].find(mark)).min().map(|at| from + at) {
        let end = item_end(code.as_bytes(), start);
        kept[start..end].iter_mut().filter(|byte| **byte != b'\n').for_each(|byte| *byte = b' ');
        from = end;
    }
    // Whole items were replaced byte by byte, so every character is either kept or gone.
    String::from_utf8_lossy(&kept).into_owned()
}

/// Where the item with an attribute at `start` ends: after its braces, its semicolon, or (a field) its comma.
fn item_end(code: &[u8], start: usize) -> usize {
    let (mut depth, mut angle, mut at) = (0_usize, 0_usize, start);
    while at < code.len() {
        match code[at] {
            b'(' | b'[' => depth += 1,
            b')' | b']' => depth = depth.saturating_sub(1),
            b'<' => angle += 1,
            b'>' => angle = angle.saturating_sub(1),
            b'{' if depth == 0 => return closing_brace(code, at),
            b';' if depth == 0 => return at + 1,
            b',' if depth == 0 && angle == 0 => return at + 1,
            _ => {}
        }
        at += 1;
    }
    at
}

/// The index after the brace that closes the one at `open`.
fn closing_brace(code: &[u8], open: usize) -> usize {
    let mut depth = 0_usize;
    for (at, byte) in code.iter().enumerate().skip(open) {
        match byte {
            b'{' => depth += 1,
            b'}' if depth == 1 => return at + 1,
            b'}' => depth -= 1,
            _ => {}
        }
    }
    code.len()
}

/// Where the comment or literal that starts at `at` ends; `at` itself if none starts there.
fn literal_end(chars: &[char], at: usize) -> usize {
    let next = |offset: usize| chars.get(at + offset).copied();
    match (chars[at], next(1)) {
        ('/', Some('/')) => position(chars, at, |c| c == '\n'),
        ('/', Some('*')) => block_comment_end(chars, at),
        ('"', _) => string_end(chars, at + 1),
        ('\'', Some('\\')) => position(chars, at + 3, |c| c == '\'') + 1,
        ('\'', Some(_)) if next(2) == Some('\'') => at + 3,
        ('r', Some('"' | '#')) if starts_raw(chars, at) => raw_string_end(chars, at + 1),
        _ => at,
    }
    .min(chars.len())
}

/// First index from `from` whose character fits; the length if none does.
fn position(chars: &[char], from: usize, fits: impl Fn(char) -> bool) -> usize {
    (from..chars.len()).find(|i| fits(chars[*i])).unwrap_or(chars.len())
}

fn block_comment_end(chars: &[char], start: usize) -> usize {
    let (mut depth, mut at) = (0, start);
    while at < chars.len() {
        match (chars[at], chars.get(at + 1)) {
            ('/', Some('*')) => (depth, at) = (depth + 1, at + 2),
            ('*', Some('/')) if depth == 1 => return at + 2,
            ('*', Some('/')) => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
    }
    at
}

fn string_end(chars: &[char], mut at: usize) -> usize {
    while at < chars.len() {
        match chars[at] {
            '\\' => at += 2,
            '"' => return at + 1,
            _ => at += 1,
        }
    }
    at
}

/// Whether the `r` at `at` begins a raw string: not the end of a name (but `br` and `cr` are prefixes), and hashes lead
/// to a quote (`r#type` is a raw identifier).
fn starts_raw(chars: &[char], at: usize) -> bool {
    let before = |offset: usize| at.checked_sub(offset).map(|i| chars[i]);
    let in_name = |c: Option<char>| c.is_some_and(is_name);
    let prefixed = matches!(before(1), Some('b' | 'c')) && !in_name(before(2));
    let quote = position(chars, at + 1, |c| c != '#');
    (prefixed || !in_name(before(1))) && chars.get(quote) == Some(&'"')
}

fn raw_string_end(chars: &[char], hashes_start: usize) -> usize {
    let quote = position(chars, hashes_start, |c| c != '#');
    let hashes = quote - hashes_start;
    let closes = |i: usize| {
        chars[i] == '"' && chars.get(i + 1..i + 1 + hashes).is_some_and(|tail| tail.iter().all(|c| *c == '#'))
    };
    (quote + 1..chars.len()).find(|i| closes(*i)).map_or(chars.len(), |i| i + 1 + hashes)
}

/// Whether `c` can be part of an identifier.
pub(super) fn is_name(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// The identifiers and keywords of a line of code, each with the rest of the line after it.
pub(super) fn words(line: &str) -> impl Iterator<Item = (&str, &str)> {
    let mut rest = line;
    std::iter::from_fn(move || {
        let start = rest.find(is_name)?;
        let word = &rest[start..];
        let end = word.find(|c| !is_name(c)).unwrap_or(word.len());
        rest = &word[end..];
        Some((&word[..end], rest))
    })
}

/// Whether `line` of code contains the identifier `name`.
pub(super) fn has_word(line: &str, name: &str) -> bool {
    words(line).any(|(word, _)| word == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The code of `text`, with every run of blanks as one.
    fn left(text: &str) -> String {
        code_only(text).split_whitespace().collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn prose_is_comments_and_strings_without_their_markers() {
        let source = Source::read("/// Some *words*.\nlet x = \"a text\"; // end");
        let prose = source.prose.replace(CODE, "");
        assert_eq!(prose.split_whitespace().collect::<Vec<_>>(), ["Some", "*words*.", "a", "text", "end"]);
        assert_eq!(source.strings, ["a text"]);
    }

    #[test]
    fn a_phrase_continues_over_lines_but_not_over_code() {
        assert!(Source::read("// one\n// two").prose.split_whitespace().eq(["one", "two"]));
        assert!(Source::read("\"one \\\n  two\"").prose.replace(CODE, "").split_whitespace().eq(["one", "two"]));
        assert!(Source::read("/* one */ x /* two */").prose.contains(CODE));
    }

    #[test]
    fn test_items_are_removed_and_all_else_stays() {
        let code = "use a;\n#[cfg(test)]\nmod tests;\nfn f<A, B>() {}\n#[cfg(test)]\nfn g<A, B>() { { } }\nfn h() {}\n";
        let left = without_tests(code);
        assert_eq!(left.lines().count(), code.lines().count());
        assert_eq!(left.split_whitespace().collect::<Vec<_>>().join(" "), "use a; fn f<A, B>() {} fn h() {}");
        let field = "struct S {\n#[cfg(test)]\na: u8,\nb: u8 }";
        assert!(without_tests(field).contains("b: u8 }") && !without_tests(field).contains("a: u8"));
    }

    #[test]
    fn comments_and_strings_are_blanked() {
        assert_eq!(left("a // unsafe\nb"), "a b");
        assert_eq!(left("a /* x /* y */ z */ b"), "a b");
        assert_eq!(left(r#"f("un\"safe", 1)"#), "f( , 1)");
        assert_eq!(left("//! unsafe"), "");
    }

    #[test]
    fn raw_strings_end_at_their_own_hashes() {
        assert_eq!(left("f(r#\"a \" b\"#) c"), "f( ) c");
        assert_eq!(left("br\"x\\\" y"), "b y");
        assert_eq!(left("let r#type = for_r; x"), "let r#type = for_r; x");
    }

    #[test]
    fn lifetimes_are_code_and_characters_are_not() {
        assert_eq!(left("fn f<'a>(x: &'a str) { '\"' }"), "fn f<'a>(x: &'a str) { }");
        assert_eq!(left(r"('\'', '\u{1F525}', 'é') z"), "( , , ) z");
        assert_eq!(left("'static"), "'static");
    }

    #[test]
    fn lines_keep_their_numbers() {
        let text = "a\n/* b\nc */\n\"d\ne\"\nf // g\nh";
        assert_eq!(code_only(text).lines().count(), text.lines().count());
        assert_eq!(code_only(text).lines().nth(6), Some("h"));
    }

    #[test]
    fn unfinished_literals_end_with_the_text() {
        for text in ["\"a", "/* a", "r#\"a", "'\\", "'", "a\\", "\"\\"] {
            assert_eq!(code_only(text).chars().count(), text.chars().count(), "{text}");
        }
    }

    #[test]
    fn words_are_whole_identifiers() {
        assert!(has_word("unsafe { x }", "unsafe"));
        assert!(!has_word("#![deny(unsafe_code)]", "unsafe"));
        assert_eq!(words("todo!(x)").next(), Some(("todo", "!(x)")));
    }
}
