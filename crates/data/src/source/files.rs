//! Finds the files that a path stands for, in the order in which they are read.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use firebrick_files::{advice_on_path, files_below, siblings_of};
use firebrick_hub::{Hub, HubId, RepoKind};
use serde_json::Value as Json;

use super::content::SourceFile;
use super::error::{SourceError, SourceResult};
use super::format::{Compression, FileFormat, known_endings};
use super::hub_choice;
use super::records::Source;
use super::spec::SourceSpec;
use super::splits;

/// The files of a source, their common format, and the unread splits next to the one that is read by default.
type Found = (Vec<SourceFile>, FileFormat, Vec<String>);

impl SourceSpec {
    /// Finds the files (of a Hub dataset only their names; they are downloaded when read). Errors: see [`SourceError`].
    pub fn resolve(&self, hub: &Hub) -> Result<Source, SourceError> {
        self.check()?;
        let (files, format, unread_splits) = resolve_files(self, hub)?;
        if format != FileFormat::Json && self.field.is_some() {
            let reason = format!("names the list in a JSON document, but the format is {format}; remove it");
            return Err(SourceError::BadSpec { key: "field", reason });
        }
        let (spec, files, unread_splits) = (Arc::new(self.clone()), files.into(), unread_splits.into());
        Ok(Source { spec, files, format, unread_splits, hub: hub.clone() })
    }
}

fn resolve_files(spec: &SourceSpec, hub: &Hub) -> SourceResult<Found> {
    if spec.path.starts_with("hf://") {
        return on_hub(spec, hub);
    }
    let path = Path::new(&spec.path);
    if path.is_dir() {
        refuse_keys(spec, false)?;
        refuse_model(path)?;
        let (files, unread_splits) = files_of_folder(spec, path)?;
        return local(spec, files, unread_splits);
    }
    let files = if path.exists() { Some(vec![path.to_owned()]) } else { matches_of(&spec.path)? };
    if let Some(files) = files {
        refuse_keys(spec, true)?;
        return local(spec, files, Vec::new());
    }
    if let Some(advice) = advice_on_path(&spec.path) {
        return Err(not_found(&spec.path, &advice));
    }
    let looks_local = looks_local(path);
    if !looks_local && HubId::parse(RepoKind::Dataset, &spec.path, None).is_some() {
        return on_hub(spec, hub);
    }
    let of_hub = if looks_local { "" } else { ". A Hub dataset is named owner/name" };
    Err(not_found(&spec.path, &format!("{}{of_hub}", siblings_of(path))))
}

fn not_found(path: &str, hint: &str) -> SourceError {
    SourceError::NotFound(format!("no data at {path:?}: {hint}"))
}

fn refuse_keys(spec: &SourceSpec, is_file: bool) -> SourceResult<()> {
    let bad = |key| {
        let kind = if is_file { "file or a pattern" } else { "folder" };
        let reason = format!("means nothing for {:?}, which is a local {kind}; remove it", spec.path);
        Err(SourceError::BadSpec { key, reason })
    };
    match spec {
        SourceSpec { revision: Some(_), .. } => bad("revision"),
        SourceSpec { split: Some(_), .. } if is_file => bad("split"),
        SourceSpec { config: Some(_), .. } if is_file => bad("config"),
        _ => Ok(()),
    }
}

/// Refuses the folder of a model or an adapter, whose JSON files are no data.
fn refuse_model(folder: &Path) -> SourceResult<()> {
    let has = |name: &str| folder.join(name).is_file();
    let is_model = has("config.json") && ["tokenizer.json", "tokenizer_config.json"].into_iter().any(has);
    if is_model || has("adapter_config.json") {
        let (what, key) = if is_model { ("a model", "model") } else { ("an adapter", "lora.init_from") };
        let folder = folder.display();
        let hint = format!("it is the folder of {what}, not of data: name it as {key}, and the data as data.path");
        return Err(SourceError::no_data(&folder.to_string(), &hint));
    }
    Ok(())
}

fn on_hub(spec: &SourceSpec, hub: &Hub) -> SourceResult<Found> {
    let Some(id) = HubId::parse(RepoKind::Dataset, &spec.path, spec.revision.as_deref()) else {
        let hint = "a Hub dataset is named owner/name, owner/name@revision or hf://datasets/owner/name";
        return Err(not_found(&spec.path, hint));
    };
    let listing = hub.listing(&id)?;
    let paths = hub_choice::choose(&listing, spec, &id)?;
    let format = common_format(paths.iter().map(Path::new), spec.file_format, &id.to_string())?;
    hub.check_cached(&id, &listing, &paths, spec.limit.is_some())?;
    let files = listing.files(&id, &paths).map(SourceFile::Hub).collect();
    Ok((files, format, Vec::new()))
}

