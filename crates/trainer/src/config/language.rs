//! The language of a recipe file, and what a text that does not parse in it, or a value in place of a section, was meant to be.

use std::path::Path;

use toml::Value;
use toml::de::{DeTable, DeValue};

use crate::config::yaml;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Language {
    Toml,
    Yaml,
}

impl Language {
    pub(super) fn of(file: &Path) -> Self {
        let is = |name: &str| file.extension().is_some_and(|extension| extension.eq_ignore_ascii_case(name));
        if is("yaml") || is("yml") { Self::Yaml } else { Self::Toml }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Toml => "TOML",
            Self::Yaml => "YAML",
        }
    }
}

/// Returns where the section or key of a line, counted from 1, of a TOML text was written before, and what to do; `None` if it was not.
pub(super) fn twice(text: &str, line: usize) -> Option<String> {
    let lines: Vec<&str> =
        text.lines().take(line).map(|line| line.split('#').next().unwrap_or_default().trim()).collect();
    let (last, before) = lines.split_last()?;
    let name = |line: &str| line.split('=').next().map(str::trim).map(str::to_owned);
    // The nearest one: before a key, that of its section.
    let first = before.iter().rposition(|line| name(line) == name(last))? + 1;
    let advice = if last.starts_with('[') { "put its keys together there" } else { "keep one of the two" };
    Some(format!("{} is there already, in line {first}: {advice}", name(last)?))
}

/// Returns what to write where the text of a recipe does not parse at `line`, from 1; `None` if that is not clear.
pub(super) fn by_text(text: &str, line: usize, language: Language) -> Option<String> {
    if language == Language::Yaml {
        let is_toml = DeTable::parse(text).is_ok_and(|tree| !tree.get_ref().is_empty());
        return is_toml.then(|| "this looks like TOML: give the file a name that ends with .toml".to_owned());
    }
    if text.trim_start().starts_with('{') {
        let what = "this is JSON; a recipe is TOML or YAML (.toml, .yaml), and data goes into it as data.path";
        return Some(what.to_owned());
    }
    if yaml::parse(text).is_ok_and(|tree| !tree.get_ref().is_empty()) {
        return Some("this looks like YAML: give the file a name that ends with .yaml".to_owned());
    }
    let (key, value) = text.lines().nth(line.checked_sub(1)?)?.split_once('=')?;
    let (key, value) = (key.trim(), value.split('#').next().unwrap_or_default().trim());
    match value {
        _ if DeValue::parse(value).is_ok() => None,
        "" => Some(format!("'{key}' has no value: write one, or leave the line out")),
        "None" | "null" | "Null" | "nil" | "~" => {
            Some(format!("there is no {value} in TOML: leave '{key}' out, which means the same"))
        }
        "True" | "False" => Some(format!("write {key} = {}, in small letters", value.to_lowercase())),
        word if word.starts_with(|first: char| first.is_alphabetic() || "/.~<".contains(first)) => {
            Some(format!("put the text into quotes: {key} = {}", Value::from(word)))
        }
        _ => None,
    }
}

/// Where a value was typed in place of a section.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Typed {
    File(Language),
    Override,
}

/// Returns what to write instead of `value` for the section `key`.
pub(super) fn by_section(key: &str, value: &str, at: Typed) -> String {
    let text = value.trim_matches(['"', '\'']);
    match (at, key) {
        (Typed::Override, _) if value == "false" => {
            let full = if key == "lora" { "; to train every weight, add --set mode=full" } else { "" };
            format!("write `--set {key}=`, which removes the section{full}")
        }
        _ if value == "false" => "leave it out, which turns it off".to_owned(),
        (Typed::Override, "data") => format!("write --set data.path={text}"),
        (Typed::Override, _) => {
            format!("write `--set {key}={{}}` for its defaults, or its keys as in --set {key}.KEY=VALUE")
        }
        (Typed::File(Language::Yaml), "data") => format!("write `data: {{path: {text}}}`"),
        (Typed::File(Language::Yaml), _) => {
            format!("write `{key}: {{}}` for its defaults, or `{key}:` and its keys indented below it")
        }
        (Typed::File(Language::Toml), "data") => {
            format!("write [data] on a separate line and path = {} below it", Value::from(text))
        }
        (Typed::File(Language::Toml), _) => format!("write [{key}] on a separate line and the keys below it"),
    }
}

/// Returns the overrides that a table of another language was meant to be: `--set lora={r:8}`.
pub(super) fn by_pairs(key: &str, value: &str) -> String {
    let pairs = value.trim_matches(['{', '}']).split(',').filter_map(|pair| pair.split_once([':', '=']));
    let plain = |text: &str| text.trim().trim_matches(['"', '\'']).to_owned();
    let sets: Vec<String> =
        pairs.map(|(name, value)| format!("--set {key}.{}={}", plain(name), plain(value))).collect();
    let sets = if sets.is_empty() { format!("--set {key}.KEY=VALUE") } else { sets.join(" ") };
    format!("{value} is no table of TOML; write {sets}")
}
