//! The contents of a repository at a commit.
//!
//! Trade-off: of the card (the metadata at the top of README.md) only the keys that something reads are stored.

use std::fmt::{Display, Formatter, Result as FormatResult};
use std::path::Path;

use serde_json::{Map, Value as Json, json};

use crate::id::{HubId, RepoKind, is_commit};

/// The card's keys that are stored: the configurations of datasets, and a model's terms.
const CARD_KEYS: [&str; 4] = ["configs", "license", "license_name", "license_link"];

/// A file of a repository at a commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HubFile {
    pub(crate) kind: RepoKind,
    pub(crate) name: String,
    pub(crate) commit: String,
    pub(crate) path: String,
    /// Size in bytes, if the listing has it.
    pub size: Option<u64>,
}

impl Display for HubFile {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> FormatResult {
        write!(formatter, "{}@{}/{}", self.name, self.commit, self.path)
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Origin {
    /// The Hub's answer to this process.
    Hub,
    /// The cache, or another process.
    Cache,
    /// The cache, because the Hub could not be reached, with the reason.
    InsteadOfTheHub(String),
}

/// A repository at a commit.
#[derive(Debug, Clone, PartialEq)]
pub struct Listing {
    /// The commit's hash.
    pub commit: String,
    /// Paths with sizes in bytes, where they are known.
    files: Vec<(String, Option<u64>)>,
    card: Json,
    pub(crate) origin: Origin,
}

impl Listing {
    /// Parses the Hub's response; `None` if it is not a listing. Paths that would leave a folder are left out.
    pub fn parse(json: &Json) -> Option<Self> {
        let commit = json["sha"].as_str().filter(|sha| is_commit(sha))?.to_owned();
        let file = |entry: &Json| {
            let path = entry["rfilename"].as_str().filter(|path| is_safe(path))?;
            Some((path.to_owned(), entry["size"].as_u64()))
        };
        let entries = json["siblings"].as_array()?;
        let files: Vec<_> = entries.iter().filter_map(file).collect();
        if let Some(unsafe_) = entries.iter().find(|entry| file(entry).is_none()) {
            let (count, name) =
                (entries.len() - files.len(), unsafe_["rfilename"].to_string().escape_debug().to_string());
            tracing::warn!("{count} files of commit {commit} are left out: no file may have the name {name}");
        }
        let kept = CARD_KEYS.iter().filter_map(|key| Some(((*key).to_owned(), json["cardData"].get(*key)?.clone())));
        Some(Self { commit, files, card: Json::Object(kept.collect::<Map<_, _>>()), origin: Origin::Cache })
    }

    /// Returns the listing in the form of the Hub's response, for the cache.
    pub(crate) fn to_json(&self) -> Json {
        let siblings: Vec<Json> =
            self.files.iter().map(|(path, size)| json!({ "rfilename": path, "size": size })).collect();
        json!({ "sha": self.commit, "siblings": siblings, "cardData": self.card })
    }

    /// Creates a listing for a commit in the cache of which only the files are known.
    pub(crate) fn of_files(commit: String, files: Vec<(String, Option<u64>)>) -> Self {
        Self { commit, files, card: Json::Null, origin: Origin::Cache }
    }

    pub(crate) fn with_origin(self, origin: Origin) -> Self {
        Self { origin, ..self }
    }

    /// Returns why the Hub could not be reached, if the cache was used instead.
    pub(crate) fn unreachable(&self) -> Option<&str> {
        match &self.origin {
            Origin::InsteadOfTheHub(reason) => Some(reason),
            Origin::Hub | Origin::Cache => None,
        }
    }

    /// Iterates over the paths of all files.
    pub fn paths(&self) -> impl Iterator<Item = &str> {
        self.files.iter().map(|(path, _)| path.as_str())
    }

    /// Returns whether there is a file of this path.
    pub fn has(&self, path: &str) -> bool {
        self.paths().any(|known| known == path)
    }

    /// Returns a value of the card; null if there is none.
    pub fn card(&self, key: &str) -> &Json {
        &self.card[key]
    }

    /// Returns these files with their sizes.
    pub fn files<'a>(&'a self, id: &'a HubId, paths: &'a [String]) -> impl Iterator<Item = HubFile> + use<'a> {
        let size = |path: &String| self.files.iter().find(|(known, _)| known == path).and_then(|(_, size)| *size);
        paths.iter().map(move |path| HubFile {
            kind: id.kind,
            name: id.name.clone(),
            commit: self.commit.clone(),
            path: path.clone(),
            size: size(path),
        })
    }
}

/// Returns whether a path from the network stays inside the folder it is written to.
pub(crate) fn is_safe(path: &str) -> bool {
    !path.contains(|letter: char| letter == '\\' || letter.is_control())
        && path.split('/').all(|part| !part.is_empty() && part != "." && part != "..")
        && !Path::new(path).is_absolute()
        && !path.contains(':')
}
