//! Turns the configuration of another trainer into a recipe: `firebrick convert`. axolotl, LLaMA-Factory, TRL, ms-swift and torchtune; of Unsloth the
//! keys whose names are known.
//!
//! `values` says what the values of a key become where it has few, `rules` what a key becomes next to others, `datasets` what a data set does, `defaults`
//! what an absent key means; names that only differ are in `other_names.toml`. The recipe is read as any other, and a value that is refused becomes a
//! comment with the refusal. Every key of the configuration is a key of the recipe or a comment: nothing is dropped silently.
//! Trade-off: keys are translated one by one, so a default that differs there and here is written only where `values` or `defaults` knows it.

mod datasets;
mod defaults;
mod kind;
mod rules;
mod values;
mod write;

use std::ops::Range;
use std::path::Path;

use firebrick_hub::{has_secrets, without_secrets};
use toml::de::{DeTable, DeValue};
use toml::{Spanned, Table, Value};

use crate::config::{ConfigError, Place, RunConfig, yaml};
use kind::Trainer;

/// Recipes are read again at most this often, each time without a key that was refused.
const MAX_REFUSALS: usize = 40;
/// Keys without which a run would train something else; so are those of `[lora]` and `[preference]`.
const DECISIVE: &str = "mode model data.path data.train_on data.roles_to_train \
    train.learning_rate train.optimizer train.epochs train.steps";

/// A recipe made from another trainer's configuration.
#[derive(Clone, Debug)]
pub struct Converted {
    /// The recipe as TOML; what did not carry over is in comments at its end.
    pub recipe: String,
    /// How many keys became keys of the recipe.
    pub carried: usize,
    /// These keys: line and path, and the key of the recipe.
    pub keys: Vec<(usize, String, String)>,
    /// Keys that need none here: it happens anyway, or elsewhere.
    pub not_needed: Vec<Remark>,
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

    /// Its value in one line, without secrets.
    fn shown(&self) -> String {
        write::of_value(&shown(self.name(), &self.value))
    }

