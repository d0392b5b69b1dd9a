//! Checkpoint folders that are either complete or absent: `checkpoints/step-N/`, complete once it contains a `manifest.json`.
//!
//! A checkpoint is written into `step-N.tmp`; every file, then the manifest, is flushed to the disk; then the folder is renamed; only then are older
//! checkpoints removed. A failure before the rename leaves all earlier checkpoints as they were. If there is no room for both, the older checkpoints
//! that a new one replaces are removed before it is written, but never the newest.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use crate::state::manifest::{Manifest, files_below, list};
use crate::storage::{StorageError, ensure_free_space, free_space, rename_durably, write_atomically};

pub(crate) const CHECKPOINTS: &str = "checkpoints";
const PREFIX: &str = "step-";
const UNFINISHED: &str = ".tmp";
/// Suffix of checkpoints later than the one that a run was resumed from. They count as kept, and are removed first.
const SET_ASIDE: &str = ".set-aside";

/// Which checkpoints of a run stay when one is added.
#[derive(Clone, Copy, Debug)]
pub struct Keep {
    /// Their number. The newest and the best one stay even if that is more.
    pub count: usize,
    /// The step of the best one.
    pub best: Option<u64>,
}

impl From<usize> for Keep {
    fn from(count: usize) -> Self {
        Self { count, best: None }
    }
}

/// A checkpoint that is being written. Dropped without [`CheckpointWriter::commit`], it leaves nothing behind.
#[derive(Debug)]
pub struct CheckpointWriter {
    step: u64,
    temporary: PathBuf,
    target: PathBuf,
    is_committed: bool,
}

impl CheckpointWriter {
    /// Begins the checkpoint of `step` in a run folder, after removing the remains of an interrupted one.
    ///
    /// # Errors
    /// [`StorageError::DiskFull`] if `expected_bytes` do not fit, [`StorageError::Io`] if the folder cannot be created.
    pub fn begin(run_folder: &Path, step: u64, expected_bytes: u64) -> Result<CheckpointWriter, StorageError> {
        let folder = run_folder.join(CHECKPOINTS);
        fs::create_dir_all(&folder).map_err(|source| StorageError::io("create", &folder, source))?;
        remove_unfinished(&folder)?;
        ensure_free_space(&folder, expected_bytes)?;
        let target = folder.join(format!("{PREFIX}{step}"));
        let temporary = folder.join(format!("{PREFIX}{step}{UNFINISHED}"));
        fs::create_dir(&temporary).map_err(|source| StorageError::writing(&temporary, expected_bytes, source))?;
        Ok(CheckpointWriter { step, temporary, target, is_committed: false })
    }

    /// Returns the path of the unfinished checkpoint of `step`, for ranks that add their part to the one that rank 0 has begun.
    pub fn unfinished(run_folder: &Path, step: u64) -> PathBuf {
        run_folder.join(CHECKPOINTS).join(format!("{PREFIX}{step}{UNFINISHED}"))
    }

    /// Returns the path of the file `name`, for writers that need a path.
    pub fn file(&self, name: &str) -> PathBuf {
        self.temporary.join(name)
    }

    /// Writes a whole file.
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<(), StorageError> {
        write_atomically(&self.file(name), bytes)
    }

    /// Completes the checkpoint, then removes all but those to keep, first those that were set aside. Returns its folder.
    ///
    /// A complete checkpoint of the same step is left as it is: a run that is resumed at its end saves the same state again.
    ///
    /// # Errors
    /// [`StorageError`] if the checkpoint could not be made durable; earlier ones are untouched then. An old one that cannot
    /// be removed is a warning.
    pub fn commit(mut self, keep: impl Into<Keep>) -> Result<PathBuf, StorageError> {
        sync_below(&self.temporary)?;
        Manifest::of_folder(&self.temporary)?.write(&self.temporary)?;
        if !Manifest::is_in(&self.target) {
            if self.target.exists() {
                remove_folder(&self.target)?;
            }
            rename_durably(&self.temporary, &self.target)?;
            self.is_committed = true;
        }
        if let Err(error) = prune(self.target.parent().unwrap_or(Path::new(".")), keep.into(), self.step) {
            tracing::warn!("an old checkpoint stays on the disk: {error}");
        }
        Ok(self.target.clone())
    }
}

