//! The settings of another trainer's configuration: keys with their values and lines, how they are shown, and what becomes of one.

use firebrick_hub::without_secrets;
use serde_json::Value as Json;
use toml::Value;

/// What became of a key that is not in the recipe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Remark {
    /// Its line in the configuration, from 1.
    pub line: usize,
    /// The key with the keys above it, and its value.
    pub setting: String,
    /// Why it is not there.
    pub reason: String,
}

/// A key of the configuration with its value; keys of nested mappings have the names above them and a dot.
#[derive(Clone, Debug)]
pub(super) struct Setting {
    pub(super) path: String,
    pub(super) value: Value,
    pub(super) line: usize,
}

impl Setting {
    /// The last part of the path.
    pub(super) fn name(&self) -> &str {
        self.path.rsplit('.').next().unwrap_or(&self.path)
    }

    /// Its value in one line, without secrets.
    pub(super) fn shown(&self) -> String {
        of_value(&shown(self.name(), &self.value))
    }

    pub(super) fn remark(&self, reason: impl Into<String>) -> Remark {
        let value = self.shown();
        let short: String = value.chars().take(60).collect();
        let more = if short.len() < value.len() { "..." } else { "" };
        Remark {
            line: self.line,
            setting: format!("{}: {short}{more}", self.path),
            reason: without_secrets(&reason.into()),
        }
    }
}

/// Returns a value as it may be shown, by the name of its key.
fn shown(name: &str, value: &Value) -> Value {
    let lower = name.to_lowercase();
    let is_of_text = ["pad", "eos", "bos", "unk", "cls", "sep", "mask"].iter().any(|kind| lower.starts_with(kind));
    let is_secret = ["api_key", "apikey", "access_key", "password", "secret"].iter().any(|part| lower.contains(part))
        || lower.ends_with("token") && !is_of_text;
    match value {
        _ if is_secret => "...".into(),
        // A list of addresses in one text.
        Value::String(text) => {
            without_secrets(text).split(',').map(without_secrets).collect::<Vec<_>>().join(",").into()
        }
        Value::Array(list) => Value::Array(list.iter().map(|value| shown(name, value)).collect()),
        Value::Table(table) => {
            Value::Table(table.iter().map(|(key, value)| (key.clone(), shown(key, value))).collect())
        }
        other => other.clone(),
    }
}

/// Writes a value in one line; small numbers as users write rates.
pub(super) fn of_value(value: &Value) -> String {
    // JSON escapes what TOML does, except for DEL, and never has several lines.
    let basic = |text: &str| Json::from(text).to_string().replace('\u{7f}', "\\u007f");
    match value {
        Value::Float(number) if *number != 0.0 && number.abs() < 1e-2 => format!("{number:e}"),
        Value::String(text) if text.contains('\n') => basic(text),
        Value::Array(list) => format!("[{}]", list.iter().map(of_value).collect::<Vec<_>>().join(", ")),
        Value::Table(table) if value.to_string().contains('\n') => {
            let entries = table.iter().map(|(key, value)| format!("{} = {}", basic(key), of_value(value)));
            format!("{{ {} }}", entries.collect::<Vec<_>>().join(", "))
        }
        other => other.to_string(),
    }
}

/// What becomes of a setting.
pub(super) enum Outcome {
    /// These keys of the recipe; one at least.
    Set(Vec<(String, Value)>),
    /// Sources of data, which are in the draft already.
    Source,
    /// Nothing: it happens anyway, or elsewhere.
    NotNeeded(String),
    /// A comment: nothing here does this.
    Left(String),
    /// A comment, and the recipe is not complete: the run would be another one without it.
    Method(String),
}

pub(super) fn set(key: &str, value: impl Into<Value>) -> Option<Outcome> {
    Some(Outcome::Set(vec![(key.to_owned(), value.into())]))
}

pub(super) fn needless(why: &str) -> Option<Outcome> {
    Some(Outcome::NotNeeded(why.to_owned()))
}

pub(super) fn left(why: &str) -> Option<Outcome> {
    Some(Outcome::Left(why.to_owned()))
}

/// Returns why a setting has no counterpart; one that is off needs none.
pub(super) fn unless_off(value: &Value, why: &str) -> Outcome {
    match value.as_bool() {
        Some(false) => Outcome::NotNeeded("it is off".to_owned()),
        _ => Outcome::Left(why.to_owned()),
    }
}

pub(super) fn nothing_does(value: &Value) -> Outcome {
    unless_off(value, "nothing here does this")
}

pub(super) fn text_of<'a>(all: &'a [Setting], name: &str) -> Option<&'a str> {
    all.iter().find(|setting| setting.name() == name).and_then(|setting| setting.value.as_str())
}

pub(super) fn number_of(all: &[Setting], name: &str) -> Option<f64> {
    all.iter().find(|setting| setting.name() == name).and_then(|setting| number(&setting.value))
}

pub(super) fn is_true(all: &[Setting], name: &str) -> bool {
    all.iter().any(|setting| setting.name() == name && setting.value.as_bool() == Some(true))
}

pub(super) fn has(all: &[Setting], name: &str) -> bool {
    all.iter().any(|setting| setting.name() == name)
}

/// Returns a number, also where it is written as a text.
pub(super) fn number(value: &Value) -> Option<f64> {
    match value {
        Value::Integer(number) => Some(*number as f64),
        Value::Float(number) => Some(*number),
        Value::String(text) => text.parse().ok(),
        _ => None,
    }
}
