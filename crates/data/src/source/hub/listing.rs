//! What a dataset holds at a commit, and which of it are the files of a configuration and split.
//!
//! The `configs` of the dataset's card decide where there are any, else the names of the files (see
//! [`splits`](super::super::splits)). Gives up datasets that are made by a script: the Hub's own conversion of them is
//! named in the error.

use std::path::Path;

use glob::{MatchOptions, Pattern};
use serde_json::{Value as Json, json};

use super::super::error::SourceError;
use super::super::format::Format;
use super::super::spec::SourceSpec;
use super::super::splits;
use super::{HubFile, HubId};

/// Best first: where a dataset holds the same rows in several formats, one is read.
const PREFERRED: [Format; 7] =
    [Format::Parquet, Format::Arrow, Format::Jsonl, Format::Json, Format::Csv, Format::Tsv, Format::Text];

/// A dataset at a commit.
#[derive(Debug, Clone, PartialEq)]
pub(in super::super) struct Listing {
    /// The commit's hash.
    pub(super) commit: String,
    /// Paths with sizes in bytes (0 where unknown).
    files: Vec<(String, u64)>,
    configs: Vec<Config>,
}

/// A configuration of the dataset's card.
#[derive(Debug, Clone, PartialEq)]
struct Config {
    name: String,
    is_default: bool,
    /// Split and pattern.
    files: Vec<(String, String)>,
    folder: Option<String>,
}

impl Listing {
    /// From the Hub's answer; none if it is not one.
    pub(super) fn parse(json: &Json) -> Option<Self> {
        let commit = json["sha"].as_str().filter(|sha| is_commit(sha))?.to_owned();
        let file = |entry: &Json| {
            let path = entry["rfilename"].as_str().filter(|path| is_safe(path))?;
            Some((path.to_owned(), entry["size"].as_u64().unwrap_or(0)))
        };
        let files = json["siblings"].as_array()?.iter().filter_map(file).collect();
        let configs = json["cardData"]["configs"].as_array().into_iter().flatten().filter_map(Config::parse).collect();
        Some(Self { commit, files, configs })
    }

    /// What to keep for offline use: the Hub's answer without what is not needed.
    pub(super) fn essence(json: &Json) -> Json {
        let siblings: Vec<Json> = json["siblings"]
            .as_array()
            .into_iter()
            .flatten()
            .map(|entry| json!({ "rfilename": entry["rfilename"], "size": entry["size"] }))
            .collect();
        json!({ "sha": json["sha"], "siblings": siblings, "cardData": { "configs": json["cardData"]["configs"] } })
    }

    /// Of a commit in the cache of which only the files are known.
    pub(super) fn of_files(commit: String, files: Vec<(String, u64)>) -> Self {
        Self { commit, files, configs: Vec::new() }
    }

    /// The chosen files with their sizes.
    pub(in super::super) fn files<'a>(&'a self, id: &'a HubId, paths: &'a [String]) -> impl Iterator<Item = HubFile> {
        let size = |path: &String| self.files.iter().find(|(known, _)| known == path).map_or(0, |(_, size)| *size);
        paths.iter().map(move |path| HubFile {
            id: id.name.clone(),
            commit: self.commit.clone(),
            path: path.clone(),
            size: size(path),
        })
    }

    /// The paths to read, in order. Errors: no such configuration or split; nothing that can be read.
    pub(in super::super) fn choose(&self, spec: &SourceSpec, id: &HubId) -> Result<Vec<String>, SourceError> {
        let place = id.to_string();
        let mut paths: Vec<String> = self.files.iter().map(|(path, _)| path.clone()).collect();
        paths.sort();
        let config = self.config(spec.config.as_deref(), &place)?;
        if let Some(config) = config.filter(|config| !config.files.is_empty()) {
            return config.choose(&paths, spec.split.as_deref(), &place);
        }
        if let Some(folder) = config.and_then(|config| config.folder.as_ref()) {
            let prefix = format!("{}/", folder.trim_matches('/'));
            paths.retain(|path| path.starts_with(&prefix));
        } else if config.is_none() {
            paths = splits::of_config(paths, spec.config.as_deref(), &place)?;
        }
        self.by_name(paths, spec, &place)
    }

    fn by_name(&self, mut paths: Vec<String>, spec: &SourceSpec, place: &str) -> Result<Vec<String>, SourceError> {
        let format_of = |path: &String| Format::of_name(Path::new(path));
        paths.retain(|path| is_data(path));
        let formats = match spec.format {
            Some(format) if paths.iter().any(|path| format_of(path) == Some(format)) => vec![format],
            Some(_) | None => PREFERRED.to_vec(),
        };
        for format in formats {
            let of_format: Vec<String> = paths.iter().filter(|path| format_of(path) == Some(format)).cloned().collect();
            if !of_format.is_empty() {
                return splits::of_split(of_format, spec.split.as_deref(), place);
            }
        }
        let shown: Vec<&str> = self.files.iter().map(|(path, _)| path.as_str()).take(8).collect();
        let hint = format!(
            "its files are {}. If it is made by a script or of other files, try revision = \"refs/convert/parquet\", \
             where the Hub keeps its own conversion",
            shown.join(", ")
        );
        Err(SourceError::NoDataFiles { place: place.to_owned(), hint })
    }

    /// The configuration that is asked for, or the default one; none if the card has none.
    fn config(&self, asked: Option<&str>, place: &str) -> Result<Option<&Config>, SourceError> {
        let configs = &self.configs;
        if configs.is_empty() {
            return Ok(None);
        }
        let chosen = match asked {
            Some(name) => configs.iter().find(|config| config.name == name),
            None if configs.len() == 1 => configs.first(),
            None => configs.iter().find(|config| config.is_default || config.name == "default"),
        };
        let names = || configs.iter().map(|config| config.name.as_str()).collect::<Vec<_>>().join(", ");
        chosen.map(Some).ok_or_else(|| SourceError::NoSuchPart {
            place: place.to_owned(),
            what: "config",
            asked: asked.unwrap_or("default").to_owned(),
            hint: format!("it has {}; name one with config = \"...\"", names()),
        })
    }
}

