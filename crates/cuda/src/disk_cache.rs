//! Results that took time to compute, cached on disk: compiled kernels, and the algorithms of GEMMs. There is one file
//! per key, written completely or not at all.
//!
//! The key is a hash of everything that determines the contents: for machine code, its source, options (including the
//! architecture), and the compiler's build. A file begins with the key and a checksum of the rest, so a truncated or
//! damaged file is not used: the contents are computed and written again.
//!
//! Cached code runs on the device with the user's rights, so no other user may be able to write it. The folder has mode
//! 0700, and a file is used only if this user owns it and no one else can write it. A folder that belongs to another
//! user is not used, with a warning. If the folder cannot be written, nothing is cached.
//!
//! Not supported: these checks on Windows, where the folder is in the user's profile.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use firebrick_files::cache_folder;
use tempfile::NamedTempFile;
use xxhash_rust::xxh3::xxh3_128;

/// A folder of files of one kind; `None` caches nothing.
#[derive(Clone, Debug)]
pub(crate) struct Cache {
    folder: Option<PathBuf>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Key(u128);

const HEADER_BYTES: usize = 32;

impl Key {
    /// Hashes `parts`, the texts that determine the contents.
    pub(crate) fn of<'a>(parts: impl IntoIterator<Item = &'a str>) -> Self {
        let mut text = String::new();
        for part in [env!("CARGO_PKG_VERSION")].into_iter().chain(parts) {
            // Lengths separate adjacent parts.
            text.push_str(&format!("{} {part}\n", part.len()));
        }
        Self(xxh3_128(text.as_bytes()))
    }
}

impl Cache {
    /// Opens the folder of all caches with this name, such as `kernels` ([`cache_folder`]).
    pub(crate) fn of(kind: &str) -> Self {
        cache_folder(kind).map_or(Self { folder: None }, |folder| Self::in_folder(&folder))
    }

    /// Creates the folder if there is none, and makes it private. If it cannot be used, nothing is cached.
    pub(crate) fn in_folder(folder: &Path) -> Self {
        match private_folder(folder) {
            Ok(()) => Self { folder: Some(folder.to_owned()) },
            Err(error) => {
                tracing::warn!(
                    "nothing is kept in {}, so each start does the work again: {error}. Set FIREBRICK_CACHE to a folder of \
                     your own",
                    folder.display()
                );
                Self { folder: None }
            }
        }
    }

    #[cfg(test)]
    pub(crate) fn none() -> Self {
        Self { folder: None }
    }

    /// Returns the contents, if there is a complete file that only this user could have written.
    pub(crate) fn read(&self, key: &Key) -> Option<Vec<u8>> {
        let mut file = File::open(self.file(key)?).ok()?;
        // Checked on the open file, so that the path cannot be exchanged in between.
        if !written_by_this_user_only(&file.metadata().ok()?) {
            return None;
        }
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).ok()?;
        let (header, image) = bytes.split_at_checked(HEADER_BYTES)?;
        (header == header_of(key, image)).then(|| image.to_vec())
    }

    /// Writes a file. Two processes at once write the same bytes to files of different names, and the last rename wins.
    pub(crate) fn write(&self, key: &Key, image: &[u8]) {
        let Some((folder, file)) = self.folder.as_deref().zip(self.file(key)) else { return };
        // If this fails, only the time to compute it again is lost.
        let _ = write_complete(folder, &file, &[header_of(key, image).as_slice(), image].concat());
    }

    fn file(&self, key: &Key) -> Option<PathBuf> {
        self.folder.as_deref().map(|folder: &Path| folder.join(format!("{:032x}", key.0)))
    }
}

fn header_of(key: &Key, image: &[u8]) -> [u8; HEADER_BYTES] {
    let mut header = [0; HEADER_BYTES];
    header[..16].copy_from_slice(&key.0.to_le_bytes());
    header[16..].copy_from_slice(&xxh3_128(image).to_le_bytes());
    header
}

/// Writes a file of the folder, which only this user can read and write: completely, or not at all.
fn write_complete(folder: &Path, file: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut unfinished = NamedTempFile::new_in(folder)?;
    unfinished.write_all(bytes)?;
    unfinished.persist(file)?;
    Ok(())
}

/// Makes `folder` a folder that only this user can read and write.
fn private_folder(folder: &Path) -> io::Result<()> {
    fs::create_dir_all(folder.parent().unwrap_or(folder))?;
    let mut builder = fs::DirBuilder::new();
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    match builder.create(folder) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => make_private(folder),
        created => created,
    }
}

