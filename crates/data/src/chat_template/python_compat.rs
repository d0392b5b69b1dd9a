//! The Python behavior that chat templates rely on: `json.dumps`, `datetime.now().strftime`, `str` and `repr`.
//!
//! Not supported: the local time zone (dates are UTC, so that two machines render the same prompt), locales other than English, and integers beyond
//! 64 bits.

use std::borrow::Cow;

use chrono::DateTime;
use chrono::format::{Item, StrftimeItems};
use firebrick_arch::python_json::repr;
use minijinja::value::{Kwargs, Rest, ValueKind, from_args};
use minijinja::{Error, ErrorKind, Value};

/// Maximum depth to which a value is written.
const MAX_DEPTH: usize = 256;

/// Maximum bytes of a text that a filter or a method builds.
const MAX_VALUE_BYTES: usize = 128 << 20;

/// Refuses a text of this many bytes if it is too large.
pub(super) fn check_size(bytes: usize) -> Result<(), Error> {
    if bytes <= MAX_VALUE_BYTES {
        return Ok(());
    }
    Err(failed(format!("it builds a text larger than {} MiB", MAX_VALUE_BYTES >> 20)))
}

pub(super) fn failed(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}

type Arg = Option<Value>;

/// Implements the template filter `tojson`: Python's `json.dumps` with `ensure_ascii=False`, not Jinja's HTML-safe filter.
pub(super) fn tojson(value: &Value, arguments: Rest<Value>) -> Result<Value, Error> {
    let (ensure_ascii, indent, separators, sort_keys, named): (Arg, Arg, Arg, Arg, Kwargs) = from_args(&arguments)?;
    let ensure_ascii = ensure_ascii.or(named.get("ensure_ascii")?).is_some_and(|value| value.is_true());
    let sort_keys = sort_keys.or(named.get("sort_keys")?).is_some_and(|value| value.is_true());
    let indent = indent.or(named.get("indent")?).filter(|value| !value.is_none());
    let separators = separators.or(named.get("separators")?).filter(|value| !value.is_none());
    named.assert_all_used()?;
    if value.is_undefined() {
        return Err(failed("tojson: the value is undefined"));
    }
    let indent = match indent {
        None => None,
        Some(indent) => match indent.as_str() {
            Some(text) => Some(text.to_owned()),
            None => Some(" ".repeat(i64::try_from(indent)?.clamp(0, 64) as usize)),
        },
    };
    let strings = |pair: Value| -> Result<Vec<String>, Error> {
        pair.try_iter()?.map(|item| to_str(&item).map(Cow::into_owned)).collect()
    };
    let separators = separators.map(strings);
    let (item_separator, key_separator) = match separators.transpose()?.as_deref() {
        Some([item, key]) => (item.clone(), key.clone()),
        Some(other) => return Err(failed(format!("tojson: separators needs 2 strings, found {}", other.len()))),
        None => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
    };
    let json = Some(JsonStyle { indent, ensure_ascii, sort_keys });
    let mut writer = ValueWriter { json, item_separator, key_separator, text: String::new() };
    writer.value(value, 0)?;
    Ok(Value::from(writer.text))
}

/// Returns Python's `str` of a value: a string unchanged, else its `repr`. Undefined is empty, as in Jinja. Errors: it is too deep or too large.
pub(super) fn to_str(value: &Value) -> Result<Cow<'_, str>, Error> {
    if let Some(text) = value.as_str() {
        return Ok(Cow::Borrowed(text));
    }
    let (item_separator, key_separator) = (", ".to_owned(), ": ".to_owned());
    let mut writer = ValueWriter { json: None, item_separator, key_separator, text: String::new() };
    if !value.is_undefined() {
        writer.value(value, 0)?;
    }
    Ok(Cow::Owned(writer.text))
}

fn repr_string(string: &str, text: &mut String) {
    let quote = if string.contains('\'') && !string.contains('"') { '"' } else { '\'' };
    text.push(quote);
    for character in string.chars() {
        match character {
            '\n' => text.push_str("\\n"),
            '\r' => text.push_str("\\r"),
            '\t' => text.push_str("\\t"),
            '\\' => text.push_str("\\\\"),
            character if character == quote => text.extend(['\\', character]),
            character if is_printable(character) => text.push(character),
            character => match character as u32 {
                code @ 0..=0xff => text.push_str(&format!("\\x{code:02x}")),
                code @ 0..=0xffff => text.push_str(&format!("\\u{code:04x}")),
                code => text.push_str(&format!("\\U{code:08x}")),
            },
        }
    }
    text.push(quote);
}

/// Implements Python's `str.isprintable`, except for unassigned code points.
fn is_printable(character: char) -> bool {
    let hidden = character.is_control()
        || (character.is_whitespace() && character != ' ')
        || matches!(character, '\u{ad}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}')
        || matches!(character, '\u{feff}' | '\u{e000}'..='\u{f8ff}' | '\u{fdd0}'..='\u{fdef}' | '\u{f0000}'..);
    !hidden
}

