//! Files that appear under their names only when they are complete and on the disk, the folders for files that later runs use again, the files
//! below a folder, and what a path that is not there was meant to be.
//!
//! Trade-off: every write waits for the disk, so this is for files that matter, not for something written every step.
#![doc = include_str!("../README.md")]

use std::env;
use std::fs::{self, File};
use std::io::{BufWriter, Error, ErrorKind, IntoInnerError, Result, Write};
use std::path::{Path, PathBuf};

use tempfile::{Builder, NamedTempFile, TempDir};

/// Begins the names of files that are being written.
const PARTIAL: &str = ".partial-";
/// Held in a folder that is being written.
const FOLDER_LOCK: &str = ".lock";
/// Deeper folders are not listed: a link to a parent would never end.
const MAX_DEPTH: usize = 32;

/// A file that is written under a temporary name next to `path`, and appears at `path` with [`AtomicFile::commit`]. If it is dropped before that, it
/// is removed, and an older file at `path` stays.
#[derive(Debug)]
pub struct AtomicFile {
    file: BufWriter<NamedTempFile>,
    path: PathBuf,
}

impl AtomicFile {
    /// Creates the temporary file in the folder of `path`, which must exist.
    pub fn create(path: &Path) -> Result<Self> {
        let file = temporary_in(parent(path), PARTIAL, "")?;
        Ok(Self { file: BufWriter::new(file), path: path.to_owned() })
    }

    /// Flushes the file to the disk, renames it to `path`, which replaces an older file, and waits until the name is on the disk.
    ///
    /// # Errors
    /// The file cannot be written or renamed: the older file is as it was. The folder cannot be flushed.
    pub fn commit(self) -> Result<()> {
        let file = self.file.into_inner().map_err(IntoInnerError::into_error)?;
        file.as_file().sync_all()?;
        file.persist(&self.path).map_err(|error| error.error)?;
        sync_folder(parent(&self.path))
    }
}

impl Write for AtomicFile {
    fn write(&mut self, bytes: &[u8]) -> Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> Result<()> {
        self.file.flush()
    }
}

/// Removes the temporary files in `folder` that killed writers left, as far as possible. No other process may be writing there.
pub fn remove_partial_files(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with(PARTIAL) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// Writes a whole file; after a crash at any moment it holds either the old bytes or the new ones.
pub fn write(path: &Path, bytes: impl AsRef<[u8]>) -> Result<()> {
    let mut file = AtomicFile::create(path)?;
    file.write_all(bytes.as_ref())?;
    file.commit()
}

/// Renames a file or folder and waits until the new name is on the disk.
pub fn rename(from: &Path, to: &Path) -> Result<()> {
    fs::rename(from, to)?;
    sync_folder(parent(to))
}

/// Waits until a folder's list of names is on the disk, so that a rename in it survives a power cut. Windows has no such call and does it by itself;
/// some network file systems refuse it, and that is ignored.
pub fn sync_folder(folder: &Path) -> Result<()> {
    if !cfg!(unix) {
        return Ok(());
    }
    match File::open(folder).and_then(|folder| folder.sync_all()) {
        Err(error) if matches!(error.kind(), ErrorKind::InvalidInput | ErrorKind::Unsupported) => Ok(()),
        result => result,
    }
}

/// Creates a temporary file in `folder` with a name between `prefix` and `suffix`, removed when it is dropped before `NamedTempFile::persist`. As for
/// any other new file, the user's umask determines who may read it.
pub fn temporary_in(folder: &Path, prefix: &str, suffix: &str) -> Result<NamedTempFile> {
    let mut builder = Builder::new();
    builder.prefix(prefix).suffix(suffix);
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        builder.permissions(fs::Permissions::from_mode(0o666));
    }
    builder.tempfile_in(folder)
}

/// A folder that is written under a temporary name, which begins with that of `path`, and appears at `path` with [`AtomicFolder::commit`]. If it is
/// dropped before that, it is removed. The next folder for the same path removes what a killed process left, recognized by its free lock. As for any
/// other new folder, the user's umask determines who may read it.
#[derive(Debug)]
pub struct AtomicFolder {
    /// `None` on a file system without locks. It is dropped before the folder, because Windows does not remove a folder with an open file.
    lock: Option<File>,
    folder: TempDir,
    path: PathBuf,
}

