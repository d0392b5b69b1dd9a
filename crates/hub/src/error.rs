//! Errors of finding, downloading and pushing files, worded so that the user can fix the cause.
//!
//! One of them is a kind of its own, because the cache may do instead; of the others only the text differs.
//! Trade-off: the text of a server's refusal is ours, by its error code; the server's own words are quoted for uploads only.

use std::fmt::Display;
use std::io::Error as IoError;
use std::path::{Path, PathBuf};

use crate::address::without_secrets;
use crate::id::HubId;

/// An error of access to the Hub or its cache.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// The Hub does not respond, and the cache is incomplete.
    #[error(
        "the cache {} does not hold all of {what}, and the Hub cannot be reached ({reason}). Try again when it can, or \
         copy the cache of a machine that has it",
        cache.display()
    )]
    Unreachable {
        /// The repository or file.
        what: String,
        /// Who was asked, and what happened.
        reason: String,
        /// The cache's folder.
        cache: PathBuf,
    },
    /// Anything else, without secrets: what is wrong, and what to do.
    #[error("{0}")]
    Other(String),
}

impl HubError {
    /// Builds the error for a request without a response.
    pub(crate) fn unreachable(cache: &Path, what: &str, reason: &str) -> Self {
        Self::Unreachable { what: what.to_owned(), reason: without_secrets(reason), cache: cache.to_owned() }
    }

    /// Builds an error of the cache at this path.
    pub(crate) fn cache(path: &Path) -> impl Fn(IoError) -> Self + '_ {
        |reason| Self::Other(format!("cannot use the Hub cache at {}: {reason}", path.display()))
    }

    /// Builds the error for what is not in the cache while the Hub is off.
    pub(crate) fn not_cached(cache: &Path, what: &str) -> Self {
        Self::Other(format!(
            "{what} is not in the cache {} and the Hub is off (HF_HUB_OFFLINE): unset HF_HUB_OFFLINE for one run that fetches it, or copy \
             the cache of a machine that has it",
            cache.display()
        ))
    }

    /// Builds the error for a request whose answer cannot be used.
    pub(crate) fn request(url: &str, reason: impl AsRef<str>) -> Self {
        let (url, reason) = (without_secrets(url), without_secrets(reason.as_ref()));
        Self::Other(format!("cannot get {url}: {reason}. Try again, or work from the cache with HF_HUB_OFFLINE=1"))
    }

    /// Builds the error for a push request without a response.
    pub(crate) fn not_sent(url: &str, reason: &str) -> Self {
        let (url, reason) = (without_secrets(url), without_secrets(reason));
        let hint = "Push again when it can be reached; files that it has are not sent again";
        Self::Other(format!("cannot reach {url}: {reason}. {hint}"))
    }

    /// Builds the error for a file to upload that cannot be read.
    pub(crate) fn unreadable(path: &Path) -> impl Fn(IoError) -> Self + '_ {
        |reason| Self::Other(format!("cannot read {}: {reason}", path.display()))
    }

    /// Builds the error for a repository without usable files.
    pub(crate) fn not_a_model(id: &HubId, missing: &str, hint: impl Display) -> Self {
        Self::Other(format!("{id} has no {missing}: {hint}"))
    }

    /// Builds the error for a failed push to this repository.
    pub(crate) fn push(id: &HubId, reason: impl AsRef<str>) -> Self {
        Self::Other(format!("cannot push to {}: {}", id.name, without_secrets(reason.as_ref())))
    }
}
