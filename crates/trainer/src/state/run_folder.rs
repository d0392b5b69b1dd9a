//! The run folder: `output_dir/name/` and the files in it.
//!
//! ```text
//! runs/<name>/config.toml  plan.toml  metrics.jsonl  tensorboard/  checkpoints/step-N/  adapter/  summary.json
//! ```
//!
//! No run overwrites another: a run whose name is taken becomes `<name>-2`, `<name>-3`, …, one more than the highest that exists. The lock contains
//! the name in the recipe, so that a recipe named `<name>-2` is not taken for a second run.

use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::state::checkpoint_folder::{CHECKPOINTS, latest};
use crate::state::manifest::list;
use crate::storage::{StorageError, rename_durably, write_atomically};

/// Held while a process writes to the folder. It contains the name in the recipe that started the run.
const LOCK: &str = "lock";
/// The results of the run.
const SUMMARY: &str = "summary.json";
/// The summary of an earlier end, while a run trains on from a step before it.
const EARLIER_SUMMARY: &str = "summary.json.set-aside";

/// An open run folder, locked as long as this value exists.
#[derive(Debug)]
pub struct RunFolder {
    path: PathBuf,
    name: String,
    notice: Option<String>,
    /// `None` on a rank that does not write.
    _lock: Option<File>,
}

impl RunFolder {
    /// Creates the folder of a new run.
    /// If a folder that is not empty has the name, the run takes one more than the highest of `<name>-2`, `-3`, …, and [`RunFolder::notice`] reports
    /// it.
    ///
    /// # Errors
    /// [`StorageError::NotWritable`] or [`StorageError::InUse`].
    pub fn create(output_dir: &Path, name: &str) -> Result<RunFolder, StorageError> {
        fs::create_dir_all(output_dir)
            .map_err(|source| StorageError::NotWritable { path: output_dir.to_path_buf(), source })?;
        let highest = runs(output_dir, name)?.last().map(|(number, _)| *number);
        // The first number from this one on whose folder does not exist, or is empty: `name` is 1, `name-2` is 2.
        let mut number = highest.unwrap_or(1);
        let (path, taken_name) = loop {
            let candidate = if number == 1 { name.to_string() } else { format!("{name}-{number}") };
            let path = output_dir.join(&candidate);
            // `create_dir` fails if the folder exists, so two processes never get the same new one.
            match fs::create_dir(&path) {
                Ok(()) => break (path, candidate),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                    if fs::read_dir(&path).is_ok_and(|mut entries| entries.next().is_none()) {
                        break (path, candidate);
                    }
                    number += 1;
                }
                Err(source) => return Err(StorageError::NotWritable { path, source }),
            }
        };
        let notice = (taken_name != name).then(|| match highest {
            Some(_) => format!(
                "{} contains an earlier run of this name, so this one is written to {}; to continue the earlier one \
                 instead, add --resume",
                output_dir.display(),
                path.display()
            ),
            None => format!(
                "{} contains a run of a recipe with another name, so this one is written to {}",
                output_dir.join(name).display(),
                path.display()
            ),
        });
        RunFolder::open(path, taken_name, notice, Some(name))
    }

    /// Opens the folder of a run that has a checkpoint.
    ///
    /// # Errors
    /// [`StorageError::NothingToResume`], [`StorageError::NotWritable`] or [`StorageError::InUse`].
    pub fn reopen(path: &Path) -> Result<RunFolder, StorageError> {
        let lacks = match path.is_dir() {
            true => latest(path)?.is_none().then_some("it has no complete checkpoint"),
            false => Some("there is no such folder"),
        };
        if let Some(found) = lacks {
            return Err(StorageError::NothingToResume { path: path.to_owned(), found });
        }
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        RunFolder::open(path.to_owned(), name, None, None)
    }

    /// Locks the folder and creates the folders in it. `recipe` is the name to record in a new one.
    fn open(
        path: PathBuf,
        name: String,
        notice: Option<String>,
        recipe: Option<&str>,
    ) -> Result<RunFolder, StorageError> {
        let not_writable = |source| StorageError::NotWritable { path: path.clone(), source };
        let mut lock =
            File::options().write(true).create(true).truncate(false).open(path.join(LOCK)).map_err(not_writable)?;
        match lock.try_lock() {
            Err(TryLockError::WouldBlock) => return Err(StorageError::InUse { path }),
            // A file system without locks: nothing protects against a second process, but training works.
            Err(TryLockError::Error(_)) => {}
            Ok(()) => firebrick_files::remove_partial_files(&path),
        }
        if let Some(recipe) = recipe {
            lock.write_all(recipe.as_bytes()).map_err(not_writable)?;
        }
        for inner in [CHECKPOINTS, "tensorboard"] {
            fs::create_dir_all(path.join(inner)).map_err(not_writable)?;
        }
        Ok(RunFolder { path, name, notice, _lock: Some(lock) })
    }

    /// Returns the folder that rank 0 has opened, for a rank that does not write to it.
    pub fn of_main_rank(path: PathBuf, name: String) -> RunFolder {
        RunFolder { path, name, notice: None, _lock: None }
    }

    /// Returns the folder itself.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the name in use: `name`, or `name-2` if that was taken. `--resume` takes it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns what the user should know about the choice of the folder.
    pub fn notice(&self) -> Option<&str> {
        self.notice.as_deref()
    }

    /// Returns the path of the run's results.
    pub fn summary_json(&self) -> PathBuf {
        self.path.join(SUMMARY)
    }

    /// Writes the summary, replacing that of an earlier end.
    pub fn write_summary(&self, text: &str) -> Result<(), StorageError> {
        self.write(SUMMARY, text)?;
        // Best effort: the new summary is valid now.
        let _ = fs::remove_file(self.path.join(EARLIER_SUMMARY));
        Ok(())
    }

    /// Renames the summary of a run that trains on, so that only the folder of a finished run contains a summary.
    pub fn set_summary_aside(&self) -> Result<(), StorageError> {
        let summary = self.summary_json();
        if summary.exists() { rename_durably(&summary, &self.path.join(EARLIER_SUMMARY)) } else { Ok(()) }
    }

    /// Writes the file `name` of the folder completely or not at all.
    pub fn write(&self, name: &str, text: &str) -> Result<(), StorageError> {
        write_atomically(&self.path.join(name), text.as_bytes())
    }
}