impl AtomicFolder {
    /// Creates the temporary folder next to `path`, in a folder that must exist.
    pub fn create(path: &Path) -> Result<Self> {
        let prefix = format!("{}.partial-", path.file_name().unwrap_or_default().to_string_lossy());
        remove_abandoned(parent(path), &prefix);
        let mut builder = Builder::new();
        builder.prefix(&prefix);
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            builder.permissions(fs::Permissions::from_mode(0o777));
        }
        let folder = builder.tempdir_in(parent(path))?;
        // The lock file gets its name once the lock is held: so a lock that can be taken is one whose process has ended.
        let unnamed = folder.path().join(".lock-new");
        let lock = File::create(&unnamed)?;
        let lock = if lock.try_lock().is_ok() {
            fs::rename(&unnamed, folder.path().join(FOLDER_LOCK))?;
            Some(lock)
        } else {
            fs::remove_file(&unnamed)?;
            None
        };
        Ok(Self { lock, folder, path: path.to_owned() })
    }

    /// Returns the path to write to.
    pub fn temporary(&self) -> &Path {
        self.folder.path()
    }

    /// Renames the folder to its final name, and waits until the name is on the disk.
    ///
    /// # Errors
    /// A folder of that name is not empty, or the rename fails: then the temporary folder is removed.
    pub fn commit(self) -> Result<()> {
        let Self { lock, folder, path } = self;
        if lock.is_some() {
            // Removed before the lock is free, so that no other writer takes it.
            fs::remove_file(folder.path().join(FOLDER_LOCK))?;
        }
        drop(lock);
        // An empty folder in the way would stop the rename on some systems.
        fs::remove_dir(&path).ok();
        rename(folder.path(), &path)?;
        // It has another name now.
        let _ = folder.keep();
        Ok(())
    }

    /// Renames `written`, a complete file or folder in this one, to the final name, and removes a folder that had the name before. A process that is
    /// killed meanwhile leaves the old one, the new one, or none, but no mixture.
    ///
    /// # Errors
    /// A folder would replace a file, or a file a folder, or a rename fails: the old one keeps its name.
    pub fn replace_by(self, written: &Path) -> Result<()> {
        let aside = self.temporary().join(".replaced");
        let replaces = self.path.is_dir();
        if self.path.exists() && replaces != written.is_dir() {
            return Err(if replaces { ErrorKind::IsADirectory } else { ErrorKind::NotADirectory }.into());
        }
        if replaces {
            fs::rename(&self.path, &aside)?;
        }
        let Err(error) = rename(written, &self.path) else { return Ok(()) };
        if replaces && fs::rename(&aside, &self.path).is_err() {
            // The old one stays where it is, rather than being removed with this folder.
            let _ = self.folder.keep();
        }
        Err(error)
    }
}

/// Removes the folders whose names begin with `prefix` and whose locks no process holds, as far as possible.
fn remove_abandoned(parent: &Path, prefix: &str) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        if !entry.file_name().to_string_lossy().starts_with(prefix) {
            continue;
        }
        let name = entry.path().join(FOLDER_LOCK);
        // Locking needs a writable handle on some systems; nothing is written.
        let Ok(lock) = File::options().append(true).open(&name) else { continue };
        // The lock of a folder that was completed meanwhile is free too, but its file was removed before.
        if lock.try_lock().is_ok() && name.exists() {
            drop(lock);
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// Lists all files below a folder, in no order, except hidden ones: paths with `/` relative to it, and whole paths. Links are followed.
///
/// # Errors
/// A folder that cannot be read, with the reason.
pub fn files_below(folder: &Path) -> std::result::Result<Vec<(String, PathBuf)>, (PathBuf, Error)> {
    let (mut found, mut waiting) = (Vec::new(), vec![(folder.to_owned(), String::new(), 0)]);
    while let Some((folder, prefix, depth)) = waiting.pop() {
        let failed = |reason| (folder.clone(), reason);
        for entry in fs::read_dir(&folder).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
            if name.starts_with('.') {
                continue;
            }
            if path.is_dir() && depth < MAX_DEPTH {
                waiting.push((path, format!("{prefix}{name}/"), depth + 1));
            } else if path.is_file() {
                found.push((format!("{prefix}{name}"), path));
            }
        }
    }
    Ok(found)
}

/// Lists what the folder of a missing path contains, for messages: a clause.
pub fn siblings_of(path: &Path) -> String {
    const SHOWN: usize = 8;
    let folder = parent(path);
    let Ok(entries) = fs::read_dir(folder) else {
        return format!("there is no folder {}", folder.display());
    };
    let mut names: Vec<String> = entries
        .take(10_000)
        .filter_map(|entry| Some(entry.ok()?.file_name().to_string_lossy().into_owned()))
        .filter(|name| !name.starts_with('.'))
        .collect();
    names.sort();
    let more = names.len().saturating_sub(SHOWN);
    names.truncate(SHOWN);
    match (names.is_empty(), more) {
        (true, _) => format!("the folder {} is empty", folder.display()),
        (false, 0) => format!("the folder {} contains {}", folder.display(), names.join(", ")),
        (false, more) => format!("the folder {} contains {} and {more} more", folder.display(), names.join(", ")),
    }
}

/// Returns what to write instead of a path that is not there, if it is one that only a shell or Windows understands: a clause.
pub fn advice_on_path(path: &str) -> Option<String> {
    if path.starts_with(['~', '%']) || path.contains('$') {
        return Some("'~' and variables stand for folders in a shell alone: write the whole path".to_owned());
    }
    // In double quotes TOML and YAML have made other letters of `\t` and the like.
    let escapes =
        [('\t', "/t"), ('\n', "/n"), ('\r', "/r"), ('\u{8}', "/b"), ('\u{c}', "/f"), ('\u{1b}', "/e"), ('\\', "/")];
    let is_separator = path.contains(char::is_control) || (path.contains('\\') && !cfg!(windows));
    let meant = escapes.iter().fold(path.to_owned(), |path, (letter, meant)| path.replace(*letter, meant));
    is_separator.then(|| format!("write / between folders, not \\: {meant:?}"))
}