impl Drop for CheckpointWriter {
    fn drop(&mut self) {
        if !self.is_committed {
            // Best effort, to free the space at once; the next `begin` removes the rest.
            let _ = fs::remove_dir_all(&self.temporary);
        }
    }
}

/// Removes checkpoints that the next one, of about `bytes`, would replace, if it fits only without them.
pub fn make_room(run_folder: &Path, bytes: u64, keep: Keep) -> Result<(), StorageError> {
    let folder = run_folder.join(CHECKPOINTS);
    remove_unfinished(&folder)?;
    let Some(free) = free_space(&folder) else { return Ok(()) };
    for path in in_the_way(&folder, free.bytes, bytes, keep)? {
        tracing::warn!(
            "{} is removed before the next checkpoint is written: the disk has no room for both",
            path.display()
        );
        remove_checkpoint(&path)?;
    }
    Ok(())
}

/// Returns the complete checkpoints of a run folder, oldest first: steps and folders. Their files are not checked.
pub fn checkpoints(run_folder: &Path) -> Result<Vec<(u64, PathBuf)>, StorageError> {
    complete(&run_folder.join(CHECKPOINTS))
}

/// Returns the path of the checkpoint of `step`, complete or not.
pub fn checkpoint_of(run_folder: &Path, step: u64) -> PathBuf {
    run_folder.join(CHECKPOINTS).join(format!("{PREFIX}{step}"))
}

/// Returns the folders named like checkpoints that are not complete, oldest first: of a process that ended while it wrote one, and without their
/// manifest. A checkpoint gets its name only with a manifest in it, so something has removed that.
pub fn incomplete(run_folder: &Path) -> Result<Vec<(u64, PathBuf)>, StorageError> {
    let step = |name: &str| name.strip_suffix(UNFINISHED).unwrap_or(name).parse().ok();
    let mut found = by_step(&run_folder.join(CHECKPOINTS), step)?;
    found.retain(|(_, path)| path.is_dir() && (path.extension().is_some() || !Manifest::is_in(path)));
    Ok(found)
}

/// Returns the newest complete checkpoint of a run folder: its step and folder.
pub fn latest(run_folder: &Path) -> Result<Option<(u64, PathBuf)>, StorageError> {
    Ok(checkpoints(run_folder)?.pop())
}

/// Renames the checkpoints after `step` to `step-N.set-aside`, or `step-N.set-aside-2` if that is taken and so on, so that a run that continues from
/// `step` does not mix with them. Returns all folders that are set aside, including those of earlier times.
pub fn set_aside_after(run_folder: &Path, step: u64) -> Result<Vec<PathBuf>, StorageError> {
    for (later, path) in checkpoints(run_folder)?.into_iter().filter(|(later, _)| *later > step) {
        let name = |time: u64| match time {
            1 => format!("{PREFIX}{later}{SET_ASIDE}"),
            _ => format!("{PREFIX}{later}{SET_ASIDE}-{time}"),
        };
        let mut targets = (1..).map(|time| path.with_file_name(name(time)));
        let target = targets.find(|target| !target.exists()).expect("some number is free");
        rename_durably(&path, &target)?;
    }
    Ok(set_aside(&run_folder.join(CHECKPOINTS))?.into_iter().map(|(_, path)| path).collect())
}

/// Returns the complete checkpoints in a folder, oldest step first.
fn complete(folder: &Path) -> Result<Vec<(u64, PathBuf)>, StorageError> {
    let mut found = by_step(folder, |name| name.parse().ok())?;
    found.retain(|(_, path)| Manifest::is_in(path));
    Ok(found)
}

