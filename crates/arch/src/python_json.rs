//! JSON as Python's `json` reads it: also NaN, Infinity, whole numbers of any size, and lone surrogates.
//!
//! What a value of JSON cannot hold stands in it as a text with a code point that Unicode never assigns; [`to_string_pretty`] and [`unmarked`] write
//! numbers back. Trade-off: a text that is itself such a code point and such a number is taken for one.

use std::sync::LazyLock;

use fancy_regex::{Captures, Regex};
use serde::Serialize;
use serde::de::IgnoredAny;
use serde_json::{Error, Value, from_slice as parse, from_str};

/// Begins the text of a number: NaN, an infinity, a number beyond 64 bits.
pub const NUMBER: char = '\u{FDD6}';
/// Stands for a lone surrogate.
pub const LONE_SURROGATE: char = '\u{FDD7}';

/// Parses a text.
///
/// # Errors
/// Text that Python's `json` does not read either; where it has numbers that are marked, the column is approximate.
pub fn from_slice(text: &[u8]) -> Result<Value, Error> {
    // A string, or what may be a number, with a colon that follows.
    static TOKEN: LazyLock<Regex> = LazyLock::new(|| {
        Regex::new(r#"(?s)"(?:[^"\\]|\\.)*"?|[-0-9NI][-+.0-9A-Za-z]*(?:\s*:)?"#).expect("a valid pattern")
    });
    match parse(text) {
        Ok(value) if !is_rounded(&value) => Ok(value),
        read => std::str::from_utf8(text)
            .map_or(read, |text| from_str(&TOKEN.replace_all(text, |found: &Captures<'_>| marked(&found[0])))),
    }
}

/// Returns the digits (or NaN, Infinity, -Infinity) of a number that is marked.
pub fn number(value: &Value) -> Option<&str> {
    value.as_str()?.strip_prefix(NUMBER).filter(|token| needs_mark(token))
}

/// Prints a value or an object that was parsed here, indented, with its marked numbers as Python writes them.
pub fn to_string_pretty(value: &impl Serialize) -> String {
    // Invariant: values and maps of JSON have string keys and no values that JSON lacks.
    unmarked(&serde_json::to_string_pretty(value).expect("a JSON value prints"))
}

/// Returns Python's `repr` of a finite number: the fewest digits that give it back, with an exponent of at least two digits from 1e16 on and below 1e-4.
pub fn repr(number: f64) -> String {
    let scientific = format!("{number:e}");
    let (digits, exponent) = scientific.split_once('e').expect("`{:e}` writes an exponent");
    let exponent: i32 = exponent.parse().expect("`{:e}` writes a whole exponent");
    if number == 0.0 || (-4..16).contains(&exponent) {
        return format!("{number:?}");
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}

/// Writes marked numbers in a text of JSON as Python does.
pub fn unmarked(text: &str) -> String {
    let begin = format!("\"{NUMBER}");
    let mut parts = text.split(&begin);
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |plain, part| match part.split_once('"') {
        // A quote after a backslash is inside a text.
        Some((token, rest)) if needs_mark(token) && !plain.ends_with('\\') => plain + token + rest,
        _ => plain + &begin + part,
    })
}

/// Returns whether a number may have lost digits, or is the whole number -0, which Python reads as 0.
fn is_rounded(value: &Value) -> bool {
    match value {
        Value::Array(items) => items.iter().any(is_rounded),
        Value::Object(fields) => fields.values().any(is_rounded),
        Value::Number(number) if number.is_f64() => {
            number.as_f64().is_some_and(|number| number.abs() >= i64::MAX as f64 || number == 0.0)
        }
        _ => false,
    }
}

/// Marks a number, and lone surrogates in a string. A number before a colon stays: marked, it would be a key.
fn marked(token: &str) -> String {
    static ESCAPE: LazyLock<Regex> = LazyLock::new(|| {
        let unit = |begin: &str| format!(r"\\u[dD][{begin}][0-9a-fA-F]{{2}}");
        let (high, low, any) = (unit("89abAB"), unit("c-fC-F"), unit("89a-fA-F"));
        Regex::new(&format!(r"(?s){high}{low}|{any}|\\.")).expect("a valid pattern")
    });
    if token.starts_with('"') {
        let is_lone = |escape: &str| escape.len() == r"\ud83d".len();
        let mark = |found: &Captures<'_>| match &found[0] {
            escape if is_lone(escape) => LONE_SURROGATE.to_string(),
            escape => escape.to_owned(),
        };
        return ESCAPE.replace_all(token, mark).into_owned();
    }
    match token {
        "-0" => "0".to_owned(),
        _ if needs_mark(token) => format!("\"{NUMBER}{token}\""),
        _ => token.to_owned(),
    }
}

/// Returns whether a text is a number that a JSON value cannot hold.
fn needs_mark(token: &str) -> bool {
    let is_kept = match token.contains(['.', 'e', 'E']) {
        true => token.parse().is_ok_and(f64::is_finite),
        false => token.parse::<i64>().is_ok() || token.parse::<u64>().is_ok(),
    };
    let is_number = || token.bytes().all(|byte| byte.is_ascii_digit() || b"+-.eE".contains(&byte));
    matches!(token, "NaN" | "Infinity" | "-Infinity")
        || (!is_kept && is_number() && from_str::<IgnoredAny>(token).is_ok())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_python_reads_is_kept_and_written_back_and_nothing_else_is_read() {
        let text =
            r#"{"a":[NaN,-Infinity,123456789012345678901234,1e999,-0,18446744073709551615,0.5,-0.0],"b\"":"NaN 😀"}"#;
        let read = from_slice(text.as_bytes()).unwrap();
        assert_eq!(number(&read["a"][2]), Some("123456789012345678901234"));
        assert_eq!(unmarked(&read.to_string()), text.replace("-0,", "0,"));
        let texts =
            json!(["\u{FDD6}text", "\u{FDD6}true", "\u{FDD6}", "\"\u{FDD6}123456789012345678901234", "\u{FDD6}1"]);
        assert_eq!(unmarked(&texts.to_string()), texts.to_string());
        assert_eq!(from_slice(br#"["\ud83d\ude00 \\ud83d \ud83d"]"#).unwrap(), json!(["😀 \\ud83d \u{FDD7}"]));
        let bad = ["[nan]", "[NaNs]", "[- 1]", "[00000000000000000000001]", "[1e]", "[NaN", r#"["\ud83d]"#, r#"["\"#];
        for bad in bad.into_iter().chain(["{NaN: 1}", "{123456789012345678901234 :1}"]) {
            assert!(from_slice(bad.as_bytes()).is_err(), "{bad}");
        }
    }
}
