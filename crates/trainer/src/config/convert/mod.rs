//! Turns the configuration of another trainer into a recipe: `firebrick convert`. axolotl and LLaMA-Factory whole; of TRL, ms-swift, torchtune and
//! Unsloth the keys whose names are known.
//!
//! `rules` says what a key becomes, `datasets` what a data set does, `defaults` what an absent key means; names that only differ are in `other_names.toml`. The recipe is read as any
//! other, and a value that is refused becomes a comment with the refusal.
//! Trade-off: keys are translated one by one, so a default that differs there and here is written only where `rules` knows it.

mod datasets;
mod defaults;
mod rules;
mod write;

use std::ops::Range;
use std::path::Path;

use toml::de::{DeTable, DeValue};
use toml::{Spanned, Table, Value};

use crate::config::{ConfigError, Place, RunConfig, yaml};

/// Recipes are read again at most this often, each time without a key that was refused.
const MAX_REFUSALS: usize = 40;

/// A recipe made from another trainer's configuration.
#[derive(Clone, Debug)]
pub struct Converted {
    /// The recipe as TOML; what did not carry over is in comments at its end.
    pub recipe: String,
    /// Keys that became keys of the recipe.
    pub carried: usize,
    /// Keys that need none here: it happens anyway, or elsewhere.
    pub not_needed: usize,
    /// Keys without a counterpart, with line and reason.
    pub left: Vec<Remark>,
    /// Why the recipe is refused as a whole, if it is: something that only the user can decide.
    pub problem: Option<String>,
}

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
struct Setting {
    path: String,
    value: Value,
    line: usize,
}

impl Setting {
    /// The last part of the path.
    fn name(&self) -> &str {
        self.path.rsplit('.').next().unwrap_or(&self.path)
    }

    fn remark(&self, reason: impl Into<String>) -> Remark {
        let value = self.value.to_string();
        let short: String = value.chars().take(60).collect();
        let more = if short.len() < value.len() { "..." } else { "" };
        Remark { line: self.line, setting: format!("{}: {short}{more}", self.path), reason: reason.into() }
    }
}

/// What becomes of a setting.
enum Outcome {
    /// These keys of the recipe.
    Set(Vec<(String, Value)>),
    /// Nothing: it happens anyway, or elsewhere.
    NotNeeded(String),
    /// A comment: nothing here does this.
    Left(String),
    /// A comment, and the recipe is not complete: the run would be another one without it.
    Method(String),
}

/// A recipe under construction.
#[derive(Default)]
struct Draft {
    /// Keys as `section.key` with their values and the settings that they come from.
    keys: Vec<(String, Value, Setting)>,
    /// Sources of training data and of evaluation data.
    sources: [Vec<Table>; 2],
    /// Comments at the beginning.
    notes: Vec<String>,
    not_needed: Vec<Remark>,
    left: Vec<Remark>,
    /// Settings of data sets that became keys of a source.
    of_sources: usize,
    /// Why the recipe is not complete.
    problem: Option<String>,
}

/// Converts a configuration in YAML or JSON; `file` is where it is, since it names data relative to that place.
///
/// # Errors
/// Text that is neither, with its line.
pub fn convert(text: &str, file: &Path) -> Result<Converted, ConfigError> {
    let tree = yaml::parse(text)
        .map_err(|error| ConfigError::At { place: Place::Line(file.to_owned(), error.line), message: error.message })?;
    let mut settings = Vec::new();
    flatten(tree.get_ref(), "", text, &mut settings);
    settings.sort_by_key(|setting| setting.line);
    let mut draft = Draft::default();
    for setting in &settings {
        let outcome = rules::outcome(setting, &settings, &mut draft, file);
        draft.take(setting, outcome);
    }
    defaults::complete(&settings, &mut draft);
    Ok(draft.finish(file))
}

/// Lists keys with their values in `text`. Mappings are entered, except where a rule takes them whole.
fn flatten(table: &DeTable<'_>, above: &str, text: &str, into: &mut Vec<Setting>) {
    for (key, value) in table {
        let path = format!("{above}{}", key.get_ref());
        match value.get_ref() {
            DeValue::Table(inner) if !rules::takes_whole(&path) => flatten(inner, &format!("{path}."), text, into),
            _ => into.push(Setting { value: plain(value), line: line_of(text, key.span()), path }),
        }
    }
}

