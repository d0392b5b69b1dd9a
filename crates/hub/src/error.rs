//! Errors of finding, downloading and pushing files, worded so that the user can fix the cause.
//!
//! Trade-off: the text of a server's refusal is ours, by its error code; the server's own words are quoted for uploads only.

use std::io::Error as IoError;
use std::path::{Path, PathBuf};

use crate::address::without_secrets;
use crate::id::HubId;

/// An error of access to the Hub or its cache.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// Offline, and not in the cache.
    #[error(
        "{what} is not in the cache {} and the Hub is off (HF_HUB_OFFLINE): unset HF_HUB_OFFLINE for one run that fetches it, or copy the \
         cache of a machine that has it",
        cache.display()
    )]
    NotCached {
        /// Repository or file.
        what: String,
        /// Cache folder.
        cache: PathBuf,
    },
    /// The Hub does not respond, and the cache is incomplete.
    #[error(
        "the cache {} does not hold all of {what}, and the Hub cannot be reached ({reason}). Try again when it can, or \
         copy the cache of a machine that has it",
        cache.display()
    )]
    Unreachable {
        /// Repository or file.
        what: String,
        /// Who was asked, and what happened.
        reason: String,
        /// Cache folder.
        cache: PathBuf,
    },
    /// No access, or no such repository, revision or file.
    #[error("{endpoint} has no {what} that you can access: {hint}")]
    Refused {
        /// The Hub's address.
        endpoint: String,
        /// Kind and id.
        what: String,
        /// Why, and what to do.
        hint: String,
    },
    /// A request whose answer cannot be used.
    #[error("cannot get {url}: {reason}. Try again, or work from the cache with HF_HUB_OFFLINE=1")]
    Request {
        /// Address without secrets.
        url: String,
        /// The cause.
        reason: String,
    },
    /// A request of a push got no response.
    #[error("cannot reach {url}: {reason}. Push again when it can be reached; files that it has are not sent again")]
    NotSent {
        /// Address without secrets.
        url: String,
        /// The cause.
        reason: String,
    },
    /// Downloaded content has another hash than the Hub announced.
    #[error(
        "{what}: the downloaded file has the {algorithm} {got} instead of {expected}. It was removed; try again. If it happens again, \
         something between you and the Hub changes files"
    )]
    WrongContent {
        /// File.
        what: String,
        /// Name of the hash.
        algorithm: &'static str,
        /// The Hub's.
        expected: String,
        /// The file's.
        got: String,
    },
    /// The cache cannot be read or written.
    #[error("cannot use the Hub cache at {}: {reason}", path.display())]
    Cache {
        /// File or folder.
        path: PathBuf,
        /// The operating system's error.
        reason: IoError,
    },
    /// A repository has no usable files.
    #[error("{id} has no {missing}: {hint}")]
    NotAModel {
        /// The repository.
        id: String,
        /// The missing files.
        missing: &'static str,
        /// The files that are there, and advice.
        hint: String,
    },
    /// A folder in the layout of a Hub cache does not contain the model.
    #[error("{}: this is a repository of a Hub cache without {missing}. Download the model again, or give one of its snapshots", folder.display())]
    NoSnapshot {
        /// The folder.
        folder: PathBuf,
        /// The missing part.
        missing: String,
    },
    /// A file to upload that cannot be read.
    #[error("cannot read {}: {reason}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The operating system's error.
        reason: IoError,
    },
    /// An upload is impossible, or the Hub refused it.
    #[error("cannot push to {repository}: {reason}")]
    Push {
        /// `owner/name`.
        repository: String,
        /// Why, and what to do.
        reason: String,
    },
}

impl HubError {
    /// Builds an error of the cache at this path.
    pub(crate) fn cache(path: &Path) -> impl Fn(IoError) -> Self + '_ {
        |reason| Self::Cache { path: path.to_owned(), reason }
    }

    /// Builds the error for a request without a response.
    pub(crate) fn unreachable(cache: &Path, what: &str, reason: &str) -> Self {
        Self::Unreachable { what: what.to_owned(), reason: without_secrets(reason), cache: cache.to_owned() }
    }

    /// Builds the error for a failed request.
    pub(crate) fn request(url: &str, reason: impl Into<String>) -> Self {
        Self::Request { url: without_secrets(url), reason: without_secrets(&reason.into()) }
    }

    /// Builds the error for a push request without a response.
    pub(crate) fn not_sent(url: &str, reason: String) -> Self {
        Self::NotSent { url: without_secrets(url), reason: without_secrets(&reason) }
    }

    /// Builds the error for a failed push to this repository.
    pub(crate) fn push(id: &HubId, reason: impl Into<String>) -> Self {
        Self::Push { repository: id.name.clone(), reason: without_secrets(&reason.into()) }
    }
}
