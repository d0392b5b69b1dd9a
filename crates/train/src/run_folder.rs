//! The run folder: `output_dir/name/` and what lies where in it.
//!
//! ```text
//! runs/<name>/config.toml  plan.toml  metrics.jsonl  tensorboard/  checkpoints/step-N/  adapter/  summary.json
//! ```
//!
//! Nothing saved is ever overwritten by another run: a name that is taken becomes `<name>-2`. One process at a time.

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

use crate::checkpoint_files::{CHECKPOINTS, latest};
use crate::storage::{StorageError, write_atomically};

/// Held while a process writes to the folder.
const LOCK: &str = "lock";

/// An open run folder. The lock on it ends with this value.
#[derive(Debug)]
pub struct RunFolder {
    path: PathBuf,
    name: String,
    notice: Option<String>,
    _lock: File,
}

impl RunFolder {
    /// Makes the folder of a new run, or opens that of a run to resume.
    ///
    /// A new run whose name is taken by a folder that is not empty takes the next free `<name>-2`, `-3`, …, and
    /// [`RunFolder::notice`] says so.
    ///
    /// # Errors
    /// [`StorageError::NotWritable`], [`StorageError::InUse`], and with `resume` [`StorageError::NothingToResume`].
    pub fn create(output_dir: &Path, name: &str, resume: bool) -> Result<RunFolder, StorageError> {
        if resume {
            return RunFolder::reopen(output_dir, name);
        }
        let (path, taken_name) = free_folder(output_dir, name)?;
        let notice = (taken_name != name).then(|| {
            format!(
                "{} holds an earlier run, so this one is written to {}; to go on with the earlier one instead, add --resume",
                output_dir.join(name).display(),
                path.display()
            )
        });
        RunFolder::open(path, taken_name, notice)
    }

    /// Opens the folder of a run that has a checkpoint.
    fn reopen(output_dir: &Path, name: &str) -> Result<RunFolder, StorageError> {
        let path = output_dir.join(name);
        if !path.is_dir() {
            return Err(StorageError::NothingToResume { path, found: "there is no such folder" });
        }
        if latest(&path)?.is_none() {
            return Err(StorageError::NothingToResume { path, found: "it holds no complete checkpoint" });
        }
        RunFolder::open(path, name.to_string(), None)
    }

    /// Locks the folder and makes the folders in it.
    fn open(path: PathBuf, name: String, notice: Option<String>) -> Result<RunFolder, StorageError> {
        let not_writable = |source| StorageError::NotWritable { path: path.clone(), source };
        let lock = File::create(path.join(LOCK)).map_err(not_writable)?;
        match lock.try_lock() {
            Err(TryLockError::WouldBlock) => return Err(StorageError::InUse { path }),
            // A file system without locks: nothing protects from a second process, and training works all the same.
            Err(TryLockError::Error(_)) | Ok(()) => {}
        }
        for inner in [CHECKPOINTS, "tensorboard"] {
            fs::create_dir_all(path.join(inner)).map_err(not_writable)?;
        }
        Ok(RunFolder { path, name, notice, _lock: lock })
    }

    /// The folder itself.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The name in use: `name`, or `name-2` where that was taken. What `--set name=… --resume` needs.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What the person should be told about the choice of the folder.
    #[must_use]
    pub fn notice(&self) -> Option<&str> {
        self.notice.as_deref()
    }

    /// The recipe with every default written out.
    #[must_use]
    pub fn config_toml(&self) -> PathBuf {
        self.path.join("config.toml")
    }

    /// What was decided, and why.
    #[must_use]
    pub fn plan_toml(&self) -> PathBuf {
        self.path.join("plan.toml")
    }

    /// One JSON object per logged step or evaluation.
    #[must_use]
    pub fn metrics_jsonl(&self) -> PathBuf {
        self.path.join("metrics.jsonl")
    }

    /// TensorBoard event files.
    #[must_use]
    pub fn tensorboard(&self) -> PathBuf {
        self.path.join("tensorboard")
    }

    /// The finished adapter in PEFT's layout.
    #[must_use]
    pub fn adapter(&self) -> PathBuf {
        self.path.join("adapter")
    }