/// Returns the newest run of a recipe's name that has a checkpoint: the one with the highest number among `name`, `name-2`, `name-3`, ….
///
/// # Errors
/// [`StorageError::NothingToResume`] if there is none; [`StorageError::Io`] if the folder cannot be listed.
pub fn newest_run(output_dir: &Path, name: &str) -> Result<PathBuf, StorageError> {
    let runs = runs(output_dir, name)?;
    for (_, run) in runs.iter().rev() {
        if latest(run)?.is_some() {
            return Ok(run.clone());
        }
    }
    let path = output_dir.join(name);
    let found = if !runs.is_empty() {
        "it has no complete checkpoint"
    } else if path.is_dir() {
        "it is a run of a recipe with another name"
    } else {
        "there is no such folder"
    };
    Err(StorageError::NothingToResume { path, found })
}

/// Returns the runs of a recipe's name with their numbers, in ascending order: `name` is 1, `name-2` is 2. Some numbers may be missing, and some
/// belong to another recipe. A folder without its lock does not record its recipe: it counts if no lower number is missing.
fn runs(output_dir: &Path, name: &str) -> Result<Vec<(u64, PathBuf)>, StorageError> {
    let number = |path: &Path| {
        let rest = path.file_name()?.to_str()?.strip_prefix(name)?;
        match rest.strip_prefix('-') {
            Some(digits) => digits.parse::<u64>().ok().filter(|number| *number > 1 && digits == number.to_string()),
            None => rest.is_empty().then_some(1),
        }
    };
    let folders = list(output_dir)?.into_iter().filter(|path| path.is_dir());
    let mut runs: Vec<(u64, PathBuf)> = folders.filter_map(|path| Some((number(&path)?, path))).collect();
    runs.sort();
    let mut next = 1;
    runs.retain(|(number, path)| {
        let is_next = *number == next;
        next += u64::from(is_next);
        let recipe = fs::read_to_string(path.join(LOCK)).ok().filter(|recipe| !recipe.is_empty());
        recipe.map_or(is_next, |recipe| recipe == name)
    });
    Ok(runs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::checkpoint_folder::CheckpointWriter;

    fn save(run: &RunFolder, step: u64) {
        CheckpointWriter::begin(run.path(), step, 0).unwrap().commit(9).unwrap();
    }

    #[test]
    fn empty_folder_is_taken_as_it_is() {
        let output = tempfile::tempdir().unwrap();
        fs::create_dir(output.path().join("run")).unwrap();
        assert_eq!(RunFolder::create(output.path(), "run").unwrap().name(), "run");
    }

    #[test]
    fn the_newest_run_has_a_checkpoint() {
        let output = tempfile::tempdir().unwrap();
        let newest = || newest_run(output.path(), "run").map_err(|error| error.to_string());
        let runs: Vec<RunFolder> = (0..3).map(|_| RunFolder::create(output.path(), "run").unwrap()).collect();
        assert!(newest().unwrap_err().contains("no complete checkpoint"));
        save(&runs[0], 9);
        assert_eq!(newest().unwrap(), output.path().join("run"));
        save(&runs[1], 1);
        assert_eq!(newest().unwrap(), output.path().join("run-2"));
    }

    #[test]
    fn a_hole_in_the_numbers_hides_no_run() {
        let output = tempfile::tempdir().unwrap();
        for _ in 0..3 {
            save(&RunFolder::create(output.path(), "run").unwrap(), 1);
        }
        for other in ["run-x", "run-03", "run-9-9", "running", "run-1"] {
            fs::create_dir_all(output.path().join(other).join("checkpoints")).unwrap();
        }
        for removed in ["run-2", "run"] {
            fs::remove_dir_all(output.path().join(removed)).unwrap();
            assert_eq!(newest_run(output.path(), "run").unwrap(), output.path().join("run-3"));
        }
        let next = RunFolder::create(output.path(), "run").unwrap();
        assert_eq!(next.name(), "run-4");
        assert!(next.notice().unwrap().contains("--resume"));
    }

    #[test]
    fn names_that_end_in_numbers_share_no_run() {
        let output = tempfile::tempdir().unwrap();
        let newest = |name: &str| newest_run(output.path(), name).map_err(|error| error.to_string());
        let started = |name: &str| {
            let run = RunFolder::create(output.path(), name).unwrap();
            save(&run, 1);
            (run.name().to_owned(), run.notice().map(str::to_owned))
        };
        assert_eq!(started("sft-16"), ("sft-16".to_owned(), None));
        assert!(newest("sft").unwrap_err().contains("there is no such folder"));
        assert_eq!(started("sft"), ("sft".to_owned(), None));
        assert_eq!(started("sft").0, "sft-2");
        assert_eq!(newest("sft").unwrap(), output.path().join("sft-2"));
        assert_eq!(newest("sft-16").unwrap(), output.path().join("sft-16"));
        assert!(newest("sft-2").unwrap_err().contains("a recipe with another name"));
        let (name, notice) = started("sft-2");
        assert!(name == "sft-2-2" && notice.unwrap().contains("another name"), "{name}");
        RunFolder::reopen(&output.path().join("sft-2")).unwrap();
        assert_eq!(started("sft").0, "sft-3", "a resumed run stays that of its recipe");
    }

    #[test]
    fn unnamed_folders_count_to_the_first_gap() {
        let output = tempfile::tempdir().unwrap();
        for name in ["run", "run-2", "run-16"] {
            let run = RunFolder::create(output.path(), name).unwrap();
            save(&run, 1);
            fs::write(run.path().join(LOCK), "").unwrap();
        }
        assert_eq!(newest_run(output.path(), "run").unwrap(), output.path().join("run-2"));
        assert_eq!(RunFolder::create(output.path(), "run").unwrap().name(), "run-3");
    }

    #[test]
    fn second_process_in_the_same_folder_is_refused() {
        let output = tempfile::tempdir().unwrap();
        let run = RunFolder::create(output.path(), "run").unwrap();
        save(&run, 1);
        let error = RunFolder::reopen(run.path()).unwrap_err();
        assert!(matches!(error, StorageError::InUse { .. }), "{error}");
    }
}
