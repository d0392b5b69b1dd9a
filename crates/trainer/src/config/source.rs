//! The recipe as typed: the file's tree with the overrides applied, where every value keeps its place.
//!
//! The parsers give each key and value its byte range in the file; a YAML file becomes the same tree as a TOML file. Each value from `--set` gets a
//! synthetic position after the end of the file, so one number says where anything was typed.
//! Trade-off: an override's place is the whole override, not a column in it.

use std::mem;
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use toml::Spanned;
use toml::de::{DeTable, DeValue, Deserializer};

use crate::config::RunConfig;
use crate::config::error::{ConfigError, RecipePlace, from_reader};
use crate::config::language::{Language, Typed, by_pairs, by_section, by_text, twice};
use crate::config::yaml::{self, YamlError};

/// Pairs of keys (or sections) for one setting, and whether both may be given if they agree. Overriding one of a pair removes the other from the
/// file's tree.
pub(super) const RIVALS: [(&str, &str, bool); 15] = [
    ("base", "bnb_4bit", false),
    ("train.steps", "train.epochs", false),
    ("train.rows_per_step", "train.gradient_accumulation", false),
    ("train.warmup_steps", "train.warmup_ratio", false),
    ("train.log_every", "train.log_every_epochs", false),
    ("eval.every_steps", "eval.every_epochs", false),
    ("checkpoint.every_steps", "checkpoint.every_epochs", false),
    ("data.path", "data.sources", false),
    ("data.eval_path", "data.eval_fraction", false),
    ("data.eval_path", "data.eval_sources", false),
    ("data.eval_fraction", "data.eval_sources", false),
    ("train.recompute", "train.grad_checkpointing", true),
    ("compute", "train.bf16", true),
    ("compute", "bnb_4bit.compute_dtype", true),
    ("train.bf16", "bnb_4bit.compute_dtype", true),
];

/// One key of the tree.
#[derive(Debug)]
pub(super) struct Entry {
    /// `train.learning_rate`.
    pub(super) path: String,
    pub(super) key_span: Range<usize>,
    value_span: Range<usize>,
    pub(super) is_table: bool,
    /// Name of the value's type, for messages.
    pub(super) type_name: &'static str,
}

/// The tree and the places in it.
#[derive(Debug)]
pub(super) struct Source<'i> {
    file: PathBuf,
    language: Language,
    text: &'i str,
    overrides: &'i [String],
    /// The override that synthetic position `text.len() + 1 + i` stands for.
    synthetic: Vec<usize>,
    tree: Spanned<DeTable<'i>>,
    pub(super) entries: Vec<Entry>,
}

