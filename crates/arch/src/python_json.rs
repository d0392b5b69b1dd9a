//! JSON as Python's `json` reads it: also NaN, Infinity, whole numbers of any size, and lone surrogates.
//!
//! What a value of JSON cannot hold stands in it as a text with a code point that Unicode never assigns; [`to_string_pretty`] and [`unmarked`] write
//! numbers back. Trade-off: a text that is itself such a code point and such a number is taken for one.

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
    match parse(text) {
        Ok(value) if !is_rounded(&value) => Ok(value),
        read => marked(text).map_or(read, |marked| parse(&marked)),
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

/// Returns the text with marks; `None` if there is nothing to mark.
fn marked(text: &[u8]) -> Option<Vec<u8>> {
    let (mut marked, mut copied, mut at, mut in_string) = (Vec::new(), 0, 0, false);
    while let Some(&byte) = text.get(at) {
        let start = at;
        at += 1;
        let mark = match (in_string, byte) {
            (true, b'\\') => {
                let unit = |at: usize| text.get(at..at + 6).and_then(escaped_unit);
                let (length, is_lone) = match (unit(start), unit(start + 6)) {
                    (Some(0xd800..=0xdbff), Some(0xdc00..=0xdfff)) => (12, false),
                    (Some(0xd800..=0xdfff), _) => (6, true),
                    _ => (2, false),
                };
                at = start + length;
                is_lone.then(|| LONE_SURROGATE.to_string())
            }
            (false, b'-' | b'0'..=b'9' | b'N' | b'I') => {
                let is_part = |byte: &&u8| byte.is_ascii_alphanumeric() || b"+-.".contains(byte);
                at = start + text[start..].iter().take_while(is_part).count();
                // Marked, a number would be a key.
                if text[at..].trim_ascii_start().starts_with(b":") {
                    return None;
                }
                mark_number(std::str::from_utf8(&text[start..at]).ok()?)
            }
            _ => {
                in_string ^= byte == b'"';
                None
            }
        };
        if let Some(mark) = mark {
            marked.extend_from_slice(&text[copied..start]);
            marked.extend_from_slice(mark.as_bytes());
            copied = at;
        }
    }
    marked.extend_from_slice(text.get(copied..)?);
    (copied > 0).then_some(marked)
}

/// Returns the UTF-16 unit of an escape such as `\ud83d`.
fn escaped_unit(escape: &[u8]) -> Option<u16> {
    let digits = std::str::from_utf8(escape.strip_prefix(b"\\u")?).ok()?;
    u16::from_str_radix(digits, 16).ok()
}

fn mark_number(token: &str) -> Option<String> {
    let mark = || needs_mark(token).then(|| format!("\"{NUMBER}{token}\""));
    if token == "-0" { Some("0".to_owned()) } else { mark() }
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