fn line_of(text: &str, span: Range<usize>) -> usize {
    text[..span.start].matches('\n').count() + 1
}

/// Returns a value without its places.
fn plain(value: &Spanned<DeValue<'_>>) -> Value {
    match value.get_ref() {
        // The YAML of other trainers is read by a reader of version 1.1.
        DeValue::String(text) => match &**text {
            "yes" | "Yes" | "YES" | "on" | "On" | "ON" => Value::Boolean(true),
            "no" | "No" | "NO" | "off" | "Off" | "OFF" => Value::Boolean(false),
            text => Value::String(text.to_owned()),
        },
        DeValue::Boolean(truth) => Value::Boolean(*truth),
        DeValue::Integer(number) => {
            let digits = number.as_str().replace('_', "");
            i64::from_str_radix(&digits, number.radix()).map_or(Value::String(digits), Value::Integer)
        }
        DeValue::Float(number) => {
            number.as_str().parse().map_or_else(|_| Value::String(number.as_str().to_owned()), Value::Float)
        }
        DeValue::Datetime(date) => Value::Datetime(*date),
        DeValue::Array(list) => Value::Array(list.iter().map(plain).collect()),
        DeValue::Table(table) => {
            Value::Table(table.iter().map(|(key, value)| (key.get_ref().to_string(), plain(value))).collect())
        }
    }
}

impl Draft {
    fn has(&self, key: &str) -> bool {
        self.keys.iter().any(|(name, ..)| name == key)
    }

    fn take(&mut self, setting: &Setting, outcome: Outcome) {
        match outcome {
            Outcome::Set(keys) => {
                for (key, value) in keys {
                    match self.keys.iter().find(|(name, ..)| *name == key) {
                        Some((_, known, _)) if *known == value => {}
                        Some((_, _, from)) => {
                            let reason = format!("{} says {key} already", from.path);
                            self.left.push(setting.remark(reason));
                        }
                        None => self.keys.push((key, value, setting.clone())),
                    }
                }
            }
            Outcome::NotNeeded(reason) => self.not_needed.push(setting.remark(reason)),
            Outcome::Left(reason) => self.left.push(setting.remark(reason)),
            Outcome::Method(reason) => {
                self.problem = Some(format!("{}: {reason}", setting.path));
                self.left.push(setting.remark(reason));
            }
        }
    }

    /// Adds a key that follows from a default of the other trainer.
    fn add(&mut self, key: &str, value: Value, why: &str) {
        if !self.has(key) {
            let from = Setting { path: why.to_owned(), value: value.clone(), line: 0 };
            self.keys.push((key.to_owned(), value, from));
        }
    }

    /// Writes the recipe, and makes comments of the values that it is refused for.
    fn finish(mut self, file: &Path) -> Converted {
        let mut problem = self.problem.take();
        for _ in 0..MAX_REFUSALS {
            let (text, places) = self.text(file);
            let Err(error) = RunConfig::from_toml(&text, Path::new("recipe"), &[]) else { break };
            let refused = match &error {
                ConfigError::At { place: Place::Line(_, line), .. } => {
                    places.iter().find(|(at, _)| at == line).map(|(_, key)| key.clone())
                }
                _ => None,
            };
            let index = refused.and_then(|key| self.keys.iter().position(|(name, ..)| *name == key));
            let ConfigError::At { message, .. } = error else {
                problem = problem.or(Some(error.to_string()));
                break;
            };
            // Without `mode` the run would be another one.
            let Some(index) = index.filter(|&index| self.keys[index].0 != "mode") else {
                problem = problem.or(Some(message));
                break;
            };
            let (_, _, setting) = self.keys.remove(index);
            self.left.push(setting.remark(message));
        }
        let (recipe, _) = self.text(file);
        let mut from: Vec<(usize, &str)> =
            self.keys.iter().filter(|key| key.2.line > 0).map(|key| (key.2.line, &*key.2.path)).collect();
        from.sort_unstable();
        from.dedup();
        let carried = from.len() + self.of_sources;
        self.left.sort_by_key(|remark| remark.line);
        Converted { recipe, carried, not_needed: self.not_needed.len(), left: self.left, problem }
    }
}

#[cfg(test)]
mod tests;