    /// What came out of the run.
    #[must_use]
    pub fn summary_json(&self) -> PathBuf {
        self.path.join("summary.json")
    }

    /// The newest complete checkpoint: its step and folder.
    ///
    /// # Errors
    /// [`StorageError::Io`] where the folder cannot be listed.
    pub fn latest_checkpoint(&self) -> Result<Option<(u64, PathBuf)>, StorageError> {
        latest(&self.path)
    }

    /// Writes a file of the folder whole or not at all, for `config.toml`, `plan.toml` and `summary.json`.
    ///
    /// # Errors
    /// As [`write_atomically`].
    pub fn write(&self, file: &Path, text: &str) -> Result<(), StorageError> {
        write_atomically(file, text.as_bytes())
    }
}

/// Makes the first of `name`, `name-2`, `name-3`, … that is not there, or takes one that is empty.
fn free_folder(output_dir: &Path, name: &str) -> Result<(PathBuf, String), StorageError> {
    fs::create_dir_all(output_dir)
        .map_err(|source| StorageError::NotWritable { path: output_dir.to_path_buf(), source })?;
    let mut number = 1;
    loop {
        let candidate = if number == 1 { name.to_string() } else { format!("{name}-{number}") };
        let path = output_dir.join(&candidate);
        // `create_dir` fails where the folder exists, so two processes never get the same new one.
        match fs::create_dir(&path) {
            Ok(()) => return Ok((path, candidate)),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && !is_empty_folder(&path) => number += 1,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok((path, candidate)),
            Err(source) => return Err(StorageError::NotWritable { path, source }),
        }
    }
}

fn is_empty_folder(path: &Path) -> bool {
    fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_none())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint_files::CheckpointWriter;

    #[test]
    fn taken_name_gets_a_number_and_says_so() {
        let output = tempfile::tempdir().unwrap();
        let first = RunFolder::create(output.path(), "run", false).unwrap();
        assert_eq!((first.name(), first.notice()), ("run", None));
        let second = RunFolder::create(output.path(), "run", false).unwrap();
        assert_eq!(second.name(), "run-2");
        assert!(second.notice().unwrap().contains("--resume"));
        assert_eq!(RunFolder::create(output.path(), "run", false).unwrap().name(), "run-3");
    }

    #[test]
    fn empty_folder_is_taken_as_it_is() {
        let output = tempfile::tempdir().unwrap();
        fs::create_dir(output.path().join("run")).unwrap();
        assert_eq!(RunFolder::create(output.path(), "run", false).unwrap().name(), "run");
    }

    #[test]
    fn resume_needs_a_complete_checkpoint() {
        let output = tempfile::tempdir().unwrap();
        let refusal = |name| RunFolder::create(output.path(), name, true).unwrap_err().to_string();
        assert!(refusal("run").contains("there is no such folder"));
        let run = RunFolder::create(output.path(), "run", false).unwrap();
        assert!(refusal("run").contains("no complete checkpoint"));
        CheckpointWriter::begin(run.path(), 3, 0).unwrap().commit(1).unwrap();
        drop(run);
        let run = RunFolder::create(output.path(), "run", true).unwrap();
        assert_eq!(run.latest_checkpoint().unwrap().unwrap().0, 3);
    }

    #[test]
    fn second_process_in_the_same_folder_is_refused() {
        let output = tempfile::tempdir().unwrap();
        let run = RunFolder::create(output.path(), "run", false).unwrap();
        CheckpointWriter::begin(run.path(), 1, 0).unwrap().commit(1).unwrap();
        let error = RunFolder::create(output.path(), "run", true).unwrap_err();
        assert!(matches!(error, StorageError::InUse { .. }), "{error}");
    }

    #[test]
    fn unwritable_run_folder_is_one_clear_error() {
        let output = tempfile::tempdir().unwrap();
        let file = output.path().join("file");
        fs::write(&file, "").unwrap();
        let message = RunFolder::create(&file, "run", false).unwrap_err().to_string();
        assert!(message.contains("cannot write the run folder") && message.contains("output_dir"), "{message}");
    }
}