/// Returns whether a path that does not exist was meant as a local path: its name ends like a data file's, or its folder exists.
fn looks_local(path: &Path) -> bool {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    FileFormat::of_name(path).is_some()
        || Compression::of_name(path) != Compression::None
        || path.is_absolute()
        || path.starts_with(".")
        || path.starts_with("..")
        || parent.is_some_and(Path::is_dir)
}

fn local(spec: &SourceSpec, files: Vec<PathBuf>, unread_splits: Vec<String>) -> SourceResult<Found> {
    let format = common_format(files.iter().map(PathBuf::as_path), spec.file_format, &spec.path)?;
    let with_size = |path: PathBuf| {
        let size = fs::metadata(&path).map_err(|reason| SourceError::Open { path: path.clone(), reason })?.len();
        Ok(SourceFile::Local { path, size })
    };
    let files = files.into_iter().map(with_size).collect::<Result<_, SourceError>>()?;
    Ok((files, format, unread_splits))
}

/// What files of other endings are, and how their rows become data.
const NO_DATA: [(&str, &str); 7] = [
    ("zip tar tgz 7z rar xz bz2", "it is an archive: unpack it, or pack its file as .gz or .zst"),
    ("xlsx xls xlsm ods numbers", "it is a spreadsheet: save it as CSV with commas"),
    ("pdf docx doc odt rtf epub html htm", "it is a document with a layout: save its text as .txt or .md"),
    ("pkl pickle npy npz pt pth bin safetensors gguf", "it is not text: write the rows as .jsonl or .parquet"),
    ("db sqlite sqlite3 duckdb sql", "it is a database: write its rows as .jsonl, .csv or .parquet"),
    ("toml yaml yml", "these are settings, not data: name the data file as data.path"),
    ("py ipynb js sh", "it is a program, which is never run: write the rows that it makes as .jsonl"),
];

/// Returns what a file is that is known to be no data file, and what to do.
fn no_data_format(path: &Path) -> Option<&'static str> {
    let end = path.extension()?.to_str()?.to_ascii_lowercase();
    NO_DATA.iter().find(|(ends, _)| ends.split(' ').any(|known| known == end)).map(|(_, what)| *what)
}

/// Returns the common format of all files. Errors: a name shows no format; the names show several.
fn common_format<'a>(
    files: impl Iterator<Item = &'a Path>,
    named: Option<FileFormat>,
    place: &str,
) -> SourceResult<FileFormat> {
    if let Some(format) = named {
        return Ok(format);
    }
    let mut counts: BTreeMap<FileFormat, usize> = BTreeMap::new();
    for path in files {
        let unknown = || {
            let endings = known_endings();
            let general =
                format!("unknown format: its name ends with none of {endings}. Set it with file_format = \"...\"");
            SourceError::file(path, no_data_format(path).map_or(general, str::to_owned))
        };
        *counts.entry(FileFormat::of_name(path).ok_or_else(unknown)?).or_default() += 1;
    }
    match counts.len() {
        1 => Ok(*counts.keys().next().expect("one key")),
        _ => {
            let formats: Vec<String> = counts.iter().map(|(format, count)| format!("{format}: {count}")).collect();
            let (place, formats) = (place.trim_end_matches('/'), formats.join(", "));
            Err(SourceError::NotFound(format!(
                "{place} contains files of several formats ({formats}). Read one of them with a pattern like \
                 \"{place}/*.jsonl\" or set file_format = \"...\", or use a separate source for each"
            )))
        }
    }
}

/// Returns the files that a pattern matches; `None` if the path is not a pattern. Error: nothing matches.
fn matches_of(pattern: &str) -> SourceResult<Option<Vec<PathBuf>>> {
    if !pattern.contains(['*', '?', '[']) {
        return Ok(None);
    }
    let no_match = |hint: String| SourceError::NotFound(format!("nothing matches {pattern:?}: {hint}"));
    let found = glob::glob(pattern).map_err(|reason| no_match(format!("it is not a pattern: {reason}")))?;
    let mut files = Vec::new();
    for path in found {
        let path = path.map_err(|error| {
            let path = error.path().to_owned();
            SourceError::Open { path, reason: error.into() }
        })?;
        if path.is_file() {
            files.push(path);
        }
    }
    if files.is_empty() {
        // The longest existing prefix without a pattern.
        let plain = pattern.split(['*', '?', '[']).next().unwrap_or_default();
        let hint = advice_on_path(pattern).unwrap_or_else(|| siblings_of(&Path::new(plain).join("*")));
        return Err(no_match(hint));
    }
    files.sort();
    Ok(Some(files))
}

