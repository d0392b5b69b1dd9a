//! Typed access to the values of a record, with errors that name the place and the path of the value.
//!
//! Trade-off: few conversions. The string "3" is not a number; where a text is expected, a number or a boolean is read as JSON writes it, as CSV has
//! them. Only a list or an object may be written as a JSON string, because table formats have no other way to store one. Unread keys are tracked for
//! the record itself, not for its messages.

use std::borrow::Cow;
use std::cell::RefCell;
use std::ptr;

use firebrick_arch::python_json::{self, LONE_SURROGATE, number};
use serde_json::Value as Json;
use thiserror::Error;

use super::row::Object;
use crate::source::RecordPlace;

/// A record that does not match its format. The message is complete: what was found, what was expected, and the remedy.
#[derive(Debug, Clone, PartialEq, Error)]
#[error("{place}: {problem}")]
pub struct RecordFormatError {
    /// File and line.
    pub place: RecordPlace,
    /// The problem, and the remedy.
    pub problem: String,
    /// Whether one value of this record is at fault rather than its form: absent or null, which are one because tables fill absent keys with null;
    /// not a text where a text is expected; or nothing that can be written. Such a record counts as bad and does not end the run.
    pub is_bad_cell: bool,
}

pub(crate) type Parsed<T> = Result<T, RecordFormatError>;

impl RecordFormatError {
    /// Creates an error that ends the run.
    pub(crate) fn new(place: &RecordPlace, problem: String) -> Self {
        Self { place: place.clone(), problem, is_bad_cell: false }
    }
}

/// Advice on a key that is missing, unless it is there under another name.
pub(super) const SAME_FORMAT: &str = "All rows of a source have the same format";
/// Maximum number of keys of an object that messages list.
const SHOWN_KEYS: usize = 24;

#[derive(Clone, Copy)]
pub(crate) struct Reader<'a> {
    pub(crate) fields: &'a Object,
    pub(crate) place: &'a RecordPlace,
    /// The values that were read so far: [`unread_keys`] lists the others.
    pub(crate) read: &'a RefCell<Vec<&'a Json>>,
}

impl<'a> Reader<'a> {
    /// Returns the value of a key, null included.
    fn find(&self, key: &str) -> Option<&'a Json> {
        let value = self.fields.get(key)?;
        self.read.borrow_mut().push(value);
        Some(value)
    }

    /// Returns the value of a key. Null counts as absent, because tables fill missing values with it.
    pub(crate) fn get(&self, key: &str) -> Option<&'a Json> {
        self.find(key).filter(|value| !value.is_null())
    }

    /// Returns the value of a required key, null included.
    pub(crate) fn need(&self, key: &str) -> Parsed<&'a Json> {
        self.find(key).ok_or_else(|| missing_key(self.place, &format!("{key:?}"), self.fields, SAME_FORMAT))
    }

    pub(crate) fn need_text(&self, key: &str) -> Parsed<Cow<'a, str>> {
        text(self.need(key)?, key, self.place)
    }

    pub(crate) fn text(&self, key: &str) -> Parsed<Option<Cow<'a, str>>> {
        self.get(key).map(|value| text(value, key, self.place)).transpose()
    }

    /// Reads an optional list of objects, possibly written as a JSON string. An empty list counts as absent.
    pub(crate) fn objects(&self, key: &str, expected: &'static str) -> Parsed<Option<Vec<Json>>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let value = unfold(value, key, self.place)?;
        check_writable(&value, key, self.place)?;
        let Json::Array(items) = value else {
            return Err(wrong_type(self.place, key, expected, &value));
        };
        if let Some(index) = items.iter().position(|item| !item.is_object()) {
            return Err(wrong_type(self.place, &format!("{key}[{index}]"), "an object", &items[index]));
        }
        Ok(Some(items).filter(|items| !items.is_empty()))
    }
}

