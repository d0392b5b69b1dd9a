//! Reading and writing recipes.
//!
//! Trade-off: a written recipe contains the defaults of its mode as values, so they stay if the mode is changed later.

use std::fs;
use std::path::{Path, PathBuf};

use firebrick_kernels::Recompute;

use crate::config::language::Language;
use crate::config::source::Source;
use crate::config::{ConfigError, Interval, Mode, RunConfig, Warmup, check, schema};
use crate::shipped;

impl RunConfig {
    /// Reads a recipe file, applies the `--set a.b=c` overrides, and refuses what cannot work.
    ///
    /// A bare file name that is not in the current folder is looked up in `configs/`, here and where the program's files are
    /// ([`shipped`]); so are names that begin with `assets/` in the recipe. An override's value is read as TOML,
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
            help: known_recipes(path),
        })?;
        RunConfig::from_source(Source::parse(&text, &file, Language::of(&file), overrides)?, &file)
    }

    /// Reads a recipe as [`RunConfig::load`] does, from TOML in memory; error messages call it `file`.
    pub fn from_toml(text: &str, file: &Path, overrides: &[String]) -> Result<RunConfig, ConfigError> {
        RunConfig::from_source(Source::parse(text, file, Language::Toml, overrides)?, file)
    }

    pub(super) fn from_source(mut source: Source<'_>, file: &Path) -> Result<RunConfig, ConfigError> {
        schema::refuse_unknown_keys(&source)?;
        let mut config = source.read_config()?;
        if config.name.is_empty() {
            config.name = file.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
        }
        check::refuse_impossible(&config, &source)?;
        // The names of shipped models and data that are not in the current folder become their places.
        let data = &mut config.data;
        let sources = data.sources.iter_mut().chain(&mut data.eval_sources).map(|source| &mut source.path);
        for name in [&mut config.model, &mut data.path].into_iter().chain(&mut data.eval_path).chain(sources) {
            if let Some(place) = shipped::asset(Path::new(name)) {
                *name = place.to_string_lossy().into_owned();
            }
        }
        Ok(config.resolved())
    }

    /// Writes the whole recipe as TOML with every default filled in: the run folder's `config.toml`. Reading it back gives the same `RunConfig`.
    pub fn to_toml(&self) -> String {
        // Invariant: a RunConfig is plain strings, numbers, lists and tables, and TOML can hold all of them.
        toml::to_string(&self.resolved()).expect("a RunConfig is always expressible as TOML")
    }

    /// Returns the recipe with every default that depends on another key filled in, and one name for each setting.
    fn resolved(&self) -> RunConfig {
        let mut config = self.clone();
        (config.train.steps, config.train.epochs) = self.length().map_or((None, None), Interval::keys);
        match self.warmup() {
            Warmup::Steps(steps) => config.train.warmup_steps = Some(steps),
            Warmup::Ratio(ratio) => config.train.warmup_ratio = Some(ratio),
        }
        // A mode that its sections (or `base`) express is not written again, so removing a section of a written recipe changes the mode.
        let mode = config.mode();
        if mode != Mode::Full {
            config.lora.get_or_insert_default();
        }
        if mode == Mode::Qlora && config.base.is_none() {
            config.bnb_4bit.get_or_insert_default();
        }
        config.mode = (mode == Mode::Full).then_some(mode);
        config.train.learning_rate = Some(self.learning_rate());
        (config.train.log_every, config.train.log_every_epochs) = self.log_interval().keys();
        (config.eval.every_steps, config.eval.every_epochs) = self.eval_interval().keys();
        (config.checkpoint.every_steps, config.checkpoint.every_epochs) = self.checkpoint_interval().keys();
        config.train.recompute = Some(self.recompute().into());
        config.train.grad_checkpointing = self.recompute().map(Recompute::repeats_gemms);
        config.compute = Some(self.compute());
        config.train.bf16 = None;
        if let Some(bnb) = &mut config.bnb_4bit {
            bnb.compute_dtype = None;
        }
        if config.train.rows_per_step.is_none() && !self.leaves_rows_open() {
            config.train.gradient_accumulation = Some(self.gradient_accumulation());
        }
        config.data.train_on = Some(self.train_on());
        config.eval.micro_batch_size = self.eval_micro_batch_size();
        config
    }
}

/// Returns `path` itself if it exists or names a folder, otherwise the recipe of that name in `configs/`.
fn find_recipe(path: &Path) -> PathBuf {
    let is_bare = path.parent().is_none_or(|parent| parent.as_os_str().is_empty());
    if !is_bare || path.exists() {
        return path.to_path_buf();
    }
    let shipped = shipped::recipe_folders().map(|folder| folder.join(path));
    let mut files = shipped.flat_map(|file| [file.clone(), file.with_extension("toml")]);
    files.find(|file| file.is_file()).unwrap_or_else(|| path.to_path_buf())
}

/// Returns a sentence that lists the shipped recipes, or says that they are missing, for the message about a file that cannot be read.
fn known_recipes(path: &Path) -> String {
    let in_folder = |folder: PathBuf| {
        let entries = fs::read_dir(&folder).into_iter().flatten().flatten();
        let mut names: Vec<String> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.retain(|name| name.ends_with(".toml") || Language::of(Path::new(name)) == Language::Yaml);
        names.sort();
        (!names.is_empty()).then(|| format!("recipes in {}: {}", folder.display(), names.join(", ")))
    };
    let listed = shipped::recipe_folders().find_map(in_folder);
    let absent = match path.components().count() {
        1 => {
            "; those that come with the program are missing: unpack its whole archive, or name its folder with FIREBRICK_SHARE"
        }
        _ => "",
    };
    listed.unwrap_or_else(|| format!("give the path of a .toml or .yaml recipe{absent}"))
}
