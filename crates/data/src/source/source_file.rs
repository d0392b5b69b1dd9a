//! One file of a source, local or on the Hub.
//!
//! Not supported: other remote storage.

use std::path::PathBuf;

use super::hub::HubFile;

/// One file of a source.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum SourceFile {
    /// On this machine.
    Local {
        /// Its path.
        path: PathBuf,
        /// Its size in bytes.
        size: u64,
    },
    /// On the Hub or in its cache; downloaded when it is read.
    Hub(HubFile),
}
