//! Tokenized documents: a memory-mapped file whose key covers everything that they depend on, or the same content in memory.
//!
//! ```text
//! records --Pipeline--> StoreWriter --> TokenStore (mapped or in memory) --> DocumentSet (all, or a split)
//!                        TokenCache: one file per key, built once, replaced only as a whole
//! ```
//!
//! A damaged file does not stop a run: [`TokenCache::get_or_build`] rebuilds it and reports that. Trade-off: files of old keys are never deleted by
//! the program, and errors are not chained, as in `DataError`: each message is complete.

mod document;
mod folder;
mod key;
mod layout;
mod map;
mod set;
mod store;
mod writer;

use std::io::Error as IoError;
use std::path::PathBuf;

use thiserror::Error;

pub use document::{Document, Example};
pub use folder::{Cached, TokenCache};
pub use key::CacheKey;
pub use layout::{DocumentEntry, Origin};
pub use set::DocumentSet;
pub use store::TokenStore;
pub use writer::StoreWriter;

/// An error of writing, finding, reading or splitting tokenized data.
#[derive(Debug, Error)]
pub enum CacheError {
    /// The environment defines no folder for the cache.
    #[error(
        "no folder for the cache of tokenized data: neither FIREBRICK_CACHE nor the user's cache folder or home is \
         known. Set FIREBRICK_CACHE to a folder with space for about 2 to 4 bytes per token"
    )]
    NoFolder,
    /// The operating system refused an operation.
    #[error(
        "cannot {doing} {}: {reason}. The cache of tokenized data needs a writable folder with free space; set \
         FIREBRICK_CACHE to another one if this one cannot be used", path.display()
    )]
    Io {
        /// The operation, as a verb.
        doing: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The operating system's error.
        reason: IoError,
    },
    /// A token file that is incomplete, was changed, or is not a token file.
    #[error("{} is damaged: {what}. Delete it; the next run rebuilds it", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The check that failed, with the expected and the found value.
        what: String,
    },
    /// A token outside the vocabulary, more documents than an index can count, or a split that would leave one side empty.
    #[error("{0}")]
    Unfit(String),
}