/// Returns the value itself, without nulls, or the parsed content of a JSON string.
fn unfold(value: &Json, key: &str, place: &RecordPlace) -> Parsed<Json> {
    let Json::String(text) = value else { return Ok(without_nulls(value)) };
    if text.trim().is_empty() {
        return Ok(Json::Array(Vec::new()));
    }
    python_json::from_slice(text.as_bytes()).map_err(|reason| {
        let hint = "Write it as a list, or as a string that holds a JSON list";
        bad_value(place, key, &format!("is a string that is not JSON: {reason}"), hint)
    })
}

/// Returns a value without keys that are null. Tables fill absent keys with null, so the two are one in every file format; in lists null stays.
pub(crate) fn without_nulls(value: &Json) -> Json {
    match value {
        Json::Array(items) => items.iter().map(without_nulls).collect(),
        Json::Object(fields) => {
            let kept = fields.iter().filter(|(_, value)| !value.is_null());
            kept.map(|(key, value)| (key.clone(), without_nulls(value))).collect()
        }
        other => other.clone(),
    }
}

/// Checks that a template can write a value as it is. The error is a bad cell.
pub(crate) fn check_writable(value: &Json, key: &str, place: &RecordPlace) -> Parsed<()> {
    match unwritable(value) {
        Some(found) => {
            let problem = format!("{key} has {found}, which cannot be written into a training text");
            Err(RecordFormatError { is_bad_cell: true, ..RecordFormatError::new(place, problem) })
        }
        None => Ok(()),
    }
}

fn unwritable(value: &Json) -> Option<String> {
    match value {
        Json::Array(items) => items.iter().find_map(unwritable),
        Json::Object(fields) => {
            fields.iter().find_map(|(key, value)| unwritable_text(key).or_else(|| unwritable(value)))
        }
        Json::String(text) => {
            let number = number(value).filter(|number| number.parse::<i128>().is_err());
            number.map(|number| format!("the number {number}")).or_else(|| unwritable_text(text))
        }
        _ => None,
    }
}

fn unwritable_text(text: &str) -> Option<String> {
    text.contains(LONE_SURROGATE).then(|| "a lone surrogate (half of a UTF-16 pair)".to_owned())
}

pub(crate) fn is_text(value: &Json) -> bool {
    matches!(value, Json::String(_) | Json::Number(_) | Json::Bool(_))
}

/// Reads a text: a string, or a number or a boolean as JSON writes it.
pub(crate) fn text<'a>(value: &'a Json, key: &str, place: &RecordPlace) -> Parsed<Cow<'a, str>> {
    match value {
        Json::Number(_) | Json::Bool(_) => Ok(Cow::Owned(value.to_string())),
        value if is_whole(value) => Ok(Cow::Borrowed(number(value).unwrap_or_default())),
        value => string(value, key, place).map(Cow::Borrowed),
    }
}

/// Returns whether a value is a whole number beyond 64 bits.
fn is_whole(value: &Json) -> bool {
    number(value).is_some_and(|number| number.bytes().all(|byte| byte == b'-' || byte.is_ascii_digit()))
}

/// Reads a string without NUL characters and lone surrogates.
pub(crate) fn string<'a>(value: &'a Json, key: &str, place: &RecordPlace) -> Parsed<&'a str> {
    let bad = |error| RecordFormatError { is_bad_cell: true, ..error };
    let Some(text) = value.as_str().filter(|_| number(value).is_none()) else {
        return Err(bad(wrong_type(place, key, "a string", value)));
    };
    if text.contains('\0') {
        let problem = format!("a NUL character in {key}: the file is damaged or not text");
        return Err(bad(RecordFormatError::new(place, problem)));
    }
    check_writable(value, key, place)?;
    Ok(text)
}

pub(crate) fn list<'a>(value: &'a Json, key: &str, expected: &'static str, place: &RecordPlace) -> Parsed<&'a [Json]> {
    value.as_array().map(Vec::as_slice).ok_or_else(|| wrong_type(place, key, expected, value))
}