impl<'i> Source<'i> {
    pub(super) fn parse(
        text: &'i str,
        file: &Path,
        language: Language,
        overrides: &'i [String],
    ) -> Result<Source<'i>, ConfigError> {
        let refuse = |line, message: String| {
            let place = RecipePlace::Line(file.to_path_buf(), line);
            let again = if message == "duplicate key" { twice(text, line) } else { None };
            let meant = again.or_else(|| by_text(text, line, language));
            ConfigError::At {
                place,
                message: meant.unwrap_or_else(|| format!("this is not {}: {message}", language.name())),
            }
        };
        let tree = match language {
            Language::Toml => DeTable::parse(text).map_err(|error| {
                refuse(line_of(text, error.span().map_or(0, |span| span.start)), error.message().to_string())
            })?,
            Language::Yaml => yaml::parse(text).map_err(|YamlError { line, message }| refuse(line, message))?,
        };
        let file = file.to_path_buf();
        let mut source = Source { file, language, text, overrides, synthetic: Vec::new(), tree, entries: Vec::new() };
        // A key of the file whose rival is overridden is gone.
        let keys: Vec<&str> = overrides.iter().map(|text| key_of(text)).collect();
        for (one, other, _) in RIVALS {
            for (overridden, rival) in [(one, other), (other, one)] {
                if keys.contains(&overridden) {
                    remove(source.tree.get_mut(), rival);
                }
            }
        }
        for index in 0..overrides.len() {
            source.apply_override(index, false)?;
        }
        list_entries(source.tree.get_ref(), "", &mut source.entries);
        Ok(source)
    }

    /// Reads the tree as a [`RunConfig`]. If the key of an override such as `name=2024` takes a text, the value becomes that text.
    pub(super) fn read_config(&mut self) -> Result<RunConfig, ConfigError> {
        loop {
            let error = match RunConfig::deserialize(Deserializer::from(self.tree.clone())) {
                Ok(config) => return Ok(config),
                Err(error) => error,
            };
            // A span of the whole file means that a key is missing at the top of the file.
            let span = error.span().filter(|span| *span != self.tree.span());
            let entry = span.and_then(|span| self.entry_at(&span));
            if let Some(index) = entry.and_then(|entry| self.text_override(entry, error.message())) {
                self.apply_override(index, true)?;
                self.entries.clear();
                list_entries(self.tree.get_ref(), "", &mut self.entries);
                continue;
            }
            let (place, key) = match entry {
                Some(entry) => (self.place_of(&entry.key_span), entry.path.as_str()),
                None => (self.file_place(), ""),
            };
            return Err(from_reader(place, key, error.message()));
        }
    }

    /// Returns the override of a key that takes a text according to the reader's message, if TOML parsed its value as something else.
    fn text_override(&self, entry: &Entry, message: &str) -> Option<usize> {
        let takes_text =
            ["a string", "path string"].iter().any(|kind| message.ends_with(&format!(", expected {kind}")));
        let is_other = !["string", "array", "table"].contains(&entry.type_name);
        let index = self.override_at(&entry.key_span)?;
        (takes_text && is_other && key_of(&self.overrides[index]) == entry.path).then_some(index)
    }

    pub(super) fn is_typed(&self, path: &str) -> bool {
        self.entries.iter().any(|entry| entry.path == path)
    }

    /// Returns where a key was typed; only the file if it was not.
    pub(super) fn place(&self, path: &str) -> RecipePlace {
        match self.entries.iter().find(|entry| entry.path == path) {
            Some(entry) => self.place_of(&entry.key_span),
            None => RecipePlace::File(self.file.clone()),
        }
    }

    /// Returns where an entry of a list of tables was typed, counted from 0; where the list was if it is not known.
    pub(super) fn place_of_item(&self, section: &str, key: &str, index: usize) -> RecipePlace {
        let list = self.tree.get_ref().get(section).and_then(|section| section.get_ref().as_table()?.get(key));
        match list.and_then(|list| list.get_ref().as_array()?.get(index)) {
            Some(item) => self.place_of(&item.span()),
            None => self.place(&format!("{section}.{key}")),
        }
    }

    pub(super) fn typed(&self, entry: &Entry) -> &str {
        match self.override_at(&entry.key_span) {
            Some(index) => self.overrides[index].split_once('=').map_or("", |(_, value)| value.trim()),
            None => self.text.get(entry.value_span.clone()).unwrap_or_default().trim(),
        }
    }

    /// Returns what to write instead of a value that is in the place of a section.
    pub(super) fn instead_of_value(&self, entry: &Entry) -> String {
        let is_override = self.override_at(&entry.key_span).is_some();
        let at = if is_override { Typed::Override } else { Typed::File(self.language) };
        by_section(&entry.path, self.typed(entry), at)
    }

    /// Returns the place of a key that was typed in the file; `None` for an override.
    pub(super) fn place_in_file(&self, entry: &Entry) -> Option<RecipePlace> {
        self.override_at(&entry.key_span).is_none().then(|| self.place_of(&entry.key_span))
    }

    /// Returns the file, as the place of what is missing in it.
    pub(super) fn file_place(&self) -> RecipePlace {
        RecipePlace::File(self.file.clone())
    }

    /// Returns the place that a byte range stands for.
    pub(super) fn place_of(&self, span: &Range<usize>) -> RecipePlace {
        match self.override_at(span) {
            Some(index) => RecipePlace::Set(self.overrides[index].clone()),
            None => RecipePlace::Line(self.file.clone(), line_of(self.text, span.start)),
        }
    }

    /// Returns the override that a byte range lies in.
    fn override_at(&self, span: &Range<usize>) -> Option<usize> {
        span.start.checked_sub(self.text.len() + 1).and_then(|index| self.synthetic.get(index)).copied()
    }

    /// Returns the innermost key whose name or value contains a byte range.
    fn entry_at(&self, span: &Range<usize>) -> Option<&Entry> {
        let holds = |outer: &Range<usize>| outer.start <= span.start && span.end <= outer.end;
        self.entries
            .iter()
            .filter(|entry| holds(&entry.value_span) || holds(&entry.key_span))
            .max_by_key(|entry| entry.path.split('.').count())
    }

    /// Applies one `a.b=c` to the tree, with its value as TOML or as a text.
    fn apply_override(&mut self, index: usize, as_text: bool) -> Result<(), ConfigError> {
        let text: &'i str = &self.overrides[index];
        let refuse = |message: String| ConfigError::At { place: RecipePlace::Set(text.to_string()), message };
        let Some((key, value)) = text.split_once('=') else {
            return Err(refuse("expected key=value, as in `--set train.steps=100`".to_string()));
        };
        let (key, value) = (key.trim(), value.trim());
        if key.split('.').any(str::is_empty) {
            return Err(refuse("expected a key before `=`, as in `--set train.steps=100`".to_string()));
        }
        if value.is_empty() {
            remove(self.tree.get_mut(), key);
            return Ok(());
        }
        let value = match DeValue::parse(value) {
            Ok(parsed) if !as_text => parsed.into_inner(),
            Err(_) if value.starts_with('{') && !key.contains('.') => {
                return Err(refuse(by_pairs(key, value)));
            }
            _ => DeValue::String(value.into()),
        };
        let value = self.at_synthetic_position(value, index);
        let key_spans: Vec<_> = key.split('.').map(|part| (part, self.synthetic_position(index))).collect();
        insert(self.tree.get_mut(), &key_spans, value).map_err(|part| {
            refuse(format!("'{part}' is not a section, so nothing can be set below it; write `--set {part}=value`"))
        })
    }

    /// Returns a new position after the end of the file that stands for override `index`.
    fn synthetic_position(&mut self, index: usize) -> Range<usize> {
        self.synthetic.push(index);
        let position = self.text.len() + self.synthetic.len();
        position..position
    }

    /// Gives a value, and everything in it, synthetic positions.
    fn at_synthetic_position(&mut self, value: DeValue<'i>, index: usize) -> Spanned<DeValue<'i>> {
        let start = self.synthetic_position(index).start;
        let value = match value {
            DeValue::Table(table) => {
                let mut moved = DeTable::new();
                for (key, inner) in table {
                    let key = Spanned::new(self.synthetic_position(index), key.into_inner());
                    moved.insert(key, self.at_synthetic_position(inner.into_inner(), index));
                }
                DeValue::Table(moved)
            }
            DeValue::Array(mut list) => {
                for element in list.iter_mut() {
                    let value = mem::replace(element.get_mut(), DeValue::Boolean(false));
                    *element = self.at_synthetic_position(value, index);
                }
                DeValue::Array(list)
            }
            other => other,
        };
        // The positions assigned since then belong to the values inside.
        Spanned::new(start..self.text.len() + self.synthetic.len(), value)
    }
}

