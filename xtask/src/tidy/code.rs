//! Tells code from comments and literals, so that a rule about code is not broken by prose about it. A scanner of
//! Rust's lexical structure only; it knows raw strings, nested comments, and lifetimes from characters.

/// `text` with comments, strings and characters blanked; line breaks stay, so line numbers do too.
pub(crate) fn code_only(text: &str) -> String {
    let chars: Vec<char> = text.chars().collect();
    let mut code = String::with_capacity(text.len());
    let mut at = 0;
    while at < chars.len() {
        let end = literal_end(&chars, at);
        if end == at {
            code.push(chars[at]);
            at += 1;
        } else {
            code.extend(chars[at..end].iter().map(|c| if *c == '\n' { '\n' } else { ' ' }));
            at = end;
        }
    }
    code
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
pub(crate) fn is_name(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// The identifiers and keywords of a line of code, each with the rest of the line behind it.
pub(crate) fn words(line: &str) -> impl Iterator<Item = (&str, &str)> {
    let mut rest = line;
    std::iter::from_fn(move || {
        let start = rest.find(is_name)?;
        let word = &rest[start..];
        let end = word.find(|c| !is_name(c)).unwrap_or(word.len());
        rest = &word[end..];
        Some((&word[..end], rest))
    })
}

/// Whether the identifier `wanted` stands in a line of code.
pub(crate) fn has_word(line: &str, wanted: &str) -> bool {
    words(line).any(|(word, _)| word == wanted)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is left, with runs of blanks made one.
    fn left(text: &str) -> String {
        code_only(text).split_whitespace().collect::<Vec<_>>().join(" ")
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
