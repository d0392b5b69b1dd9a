//! What can be wrong with a recipe: every message names the place, the key, and the way out.
//!
//! Trade-off: problems are sentences, not types, because no caller distinguishes them.

use std::fmt;
use std::io;
use std::path::PathBuf;

use crate::config::other_names;

/// Where something was typed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// Somewhere in a file, for what is missing rather than wrong.
    File(PathBuf),
    /// A line of a file, counted from 1.
    Line(PathBuf, usize),
    /// An override on the command line, as typed after `--set`.
    Set(String),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::File(file) => write!(f, "{}", file.display()),
            Place::Line(file, line) => write!(f, "{}:{line}", file.display()),
            Place::Set(text) => write!(f, "--set {text}"),
        }
    }
}

/// Why a recipe is refused. Keys are written as in `--set`: `train.learning_rate`.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file could not be read.
    #[error("cannot read the recipe {}: {problem}; {help}", path.display())]
    Read {
        /// The path as given.
        path: PathBuf,
        /// The system's error.
        problem: io::Error,
        /// What to give instead.
        help: String,
    },
    /// The file is not what its name says.
    #[error("{place}: this is not {language}: {message}")]
    Syntax {
        /// Where.
        place: Place,
        /// "TOML" or "YAML".
        language: &'static str,
        /// What the parser expected.
        message: String,
    },
    /// An override without `=`, or one that goes through a key that is not a section.
    #[error("{place}: {message}")]
    Override {
        /// The override.
        place: Place,
        /// What is wrong and how to write it.
        message: String,
    },
    /// Keys that do not exist, at least one.
    #[error("{}", lines(.0))]
    UnknownKeys(Vec<UnknownKey>),
    /// A value of the wrong type.
    #[error("{place}: {key}: expected {expected}, got {got}")]
    WrongType {
        /// Where.
        place: Place,
        /// The key.
        key: String,
        /// What the key takes.
        expected: String,
        /// What was typed.
        got: String,
    },
    /// A word that is not among the allowed ones.
    #[error("{place}: {key}: '{got}' is not one of {allowed}")]
    UnknownValue {
        /// Where.
        place: Place,
        /// The key.
        key: String,
        /// What was typed.
        got: String,
        /// The allowed words, and the nearest one or what to do.
        allowed: String,
    },
    /// A key without a default is not there.
    #[error("{place}: {key} is missing; {help}")]
    Missing {
        /// The file, or the line of its section.
        place: Place,
        /// The key.
        key: String,
        /// The line to add.
        help: String,
    },
    /// A value out of range, or keys that cannot be together.
    #[error("{place}: {key}: {problem}; {help}")]
    Impossible {
        /// Where.
        place: Place,
        /// The key.
        key: String,
        /// Why it cannot work.
        problem: String,
        /// What to write instead.
        help: String,
    },
    /// A value that is wrong in some other way.
    #[error("{place}: {key}: {message}")]
    Invalid {
        /// Where.
        place: Place,
        /// The key.
        key: String,
        /// The reader's message.
        message: String,
    },
    /// A model or an adapter is neither a folder nor an id of the Hub.
    #[error("{what} '{model}' is neither a folder on this machine nor an id of the Hub; {help}")]
    NoModel {
        /// "model", or the key of an adapter.
        what: &'static str,
        /// Its name as typed.
        model: String,
        /// What to write.
        help: String,
    },
}

/// A key that does not exist.
#[derive(Debug, thiserror::Error)]
#[error("{place}: unknown key '{key}' {section}; {hint}")]
pub struct UnknownKey {
    /// Where.
    pub place: Place,
    /// The key as typed, without its section.
    pub key: String,
    /// "in `[train]`" or "at the top of the file".
    pub section: String,
    /// The nearest known key, or where it belongs.
    pub hint: String,
}

fn lines(keys: &[UnknownKey]) -> String {
    keys.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
}

