//! Errors of finding, downloading and pushing files, worded so that the user can fix the cause.
//!
//! Trade-off: the text of a server's refusal is ours, by its error code; the server's own words are quoted for uploads only.

use std::io::Error as IoError;
use std::path::{Path, PathBuf};

use crate::address::without_secrets;
use crate::id::HubId;

/// An error of access to the Hub or its cache.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "messages say what variants and their fields are")]
pub enum HubError {
    #[error(
        "{what} is not in the cache {} and the Hub is off (HF_HUB_OFFLINE): unset HF_HUB_OFFLINE for one run that fetches it, or copy the \
         cache of a machine that has it",
        cache.display()
    )]
    NotCached { what: String, cache: PathBuf },

    #[error(
        "the cache {} does not hold all of {what}, and the Hub cannot be reached ({reason}). Try again when it can, or \
         copy the cache of a machine that has it",
        cache.display()
    )]
    Unreachable { what: String, reason: String, cache: PathBuf },

    #[error("HF_ENDPOINT={0} is no address: write it with its beginning, HF_ENDPOINT=https://{0}")]
    Endpoint(String),

    #[error("{endpoint} has no {what} that you can access: {hint}")]
    Refused { endpoint: String, what: String, hint: String },

    /// A request whose answer cannot be used.
    #[error("cannot get {url}: {reason}. Try again, or work from the cache with HF_HUB_OFFLINE=1")]
    Request {
        /// Address without secrets.
        url: String,
        reason: String,
    },

    /// A request of a push got no response.
    #[error("cannot reach {url}: {reason}. Push again when it can be reached; files that it has are not sent again")]
    NotSent {
        /// Address without secrets.
        url: String,
        reason: String,
    },

    #[error(
        "{what}: the downloaded file has the {algorithm} {got} instead of {expected}. It was removed; try again. If it happens again, \
         something between you and the Hub changes files"
    )]
    WrongContent { what: String, algorithm: &'static str, expected: String, got: String },

    #[error("cannot use the Hub cache at {}: {reason}", path.display())]
    Cache { path: PathBuf, reason: IoError },

    #[error("{id} has no {missing}: {hint}")]
    NotAModel { id: String, missing: &'static str, hint: String },

    #[error("{}: this is a repository of a Hub cache without {missing}. Download the model again, or give one of its snapshots", folder.display())]
    NoSnapshot { folder: PathBuf, missing: String },

    #[error("cannot read {}: {reason}", path.display())]
    Read { path: PathBuf, reason: IoError },

    /// An upload is impossible, or the Hub refused it.
    #[error("cannot push to {repository}: {reason}")]
    Push { repository: String, reason: String },
}

impl HubError {
    pub(crate) fn cache(path: &Path) -> impl Fn(IoError) -> Self + '_ {
        |reason| Self::Cache { path: path.to_owned(), reason }
    }

    /// Builds the error for an endpoint without `https://` at its beginning.
    pub(crate) fn endpoint(endpoint: &str) -> Self {
        let begin = "https://";
        Self::Endpoint(without_secrets(&format!("{begin}{endpoint}")).trim_start_matches(begin).to_owned())
    }

    pub(crate) fn unreachable(cache: &Path, what: &str, reason: &str) -> Self {
        Self::Unreachable { what: what.to_owned(), reason: without_secrets(reason), cache: cache.to_owned() }
    }

    pub(crate) fn request(url: &str, reason: impl Into<String>) -> Self {
        Self::Request { url: without_secrets(url), reason: without_secrets(&reason.into()) }
    }

    /// Builds the error for a push request without a response.
    pub(crate) fn not_sent(url: &str, reason: String) -> Self {
        Self::NotSent { url: without_secrets(url), reason: without_secrets(&reason) }
    }

    pub(crate) fn push(id: &HubId, reason: impl Into<String>) -> Self {
        Self::Push { repository: id.name.clone(), reason: without_secrets(&reason.into()) }
    }
}
