//! The point where a resumed run continues: the run folder, and its newest checkpoint with correct checksums.
//!
//! Trade-off: a damaged checkpoint stays on disk; it is renamed once the run continues from an older one.

use std::path::{Path, PathBuf};

use crate::error::RunError;
use crate::state::checkpoint::{RunState, read_state};
use crate::state::checkpoint_folder::{CHECKPOINTS, checkpoints, without_manifest};
use crate::state::manifest::{MANIFEST, Manifest};
use crate::state::run_folder::{RunFolder, newest_run};
use crate::storage::StorageError;

/// The run or checkpoint to resume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ResumeFrom {
    /// The newest run of the recipe's name.
    Newest,
    /// A run folder, a run's name, or a checkpoint folder.
    Named(PathBuf),
}

/// A run that is resumed.
#[derive(Debug)]
pub struct ResumePoint {
    /// The folder of the run, locked.
    pub folder: RunFolder,
    /// The checkpoint that is read: `step-N`.
    pub checkpoint: PathBuf,
    /// The progress of the run there.
    pub state: RunState,
    /// Sentences about damaged checkpoints that were skipped.
    pub notes: Vec<String>,
}

impl ResumePoint {
    /// Finds and verifies the checkpoint to continue from.
    ///
    /// # Errors
    /// [`StorageError::NothingToResume`], [`StorageError::OtherFormat`]; [`StorageError::Damaged`] if the named checkpoint, or
    /// every checkpoint of the run, is damaged; another process that writes to the folder.
    pub fn open(from: &ResumeFrom, output_dir: &Path, name: &str) -> Result<Self, RunError> {
        let run = match from {
            ResumeFrom::Newest => newest_run(output_dir, name)?,
            ResumeFrom::Named(path) if Manifest::is_in(path) => return Self::at_checkpoint(path),
            ResumeFrom::Named(path) if path.join(CHECKPOINTS).is_dir() => path.clone(),
            ResumeFrom::Named(name) => output_dir.join(name),
        };
        let folder = RunFolder::reopen(&run)?;
        let mut damaged: Vec<(PathBuf, StorageError)> = Vec::new();
        for (_, checkpoint) in checkpoints(&run)?.into_iter().rev() {
            match verified(&checkpoint) {
                Ok(state) => {
                    let incomplete = without_manifest(&run)?.into_iter().filter(|(step, _)| *step > state.step);
                    let notes =
                        damaged.into_iter().chain(incomplete.map(|(_, path)| (path.clone(), no_manifest(&path))));
                    let notes = notes.map(|(path, error)| passed_over(&path, &error, &checkpoint)).collect();
                    return Ok(Self { folder, checkpoint, state, notes });
                }
                Err(error @ StorageError::Damaged { .. }) => damaged.push((checkpoint, error)),
                Err(other) => return Err(other.into()),
            }
        }
        // Invariant: a folder that could be reopened has a checkpoint, and all of them are damaged.
        Err(damaged.swap_remove(0).1.into())
    }

    fn at_checkpoint(checkpoint: &Path) -> Result<Self, RunError> {
        let nothing = || StorageError::NothingToResume {
            path: checkpoint.to_path_buf(),
            found: "it is a checkpoint outside of a run folder",
        };
        let checkpoint = checkpoint.canonicalize().map_err(|source| StorageError::io("open", checkpoint, source))?;
        let inside = checkpoint.parent().filter(|parent| parent.ends_with(CHECKPOINTS));
        let run = inside.and_then(Path::parent).ok_or_else(nothing)?;
        let folder = RunFolder::reopen(run)?;
        let state = verified(&checkpoint)?;
        Ok(Self { folder, checkpoint, state, notes: Vec::new() })
    }
}

/// Verifies the files of a checkpoint, then reads its state.
fn verified(checkpoint: &Path) -> Result<RunState, StorageError> {
    Manifest::check(checkpoint)?;
    read_state(checkpoint)
}

fn no_manifest(checkpoint: &Path) -> StorageError {
    StorageError::Damaged { path: checkpoint.join(MANIFEST), problem: "is missing".to_owned() }
}

fn passed_over(checkpoint: &Path, error: &StorageError, older: &Path) -> String {
    let (checkpoint, older, problem) = (checkpoint.display(), older.display(), error.problem());
    format!("checkpoint {checkpoint} is damaged ({problem}); the run continues from {older}")
}

#[cfg(test)]
mod tests {
    use std::fs;

    use firebrick_data::Cursor;
    use serde_json::{Value, json};

    use super::*;
    use crate::metrics::Evaluation;
    use crate::state::checkpoint_folder::CheckpointWriter;
    use crate::state::identity::RunSettings;

    fn settings(learning_rate: f64, steps: u64) -> RunSettings {
        let values = json!({"train.learning_rate": learning_rate, "train.steps": steps, "checkpoint.keep": 3});
        serde_json::from_value(values).unwrap()
    }

    fn state(step: u64) -> RunState {
        RunState {
            step,
            cursor: Cursor { epoch: 1, row: 2 },
            loss_tokens: 10 * step,
            date: 7,
            wall_s: 0.25,
            step_s: 0.125,
            step_tokens: 9,
            rounds: None,
            loss_scale: None,
            last_losses: vec![1.5],
            before: Evaluation { loss: Some(2.0), ..Evaluation::default() },
            evaluation_is_due: false,
            best: None,
            samples_before: vec!["a".to_owned()],
            base_hash: Some(u64::MAX),
            reference: None,
            decided: None,
            length_group: None,
            identity: serde_json::from_value(json!({"seed": 0, "data": "rows 1"})).unwrap(),
            settings: settings(1e-4, 9),
        }
    }

