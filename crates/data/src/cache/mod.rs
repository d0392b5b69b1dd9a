//! Tokenized documents: a memory-mapped file whose key covers all that they depend on, or the same in memory.
//!
//! ```text
//! records --Pipeline--> StoreWriter --> TokenStore (mapped or in memory) --> DocumentSet (all, or a split)
//!                        TokenCache: one file per key, built once, replaced only as a whole
//! ```
//!
//! Trade-off: files of old keys are never deleted by the program.

mod document;
mod error;
mod folder;
mod key;
mod layout;
mod map;
mod set;
mod store;
mod writer;

pub use document::{Document, Example};
pub use error::CacheError;
pub use folder::{Cached, TokenCache};
pub use key::CacheKey;
pub use layout::{DocumentEntry, Origin};
pub use set::DocumentSet;
pub use store::TokenStore;
pub use writer::StoreWriter;