/// Removes the rights of others on an existing folder.
#[cfg(unix)]
fn make_private(folder: &Path) -> io::Result<()> {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    let metadata = fs::metadata(folder)?;
    let (owner, user) = (metadata.uid(), rustix::process::geteuid().as_raw());
    if owner != user {
        return Err(io::Error::other(format!("the folder belongs to the user with id {owner}, not to {user}")));
    }
    if metadata.mode() & 0o077 != 0 {
        fs::set_permissions(folder, fs::Permissions::from_mode(0o700))?;
    }
    Ok(())
}

#[cfg(not(unix))]
fn make_private(_folder: &Path) -> io::Result<()> {
    Ok(())
}

#[cfg(unix)]
fn written_by_this_user_only(file: &fs::Metadata) -> bool {
    use std::os::unix::fs::MetadataExt;

    file.uid() == rustix::process::geteuid().as_raw() && file.mode() & 0o022 == 0
}

#[cfg(not(unix))]
fn written_by_this_user_only(_file: &fs::Metadata) -> bool {
    true
}

#[cfg(test)]
mod tests {
    use tempfile::tempdir;

    use super::*;

    #[test]
    fn parts_cannot_run_into_each_other() {
        let key = Key::of(["x", "-a", "-b"]);
        assert_eq!(key, Key::of(["x", "-a", "-b"]));
        for other in [Key::of(["y", "-a", "-b"]), Key::of(["x", "-a"]), Key::of(["x", "-a -b"]), Key::of(["x-a", "-b"])]
        {
            assert_ne!(key, other);
        }
    }

    #[test]
    fn damaged_files_are_not_used_and_none_is_partial() {
        let folder = tempdir().expect("a folder");
        let cache = Cache::in_folder(folder.path());
        let key = Key::of(["x"]);
        assert_eq!(cache.read(&key), None);
        cache.write(&key, b"the image");
        assert_eq!(cache.read(&key).as_deref(), Some(b"the image".as_slice()));
        let file = cache.file(&key).expect("a folder was given");
        let complete = fs::read(&file).expect("it was written");
        for damaged in [&complete[..complete.len() - 1], &complete[..7], &[complete.as_slice(), b"x"].concat()] {
            fs::write(&file, damaged).expect("overwriting");
            assert_eq!(cache.read(&key), None);
        }
        assert_eq!(fs::read_dir(folder.path()).expect("the folder").count(), 1);
    }

    #[test]
    fn a_folder_that_cannot_be_written_caches_nothing() {
        let cache = Cache::in_folder(Path::new("/dev/null/nowhere"));
        let key = Key::of(["x"]);
        cache.write(&key, b"image");
        assert_eq!(cache.read(&key), None);
    }

    #[cfg(unix)]
    #[test]
    fn folder_and_files_become_private() {
        use std::os::unix::fs::PermissionsExt;

        let temp = tempdir().expect("a folder");
        let folder = temp.path();
        fs::set_permissions(folder, fs::Permissions::from_mode(0o777)).expect("rights for all");
        let (cache, key) = (Cache::in_folder(folder), Key::of(["x"]));
        cache.write(&key, b"the image");
        let mode = |path: &Path| fs::metadata(path).expect("metadata").permissions().mode() & 0o777;
        assert_eq!((mode(folder), mode(&cache.file(&key).expect("a file"))), (0o700, 0o600));
    }

    #[cfg(unix)]
    #[test]
    fn a_file_that_others_can_write_is_replaced() {
        use std::os::unix::fs::PermissionsExt;

        let folder = tempdir().expect("a folder");
        let (cache, key) = (Cache::in_folder(folder.path()), Key::of(["x"]));
        cache.write(&key, b"the image");
        let file = cache.file(&key).expect("a file");
        fs::set_permissions(&file, fs::Permissions::from_mode(0o620)).expect("rights for the group");
        assert_eq!(cache.read(&key), None);
        cache.write(&key, b"the image");
        assert_eq!(cache.read(&key).as_deref(), Some(b"the image".as_slice()));
    }

    /// Only the superuser can give a folder to another user; returns early for others.
    #[cfg(unix)]
    #[test]
    fn a_folder_of_another_user_is_not_used() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let folder = tempdir().expect("a folder");
        std::os::unix::fs::chown(folder.path(), Some(12_345), None).expect("another owner");
        let (cache, key) = (Cache::in_folder(folder.path()), Key::of(["x"]));
        cache.write(&key, b"the image");
        assert_eq!((cache.read(&key), fs::read_dir(folder.path()).expect("the folder").count()), (None, 0));
    }
}