impl Config {
    fn parse(json: &Json) -> Option<Self> {
        let name = json["config_name"].as_str()?.to_owned();
        let texts = |value: &Json| -> Vec<String> {
            match value {
                Json::String(text) => vec![text.clone()],
                Json::Array(items) => items.iter().filter_map(Json::as_str).map(str::to_owned).collect(),
                _ => Vec::new(),
            }
        };
        let mut files = Vec::new();
        match &json["data_files"] {
            Json::Array(items) if items.iter().any(Json::is_object) => {
                for item in items {
                    let split = item["split"].as_str().unwrap_or("train");
                    files.extend(texts(&item["path"]).into_iter().map(|path| (split.to_owned(), path)));
                }
            }
            Json::Object(splits) => {
                for (split, paths) in splits {
                    files.extend(texts(paths).into_iter().map(|path| (split.clone(), path)));
                }
            }
            other => files.extend(texts(other).into_iter().map(|path| ("train".to_owned(), path))),
        }
        let folder = json["data_dir"].as_str().map(str::to_owned);
        Some(Self { name, is_default: json["default"].as_bool().unwrap_or(false), files, folder })
    }

    fn choose(&self, paths: &[String], split: Option<&str>, place: &str) -> Result<Vec<String>, SourceError> {
        let wanted = split.unwrap_or("train");
        let patterns = self.files.iter().filter(|(split, _)| split == wanted).map(|(_, pattern)| pattern);
        let options = MatchOptions { require_literal_separator: true, ..MatchOptions::new() };
        let mut chosen: Vec<String> = Vec::new();
        for pattern in patterns {
            let pattern = match &self.folder {
                Some(folder) => format!("{}/{pattern}", folder.trim_matches('/')),
                None => pattern.trim_start_matches("./").to_owned(),
            };
            // As `datasets`: a folder's name stands for all data files in it.
            let inside = format!("{}/", pattern.trim_end_matches('/'));
            let matcher = Pattern::new(&pattern).ok();
            let is_match = |path: &&String| {
                **path == pattern
                    || matcher.as_ref().is_some_and(|matcher| matcher.matches_with(path, options))
                    || (path.starts_with(&inside) && is_data(path))
            };
            let new = paths.iter().filter(is_match).filter(|path| !chosen.contains(path)).cloned();
            let new: Vec<String> = new.collect();
            chosen.extend(new);
        }
        if chosen.is_empty() {
            let mut known: Vec<&str> = self.files.iter().map(|(split, _)| split.as_str()).collect();
            known.sort_unstable();
            known.dedup();
            let hint = if known.contains(&wanted) {
                "the files that the dataset's card names for it are not there; name another with split = \"...\""
                    .to_owned()
            } else {
                format!("it has {}; name one with split = \"...\"", known.join(", "))
            };
            let (place, asked) = (place.to_owned(), wanted.to_owned());
            return Err(SourceError::NoSuchPart { place, what: "split", asked, hint });
        }
        Ok(chosen)
    }
}

/// Whether a file of a dataset can hold rows, by its name.
fn is_data(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or_default();
    let describes = ["dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "metadata.json"];
    let is_prose = name.to_ascii_lowercase().ends_with(".md") || name.eq_ignore_ascii_case("license.txt");
    Format::of_name(Path::new(name)).is_some() && !describes.contains(&name) && !is_prose && !path.starts_with('.')
}

fn is_commit(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Whether a path from the network stays inside the folder it is put into.
fn is_safe(path: &str) -> bool {
    !path.contains(['\\', '\0'])
        && path.split('/').all(|part| !part.is_empty() && part != "." && part != "..")
        && !Path::new(path).is_absolute()
        && !path.contains(':')
}
