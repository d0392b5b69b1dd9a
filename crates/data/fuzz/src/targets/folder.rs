//! A folder for the files that the targets write, in memory where the system supports that.
//!
//! Trade-off: a process that is killed leaves its folder.

use std::fs;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

/// An empty folder, removed at the end of its use.
pub(crate) struct Folder(TempDir);

impl Folder {
    pub(crate) fn new() -> Self {
        let memory = Path::new("/dev/shm");
        let base = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
        Self(TempDir::with_prefix_in("firebrick-fuzz-", base).expect("a folder for files can be made"))
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    /// Writes a file, with the folders above it, and gives its path.
    pub(crate) fn write(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.path().join(name);
        fs::create_dir_all(path.parent().expect("inside the folder")).expect("a folder can be made");
        fs::write(&path, bytes).expect("a file can be written");
        path
    }
}
