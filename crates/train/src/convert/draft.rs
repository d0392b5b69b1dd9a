//! A recipe under construction: the keys that settings become, the sources of data, and the settings that become none.

use std::sync::LazyLock;

use firebrick_hub::has_secrets;
use firebrick_trainer::config::{KnownKeys, known_keys};
use toml::{Table, Value};

use super::kind::Trainer;
use super::setting::{Outcome, Remark, Setting};

/// Keys without which a run would train something else; so are those of `[lora]`, `[preference]` and `[grpo]`.
const DECISIVE: &str = "mode model data.path data.train_on data.roles_to_train \
    train.learning_rate train.optimizer train.epochs train.steps";

/// Returns whether a run would train something else without a key of the recipe.
pub(super) fn is_decisive(key: &str) -> bool {
    ["lora", "preference", "grpo"].iter().any(|section| key.starts_with(section))
        || DECISIVE.split(' ').any(|known| known == key)
}

pub(super) fn has_key(section: &str, name: &str) -> bool {
    // Made from the whole schema, once.
    static KNOWN: LazyLock<KnownKeys> = LazyLock::new(known_keys);
    KNOWN.get(section).is_some_and(|keys| keys.iter().any(|key| key == name))
}

#[derive(Default)]
pub(super) struct Draft {
    pub(super) trainer: Trainer,
    /// Keys as `section.key` with their values and the settings that they come from.
    pub(super) keys: Vec<(String, Value, Setting)>,
    /// Sources of training data and of evaluation data.
    pub(super) sources: [Vec<Table>; 2],
    /// Comments at the beginning.
    pub(super) notes: Vec<String>,
    pub(super) not_needed: Vec<Remark>,
    pub(super) left: Vec<Remark>,
    /// Settings that became keys of a source, or say what another key says: line, path, and that key.
    pub(super) also_carried: Vec<(usize, String, String)>,
    /// Why the recipe is not complete: a method that is not there.
    pub(super) problem: Option<String>,
    /// Why it is not, of a known method.
    pub(super) incomplete: Option<String>,
}

impl Draft {
    pub(super) fn has(&self, key: &str) -> bool {
        self.keys.iter().any(|(name, ..)| name == key)
    }

    /// Adds a source of training data or of evaluation data, unless it has a secret.
    pub(super) fn add_source(&mut self, set: usize, source: Table, setting: &Setting) {
        if !has_secrets(&Value::Table(source.clone()).to_string()) {
            return self.sources[set].push(source);
        }
        let reason = "the address of a data set has a user, a password or a query: write it without them";
        self.left.push(setting.remark(reason));
        self.incomplete.get_or_insert(format!("{}: {reason}", setting.path));
    }

    pub(super) fn take(&mut self, setting: &Setting, outcome: Outcome) {
        match outcome {
            Outcome::Set(keys) => keys.into_iter().for_each(|(key, value)| self.set(key, value, setting)),
            Outcome::Source => self.carry(setting, "data"),
            Outcome::NotNeeded(reason) => self.not_needed.push(setting.remark(reason)),
            Outcome::Left(reason) => self.left.push(setting.remark(reason)),
            Outcome::Method(reason) => {
                self.problem = Some(format!("{}: {reason}", setting.path));
                self.left.push(setting.remark(reason));
            }
        }
    }

    /// Sets a key, or adds to the table that it is already.
    fn set(&mut self, key: String, value: Value, setting: &Setting) {
        match (self.keys.iter_mut().find(|(name, ..)| *name == key), value) {
            (None, value) => self.keys.push((key, value, setting.clone())),
            (Some((_, Value::Table(known), _)), Value::Table(more)) => {
                known.extend(more);
                self.carry(setting, &key);
            }
            (Some((_, known, _)), value) if *known == value => self.carry(setting, &key),
            (Some((_, _, from)), _) => {
                let reason = format!("{} says {key} already", from.path);
                self.left.push(setting.remark(reason));
            }
        }
    }

    /// Notes that a setting is in a key that is there already.
    pub(super) fn carry(&mut self, setting: &Setting, key: &str) {
        self.also_carried.push((setting.line, setting.path.clone(), key.to_owned()));
    }

    /// Adds a key that follows from a default of the other trainer.
    pub(super) fn add(&mut self, key: &str, value: Value, why: &str) {
        if !self.has(key) {
            let from = Setting { path: why.to_owned(), value: value.clone(), line: 0 };
            self.keys.push((key.to_owned(), value, from));
        }
    }

    /// Makes comments of the keys that `is_lost`.
    pub(super) fn leave(&mut self, why: &str, is_lost: impl Fn(&str) -> bool) {
        let (lost, kept) = std::mem::take(&mut self.keys).into_iter().partition(|(key, ..)| is_lost(key));
        self.keys = kept;
        let lost: Vec<(String, Value, Setting)> = lost;
        let typed = lost.iter().filter(|(.., setting)| setting.line > 0);
        self.left.extend(typed.map(|(.., setting)| setting.remark(why)));
    }
}
