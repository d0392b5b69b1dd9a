//! What can be wrong with a cache of tokenised data.
//!
//! A damaged file is no reason to stop: `TokenCache::get_or_build` builds it anew and says so. Errors that reach the
//! caller are about disks, folders and tokens that do not fit the model.

use std::io::Error as IoError;
use std::path::PathBuf;

use thiserror::Error;

/// Why a token file cannot be written, found or trusted.
#[derive(Debug, Error)]
pub enum CacheError {
    /// No place for the cache.
    #[error(
        "no folder for the cache of tokenised data: neither FIREBRICK_CACHE nor the user's cache folder or home is \
         known. Set FIREBRICK_CACHE to a folder with room for about 2 to 4 bytes a token"
    )]
    NoFolder,
    /// The operating system refused.
    #[error(
        "cannot {doing} {}: {reason}. The cache of tokenised data needs a writable folder with room; set \
         FIREBRICK_CACHE to another one if this one cannot be used", path.display()
    )]
    Io {
        /// What was tried, as a verb.
        doing: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// What the operating system said.
        reason: IoError,
    },
    /// A token file that was not written to its end, was cut, changed, or is none.
    #[error("{} is damaged: {what}. Delete it; the next run builds it anew", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Which check failed, with what was expected and found.
        what: String,
    },
    /// A token that the model does not know.
    #[error(
        "token {token} in document {document} (counted from 1, in the order of the data) is outside the vocabulary of \
         {vocab_size} tokens: the data was tokenised for another model, or the tokenizer has more tokens than the model"
    )]
    TokenOutOfRange {
        /// The token id.
        token: u32,
        /// Document, the first is 1.
        document: usize,
        /// Tokens that there are.
        vocab_size: usize,
    },
    /// More documents than an index can number.
    #[error("more than {limit} documents in one dataset: split it into several runs, or join short documents")]
    TooManyDocuments {
        /// The most there may be.
        limit: usize,
    },
}
