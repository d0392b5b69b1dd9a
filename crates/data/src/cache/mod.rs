//! Documents that were tokenised once: a memory-mapped file keyed by all that they depend on, or the same in memory.
//!
//! ```text
//! records --Pipeline--> StoreWriter --finish--> TokenStore (mapped or in memory) --> DocumentSet (all, or a split)
//!                        TokenCache: one file a key, built once, replaced only whole
//! ```

mod document;
mod error;
mod folder;
mod key;
mod layout;
mod map;
mod set;
mod store;
mod writer;

pub use document::Document;
pub use error::CacheError;
pub use folder::{Cached, TokenCache};
pub use key::CacheKey;
pub use set::DocumentSet;
pub use store::TokenStore;
pub use writer::StoreWriter;
