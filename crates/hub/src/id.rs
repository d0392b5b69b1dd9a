//! Names of repositories on the Hub.
//!
//! Trade-off: names without an owner, such as `gpt2`, are not ids here; a misspelled folder would become a request.

use std::fmt::{Display, Formatter, Result as FormatResult};

/// The kind of a repository, which decides the URLs of its pages and files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum RepoKind {
    /// Weights, or an adapter.
    Model,
    /// Rows.
    Dataset,
}

impl RepoKind {
    /// Returns the word in messages.
    pub(crate) fn noun(self) -> &'static str {
        match self {
            Self::Model => "model",
            Self::Dataset => "dataset",
        }
    }

    /// Returns the word in URLs of the API (`/api/models/...`) and in names of cache folders (`models--...`).
    pub(crate) fn plural(self) -> String {
        format!("{}s", self.noun())
    }

    /// Returns the path before `owner/name` in the URLs of pages and files.
    pub(crate) fn prefix(self) -> &'static str {
        match self {
            Self::Model => "",
            Self::Dataset => "datasets/",
        }
    }
}

/// A repository at a revision, as a recipe names it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct HubId {
    /// Model or dataset.
    pub kind: RepoKind,
    /// `owner/name`.
    pub name: String,
    /// Branch, tag or commit.
    pub revision: String,
}

impl HubId {
    /// Parses `owner/name`, `owner/name@revision` or `hf://datasets/owner/name` (`hf://owner/name` for a model); `None` for anything
    /// else. A separate `revision` takes precedence.
    pub fn parse(kind: RepoKind, text: &str, revision: Option<&str>) -> Option<Self> {
        let text = match text.strip_prefix("hf://") {
            Some(rest) => rest.strip_prefix(kind.prefix())?,
            None => text,
        };
        let text = text.trim_end_matches('/');
        let (name, inside) = text.split_once('@').map_or((text, None), |(name, revision)| (name, Some(revision)));
        let (owner, repository) = name.split_once('/')?;
        let is_part = |part: &str| {
            let is_letter = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
            (1..=96).contains(&part.len()) && part.bytes().all(is_letter) && !part.starts_with('.')
        };
        let revision = revision.or(inside).unwrap_or("main");
        let is_revision = revision.split('/').all(|part| !part.is_empty() && !part.starts_with('.'))
            && !revision.contains(|letter: char| matches!(letter, '\\' | ':') || letter.is_control());
        (is_part(owner) && is_part(repository) && is_revision).then(|| Self {
            kind,
            name: name.to_owned(),
            revision: revision.to_owned(),
        })
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

/// Returns whether a text is the hash of a commit.
pub(crate) fn is_commit(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_owner_and_name_with_an_optional_revision_are_an_id() {
        let parse = |kind, text| HubId::parse(kind, text, None).map(|id| id.to_string());
        for (text, id) in
            [("o/n", "o/n"), ("o/n@v1", "o/n@v1"), ("o/n@main", "o/n"), ("hf://o/n@refs/pr/1", "o/n@refs/pr/1")]
        {
            assert_eq!(parse(RepoKind::Model, text).as_deref(), Some(id));
        }
        assert_eq!(parse(RepoKind::Dataset, "hf://datasets/o/n").as_deref(), Some("o/n"));
        for text in ["gpt2", "./o/n", "o/n/x", "../n", "o/n@../x", "o/n@", "/o/n", "o n/x", "hf://o"] {
            assert_eq!(parse(RepoKind::Model, text), None, "{text}");
        }
        assert_eq!(HubId::parse(RepoKind::Model, "o/n@a", Some("b")).unwrap().revision, "b");
    }
}