    /// Creates a run with checkpoints after these steps.
    fn run(output: &Path, steps: &[u64]) -> PathBuf {
        let run = RunFolder::create(output, "run").unwrap();
        for &step in steps {
            let writer = CheckpointWriter::begin(run.path(), step, 0).unwrap();
            writer.write("state.json", &serde_json::to_vec(&state(step)).unwrap()).unwrap();
            writer.write("weights", &[step as u8; 64]).unwrap();
            writer.commit(9).unwrap();
        }
        run.path().to_owned()
    }

    fn open(from: &ResumeFrom, output: &Path) -> Result<ResumePoint, String> {
        ResumePoint::open(from, output, "run").map_err(|error| error.to_string())
    }

    #[test]
    fn a_run_is_found_by_name_folder_or_checkpoint() {
        let output = tempfile::tempdir().unwrap();
        let folder = run(output.path(), &[1, 2]);
        for (from, step) in [
            (ResumeFrom::Newest, 2),
            (ResumeFrom::Named("run".into()), 2),
            (ResumeFrom::Named(folder.clone()), 2),
            (ResumeFrom::Named(folder.join("checkpoints/step-1")), 1),
        ] {
            let point = open(&from, output.path()).unwrap();
            assert_eq!((point.state, point.notes), (state(step), Vec::new()), "{from:?}");
            assert_eq!(point.folder.name(), "run");
        }
        assert!(open(&ResumeFrom::Named("other".into()), output.path()).unwrap_err().contains("no such folder"));
    }

    #[test]
    fn a_damaged_checkpoint_leads_to_the_older_one() {
        let output = tempfile::tempdir().unwrap();
        let folder = run(output.path(), &[1, 2]);
        let weights = |step: u64| folder.join(format!("checkpoints/step-{step}/weights"));
        fs::write(weights(2), [2; 63]).unwrap();
        let point = open(&ResumeFrom::Newest, output.path()).unwrap();
        assert_eq!(point.state.step, 1);
        let [note] = &point.notes[..] else { panic!("one note: {:?}", point.notes) };
        assert!(note.contains("step-2/weights` has 63 bytes, expected 64") && note.contains("step-1"), "{note}");
        drop(point);
        let named = ResumeFrom::Named(folder.join("checkpoints/step-2"));
        assert!(open(&named, output.path()).unwrap_err().contains("has 63 bytes"));
        fs::write(weights(1), [9; 64]).unwrap();
        assert!(open(&ResumeFrom::Newest, output.path()).unwrap_err().contains("step-2/weights"));
    }

    #[test]
    fn settings_that_may_change_are_reported_by_key() {
        let saved = state(1).settings;
        assert_eq!(saved.changes(&saved), None);
        let now = settings(2e-4, 20);
        let expected = "changed since the checkpoint: train.learning_rate 0.0001 -> 0.0002, train.steps 9 -> 20";
        assert_eq!(saved.changes(&now).as_deref(), Some(expected));
    }

    /// Saves a state as a checkpoint with a valid manifest, and opens it.
    fn reopened(state: &Value) -> Result<ResumePoint, String> {
        let output = tempfile::tempdir().unwrap();
        let checkpoint = run(output.path(), &[3]).join("checkpoints/step-3");
        fs::write(checkpoint.join("state.json"), state.to_string()).unwrap();
        fs::remove_file(checkpoint.join(MANIFEST)).unwrap();
        Manifest::of_folder(&checkpoint).unwrap().write(&checkpoint).unwrap();
        open(&ResumeFrom::Named(checkpoint), output.path())
    }

    #[test]
    fn impossible_numbers_are_refused_by_file() {
        let good = json!(state(3));
        assert!(reopened(&good).is_ok());
        for (pointer, value) in [
            ("/step", json!(4)),
            ("/cursor/epoch", json!(u64::MAX)),
            ("/cursor/row", json!(1u64 << 40)),
            ("/wall_s", json!(1e300)),
            ("/date", json!(i64::MIN)),
        ] {
            let mut state = good.clone();
            *state.pointer_mut(pointer).unwrap() = value;
            let error = reopened(&state).unwrap_err();
            assert!(error.contains("state.json") && error.contains(&pointer[1..].replace('/', ".")), "{error}");
        }
        let error = state(3).check_cursor(Path::new("step-3"), 2).unwrap_err().to_string();
        assert!(error.contains("cursor.row = 2") && error.contains("2 rows"), "{error}");
    }

    #[test]
    fn hostile_states_and_manifests_are_read_or_refused() {
        let mut full = json!(state(3));
        full["loss_scale"] = json!({ "scale": 1.0, "good_steps": 1, "skipped_steps": 0 });
        crate::hostile_json::each_hostile(&full, |state| {
            if let Ok(point) = reopened(state) {
                assert!(point.state.step == 3 && point.state.cursor.epoch <= 1 << 31);
            }
        });
        let output = tempfile::tempdir().unwrap();
        let checkpoint = run(output.path(), &[3]).join("checkpoints/step-3");
        let manifest: Value = serde_json::from_slice(&fs::read(checkpoint.join(MANIFEST)).unwrap()).unwrap();
        crate::hostile_json::each_hostile(&manifest, |manifest| {
            fs::write(checkpoint.join(MANIFEST), manifest.to_string()).unwrap();
            let _ = open(&ResumeFrom::Named(checkpoint.clone()), output.path());
        });
    }
}
