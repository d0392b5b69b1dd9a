//! The point where a resumed run continues: the run folder, and its newest checkpoint with correct checksums.
//!
//! Trade-off: a damaged checkpoint stays on disk; it is renamed once the run continues from an older one.

use std::path::{Path, PathBuf};

use firebrick_arch::CONFIG_FILE;
use firebrick_arch::folder::ADAPTER_CONFIG_FILE;

use crate::error::RunError;
use crate::state::checkpoint::{RunState, read_state};
use crate::state::checkpoint_folder::{CHECKPOINTS, checkpoints, incomplete};
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
    /// Sentences about newer checkpoints that were skipped, because they are damaged or were never complete.
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
            ResumeFrom::Named(path) if result_in(path).is_some() => return Err(is_result(path)),
            // A path, which stands for itself, or the name of a run.
            ResumeFrom::Named(path) if path.components().count() > 1 => path.clone(),
            ResumeFrom::Named(name) => output_dir.join(name),
        };
        let folder = RunFolder::reopen(&run)?;
        let mut damaged: Vec<(PathBuf, StorageError)> = Vec::new();
        for (_, checkpoint) in checkpoints(&run)?.into_iter().rev() {
            match verified(&checkpoint) {
                Ok(state) => {
                    let incomplete = incomplete(&run)?.into_iter().filter(|(step, _)| *step > state.step);
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

/// Returns what a run saves as its result, if a folder is that.
fn result_in(path: &Path) -> Option<&'static str> {
    let kinds = [("adapter", ADAPTER_CONFIG_FILE), ("model", CONFIG_FILE)];
    kinds.into_iter().find(|(_, file)| path.join(file).is_file()).map(|(what, _)| what)
}

/// Returns the error for the result of a run in place of the run.
fn is_result(path: &Path) -> RunError {
    let (what, shown) = (result_in(path).unwrap_or("model"), path.display());
    let advice = match path.parent().filter(|run| run.join(CHECKPOINTS).is_dir()) {
        Some(run) => format!("its run is --resume {}", run.display()),
        None if what == "adapter" => format!("a new run starts from it with --set lora.init_from={shown}"),
        None => format!("a new run starts from it with --set model={shown}"),
    };
    RunError::Refused(format!(
        "--resume {shown}: these are the weights of the {what} that a run saved, not the run; {advice}"
    ))
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
    let problem = match checkpoint.extension() {
        Some(_) => "was still being written when the run ended".to_owned(),
        None => format!("is damaged ({})", error.problem()),
    };
    let (checkpoint, older) = (checkpoint.display(), older.display());
    format!("checkpoint {checkpoint} {problem}; the run continues from {older}")
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::{Value, json};

    use super::*;
    use crate::state::checkpoint_folder::CheckpointWriter;

    fn state(step: u64) -> Value {
        json!({
            "step": step, "cursor": {"epoch": 1, "row": 2}, "loss_tokens": 10 * step, "date": 7, "wall_s": 0.25,
            "step_s": 0.125, "step_tokens": 9, "loss_scale": {"scale": 1.0, "good_steps": 1, "skipped_steps": 0},
            "last_losses": [1.5], "before": {"loss": 2.0, "token_accuracy": null, "exact_match": null},
            "evaluation_is_due": false, "samples_before": ["a"], "base_hash": u64::MAX,
            "identity": {"seed": 0, "data": "rows 1"}, "settings": {"train.learning_rate": 1e-4, "train.steps": 9},
        })
    }

    /// Creates a run with checkpoints after these steps.
    fn run(output: &Path, steps: &[u64]) -> PathBuf {
        let run = RunFolder::create(output, "run").unwrap();
        for &step in steps {
            let writer = CheckpointWriter::begin(run.path(), step, 0).unwrap();
            writer.write("state.json", state(step).to_string().as_bytes()).unwrap();
            writer.write("weights", &[step as u8; 64]).unwrap();
            writer.commit(9).unwrap();
        }
        run.path().to_owned()
    }

    fn open(from: &ResumeFrom, output: &Path) -> Result<ResumePoint, String> {
        ResumePoint::open(from, output, "run").map_err(|error| error.to_string())
    }

    #[test]
    fn what_a_run_saved_is_not_the_run() {
        let output = tempfile::tempdir().unwrap();
        let folder = run(output.path(), &[1]);
        for (name, file) in
            [("adapter", "adapter_config.json"), ("lone", "adapter_config.json"), ("full", "config.json")]
        {
            let place = if name == "adapter" { folder.join(name) } else { output.path().join(name) };
            fs::create_dir_all(&place).unwrap();
            fs::write(place.join(file), "{}").unwrap();
            let message = open(&ResumeFrom::Named(place.clone()), output.path()).unwrap_err();
            let advice = match name {
                "adapter" => format!("its run is --resume {}", folder.display()),
                "lone" => format!("--set lora.init_from={}", place.display()),
                _ => format!("--set model={}", place.display()),
            };
            assert!(message.contains("not the run; ") && message.contains(&advice), "{message}");
        }
        let message = open(&ResumeFrom::Named("runs/nowhere".into()), output.path()).unwrap_err();
        assert!(message.starts_with("nothing to resume in runs/nowhere: there is no such folder"), "{message}");
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
        let good = state(3);
        let error = reopened(&good).unwrap().state.check_cursor(Path::new("step-3"), 2).unwrap_err().to_string();
        assert!(error.contains("cursor.row = 2") && error.contains("2 rows"), "{error}");
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
    }

    #[test]
    fn hostile_states_and_manifests_are_read_or_refused() {
        crate::hostile_json::each_hostile(&state(3), |state| {
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
