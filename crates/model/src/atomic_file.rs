//! Files that appear under their names only when they are complete and on the disk.
//!
//! Trade-off: every write waits for the disk.

use std::fs::File;
use std::io::{BufWriter, Error as IoError, ErrorKind, Write};
use std::path::Path;

use tempfile::NamedTempFile;

use crate::error::ModelError;

/// Writes a small text file atomically.
pub(crate) fn write_text(path: &Path, text: &str) -> Result<(), ModelError> {
    write_bytes(path, text.as_bytes())
}

/// Writes a file that is held in memory atomically.
pub(crate) fn write_bytes(path: &Path, bytes: &[u8]) -> Result<(), ModelError> {
    write_atomically(path, |file| file.write_all(bytes).map_err(ModelError::io("write", path)))
}

/// Lets `fill` write to a temporary file next to `path`, syncs it to disk, and only then gives it its name.
pub(crate) fn write_atomically(
    path: &Path,
    fill: impl FnOnce(&mut BufWriter<NamedTempFile>) -> Result<(), ModelError>,
) -> Result<(), ModelError> {
    let mut file = BufWriter::new(temporary(path).map_err(ModelError::io("create", path))?);
    fill(&mut file)?;
    let failed = ModelError::io("write", path);
    let written = file.into_inner().map_err(|error| error.into_error());
    let persisted = written.and_then(|file| {
        file.as_file().sync_all()?;
        file.persist(path).map_err(|error| error.error)
    });
    persisted.map_err(failed)?;
    sync_parent(path)
}

/// A temporary file in the folder of `path`, removed unless it is persisted; with the permissions of an ordinary new file.
fn temporary(path: &Path) -> Result<NamedTempFile, IoError> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(".partial-");
    #[cfg(unix)]
    {
        use std::fs::Permissions;
        use std::os::unix::fs::PermissionsExt;
        builder.permissions(Permissions::from_mode(0o666));
    }
    builder.tempfile_in(parent_of(path))
}

fn parent_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// A rename lasts through a power cut once the folder itself is on the disk. Only Unix can request that, and some network file
/// systems refuse it, which is no reason to stop.
pub(crate) fn sync_parent(path: &Path) -> Result<(), ModelError> {
    let parent = parent_of(path);
    if !cfg!(unix) {
        return Ok(());
    }
    match File::open(parent).and_then(|dir| dir.sync_all()) {
        Err(error) if matches!(error.kind(), ErrorKind::InvalidInput | ErrorKind::Unsupported) => Ok(()),
        result => result.map_err(ModelError::io("write", parent)),
    }
}
