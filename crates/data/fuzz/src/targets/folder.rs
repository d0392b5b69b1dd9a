//! A folder for the files that the targets write, in memory where the system supports that.
//!
//! Trade-off: one use at a time per name and process.

use std::fs;
use std::path::{Path, PathBuf};

/// A folder of this process and use; empty at the beginning.
pub(crate) struct Folder {
    path: PathBuf,
}

impl Folder {
    /// An empty folder. Uses with different names are independent.
    pub(crate) fn new(name: &str) -> Self {
        let memory = Path::new("/dev/shm");
        let base = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
        let path = base.join(format!("firebrick-fuzz-{}", std::process::id())).join(name);
        // It may not exist.
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).expect("a folder for files can be made");
        Self { path }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Writes a file, with the folders above it, and gives its path.
    pub(crate) fn write(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.path.join(name);
        let folder = path.parent().expect("inside the folder");
        fs::create_dir_all(folder).expect("a folder can be made");
        fs::write(&path, bytes).expect("a file can be written");
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.path);
        // The process's folder goes with the last of its uses; until then it is not empty and stays.
        if let Some(parent) = self.path.parent() {
            let _ = fs::remove_dir(parent);
        }
    }
}