/// Returns the checkpoints in a folder that were set aside, oldest step first.
fn set_aside(folder: &Path) -> Result<Vec<(u64, PathBuf)>, StorageError> {
    by_step(folder, |name| {
        let (step, time) = name.split_once(SET_ASIDE)?;
        let is_time = time.is_empty() || time.strip_prefix('-')?.parse::<u64>().is_ok();
        if is_time { step.parse().ok() } else { None }
    })
}

/// Lists the checkpoints in a folder by ascending step; `step_of` reads the step from what follows the prefix of a name.
fn by_step(folder: &Path, step_of: impl Fn(&str) -> Option<u64>) -> Result<Vec<(u64, PathBuf)>, StorageError> {
    let step = |path: &Path| step_of(path.file_name()?.to_str()?.strip_prefix(PREFIX)?);
    let mut found: Vec<(u64, PathBuf)> =
        list(folder)?.into_iter().filter_map(|path| Some((step(&path)?, path))).collect();
    found.sort();
    Ok(found)
}

fn remove_unfinished(folder: &Path) -> Result<(), StorageError> {
    for path in list(folder)? {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if name.starts_with(PREFIX) && name.ends_with(UNFINISHED) {
            remove_folder(&path)?;
        }
    }
    Ok(())
}

/// Removes all but `keep` checkpoints: first those that were set aside, then the oldest, but never that of `just_saved` or the best.
fn prune(folder: &Path, keep: Keep, just_saved: u64) -> Result<(), StorageError> {
    let (aside, complete) = (set_aside(folder)?, complete(folder)?);
    let surplus = (aside.len() + complete.len()).saturating_sub(keep.count.max(1));
    let older = complete.into_iter().filter(|(step, _)| *step != just_saved && Some(*step) != keep.best);
    aside.into_iter().chain(older).take(surplus).try_for_each(|(_, path)| remove_checkpoint(&path))
}

/// Returns what to remove before a checkpoint of about `bytes` is written where `free` bytes are: as little as makes it fit, or nothing if removing
/// everything is not enough. The newest and the best checkpoint stay.
fn in_the_way(folder: &Path, free: u64, bytes: u64, keep: Keep) -> Result<Vec<PathBuf>, StorageError> {
    let complete = complete(folder)?;
    let Some((last, newest)) = complete.last().cloned() else { return Ok(Vec::new()) };
    let needed = bytes.max(size(&newest)?);
    let surplus = complete.len() - keep.count.saturating_sub(1).clamp(1, complete.len());
    let older = complete.into_iter().filter(|(step, _)| *step != last && Some(*step) != keep.best);
    let mut older = set_aside(folder)?.into_iter().chain(older.take(surplus));
    let (mut room, mut removed) = (free, Vec::new());
    while room < needed {
        let Some((_, path)) = older.next() else { return Ok(Vec::new()) };
        room = room.saturating_add(size(&path)?);
        removed.push(path);
    }
    Ok(removed)
}

fn size(checkpoint: &Path) -> Result<u64, StorageError> {
    let bytes = |path: &PathBuf| fs::metadata(path).map_or(0, |metadata| metadata.len());
    Ok(files_below(checkpoint)?.iter().map(bytes).sum())
}

/// Removes a checkpoint. It is renamed first, so that a half-removed folder never looks complete.
fn remove_checkpoint(path: &Path) -> Result<(), StorageError> {
    let doomed = path.with_file_name(format!("{}{UNFINISHED}", path.file_name().unwrap_or_default().to_string_lossy()));
    rename_durably(path, &doomed)?;
    remove_folder(&doomed)
}

