//! Names of datasets and files on the Hub.
//!
//! Not supported: models and spaces.

use std::fmt::{Display, Formatter, Result as FormatResult};

/// A dataset as the recipe names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in super::super) struct HubId {
    /// `owner/name`.
    pub(super) name: String,
    /// Branch, tag or commit.
    pub(super) revision: String,
}

impl HubId {
    /// Parses `owner/name`, `owner/name@revision` or `hf://datasets/...`; `None` for anything else. A separate
    /// `revision` takes precedence.
    pub(in super::super) fn parse(text: &str, revision: Option<&str>) -> Option<Self> {
        let text = text.strip_prefix("hf://datasets/").unwrap_or(text).trim_end_matches('/');
        let (name, inside) = text.split_once('@').map_or((text, None), |(name, revision)| (name, Some(revision)));
        let (owner, dataset) = name.split_once('/')?;
        let is_part = |part: &str| {
            let is_letter = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
            (1..=96).contains(&part.len()) && part.bytes().all(is_letter) && !part.starts_with('.')
        };
        let revision = revision.or(inside).unwrap_or("main");
        let is_revision = revision.split('/').all(|part| !part.is_empty() && !part.starts_with('.'))
            && !revision.contains(['\\', ':', '\0']);
        (is_part(owner) && is_part(dataset) && is_revision)
            .then(|| Self { name: name.to_owned(), revision: revision.to_owned() })
    }
}

impl Display for HubId {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> FormatResult {
        match self.revision.as_str() {
            "main" => formatter.write_str(&self.name),
            revision => write!(formatter, "{}@{revision}", self.name),
        }
    }
}

/// A file of a dataset at a commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in super::super) struct HubFile {
    pub(super) id: String,
    pub(super) commit: String,
    pub(super) path: String,
    /// Size in bytes, 0 if unknown.
    pub(in super::super) size: u64,
}

impl Display for HubFile {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> FormatResult {
        write!(formatter, "{}@{}/{}", self.id, self.commit, self.path)
    }
}
