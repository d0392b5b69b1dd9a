//! What chat templates expect from Python: `json.dumps`, `datetime.now().strftime`, `str` and `repr`.
//!
//! Gives up the local time zone (dates are UTC, so that two machines render the same prompt), the locale (English), and
//! integers beyond 64 bits.

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Value};

use crate::chat_template::engine::{MAX_TEXT_BYTES, spend, spend_text, too_large};

/// Depth to which a value is written.
const MAX_DEPTH: usize = 256;
/// What a value costs to write as JSON, beside its text.
const JSON_BYTES: usize = 64;
/// The most bytes of what stands between two values of JSON.
const MAX_SPACE_BYTES: usize = 1000;
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const WEEKDAYS: [&str; 7] = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];

/// The template filter `tojson`: Python's `json.dumps` with `ensure_ascii=False`, not the HTML-safe filter of Jinja.
pub(crate) fn tojson(value: &Value, arguments: Kwargs) -> Result<Value, Error> {
    let failed = |message: String| Error::new(ErrorKind::InvalidOperation, format!("tojson: {message}"));
    let ensure_ascii = arguments.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    let sort_keys = arguments.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    let indent = arguments.get::<Option<Value>>("indent")?.filter(|value| !value.is_none());
    let separators = arguments.get::<Option<Value>>("separators")?.filter(|value| !value.is_none());
    arguments.assert_all_used()?;
    if value.is_undefined() {
        return Err(failed("the value is undefined".to_owned()));
    }
    let indent = match indent {
        None => None,
        Some(indent) => match indent.as_str() {
            Some(text) => Some(text.to_owned()),
            None => Some(" ".repeat(i64::try_from(indent)?.clamp(0, 64) as usize)),
        },
    };
    let strings = |pair: Value| Ok::<Vec<String>, Error>(pair.try_iter()?.map(|item| to_str(&item)).collect());
    let separators = separators.map(strings);
    let (item_separator, key_separator) = match separators.transpose()?.as_deref() {
        Some([item, key]) => (item.clone(), key.clone()),
        Some(other) => return Err(failed(format!("separators needs 2 strings, found {}", other.len()))),
        None => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
    };
    if [indent.as_deref(), Some(&item_separator), Some(&key_separator)].into_iter().flatten().any(is_long) {
        return Err(failed(format!("an indent or a separator of more than {MAX_SPACE_BYTES} bytes")));
    }
    let mut writer = JsonWriter { indent, item_separator, key_separator, ensure_ascii, sort_keys, text: String::new() };
    writer.value(value, 0)?;
    spend_text(writer.text.len())?;
    Ok(Value::from(writer.text))
}

fn is_long(space: &str) -> bool {
    space.len() > MAX_SPACE_BYTES
}

/// Python's `str` of a value: a text as it is, everything else as [`to_repr`]. Undefined is nothing, as in Jinja.
pub(crate) fn to_str(value: &Value) -> String {
    bounded_str(value).unwrap_or_default()
}

/// [`to_str`], or an error where the text would be too large.
pub(crate) fn bounded_str(value: &Value) -> Result<String, Error> {
    if let Some(text) = value.as_str() {
        spend(text.len())?;
        return Ok(text.to_owned());
    }
    let mut text = String::new();
    if !value.is_undefined() {
        to_repr(value, &mut text, 0)?;
        spend_text(text.len())?;
    }
    Ok(text)
}

/// Python's `repr` of a value, appended.
fn to_repr(value: &Value, text: &mut String, depth: usize) -> Result<(), Error> {
    if depth > MAX_DEPTH || text.len() > MAX_TEXT_BYTES {
        return Err(too_large());
    }
    match value.kind() {
        ValueKind::String => repr_string(value.as_str().unwrap_or_default(), text),
        ValueKind::Number if !value.is_integer() => text.push_str(&repr_float(f64::try_from(value.clone())?)),
        ValueKind::Seq | ValueKind::Iterable => {
            text.push('[');
            for (index, item) in value.try_iter()?.enumerate() {
                text.push_str(if index > 0 { ", " } else { "" });
                to_repr(&item, text, depth + 1)?;
            }
            text.push(']');
        }
        ValueKind::Map => {
            text.push('{');
            for (index, key) in value.try_iter()?.enumerate() {
                text.push_str(if index > 0 { ", " } else { "" });
                to_repr(&key, text, depth + 1)?;
                text.push_str(": ");
                to_repr(&value.get_item(&key)?, text, depth + 1)?;
            }
            text.push('}');
        }
        ValueKind::Undefined => text.push_str("Undefined"),
        // The engine writes None, True, False and whole numbers as Python does.
        _ => text.push_str(&value.to_string()),
    }
    Ok(())
}