/// Lists the keys of an object, for messages.
pub(crate) fn names(fields: &Object) -> String {
    if fields.is_empty() {
        return "no key".to_owned();
    }
    let shown: Vec<String> = fields.keys().take(SHOWN_KEYS).map(|key| format!("{key:?}")).collect();
    match fields.len().saturating_sub(SHOWN_KEYS) {
        0 => shown.join(", "),
        more => format!("{} and {more} more keys (is it an object with the rows by their ids?)", shown.join(", ")),
    }
}

/// Creates the error for a value of the wrong type; null and what is no number of JSON are bad cells of their record.
pub(crate) fn wrong_type(place: &RecordPlace, key: &str, expected: &str, found: &Json) -> RecordFormatError {
    let is_bad_cell = found.is_null() || number(found).is_some();
    let found = match found {
        _ if number(found).is_some() => format!("the number {}", number(found).unwrap_or_default()),
        Json::Null => "null".to_owned(),
        Json::Bool(value) => format!("the boolean {value}"),
        Json::Number(value) => format!("the number {value}"),
        Json::String(text) if text.starts_with('[') => "a list as JSON in a string: write the list itself".to_owned(),
        Json::String(_) => "a string".to_owned(),
        Json::Array(items) => format!("a list of {}", items.len()),
        Json::Object(fields) => format!("an object with {}", names(fields)),
    };
    let problem = format!("{key} must be {expected}, found {found}");
    RecordFormatError { is_bad_cell, ..RecordFormatError::new(place, problem) }
}

pub(crate) fn missing_key(place: &RecordPlace, expected: &str, fields: &Object, hint: &str) -> RecordFormatError {
    let problem = format!("expected the key {expected}, found {}. {hint}", names(fields));
    RecordFormatError { is_bad_cell: true, ..RecordFormatError::new(place, problem) }
}

pub(crate) fn bad_value(place: &RecordPlace, key: &str, problem: &str, hint: &str) -> RecordFormatError {
    RecordFormatError::new(place, format!("{key} {problem}. {hint}"))
}

/// Columns of images, audio and video (LLaMA-Factory's in the plural, LLaVA's in the singular).
const MEDIA: [&str; 6] = ["images", "audios", "videos", "image", "audio", "video"];

/// Returns the keys with a value, except for those whose values are among `read`. Error: one of them contains images, audio or video.
pub(super) fn unread_keys<'a>(fields: &'a Object, read: &[&Json], place: &RecordPlace) -> Parsed<Vec<&'a str>> {
    let is_unread = |value: &Json| !is_empty(value) && !read.iter().any(|&known| ptr::eq(known, value));
    let unread: Vec<&str> = fields.iter().filter(|(_, value)| is_unread(value)).map(|(key, _)| key.as_str()).collect();
    // A number or a boolean describes media rather than containing it.
    let is_media = |key: &str| MEDIA.contains(&key) && !matches!(fields[key], Json::Bool(_) | Json::Number(_));
    match unread.iter().find(|key| is_media(key)) {
        Some(key) => {
            let problem = "is not empty, but images, audio and video cannot be trained on";
            let hint = "If the texts make sense without it, name the other keys with columns = [...]; if it is a text, \
                        name it with fields = { ... }; otherwise remove the rows that have it";
            Err(bad_value(place, key, problem, hint))
        }
        None => Ok(unread),
    }
}

/// Returns whether a value is empty: tables fill rows with null, and with empty texts and lists.
fn is_empty(value: &Json) -> bool {
    match value {
        Json::Null => true,
        Json::Bool(_) | Json::Number(_) => false,
        Json::String(text) => text.trim().is_empty(),
        Json::Array(items) => items.iter().all(is_empty),
        Json::Object(fields) => fields.values().all(is_empty),
    }
}