/// Flushes every file below a folder, and every folder, to the disk.
fn sync_below(folder: &Path) -> Result<(), StorageError> {
    for path in list(folder)? {
        if path.is_dir() {
            sync_below(&path)?;
        } else {
            // Opened for writing, because Windows flushes only such files.
            File::options().write(true).open(&path).and_then(|file| file.sync_all()).map_err(|source| {
                let bytes = fs::metadata(&path).map_or(0, |metadata| metadata.len());
                StorageError::writing(&path, bytes, source)
            })?;
        }
    }
    firebrick_files::sync_folder(folder).map_err(|source| StorageError::io("flush to disk", folder, source))
}

fn remove_folder(path: &Path) -> Result<(), StorageError> {
    fs::remove_dir_all(path).map_err(|source| StorageError::io("remove", path, source))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn save(run: &Path, step: u64, keep: usize) -> PathBuf {
        let writer = CheckpointWriter::begin(run, step, 10).unwrap();
        writer.write("state.json", format!("{step}").as_bytes()).unwrap();
        fs::create_dir(writer.file("adapter")).unwrap();
        fs::write(writer.file("adapter/weights"), [1, 2, 3]).unwrap();
        writer.commit(keep).unwrap()
    }

    /// Returns a run that saved these steps, each of which kept so many checkpoints.
    fn run(saved: &[u64], keep: usize) -> tempfile::TempDir {
        let run = tempfile::tempdir().unwrap();
        saved.iter().for_each(|step| drop(save(run.path(), *step, keep)));
        run
    }

    fn steps(run: &Path) -> Vec<u64> {
        complete(&run.join(CHECKPOINTS)).unwrap().into_iter().map(|(step, _)| step).collect()
    }

    fn names(paths: Vec<PathBuf>) -> Vec<String> {
        paths.iter().map(|path| path.file_name().unwrap().to_str().unwrap().to_owned()).collect()
    }

    #[test]
    fn only_the_newest_are_kept() {
        let run = run(&[1, 5, 10, 11, 100], 2);
        assert_eq!(steps(run.path()), [11, 100]);
        // A limit of 0 counts as 1: the newest checkpoint is never removed.
        save(run.path(), 101, 0);
        assert_eq!(steps(run.path()), [101]);
    }

    #[test]
    fn set_aside_checkpoints_are_the_first_to_go() {
        let run = run(&[1, 2, 3], 3);
        let sorted = || {
            let mut names = names(list(&run.path().join(CHECKPOINTS)).unwrap());
            names.sort();
            names
        };
        set_aside_after(run.path(), 1).unwrap();
        save(run.path(), 2, 3);
        assert_eq!(sorted(), ["step-1", "step-2", "step-3.set-aside"]);
        save(run.path(), 3, 3);
        assert_eq!(sorted(), ["step-1", "step-2", "step-3"]);
    }

    #[test]
    fn set_aside_checkpoints_stay_and_are_named() {
        let run = tempfile::tempdir().unwrap();
        let mut expected = Vec::new();
        for name in ["step-2.set-aside", "step-2.set-aside-2", "step-2.set-aside-3"] {
            for step in [1, 2] {
                save(run.path(), step, 9);
            }
            expected.push(name.to_owned());
            assert_eq!(names(set_aside_after(run.path(), 1).unwrap()), expected);
        }
        save(run.path(), 2, 4);
        assert_eq!(steps(run.path()), [1, 2]);
        assert_eq!(names(set_aside_after(run.path(), 2).unwrap()), expected[1..], "none is new");
    }

    #[test]
    fn without_room_the_replaced_go_first() {
        let run = run(&[1, 2, 3, 4], 9);
        set_aside_after(run.path(), 3).unwrap();
        let folder = run.path().join(CHECKPOINTS);
        let one = size(&folder.join("step-3")).unwrap();
        let bytes = 10 * one;
        let removed =
            |missing: u64, keep| names(in_the_way(&folder, bytes - missing, bytes, Keep::from(keep)).unwrap());
        assert_eq!(removed(0, 2), [""; 0]);
        assert_eq!(removed(1, 2), ["step-4.set-aside"]);
        assert_eq!(removed(one + 1, 2), ["step-4.set-aside", "step-1"]);
        assert_eq!(removed(2 * one + 1, 1), ["step-4.set-aside", "step-1", "step-2"]);
        assert_eq!(removed(one + 1, 9), [""; 0], "nine are kept");
        assert_eq!(removed(4 * one, 1), [""; 0], "all that may go is not enough");
        assert_eq!(
            in_the_way(&folder, one - 1, 0, Keep::from(1)).unwrap().len(),
            1,
            "it is as large as the newest at least"
        );
    }

    #[test]
    fn the_best_checkpoint_stays() {
        for (count, expected) in [(1, [2, 5].as_slice()), (2, &[2, 5]), (3, &[2, 4, 5])] {
            let run = tempfile::tempdir().unwrap();
            let keep = Keep { count, best: Some(2) };
            for step in [1, 2, 3, 4, 5] {
                let writer = CheckpointWriter::begin(run.path(), step, 0).unwrap();
                writer.write("state.json", b"{}").unwrap();
                writer.commit(if step < 2 { Keep::from(count) } else { keep }).unwrap();
            }
            assert_eq!(steps(run.path()), expected, "keep = {count}");
            let folder = run.path().join(CHECKPOINTS);
            let bytes = size(&folder.join("step-5")).unwrap();
            let removed = names(in_the_way(&folder, bytes - 1, bytes, Keep { count: 1, ..keep }).unwrap());
            let middle: &[&str] = if count == 3 { &["step-4"] } else { &[] };
            assert_eq!(removed, middle, "keep = {count}: the best and the newest are never in the way");
        }
    }

    #[test]
    fn an_unfinished_checkpoint_does_not_count() {
        let run = run(&[1], 3);
        let leftover = run.path().join("checkpoints/step-2.tmp");
        fs::create_dir(&leftover).unwrap();
        fs::write(leftover.join("manifest.json"), "2").unwrap();
        fs::create_dir(run.path().join("checkpoints/step-3")).unwrap();
        assert_eq!(latest(run.path()).unwrap().unwrap().0, 1);
        save(run.path(), 3, 3);
        assert!(!leftover.exists());
        assert_eq!(steps(run.path()), [1, 3]);
    }

    #[test]
    fn complete_checkpoint_of_the_same_step_is_kept() {
        let run = run(&[4], 3);
        let writer = CheckpointWriter::begin(run.path(), 4, 0).unwrap();
        let folder = writer.commit(3).unwrap();
        assert_eq!(fs::read(folder.join("state.json")).unwrap(), b"4");
        assert_eq!(list(&run.path().join(CHECKPOINTS)).unwrap().len(), 1);
    }

    #[test]
    fn a_failed_write_leaves_earlier_checkpoints() {
        let run = run(&[1], 1);
        let writer = CheckpointWriter::begin(run.path(), 2, 0).unwrap();
        writer.write("state.json", b"half").unwrap();
        // A folder of this name fails the write for every user, root included.
        fs::create_dir(writer.file("weights")).unwrap();
        fs::create_dir(writer.file("weights/in-the-way")).unwrap();
        writer.write("weights", &[0; 4096]).unwrap_err();
        drop(writer);
        assert_eq!(steps(run.path()), [1]);
        assert_eq!(list(&run.path().join(CHECKPOINTS)).unwrap().len(), 1);
    }

    #[cfg(unix)]
    #[test]
    fn what_will_not_fit_is_refused_before_writing() {
        let run = run(&[1], 1);
        let error = CheckpointWriter::begin(run.path(), 2, u64::MAX).unwrap_err();
        assert!(matches!(error, StorageError::DiskFull { .. }), "{error}");
        assert_eq!(steps(run.path()), [1]);
    }
}
