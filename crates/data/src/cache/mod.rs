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
#[expect(missing_docs, reason = "messages say what variants and their fields are")]
pub enum CacheError {
    #[error(
        "no folder for the cache of tokenized data: neither FIREBRICK_CACHE nor the user's cache folder or home is \
         known. Set FIREBRICK_CACHE to a folder with space for about 2 to 4 bytes per token"
    )]
    NoFolder,

    #[error(
        "cannot {doing} {}: {reason}. The cache of tokenized data needs a writable folder with free space; set \
         FIREBRICK_CACHE to another one if this one cannot be used", path.display()
    )]
    Io {
        /// The operation, as a verb.
        doing: &'static str,
        path: PathBuf,
        reason: IoError,
    },

    /// A token file that is incomplete, was changed, or is not a token file.
    #[error("{} is damaged: {what}. Delete it; the next run rebuilds it", path.display())]
    Damaged {
        path: PathBuf,
        /// The check that failed, with the expected and the found value.
        what: String,
    },

    #[error(
        "token {token} in document {document} (counted from 1, in the order of the data) is outside the vocabulary of \
         {vocab_size} tokens: the data was tokenized for another model, or the tokenizer has more tokens than the model"
    )]
    TokenOutOfRange { token: u32, document: usize, vocab_size: usize },

    #[error("more than {0} documents in one dataset: split it into several runs, or join short documents")]
    TooManyDocuments(usize),

    /// A split that would leave one side empty.
    #[error(
        "cannot hold out {0}. Use another share, more data, or a separate evaluation file; of a text file each line is a \
             record with text_unit = \"line\""
    )]
    BadSplit(String),
}
