//! The recipe: what the user typed, read from a TOML or YAML file and `--set` overrides into [`RunConfig`].
//!
//! Everything that can be refused without looking at the machine is refused here, with the file and line, the key, and
//! what to do. What depends on the machine (does it fit, is the backend available) belongs to the plan.
//! Trade-off: unknown keys are reported together, of other problems the first one.

mod agreement;
mod backend_choice;
mod base_name;
mod bounds;
mod check;
mod check_data;
mod check_preference;
pub mod compute;
mod data_section;
mod defaults;
mod device_budget;
mod error;
mod extraction;
mod names;
mod other_names;
mod preference_section;
mod recipe;
mod rule;
mod schema;
mod source;
mod yaml;
mod zero_stage;

use std::fs;
use std::path::{Path, PathBuf};

pub use backend_choice::BackendChoice;
pub use data_section::{DataConfig, SourceConfig};
pub use defaults::{Interval, RunLength, Warmup};
pub use device_budget::DeviceBudget;
pub use error::{ConfigError, Place, UnknownKey};
pub use extraction::Extraction;
pub use names::{from_name, to_name};
pub use preference_section::{LossType, PreferenceLoss, PreferenceSection};
pub use recipe::{Bnb4bitSection, CheckpointConfig, EvalConfig, Init, Mode, QuantType, RunConfig, TrainConfig};
pub use schema::json_schema;
use source::{Language, Source};
pub use zero_stage::ZeroStage;

/// The folder in which a bare recipe name is looked up.
const RECIPE_FOLDER: &str = "configs";

impl RunConfig {
    /// Reads a recipe file, applies the `--set a.b=c` overrides, and refuses what cannot work.
    ///
    /// A bare file name that is not in the current folder is looked up in `configs/`. An override's value is read as TOML,
    /// or as a plain string if it is not TOML or its key takes a text; `a.b=` with nothing after it removes the key. Overriding
    /// one of two keys for the same setting (`train.steps` and `train.epochs`, …) removes the other one of the file.
    ///
    /// # Errors
    /// [`ConfigError`] names the place, the key and the way out.
    pub fn load(path: &Path, overrides: &[String]) -> Result<RunConfig, ConfigError> {
        let file = find_recipe(path);
        let text = fs::read_to_string(&file).map_err(|problem| ConfigError::Read {
            path: path.to_path_buf(),
            problem,
            help: known_recipes(),
        })?;
        RunConfig::from_source(Source::parse(&text, &file, Language::of(&file), overrides)?, &file)
    }

    /// As [`RunConfig::load`], from TOML that is already in memory; `file` is what error messages call it.
    ///
    /// # Errors
    /// As [`RunConfig::load`].
    pub fn from_toml(text: &str, file: &Path, overrides: &[String]) -> Result<RunConfig, ConfigError> {
        RunConfig::from_source(Source::parse(text, file, Language::Toml, overrides)?, file)
    }

    fn from_source(mut source: Source<'_>, file: &Path) -> Result<RunConfig, ConfigError> {
        schema::refuse_unknown_keys(&source)?;
        let mut config = source.read_config()?;
        if config.name.is_empty() {
            config.name = file.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
        }
        check::refuse_impossible(&config, &source)?;
        Ok(config.resolved())
    }

    /// The whole recipe as TOML with every default filled in: the run folder's `config.toml`.
    /// Reading it back gives the same `RunConfig`.
    #[must_use]
    pub fn to_toml(&self) -> String {
        // Invariant: a RunConfig is plain strings, numbers, lists and tables, and TOML can hold all of them.
        toml::to_string(&self.resolved()).expect("a RunConfig is always expressible as TOML")
    }
}

/// `path` itself where it exists or names a folder, otherwise the recipe of that name in `configs/`.
fn find_recipe(path: &Path) -> PathBuf {
    let is_bare = path.parent().is_none_or(|parent| parent.as_os_str().is_empty());
    if !is_bare || path.exists() {
        return path.to_path_buf();
    }
    let shipped = Path::new(RECIPE_FOLDER).join(path);
    let found = [shipped.clone(), shipped.with_extension("toml")].into_iter().find(|file| file.is_file());
    found.unwrap_or_else(|| path.to_path_buf())
}

/// One sentence that lists the shipped recipes, for the message about a file that cannot be read.
fn known_recipes() -> String {
    let mut names: Vec<String> = fs::read_dir(RECIPE_FOLDER)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .filter(|name| name.ends_with(".toml") || Language::of(Path::new(name)) == Language::Yaml)
        .collect();
    names.sort();
    if names.is_empty() {
        "give the path of a .toml or .yaml recipe".to_string()
    } else {
        format!("recipes in {RECIPE_FOLDER}/: {}", names.join(", "))
    }
}

#[cfg(test)]
mod tests;