/// Returns the cache folder for files of one kind: `<kind>` in `$FIREBRICK_CACHE`, or else `firebrick/<kind>` in the user's cache folder, which is
/// `$XDG_CACHE_HOME` or `~/.cache`, `~/Library/Caches` on macOS, `%LOCALAPPDATA%` on Windows. `None`: the environment defines none of them, and the
/// user has no home.
pub fn cache_folder(kind: &str) -> Option<PathBuf> {
    let set = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    cache_folder_from(set, env::home_dir()).map(|folder| folder.join(kind))
}

fn cache_folder_from(set: impl Fn(&str) -> Option<PathBuf>, home: Option<PathBuf>) -> Option<PathBuf> {
    if let Some(folder) = set("FIREBRICK_CACHE") {
        return Some(folder);
    }
    let in_home = |folder| home.map(|home| home.join(folder));
    let of_user = if cfg!(windows) {
        set("LOCALAPPDATA").or_else(|| in_home("AppData/Local"))
    } else if cfg!(target_os = "macos") {
        in_home("Library/Caches")
    } else {
        // The XDG standard ignores relative paths.
        set("XDG_CACHE_HOME").filter(|folder| folder.is_absolute()).or_else(|| in_home(".cache"))
    };
    of_user.map(|folder| folder.join("firebrick"))
}

fn parent(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_of_a_shell_or_of_windows_is_known() {
        assert!(advice_on_path("$DATA/a").is_some() && advice_on_path("data/train.jsonl").is_none());
        assert!(advice_on_path("data\train\new.jsonl").unwrap().ends_with("\"data/train/new.jsonl\""));
    }

    #[test]
    fn a_file_is_replaced_as_a_whole_and_nothing_else_remains() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        for text in ["first", "second"] {
            write(&path, text).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
        }
        let mut unfinished = AtomicFile::create(&path).unwrap();
        unfinished.write_all(b"half").unwrap();
        drop(unfinished);
        assert_eq!(fs::read_to_string(&path).unwrap(), "second");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_folder_removes_only_what_killed_writers_left() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("out");
        let killed = AtomicFolder::create(&path).unwrap();
        let left = killed.temporary().to_owned();
        write(&left.join("half"), "half").unwrap();
        // The end of a process does the same.
        let AtomicFolder { lock, folder, .. } = killed;
        let _ = folder.keep();
        drop(lock);
        let of_other = parent.path().join("other.partial-1");
        let without_lock = parent.path().join("out.partial-1");
        for folder in [&of_other, &without_lock] {
            fs::create_dir(folder).unwrap();
        }
        write(&of_other.join(FOLDER_LOCK), "").unwrap();
        let running = AtomicFolder::create(&path).unwrap();
        assert!(!left.exists() && of_other.exists() && without_lock.exists());
        let second = AtomicFolder::create(&path).unwrap();
        write(&running.temporary().join("file"), "whole").unwrap();
        running.commit().unwrap();
        assert!(second.commit().is_err(), "the first has the name");
        let names = |folder: &Path| {
            let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
            let mut names: Vec<String> = entries.collect();
            names.sort();
            names
        };
        assert_eq!(names(&path), ["file"]);
        assert_eq!(names(parent.path()), ["other.partial-1", "out", "out.partial-1"]);
    }

    #[test]
    fn a_folder_is_replaced_as_a_whole_or_stays() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("out");
        for (name, is_written) in [("one", true), ("two", true), ("three", false)] {
            let partial = AtomicFolder::create(&path).unwrap();
            let inner = partial.temporary().join("inner");
            if is_written {
                fs::create_dir(&inner).unwrap();
                write(&inner.join(name), name).unwrap();
            }
            assert_eq!(partial.replace_by(&inner).is_ok(), is_written);
            assert!(path.join(if is_written { name } else { "two" }).exists());
            let killed = AtomicFile::create(&path).unwrap();
            killed.file.into_inner().unwrap().keep().unwrap();
            remove_partial_files(parent.path());
            let left = [&path, parent.path()].map(|folder| fs::read_dir(folder).unwrap().count());
            assert_eq!(left, [1, 1], "nothing else is left");
        }
    }

    #[test]
    fn the_cache_is_in_the_folder_of_the_variable_or_else_of_the_user() {
        let home = Some(PathBuf::from("/users/one"));
        let set = |name: &str| (name == "FIREBRICK_CACHE").then(|| PathBuf::from("/big/disk"));
        assert_eq!(cache_folder_from(set, home.clone()), Some("/big/disk".into()));
        assert_eq!(cache_folder_from(|_| None, None), None);
        let of_user = cache_folder_from(|_| None, home.clone()).unwrap();
        assert!(of_user.starts_with("/users/one") && of_user.ends_with("firebrick"), "{of_user:?}");
        let relative = |name: &str| (name == "XDG_CACHE_HOME").then(|| PathBuf::from("cache"));
        assert_eq!(cache_folder_from(relative, home), Some(of_user));
    }
}
