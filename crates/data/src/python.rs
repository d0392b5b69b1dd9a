//! The two functions that chat templates expect from Python: `json.dumps` and `datetime.now().strftime`.
//!
//! Gives up the local time zone (dates are UTC, so that two machines render the same prompt) and the locale (English).

use minijinja::value::Kwargs;
use minijinja::{Error, ErrorKind, Value};
use serde_json::Value as Json;

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
    let ensure_ascii = arguments.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    let sort_keys = arguments.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    let indent = arguments.get::<Option<Value>>("indent")?.filter(|value| !value.is_none());
    let separators = arguments.get::<Option<Vec<String>>>("separators")?;
    arguments.assert_all_used()?;

    let indent = match indent {
        None => None,
        Some(indent) => match indent.as_str() {
            Some(text) => Some(text.to_owned()),
            None => Some(" ".repeat(usize::try_from(indent)?)),
        },
    };
    let (item_separator, key_separator) = match separators.as_deref() {
        Some([item, key]) => (item.clone(), key.clone()),
        Some(other) => {
            let message = format!("tojson: separators needs 2 strings, found {}", other.len());
            return Err(Error::new(ErrorKind::InvalidOperation, message));
        }
        None => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
    };
    let mut json = serde_json::to_value(value)
        .map_err(|reason| Error::new(ErrorKind::InvalidOperation, format!("tojson: {reason}")))?;
    if sort_keys {
        json.sort_all_objects();
    }
    let mut writer = JsonWriter { indent, item_separator, key_separator, ensure_ascii, text: String::new() };
    writer.value(&json, 0);
    Ok(Value::from(writer.text))
}

/// Writes JSON with the spaces and escapes of `json.dumps`.
struct JsonWriter {
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
    ensure_ascii: bool,
    text: String,
}

impl JsonWriter {
    fn value(&mut self, json: &Json, depth: usize) {
        match json {
            Json::Array(items) => self.container('[', ']', items.iter().map(|item| (None, item)), depth),
            Json::Object(map) => {
                self.container('{', '}', map.iter().map(|(key, item)| (Some(key.as_str()), item)), depth);
            }
            Json::String(text) => self.string(text),
            scalar => self.text.push_str(&scalar.to_string()),
        }
    }

    fn container<'a>(
        &mut self,
        open: char,
        close: char,
        items: impl ExactSizeIterator<Item = (Option<&'a str>, &'a Json)>,
        depth: usize,
    ) {
        self.text.push(open);
        let has_items = items.len() > 0;
        for (index, (key, item)) in items.enumerate() {
            if index > 0 {
                self.text.push_str(&self.item_separator);
            }
            self.new_line(depth + 1);
            if let Some(key) = key {
                self.string(key);
                self.text.push_str(&self.key_separator);
            }
            self.value(item, depth + 1);
        }
        if has_items {
            self.new_line(depth);
        }
        self.text.push(close);
    }

    fn new_line(&mut self, depth: usize) {
        if let Some(indent) = &self.indent {
            self.text.push('\n');
            self.text.push_str(&indent.repeat(depth));
        }
    }

    fn string(&mut self, text: &str) {
        // serde_json escapes exactly what Python does, but for characters outside ASCII.
        for character in Json::from(text).to_string().chars() {
            if self.ensure_ascii && !character.is_ascii() {
                for unit in character.encode_utf16(&mut [0; 2]) {
                    self.text.push_str(&format!("\\u{unit:04x}"));
                }
            } else {
                self.text.push(character);
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
