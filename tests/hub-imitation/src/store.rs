//! The contents of an imitated Hub.
//!
//! Trade-off: everything is in memory, every commit with all of its files.

use std::collections::BTreeMap;

use crate::sha256;

/// Files by path.
pub(super) type Files = BTreeMap<String, Vec<u8>>;

/// A repository.
#[derive(Debug, Clone, Default)]
pub struct Repo {
    /// Commits, oldest first: hash and files.
    pub commits: Vec<(String, Files)>,
    /// Whether it is hidden without the token.
    pub is_private: bool,
    /// Whether its files need the token, while its listing is public.
    pub is_gated: bool,
    /// The metadata of its card.
    pub card: serde_json::Value,
}

impl Repo {
    /// Adds a commit of all these files; returns its hash.
    pub fn commit(&mut self, files: Files) -> String {
        let text = format!("{:?} {:?}", self.commits.last().map(|(hash, _)| hash), files);
        let hash = sha256(text.as_bytes())[..40].to_owned();
        self.commits.push((hash.clone(), files));
        hash
    }

    /// Returns a commit by its hash, or the newest under the name `main`.
    pub(super) fn at(&self, revision: &str) -> Option<&(String, Files)> {
        match revision {
            "main" => self.commits.last(),
            hash => self.commits.iter().find(|(known, _)| known == hash),
        }
    }
}

/// Repositories, large-file storage, and injected failures.
#[derive(Debug, Default)]
pub struct Store {
    /// The token of its only user.
    pub token: String,
    /// By `owner/name`; datasets as `datasets/owner/name`.
    pub repos: BTreeMap<String, Repo>,
    /// Large files by SHA-256.
    pub objects: BTreeMap<String, Vec<u8>>,
    /// Parts of large files by SHA-256 and number.
    pub(super) parts: BTreeMap<(String, usize), Vec<u8>>,
    /// Body bytes after which the next downloads break, one after the other.
    pub breaks: Vec<usize>,
    /// Files from this size on are large; binary ones always are.
    pub large_bytes: Option<usize>,
    /// Large files above this size are requested in parts of it.
    pub part_bytes: Option<usize>,
}

impl Store {
    /// Returns whether the Hub keeps a file in large-file storage: by size, and by name as in the Hub's default .gitattributes. Empty files are in
    /// git.
    pub(super) fn is_large(&self, path: &str, size: usize) -> bool {
        let ends = [".safetensors", ".bin", ".gguf", ".parquet", ".zst"];
        size > 0 && (ends.iter().any(|end| path.ends_with(end)) || size >= self.large_bytes.unwrap_or(10 << 20))
    }
}
