//! Files that appear under their final name only when they are complete.
//!
//! Trade-off: small files are not synced to disk. After a power failure such a file may be missing, never half written.

use std::fs;
use std::io::{Error, Result, Write};
use std::path::Path;

use tempfile::{Builder, NamedTempFile};

/// Creates a temporary file in `folder`, removed when it is dropped before `NamedTempFile::persist`. The hidden name
/// begins with `prefix` and ends with `suffix`. As for other files, the process's umask determines who may read it.
pub(crate) fn create_temporary(folder: &Path, prefix: &str, suffix: &str) -> Result<NamedTempFile> {
    let mut builder = Builder::new();
    builder.prefix(prefix).suffix(suffix);
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        builder.permissions(fs::Permissions::from_mode(0o666));
    }
    builder.tempfile_in(folder)
}

/// Writes a file so that readers see all of it or nothing. Creates its folder if needed.
///
/// # Errors
/// The operating system's error, or `path` has no parent folder.
pub(crate) fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    let folder = path.parent().ok_or_else(|| Error::other("the path has no parent folder"))?;
    fs::create_dir_all(folder)?;
    let mut file = create_temporary(folder, ".", ".tmp")?;
    file.write_all(bytes)?;
    file.persist(path).map(drop).map_err(|error| error.error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_as_a_whole_and_nothing_else_remains() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new/file");
        for text in ["first", "second"] {
            write(&path, text.as_bytes()).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
        }
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }
}
