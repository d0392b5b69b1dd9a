//! Errors of recipes. Every message names the place, the key, and the remedy.
//!
//! Trade-off: problems are sentences, not types, because no caller distinguishes them.

use std::fmt;
use std::io;
use std::path::PathBuf;

use firebrick_hub::without_secrets;

use crate::config::other_names;

/// The place where something was typed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RecipePlace {
    /// Somewhere in a file; for a key that is missing.
    File(PathBuf),
    /// A line of a file, counted from 1.
    Line(PathBuf, usize),
    /// An override on the command line, as typed after `--set`.
    Set(String),
}

impl fmt::Display for RecipePlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RecipePlace::File(file) => write!(f, "{}", file.display()),
            RecipePlace::Line(file, line) => write!(f, "{}:{line}", file.display()),
            // What is not read as an address may hold a password all the same.
            RecipePlace::Set(text) if text.contains("tracking_uri") => {
                write!(f, "--set {}=...", text.split('=').next().unwrap_or_default())
            }
            RecipePlace::Set(text) => write!(f, "--set {text}"),
        }
    }
}

/// The reasons why a recipe is refused. Keys are written as in `--set`: `train.learning_rate`.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // of fields, which the messages name
pub enum ConfigError {
    /// The file could not be read.
    #[error("cannot read the recipe {}: {problem}; {help}", path.display())]
    Read { path: PathBuf, problem: io::Error, help: String },
    /// Keys that do not exist, a line for each.
    #[error("{}", without_secrets(.0))]
    UnknownKeys(String),
    /// Anything else that is wrong at a place.
    #[error("{}", without_secrets(&format!("{place}: {message}")))]
    At {
        place: RecipePlace,
        /// The key if it is one, what is wrong, and what to write instead.
        message: String,
    },
    /// A model or an adapter is neither a folder nor an id of the Hub.
    #[error("{what} '{}' is neither a folder on this machine nor an id of the Hub; {help}", without_secrets(model))]
    NoModel {
        /// "model", or the key of an adapter.
        what: &'static str,
        model: String,
        help: String,
    },
}

impl ConfigError {
    pub(super) fn key(place: RecipePlace, key: &str, problem: impl fmt::Display) -> Self {
        Self::At { place, message: format!("{key}: {problem}") }
    }

    pub(super) fn missing(place: RecipePlace, key: &str, help: impl fmt::Display) -> Self {
        Self::At { place, message: format!("{key} is missing; {help}") }
    }
}

/// Turns the TOML reader's message about the value of `key` into ours.
pub(super) fn from_reader(place: RecipePlace, key: &str, message: &str) -> ConfigError {
    let wrong_type = message.strip_prefix("invalid type: ").or_else(|| message.strip_prefix("invalid value: "));
    if let Some((got, expected)) = wrong_type.and_then(|rest| rest.split_once(", expected ")) {
        if got == "map" && ["grpo.rewards", "data.sources", "data.eval_sources"].contains(&key) {
            let what = "is a list, and each entry is a table of its own";
            return ConfigError::key(place, key, format!("{what}: write [[{key}]] with two brackets (a list in YAML)"));
        }
        let text = got.strip_prefix("string \"").and_then(|rest| rest.strip_suffix('"'));
        let of_value = text.and_then(|text| other_names::value(key, text)).map(|advice| format!("; {advice}"));
        let advice = of_value.unwrap_or_else(|| advice_on_type(key, got, text, expected).to_owned());
        let expected = match expected {
            "f64" => "a number",
            "u64" | "usize" => "a whole number, 0 or more",
            "a boolean" => "true or false",
            "a sequence" => "a list",
            other => other,
        };
        // Without Rust's name of a large integer's type.
        let got = got.trim_end_matches(" as i128").trim_end_matches(" as u128");
        return ConfigError::key(place, key, format!("expected {expected}, got {got}{advice}"));
    }
    if message.starts_with("unknown variant ") {
        // "unknown variant `x`, expected one of `a`, `b`": only the words between backticks matter.
        let mut words = message.split('`').skip(1).step_by(2);
        let got = words.next().unwrap_or_default();
        let allowed: Vec<&str> = words.collect();
        let hint = match (other_names::value(key, got), nearest(got, allowed.iter().copied())) {
            (Some(answer), _) => answer.to_owned(),
            (None, Some(nearest)) => format!("did you mean '{nearest}'?"),
            (None, None) => "write one of them".to_owned(),
        };
        let problem = format!("'{got}' is not one of '{}'; {hint}", allowed.join("', '"));
        return ConfigError::key(place, key, problem);
    }
    if let Some(field) = message.strip_prefix("missing field `").and_then(|rest| rest.strip_suffix('`')) {
        let help = format!("add `{field} = ...` to its section, or remove the section");
        return ConfigError::missing(place, &format!("{key}.{field}"), help);
    }
    ConfigError::key(place, key, message)
}

/// Returns advice to append to a value of the wrong type, if it is clear what was meant.
fn advice_on_type(key: &str, got: &str, text: Option<&str>, expected: &str) -> &'static str {
    match (text, expected) {
        (Some("None" | "none" | "null" | "nil"), "f64" | "u64" | "usize" | "a boolean") => {
            "; for none, leave the key out"
        }
        (Some(text), "f64" | "u64" | "usize") if text.parse::<f64>().is_ok() => "; write it without the quotes",
        (Some(text), "a sequence") if text.starts_with('[') => {
            "; its texts need quotes, and then a shell needs some around it: --set 'KEY=[\"a\", \"b\"]'"
        }
        (Some("true" | "false"), "a boolean") => "; write it without the quotes",
        (Some("auto"), "a boolean") if key == "train.bf16" => "; for that write compute = \"auto\" at the top instead",
        (None, "a string") if key == "data.path" && got == "sequence" => "; write a [[data.sources]] table for each",
        _ => "",
    }
}

/// Returns the candidate that `typed` is a misspelling or a part of, if there is one. Names that merely look alike may mean different things
/// (`use_dora` and `use_rslora`, 32 and 8 bits), so candidates with other digits or more than a few edits away do not count.
pub(super) fn nearest<'a>(typed: &str, candidates: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    /// One edit in this many characters is a misspelling.
    const CHARACTERS_PER_EDIT: usize = 4;
    /// A name that begins with the other one counts as meant if the shorter is at least this share of the longer.
    const PART: f64 = 0.65;
    /// No name is longer, and the time for one grows with its length.
    const MAX_BYTES: usize = 100;
    let typed = if typed.len() > MAX_BYTES { "" } else { typed };
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