/// Returns the key of an `a.b=c` override.
fn key_of(text: &str) -> &str {
    text.split_once('=').map_or(text, |(key, _)| key).trim()
}

/// Returns the line, counted from 1, of a byte of `text`.
fn line_of(text: &str, byte: usize) -> usize {
    1 + text.bytes().take(byte).filter(|&byte| byte == b'\n').count()
}

/// Lists every key below `table`, outer ones first.
fn list_entries(table: &DeTable<'_>, prefix: &str, entries: &mut Vec<Entry>) {
    for (key, value) in table {
        let path =
            if prefix.is_empty() { key.get_ref().to_string() } else { format!("{prefix}.{}", key.get_ref().as_ref()) };
        entries.push(Entry {
            path: path.clone(),
            key_span: key.span(),
            value_span: value.span(),
            is_table: value.get_ref().is_table(),
            type_name: value.get_ref().type_str(),
        });
        if let DeValue::Table(inner) = value.get_ref() {
            list_entries(inner, &path, entries);
        }
    }
}

fn remove(table: &mut DeTable<'_>, path: &str) {
    match path.split_once('.') {
        None => {
            table.remove(path);
        }
        Some((first, rest)) => {
            if let Some(DeValue::Table(inner)) = table.get_mut(first).map(Spanned::get_mut) {
                remove(inner, rest);
            }
        }
    }
}

/// Sets the value at a path and creates the tables on the way. `Err` is the path of a key on the way that is not a table.
fn insert<'i>(
    table: &mut DeTable<'i>,
    path: &[(&'i str, Range<usize>)],
    value: Spanned<DeValue<'i>>,
) -> Result<(), String> {
    // Invariant: a key has at least one part, because an empty key was refused.
    let ((name, span), rest) = path.split_first().expect("a key has at least one part");
    let key = Spanned::new(span.clone(), (*name).into());
    if rest.is_empty() {
        // The entry is removed first, so that the key's place becomes the override's.
        table.remove(*name);
        table.insert(key, value);
        return Ok(());
    }
    let inner = table.entry(key).or_insert_with(|| Spanned::new(span.clone(), DeValue::Table(DeTable::new())));
    match inner.get_mut() {
        DeValue::Table(inner) => insert(inner, rest, value).map_err(|part| format!("{name}.{part}")),
        _ => Err(name.to_string()),
    }
}
