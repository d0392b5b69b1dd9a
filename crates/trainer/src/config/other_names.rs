//! Keys of axolotl, TRL, transformers, LLaMA-Factory, Unsloth, mlx-lm and others, and their equivalents here: `other_names.toml`.
//!
//! Trade-off: the table is kept by hand; a test checks that every key and section in it exists.

use std::collections::{BTreeMap, HashMap};
use std::sync::LazyLock;

use serde::Deserialize;

/// Answers, each with the names it is for.
type Answers = BTreeMap<String, Vec<String>>;
type Kind = fn(&'static str) -> Answer;

#[derive(Deserialize)]
struct Names {
    here: Answers,
    section: Answers,
    not_yet: Answers,
    not_needed: Answers,
    values: BTreeMap<String, Answers>,
}

static NAMES: LazyLock<Names> =
    LazyLock::new(|| toml::from_str(include_str!("other_names.toml")).expect("a test has read the table"));

/// The equivalent of another trainer's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// This key, written `section.key`, and the form of its values if that differs.
    Key(&'static str, Option<&'static str>),
    /// This section.
    Section(&'static str),
    /// Not supported yet; the reason.
    NotYet(&'static str),
    /// Not needed: it happens anyway or elsewhere.
    NotNeeded(&'static str),
}

impl Answer {
    /// Returns whether a typed value only says that something is off which is off without the key: no note on the values says what false is.
    pub(super) fn is_off(self, typed: &str) -> bool {
        let says_off = match self {
            Self::Section(_) | Self::NotYet(_) => true,
            Self::Key(_, note) => note.is_some_and(|note| !note.contains("false")),
            Self::NotNeeded(_) => false,
        };
        says_off && typed.eq_ignore_ascii_case("false")
    }

    /// Returns the answer as advice to a user who typed the name in `section`.
    pub(super) fn advice(self, section: &str) -> String {
        match self {
            Self::Key(path, None) => format!("here it is {}", place(path, section)),
            Self::Key(path, Some(note)) => format!("here it is {}: {note}", place(path, section)),
            Self::Section(name) => format!("write the section [{name}]"),
            Self::NotYet(why) => format!("not there yet: {why}"),
            Self::NotNeeded(why) => format!("not needed: {why}"),
        }
    }
}

/// Writes "'r' in [lora]", or "'r'" inside that section.
fn place(path: &str, section: &str) -> String {
    match path.split_once('.').unwrap_or(("", path)) {
        (home, key) if home == section => format!("'{key}'"),
        ("", key) => format!("'{key}' at the top of the file, before the first [section]"),
        (home, key) => format!("'{key}' in [{home}]"),
    }
}

/// Returns the answer for the name of a key.
pub fn key(name: &str) -> Option<Answer> {
    static WHOLE: LazyLock<HashMap<&str, Answer>> = LazyLock::new(|| names().collect());
    static BEGINNINGS: LazyLock<Vec<(&str, Answer)>> =
        LazyLock::new(|| names().filter_map(|(name, answer)| Some((name.strip_suffix('*')?, answer))).collect());
    let by_beginning = || BEGINNINGS.iter().find(|(start, _)| name.starts_with(start)).map(|(_, answer)| answer);
    WHOLE.get(name).or_else(by_beginning).copied()
}

pub(super) fn names() -> impl Iterator<Item = (&'static str, Answer)> {
    let here = |text: &'static str| match text.split_once(": ") {
        Some((key, note)) => Answer::Key(key, Some(note)),
        None => Answer::Key(text, None),
    };
    let kinds: [(&'static Answers, Kind); 4] = [
        (&NAMES.here, here),
        (&NAMES.section, Answer::Section),
        (&NAMES.not_yet, Answer::NotYet),
        (&NAMES.not_needed, Answer::NotNeeded),
    ];
    kinds.into_iter().flat_map(|(answers, kind)| {
        answers.iter().flat_map(move |(text, names)| names.iter().map(move |name| (name.as_str(), kind(text))))
    })
}

/// Returns the advice for a value of another trainer.
pub(super) fn value(key: &str, got: &str) -> Option<&'static str> {
    let found = NAMES.values.get(key)?.iter().find(|(_, names)| names.iter().any(|name| name == got));
    found.map(|(advice, _)| advice.as_str())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::config::known_keys;

    #[test]
    fn every_name_is_there_once() {
        let distinct: BTreeSet<&str> = names().map(|(name, _)| name).collect();
        assert_eq!(distinct.len(), names().count());
    }

    /// `their_keys.toml` was made of the classes of settings in the sources of each program.
    #[test]
    fn every_key_of_the_others_has_an_answer() {
        let (programs, ours): (Answers, _) = (toml::from_str(include_str!("their_keys.toml")).unwrap(), known_keys());
        let is_answered = |name: &str| key(name).is_some() || ours.values().flatten().any(|known| known == name);
        let missing: Vec<_> = programs.values().flatten().filter(|name| !is_answered(name)).collect();
        assert!(programs.len() > 5 && missing.is_empty(), "{missing:?}");
    }

    #[test]
    fn a_value_that_is_not_there_is_never_answered_with_another_meaning() {
        assert!(value("train.optimizer", "paged_adamw_32bit").unwrap().contains("not there yet"));
        assert!(value("train.schedule", "constant_with_warmup").unwrap().contains("warmup_steps"));
        assert_eq!(value("train.schedule", "cosin"), None);
    }
}