fn repr_string(said: &str, text: &mut String) {
    let quote = if said.contains('\'') && !said.contains('"') { '"' } else { '\'' };
    text.push(quote);
    for character in said.chars() {
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

/// Python's `str.isprintable`, but for code points that are not assigned.
fn is_printable(character: char) -> bool {
    let hidden = character.is_control()
        || (character.is_whitespace() && character != ' ')
        || matches!(character, '\u{ad}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}')
        || matches!(character, '\u{feff}' | '\u{e000}'..='\u{f8ff}' | '\u{fdd0}'..='\u{fdef}' | '\u{f0000}'..);
    !hidden
}

/// Python's `repr` of a float: the fewest digits that read back, exponents of at least two digits from 1e16 and below
/// 1e-4.
fn repr_float(value: f64) -> String {
    if value.is_nan() {
        return "nan".to_owned();
    }
    if value.is_infinite() {
        return if value > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific.split_once('e').expect("`{:e}` writes an exponent");
    let exponent: i32 = exponent.parse().expect("`{:e}` writes a whole exponent");
    if value == 0.0 || (-4..16).contains(&exponent) {
        let plain = value.to_string();
        return if plain.contains('.') { plain } else { format!("{plain}.0") };
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}

/// Writes JSON with the spaces and escapes of `json.dumps`.
struct JsonWriter {
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
    ensure_ascii: bool,
    sort_keys: bool,
    text: String,
}

impl JsonWriter {
    /// Errors: too deep, too much, a key that JSON cannot have.
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH || self.text.len() > MAX_TEXT_BYTES {
            return Err(too_large());
        }
        if let Some(text) = value.as_str() {
            self.string(text);
            return Ok(());
        }
        match value.kind() {
            ValueKind::None | ValueKind::Undefined => self.text.push_str("null"),
            ValueKind::Bool => self.text.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number if value.is_integer() => self.text.push_str(&value.to_string()),
            ValueKind::Number => {
                let number = f64::try_from(value.clone())?;
                self.text.push_str(&if number.is_finite() { repr_float(number) } else { "null".to_owned() });
            }
            ValueKind::Seq | ValueKind::Iterable => {
                self.open('[')?;
                for (index, item) in value.try_iter()?.enumerate() {
                    self.before(index, depth + 1)?;
                    self.value(&item, depth + 1)?;
                }
                self.close(']', depth);
            }
            ValueKind::Map => self.map(value, depth)?,
            _ => self.string(&value.to_string()),
        }
        Ok(())
    }

    fn map(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        self.open('{')?;
        let mut keys: Vec<Value> = value.try_iter()?.collect();
        if self.sort_keys {
            keys.sort();
        }
        for (index, key) in keys.iter().enumerate() {
            self.before(index, depth + 1)?;
            match (key.as_str(), key.kind()) {
                (Some(text), _) => self.string(text),
                (None, ValueKind::Number) => self.string(&to_str(key)),
                (None, ValueKind::Bool) => self.string(if key.is_true() { "true" } else { "false" }),
                (None, ValueKind::None) => self.string("null"),
                _ => {
                    let message = format!("tojson: a {} cannot be the key of an object", key.kind());
                    return Err(Error::new(ErrorKind::InvalidOperation, message));
                }
            }
            self.text.push_str(&self.key_separator);
            self.value(&value.get_item(key)?, depth + 1)?;
        }
        self.close('}', depth);
        Ok(())
    }

    fn open(&mut self, bracket: char) -> Result<(), Error> {
        self.text.push(bracket);
        spend(JSON_BYTES)
    }

    /// What stands before an item.
    fn before(&mut self, index: usize, depth: usize) -> Result<(), Error> {
        if index > 0 {
            self.text.push_str(&self.item_separator);
        }
        self.new_line(depth);
        spend(JSON_BYTES)
    }

    /// On a line of its own, unless there is nothing inside.
    fn close(&mut self, bracket: char, depth: usize) {
        if !self.text.ends_with(['[', '{']) {
            self.new_line(depth);
        }
        self.text.push(bracket);
    }

    fn new_line(&mut self, depth: usize) {
        if let Some(indent) = &self.indent {
            self.text.push('\n');
            for _ in 0..depth {
                self.text.push_str(indent);
            }
        }
    }

    fn string(&mut self, text: &str) {
        // serde_json escapes exactly what Python does, but for characters outside ASCII.
        let escaped = serde_json::to_string(text).expect("a text is always JSON");
        if !self.ensure_ascii {
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

/// `datetime.strftime` of a moment in UTC.
///
/// Errors: a directive that this list does not have.
pub(crate) fn strftime(format: &str, unix_seconds: i64) -> Result<String, Error> {
    let date = Date::of(unix_seconds);
    let mut text = String::new();
    let mut characters = format.chars();
    while let Some(character) = characters.next() {
        if character != '%' {
            text.push(character);
            continue;
        }
        let mut directive = characters.next();
        let plain = directive == Some('-');
        if plain {
            directive = characters.next();
        }
        let Some(written) = directive.and_then(|directive| date.directive(directive)) else {
            let message = format!("strftime_now: unknown directive in {format:?}");
            return Err(Error::new(ErrorKind::InvalidOperation, message));
        };
        // `%-d` is `%d` without the leading zero.
        let shown = if plain && written.len() > 1 { written.trim_start_matches('0') } else { &written };
        text.push_str(if plain && shown.is_empty() { "0" } else { shown });
    }
    Ok(text)
}

/// A moment taken apart, UTC, Gregorian calendar.
struct Date {
    year: i64,
    /// 0 is January.
    month: usize,
    /// 1 is the first.
    day: i64,
    /// 1 is January 1st.
    day_of_year: i64,
    /// 0 is Monday.
    weekday: usize,
    /// Seconds since midnight.
    second_of_day: i64,
}

impl Date {
    fn of(unix_seconds: i64) -> Self {
        let days = unix_seconds.div_euclid(86_400);
        let (mut year, mut day_of_year) = (1970, days);
        while day_of_year < 0 {
            year -= 1;
            day_of_year += days_in_year(year);
        }
        while day_of_year >= days_in_year(year) {
            day_of_year -= days_in_year(year);
            year += 1;
        }
        let (mut month, mut day) = (0, day_of_year);
        while day >= days_in_month(year, month) {
            day -= days_in_month(year, month);
            month += 1;
        }
        // 1 January 1970 was a Thursday.
        let weekday = (days + 3).rem_euclid(7) as usize;
        let second_of_day = unix_seconds.rem_euclid(86_400);
        Self { year, month, day: day + 1, day_of_year: day_of_year + 1, weekday, second_of_day }
    }

    fn directive(&self, directive: char) -> Option<String> {
        let hour = self.second_of_day / 3600;
        let (month_name, weekday_name) = (MONTHS[self.month], WEEKDAYS[self.weekday]);
        Some(match directive {
            'Y' => self.year.to_string(),
            'y' => format!("{:02}", self.year.rem_euclid(100)),
            'm' => format!("{:02}", self.month + 1),
            'd' => format!("{:02}", self.day),
            'e' => format!("{:2}", self.day),
            'j' => format!("{:03}", self.day_of_year),
            'B' => month_name.to_owned(),
            'b' | 'h' => month_name[..3].to_owned(),
            'A' => weekday_name.to_owned(),
            'a' => weekday_name[..3].to_owned(),
            'u' => (self.weekday + 1).to_string(),
            'w' => ((self.weekday + 1) % 7).to_string(),
            'H' => format!("{hour:02}"),
            'I' => format!("{:02}", (hour + 11) % 12 + 1),
            'M' => format!("{:02}", self.second_of_day / 60 % 60),
            'S' => format!("{:02}", self.second_of_day % 60),
            'p' => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            'F' => format!("{}-{:02}-{:02}", self.year, self.month + 1, self.day),
            'T' => format!("{hour:02}:{:02}:{:02}", self.second_of_day / 60 % 60, self.second_of_day % 60),
            'Z' => "UTC".to_owned(),
            'z' => "+0000".to_owned(),
            '%' => "%".to_owned(),
            _ => return None,
        })
    }
}

fn is_leap(year: i64) -> bool {
    year % 4 == 0 && (year % 100 != 0 || year % 400 == 0)
}

fn days_in_year(year: i64) -> i64 {
    if is_leap(year) { 366 } else { 365 }
}

fn days_in_month(year: i64, month: usize) -> i64 {
    match month {
        1 if is_leap(year) => 29,
        1 => 28,
        3 | 5 | 8 | 10 => 30,
        _ => 31,
    }
}

#[cfg(test)]
mod tests {
    use minijinja::Environment;

    use super::*;

    fn render(template: &str) -> String {
        let mut environment = Environment::new();
        environment.add_filter("tojson", tojson);
        environment.render_str(template, ()).unwrap()
    }

    #[test]
    fn tojson_writes_what_json_dumps_writes() {
        // Right-hand sides printed by Python 3.11's json.dumps.
        assert_eq!(
            render(r#"{{ {"b": [1, 2.5, true, none], "a": "é<'>\n"} | tojson }}"#),
            r#"{"b": [1, 2.5, true, null], "a": "é<'>\n"}"#
        );
        assert_eq!(
            render(r#"{{ {"b": [], "a": {}} | tojson(indent=2, sort_keys=true) }}"#),
            "{\n  \"a\": {},\n  \"b\": []\n}"
        );
        assert_eq!(
            render(r#"{{ ["é", "😀"] | tojson(ensure_ascii=true, separators=(",", ":")) }}"#),
            r#"["\u00e9","\ud83d\ude00"]"#
        );
        assert_eq!(render(r#"{{ [[1], 2] | tojson(indent=1) }}"#), "[\n [\n  1\n ],\n 2\n]");
    }

    #[test]
    fn str_and_floats_are_written_as_python_writes_them() {
        let value = Value::from_serialize(serde_json::json!({ "a": ["it's", "\n\u{a0}", null, true], "b": 1e-7 }));
        assert_eq!(to_str(&value), r#"{'a': ["it's", '\n\xa0', None, True], 'b': 1e-07}"#);
        let floats = [1e16, 1.5e300, 0.0001, 0.00001, 123456789.125, -2.0, 1e15, 0.0];
        let shown = floats.map(repr_float);
        assert_eq!(
            shown,
            ["1e+16", "1.5e+300", "0.0001", "1e-05", "123456789.125", "-2.0", "1000000000000000.0", "0.0"]
        );
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