fn repr_float(value: f64) -> String {
    if value.is_nan() {
        return "nan".to_owned();
    }
    if value.is_infinite() {
        return if value > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    repr(value)
}

/// Writes values as `repr` or as `json.dumps` does.
struct ValueWriter {
    /// `None` writes like `repr`.
    json: Option<JsonStyle>,
    item_separator: String,
    key_separator: String,
    text: String,
}

struct JsonStyle {
    indent: Option<String>,
    ensure_ascii: bool,
    sort_keys: bool,
}

impl ValueWriter {
    /// Writes a value. Errors: it is too deep or too large, or has a key that JSON does not allow.
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(failed("a value is nested too deeply to be written"));
        }
        check_size(self.text.len())?;
        if let Some(text) = value.as_str() {
            self.string(text);
            return Ok(());
        }
        match value.kind() {
            ValueKind::Number if !value.is_integer() => {
                let number = f64::try_from(value.clone())?;
                let text = repr_float(number);
                let in_json = || text.replace("inf", "Infinity").replace("nan", "NaN");
                self.text.push_str(&if self.json.is_some() { in_json() } else { text });
            }
            ValueKind::Seq | ValueKind::Iterable => {
                self.text.push('[');
                for (index, item) in value.try_iter()?.enumerate() {
                    self.before(index, depth + 1);
                    self.value(&item, depth + 1)?;
                }
                self.close(']', depth);
            }
            ValueKind::Map => self.map(value, depth)?,
            kind => match (self.json.is_some(), kind) {
                (true, ValueKind::None) => self.text.push_str("null"),
                (true, ValueKind::Bool) => self.text.push_str(if value.is_true() { "true" } else { "false" }),
                (true, ValueKind::Plain | ValueKind::Undefined) => {
                    return Err(failed("tojson: a value is neither text, number, list nor dictionary"));
                }
                (true, kind) if kind != ValueKind::Number => self.string(&value.to_string()),
                (false, ValueKind::Undefined) => self.text.push_str("Undefined"),
                // The engine writes None, True, False and integers as Python does.
                _ => self.text.push_str(&value.to_string()),
            },
        }
        Ok(())
    }

    fn map(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        self.text.push('{');
        let mut keys: Vec<Value> = value.try_iter()?.collect();
        if self.json.as_ref().is_some_and(|json| json.sort_keys) {
            keys.sort();
        }
        for (index, key) in keys.iter().enumerate() {
            self.before(index, depth + 1);
            match key.kind() {
                _ if self.json.is_none() || key.as_str().is_some() => self.value(key, depth + 1)?,
                ValueKind::Number => self.string(&to_str(key)?),
                ValueKind::Bool => self.string(if key.is_true() { "true" } else { "false" }),
                ValueKind::None => self.string("null"),
                kind => return Err(failed(format!("tojson: a {kind} cannot be the key of an object"))),
            }
            self.text.push_str(&self.key_separator);
            self.value(&value.get_item(key)?, depth + 1)?;
        }
        self.close('}', depth);
        Ok(())
    }

    /// Writes the text that precedes an item.
    fn before(&mut self, index: usize, depth: usize) {
        if index > 0 {
            self.text.push_str(&self.item_separator);
        }
        self.new_line(depth);
    }

    /// Closes on a new line, unless there is nothing inside.
    fn close(&mut self, bracket: char, depth: usize) {
        if !self.text.ends_with(['[', '{']) {
            self.new_line(depth);
        }
        self.text.push(bracket);
    }

    fn new_line(&mut self, depth: usize) {
        if let Some(JsonStyle { indent: Some(indent), .. }) = &self.json {
            self.text.push('\n');
            for _ in 0..depth {
                self.text.push_str(indent);
            }
        }
    }

    fn string(&mut self, text: &str) {
        let Some(json) = &self.json else { return repr_string(text, &mut self.text) };
        // serde_json escapes exactly what Python does, except for characters outside ASCII.
        let escaped = serde_json::to_string(text).expect("a text is always JSON");
        if !json.ensure_ascii {
            return self.text.push_str(&escaped);
        }
        for character in escaped.chars() {
            if character.is_ascii() {
                self.text.push(character);
            } else {
                for unit in character.encode_utf16(&mut [0; 2]) {
                    self.text.push_str(&format!("\\u{unit:04x}"));
                }
            }
        }
    }
}

/// Implements `datetime.strftime` for a moment in UTC, in seconds since 1970. Errors: an unknown directive, or a moment outside the calendar.
pub(super) fn strftime(format: &str, unix_seconds: i64) -> Result<String, Error> {
    let out_of_range = || failed("strftime_now: date out of range");
    let moment = DateTime::from_timestamp(unix_seconds, 0).ok_or_else(out_of_range)?;
    let items: Vec<Item<'_>> = StrftimeItems::new(format).collect();
    if items.contains(&Item::Error) {
        return Err(failed(format!("strftime_now: unknown directive in {format:?}")));
    }
    Ok(moment.format_with_items(items.into_iter()).to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn str_and_floats_are_written_as_python_writes_them() {
        let value = Value::from_serialize(serde_json::json!({ "a": ["it's", "\n\u{a0}", null, true], "b": 1e-7 }));
        assert_eq!(to_str(&value).unwrap(), r#"{'a': ["it's", '\n\xa0', None, True], 'b': 1e-07}"#);
        let floats = [1e16, 1.5e300, 0.0001, 0.00001, 123456789.125, -2.0, 1e15, 0.0];
        let shown = ["1e+16", "1.5e+300", "0.0001", "1e-05", "123456789.125", "-2.0", "1000000000000000.0", "0.0"];
        assert_eq!(floats.map(repr_float), shown);
    }

    #[test]
    fn strftime_agrees_with_python() {
        // 29 February 2024, 15:04:05 UTC, a Thursday.
        let moment = 1_709_219_045;
        assert_eq!(
            strftime("%d %b %Y|%A %-d %B, %I:%M:%S %p|%j %y-%m %u%%", moment).unwrap(),
            "29 Feb 2024|Thursday 29 February, 03:04:05 PM|060 24-02 4%"
        );
        assert_eq!(strftime("%F %T", 0).unwrap(), "1970-01-01 00:00:00");
        assert_eq!(strftime("%F %a %-H", -1).unwrap(), "1969-12-31 Wed 23");
        assert_eq!(strftime("%F", 4_107_542_400).unwrap(), "2100-03-01");
        assert!(strftime("%Q", 0).is_err());
    }
}
