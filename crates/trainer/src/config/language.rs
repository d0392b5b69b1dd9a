//! The language of a recipe file, and what a text that does not parse in it, or a value in place of a section, was meant to be.

use std::path::Path;

use toml::Value;
use toml::de::{DeTable, DeValue};

use crate::config::yaml;

/// The language of a recipe file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Language {
    Toml,
    Yaml,
}

impl Language {
    /// Returns the language of a file by its extension.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::RunConfig;
    use crate::config::source::Source;

    /// Reads a recipe in one language and returns why it is refused.
    fn refusal(text: &str, language: Language, overrides: &[&str]) -> String {
        let overrides: Vec<String> = overrides.iter().map(|text| (*text).to_owned()).collect();
        let file = Path::new("x");
        let read = Source::parse(text, file, language, &overrides);
        read.and_then(|source| RunConfig::from_source(source, file)).unwrap_err().to_string()
    }

    #[test]
    fn what_was_meant_is_said_in_the_language_of_the_file() {
        use Language::{Toml, Yaml};
        let data = "model: m\nmode: lora\ndata: {path: d}\n";
        let cases: [(&str, Language, &[&str], &str); 18] = [
            (
                "model: m\nlora:\n  r: 8\n",
                Toml,
                &[],
                "x:1: this looks like YAML: give the file a name that ends with .yaml",
            ),
            ("model = 'm'\n[lora]\nr = 8\n", Yaml, &[], "this looks like TOML"),
            ("model = 'm'\n[lora]\nr = None\n", Toml, &[], "x:3: there is no None in TOML: leave 'r' out"),
            ("pack = True\n", Toml, &[], "write pack = true, in small letters"),
            ("model = a/b # the base\n", Toml, &[], "put the text into quotes: model = \"a/b\""),
            ("model = C:\\m\n", Toml, &[], "put the text into quotes: model = "),
            (
                "base_model: a/b\nadapter: lora\nlora_r: 8\n",
                Yaml,
                &[],
                "x:1: this is a configuration of another trainer (base_model, adapter, lora_r, ...): `firebrick convert x`",
            ),
            (
                "model_name_or_path: a/b\nstage: sft\ncutoff_len: 8\nbf16: true\n",
                Yaml,
                &[],
                "`firebrick convert x` makes a recipe of it",
            ),
            ("lora: true\n", Yaml, &[], "lora: expected a table of keys, got boolean: write `lora: {}`"),
            ("bnb_4bit: true\n", Yaml, &[], "write `bnb_4bit: {}` for its defaults"),
            ("data: x.jsonl\n", Yaml, &[], "write `data: {path: x.jsonl}`"),
            ("data = 'x.jsonl'\n", Toml, &[], "write [data] on a separate line and path = \"x.jsonl\" below it"),
            ("lora = false\n", Toml, &[], "leave it out, which turns it off"),
            (
                data,
                Yaml,
                &["lora=true"],
                "write `--set lora={}` for its defaults, or its keys as in --set lora.KEY=VALUE",
            ),
            (data, Yaml, &["lora={r:8, 'alpha': 16}"], "write --set lora.r=8 --set lora.alpha=16"),
            (data, Yaml, &["data=x.jsonl"], "write --set data.path=x.jsonl"),
            (
                "load_in_4bit: false\nmodel: m\ndata: {path: d}\n",
                Yaml,
                &[],
                "x:1: unknown key 'load_in_4bit' at the top of the file; leave it out: without it, it is off",
            ),
            (data, Yaml, &["train.grad_checkpointing=unsloth"], "write true, or leave the key out: the plan chooses"),
        ];
        for (text, language, overrides, part) in cases {
            let message = refusal(text, language, overrides);
            assert!(message.contains(part) && message.lines().count() == 1, "{text:?} {overrides:?}: {message}");
        }
        let message = refusal(data, Yaml, &["lora.r=None"]);
        assert!(message.contains("for none, leave the key out"), "{message}");
    }
}
