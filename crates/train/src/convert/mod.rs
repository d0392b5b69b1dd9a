//! Turns the configuration of another trainer into a recipe: `firebrick convert`. axolotl, LLaMA-Factory, TRL, ms-swift, torchtune and mlx-lm; of
//! Unsloth the keys whose names are known.
//!
//! `values` says what the values of a key become where it has few, `rules` what a key becomes next to others, `datasets` what a data set does, `defaults`
//! what an absent key means; names that only differ are in `other_names.toml` of `firebrick-trainer`. The recipe is read as any other, and a value that
//! is refused becomes a comment with the refusal. Every key of the configuration is a key of the recipe or a comment: nothing is dropped silently.
//! Trade-off: keys are translated one by one, so a default that differs there and here is written only where `values` or `defaults` knows it.

mod datasets;
mod defaults;
mod draft;
mod kind;
mod rules;
mod setting;
mod values;
mod write;

use std::path::Path;

use firebrick_hub::{has_secrets, without_secrets};
use firebrick_trainer::config::{ConfigError, RecipePlace, RunConfig, yaml};
use toml::de::{DeTable, DeValue};
use toml::{Spanned, Value};

use draft::{Draft, is_decisive};
use kind::Trainer;
pub use setting::Remark;
use setting::Setting;

/// Recipes are read again at most this often, each time without a key that was refused.
const MAX_REFUSALS: usize = 40;

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

/// Converts a configuration in YAML or JSON; `file` is where it is, since it names data relative to that place.
///
/// # Errors
/// Text that is neither, with its line.
pub fn convert(text: &str, file: &Path) -> Result<Converted, ConfigError> {
    let at = |line, message| ConfigError::At { place: RecipePlace::Line(file.to_owned(), line), message };
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
            _ => {
                let line = text[..key.span().start].matches('\n').count() + 1;
                into.push(Setting { value: plain(value), line, path });
            }
        }
    }
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
    /// Writes the recipe, and makes comments of the values that it is refused for.
    fn finish(mut self, file: &Path) -> Converted {
        let with_secrets = self.keys.iter().filter(|(_, value, _)| has_secrets(&value.to_string()));
        let secret: Vec<String> = with_secrets.map(|(key, ..)| key.clone()).collect();
        let why = "the address has a user, a password or a query: write it without them";
        self.leave(why, |key| secret.iter().any(|name| name == key));
        let problem = self.problem.take().or(self.incomplete.take());
        let problem = self.leave_refused(file, problem).map(|problem| without_secrets(&problem));
        let (recipe, _) = self.text(file);
        let typed = self.keys.iter().filter(|(.., from)| from.line > 0);
        let mut keys: Vec<_> = typed.map(|(key, _, from)| (from.line, from.path.clone(), key.clone())).collect();
        keys.sort_unstable();
        let mut settings: Vec<_> = keys.iter().map(|(line, path, _)| (line, path)).collect();
        settings.dedup();
        let carried = settings.len() + self.also_carried.len();
        keys.extend(self.also_carried);
        self.left.sort_by_key(|remark| remark.line);
        Converted { recipe, carried, keys, not_needed: self.not_needed, left: self.left, problem }
    }

    /// Reads the recipe until nothing in it is refused, each time without the key that was. Returns `problem`, or else why the recipe is refused
    /// as a whole.
    fn leave_refused(&mut self, file: &Path, mut problem: Option<String>) -> Option<String> {
        for _ in 0..MAX_REFUSALS {
            let (text, places) = self.text(file);
            let Err(error) = RunConfig::from_toml(&text, Path::new("recipe"), &[]) else { break };
            let ConfigError::At { place, message } = error else { return problem.or(Some(error.to_string())) };
            let line = if let RecipePlace::Line(_, line) = place { Some(line) } else { None };
            let key = places.iter().find(|(at, _)| Some(*at) == line).map(|(_, key)| key);
            // Without `mode` the run would be another one.
            let refused = self.keys.iter().find(|(name, ..)| Some(name) == key && name != "mode");
            let Some((key, _, from)) = refused else { return problem.or(Some(message)) };
            if is_decisive(key) && from.line > 0 && !message.contains("has no effect") {
                problem = problem.or_else(|| Some(format!("{}: {message}", from.path)));
            }
            let key = key.clone();
            self.leave(&message, |name| name == key);
        }
        problem
    }
}

#[cfg(test)]
mod tests;