/// Finds the data files of a folder: those that `datasets.save_to_disk` lists, or all inside, by name and split. Also returns the splits that are not
/// read although the recipe names none.
fn files_of_folder(spec: &SourceSpec, folder: &Path) -> SourceResult<(Vec<PathBuf>, Vec<String>)> {
    let place = spec.path.trim_end_matches('/');
    if let Some(saved) = saved_splits(folder)? {
        let requested = spec.split.clone().unwrap_or_else(|| "train".to_owned());
        if !saved.contains(&requested) {
            let hint = format!("it has {}; name one with split = \"...\"", saved.join(", "));
            return Err(SourceError::no_such_part(place, "split", &requested, &hint));
        }
        let files = saved_files(&folder.join(&requested))?.ok_or_else(|| no_data(place, folder))?;
        return Ok((files, unread(spec, saved, &requested)));
    }
    if let Some(files) = saved_files(folder)? {
        return Ok((files, Vec::new()));
    }
    let files = files_below(folder).map_err(|(path, reason)| SourceError::Open { path, reason })?;
    let mut found: Vec<_> = files.into_iter().map(|(name, _)| name).collect();
    found.retain(|path| !splits::describes(path) && !path.to_ascii_uppercase().contains("README"));
    found.sort();
    let formatted = |path: &String| FileFormat::of_name(Path::new(path));
    found = match spec.file_format {
        Some(format) if found.iter().any(|path| formatted(path) == Some(format)) => {
            found.into_iter().filter(|path| formatted(path) == Some(format)).collect()
        }
        Some(_) => found,
        None => found.into_iter().filter(|path| formatted(path).is_some()).collect(),
    };
    found = splits::of_config(found, spec.config.as_deref(), place)?;
    if found.is_empty() {
        return Err(no_data(place, folder));
    }
    let known = splits::splits_of(found.iter().map(String::as_str));
    // Reading all splits would train on the test data.
    if spec.split.is_some() || known.len() > 1 {
        found = splits::of_split(found, spec.split.as_deref(), place)?;
    }
    Ok((found.into_iter().map(|path| folder.join(path)).collect(), unread(spec, known, splits::TRAIN)))
}

fn unread(spec: &SourceSpec, splits: Vec<String>, taken: &str) -> Vec<String> {
    if spec.split.is_some() || splits.len() < 2 {
        return Vec::new();
    }
    splits.into_iter().filter(|split| split != taken).collect()
}

fn no_data(place: &str, folder: &Path) -> SourceError {
    SourceError::no_data(place, &siblings_of(&folder.join("*")))
}

fn json_in(folder: &Path, name: &str) -> SourceResult<Option<Json>> {
    let path = folder.join(name);
    if !path.is_file() {
        return Ok(None);
    }
    let text = fs::read(&path).map_err(|reason| SourceError::Open { path, reason })?;
    Ok(serde_json::from_slice(&text).ok())
}

/// Returns the splits of a saved `DatasetDict`.
fn saved_splits(folder: &Path) -> SourceResult<Option<Vec<String>>> {
    let Some(json) = json_in(folder, "dataset_dict.json")? else { return Ok(None) };
    let names = json["splits"].as_array().map(|names| names.iter().filter_map(Json::as_str).map(str::to_owned));
    // The names become folders, so none may point elsewhere.
    let is_inside = |name: &String| !name.contains(['/', '\\']) && !["", ".", ".."].contains(&name.as_str());
    Ok(names.map(|names| names.filter(is_inside).collect()))
}

/// Returns the files of a saved `Dataset`, in the order of its rows.
fn saved_files(folder: &Path) -> SourceResult<Option<Vec<PathBuf>>> {
    let Some(json) = json_in(folder, "state.json")? else { return Ok(None) };
    let Some(files) = json["_data_files"].as_array() else { return Ok(None) };
    let names = files.iter().filter_map(|file| file["filename"].as_str());
    let names = names.filter(|name| !name.contains(['/', '\\']) && !["", ".", ".."].contains(name));
    let files: Vec<PathBuf> = names.map(|name| folder.join(name)).collect();
    Ok((!files.is_empty()).then_some(files))
}