/// Turns a message of the TOML reader about the value of `key` into one of ours.
pub(super) fn from_reader(place: Place, key: String, message: &str) -> ConfigError {
    if let Some((got, expected)) = message
        .strip_prefix("invalid type: ")
        .or_else(|| message.strip_prefix("invalid value: "))
        .and_then(|rest| rest.split_once(", expected "))
    {
        let advice = advice_on_type(&key, got, expected);
        let got = plain_value(got) + advice;
        return ConfigError::WrongType { place, key, expected: plain_type(expected), got };
    }
    if message.starts_with("unknown variant ") {
        return unknown_value(place, key, message);
    }
    if let Some(field) = message.strip_prefix("missing field `").and_then(|rest| rest.strip_suffix('`')) {
        let help = format!("add `{field} = ...` to its section, or remove the section");
        return ConfigError::Missing { place, key: format!("{key}.{field}"), help };
    }
    ConfigError::Invalid { place, key, message: message.to_string() }
}

/// The reader's "unknown variant `x`, expected one of `a`, `b`": the words between backticks are what counts.
fn unknown_value(place: Place, key: String, message: &str) -> ConfigError {
    let mut words = message.split('`').skip(1).step_by(2).map(str::to_string);
    let got = words.next().unwrap_or_default();
    let allowed: Vec<String> = words.collect();
    let nearest = nearest(&got, allowed.iter().map(String::as_str));
    let hint = match (other_names::value(&key, &got), nearest) {
        (Some(answer), _) => answer.to_string(),
        (None, Some(nearest)) => format!("did you mean '{nearest}'?"),
        (None, None) => "write one of them".to_string(),
    };
    let allowed = allowed.iter().map(|word| format!("'{word}'")).collect::<Vec<_>>().join(", ");
    ConfigError::UnknownValue { place, key, got, allowed: format!("{allowed}; {hint}") }
}

/// What to write instead of a value of the wrong type, where that is clear; it follows the value.
fn advice_on_type(key: &str, got: &str, expected: &str) -> &'static str {
    let text = got.strip_prefix("string \"").and_then(|rest| rest.strip_suffix('"'));
    match (text, expected) {
        (Some(text), "f64" | "u64" | "usize") if text.parse::<f64>().is_ok() => "; write it without the quotes",
        (Some("true" | "false"), "a boolean") => "; write it without the quotes",
        (None, "a string") if key == "data.path" && got == "sequence" => "; write a [[data.sources]] table for each",
        _ => "",
    }
}

/// Rust's name of a type in plain words.
fn plain_type(expected: &str) -> String {
    match expected {
        "f64" => "a number",
        "u64" | "usize" => "a whole number, 0 or more",
        "a boolean" => "true or false",
        "a sequence" => "a list",
        other => other,
    }
    .to_string()
}

/// A value as the reader shows it, without Rust's name of the type of a large integer.
fn plain_value(got: &str) -> String {
    got.trim_end_matches(" as i128").trim_end_matches(" as u128").to_string()
}

/// The candidate that `typed` is a misspelling or a part of, if there is one. Names that merely look alike may mean different things
/// (`use_dora` and `use_rslora`, 32 and 8 bits), so a candidate with other digits or more than a few edits away is none.
pub(super) fn nearest<'a>(typed: &str, candidates: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    /// One edit in this many characters is a misspelling.
    const CHARACTERS_PER_EDIT: usize = 4;
    /// A name of which the typed one has this share, from the beginning, is meant.
    const PART: f64 = 0.65;
    let digits = |name: &str| name.chars().filter(char::is_ascii_digit).collect::<String>();
    let edits = |candidate: &str| {
        let (short, long) = if typed.len() < candidate.len() { (typed, candidate) } else { (candidate, typed) };
        if long.starts_with(short) && short.len() as f64 >= PART * long.len() as f64 {
            return Some(0);
        }
        let edits = strsim::damerau_levenshtein(typed, candidate);
        (edits <= (typed.chars().count() / CHARACTERS_PER_EDIT).max(1)).then_some(edits)
    };
    candidates
        .filter(|candidate| digits(candidate) == digits(typed))
        .filter_map(|candidate| Some((edits(candidate)?, candidate)))
        .min_by_key(|(edits, _)| *edits)
        .map(|(_, candidate)| candidate)
}
