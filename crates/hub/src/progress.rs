//! What receives how far a transfer is.
//!
//! Trade-off: bytes of all files are one number, since several files travel at a time.

/// Watches transfers. Every method has a body, so that a watcher writes only what it shows.
pub trait Progress: Send + Sync {
    /// A transfer begins: what, and its bytes, of which some may be here already.
    fn begin(&self, _what: &str, _bytes: u64) {}
    /// So many more bytes are through.
    fn advance(&self, _bytes: u64) {}
    /// The transfer has ended, well or not.
    fn end(&self) {}
}

/// Shows nothing.
#[derive(Debug)]
pub(crate) struct Silent;

impl Progress for Silent {}