    fn remark(&self, reason: impl Into<String>) -> Remark {
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

/// Returns whether a run would train something else without a key of the recipe.
fn is_decisive(key: &str) -> bool {
    key.starts_with("lora") || key.starts_with("preference") || DECISIVE.split(' ').any(|known| known == key)
}

/// What becomes of a setting.
enum Outcome {
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

/// A recipe under construction.
#[derive(Default)]
struct Draft {
    /// Who wrote the configuration.
    trainer: Trainer,
    /// Keys as `section.key` with their values and the settings that they come from.
    keys: Vec<(String, Value, Setting)>,
    /// Sources of training data and of evaluation data.
    sources: [Vec<Table>; 2],
    /// Comments at the beginning.
    notes: Vec<String>,
    not_needed: Vec<Remark>,
    left: Vec<Remark>,
    /// Settings that became keys of a source, or say what another key says: line, path, and that key.
    also_carried: Vec<(usize, String, String)>,
    /// Why the recipe is not complete: a method that is not there.
    problem: Option<String>,
    /// Why it is not, of a known method.
    incomplete: Option<String>,
}

/// Converts a configuration in YAML or JSON; `file` is where it is, since it names data relative to that place.
///
/// # Errors
/// Text that is neither, with its line.
pub fn convert(text: &str, file: &Path) -> Result<Converted, ConfigError> {
    let at = |line, message| ConfigError::At { place: Place::Line(file.to_owned(), line), message };
    if let Some(message) = kind::refusal_of_file(text, file) {
        return Err(at(1, message.to_owned()));
    }
    let tree = yaml::parse_other(text).map_err(|error| at(error.line, error.message))?;
    let mut settings = Vec::new();
    flatten(tree.get_ref(), "", text, &mut settings);
    settings.sort_by_key(|setting| setting.line);
    if let Some(message) = kind::refusal(&settings) {
        return Err(at(1, message.to_owned()));
    }
    let mut draft = Draft { trainer: Trainer::of(&settings), ..Draft::default() };
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
        let path = format!("{above}{}", key.get_ref().replace(char::is_control, " "));
        match value.get_ref() {
            DeValue::Table(inner) if !(rules::takes_whole(&path) || inner.is_empty() && path == "fsdp") => {
                flatten(inner, &format!("{path}."), text, into)
            }
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
        DeValue::String(text) if text.starts_with(['.', '-', '+']) || text.ends_with('.') => {
            text.parse().map_or_else(|_| Value::String(text.to_string()), Value::Float)
        }
        DeValue::String(text) => Value::String(text.to_string()),
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

    /// Adds a source of training data or of evaluation data, unless it has a secret.
    fn add_source(&mut self, set: usize, source: Table, setting: &Setting) {
        if !has_secrets(&Value::Table(source.clone()).to_string()) {
            return self.sources[set].push(source);
        }
        let reason = "the address of a data set has a user, a password or a query: write it without them";
        self.left.push(setting.remark(reason));
        self.incomplete.get_or_insert(format!("{}: {reason}", setting.path));
    }

    fn take(&mut self, setting: &Setting, outcome: Outcome) {
        match outcome {
            Outcome::Set(keys) => {
                for (key, value) in keys {
                    match (self.keys.iter_mut().find(|(name, ..)| *name == key), value) {
                        (None, value) => self.keys.push((key, value, setting.clone())),
                        (Some((key, Value::Table(known), _)), Value::Table(more)) => {
                            known.extend(more);
                            self.also_carried.push((setting.line, setting.path.clone(), key.clone()));
                        }
                        (Some((key, known, _)), value) if *known == value => {
                            self.also_carried.push((setting.line, setting.path.clone(), key.clone()));
                        }
                        (Some((_, _, from)), _) => {
                            let reason = format!("{} says {key} already", from.path);
                            self.left.push(setting.remark(reason));
                        }
                    }
                }
            }
            Outcome::Source => self.also_carried.push((setting.line, setting.path.clone(), "data".to_owned())),
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

    /// Makes comments of the keys that `is_lost`.
    fn leave(&mut self, why: &str, is_lost: impl Fn(&str) -> bool) {
        let (lost, kept) = std::mem::take(&mut self.keys).into_iter().partition(|(key, ..)| is_lost(key));
        self.keys = kept;
        let lost: Vec<(String, Value, Setting)> = lost;
        let typed = lost.iter().filter(|(.., setting)| setting.line > 0);
        self.left.extend(typed.map(|(.., setting)| setting.remark(why)));
    }

    /// Writes the recipe, and makes comments of the values that it is refused for.
    fn finish(mut self, file: &Path) -> Converted {
        let with_secrets = self.keys.iter().filter(|(_, value, _)| has_secrets(&value.to_string()));
        let secret: Vec<String> = with_secrets.map(|(key, ..)| key.clone()).collect();
        let why = "the address has a user, a password or a query: write it without them";
        self.leave(why, |key| secret.iter().any(|name| name == key));
        let mut problem = self.problem.take().or(self.incomplete.take());
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
            let (key, _, from) = &self.keys[index];
            if is_decisive(key) && from.line > 0 && !message.contains("has no effect") {
                problem = problem.or_else(|| Some(format!("{}: {message}", from.path)));
            }
            let key = key.clone();
            self.leave(&message, |name| name == key);
        }
        let (recipe, _) = self.text(file);
        let typed = self.keys.iter().filter(|(.., from)| from.line > 0);
        let mut keys: Vec<_> = typed.map(|(key, _, from)| (from.line, from.path.clone(), key.clone())).collect();
        keys.sort_unstable();
        let mut settings: Vec<_> = keys.iter().map(|(line, path, _)| (line, path)).collect();
        settings.dedup();
        let carried = settings.len() + self.also_carried.len();
        keys.extend(self.also_carried);
        self.left.sort_by_key(|remark| remark.line);
        let problem = problem.map(|problem| without_secrets(&problem));
        Converted { recipe, carried, keys, not_needed: self.not_needed, left: self.left, problem }
    }
}

#[cfg(test)]
mod tests;
