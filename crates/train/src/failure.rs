//! What a person is told when the device gives up in the middle of a run: what it was expected to hold, the next smaller run,
//! what is saved, and how to go on.

use std::path::PathBuf;

use crate::backend::{BackendKind, Failure};
use crate::checkpoint_files::latest;
use crate::error::RunError;
use crate::plan::{PlanInputs, SmallerRun, next_smaller};

/// Made before the run, as the run takes everything with it.
#[derive(Clone, Debug)]
pub struct FailureReport {
    smaller: SmallerRun,
    /// Folder and name of the run; `None` for work that saves nothing.
    saved: Option<(PathBuf, String)>,
}

impl FailureReport {
    /// For a run of this plan, which saves to `folder` under `name`.
    pub fn new(inputs: &PlanInputs<'_>, backend: BackendKind, saved: Option<(PathBuf, String)>) -> Self {
        Self { smaller: next_smaller(inputs, backend), saved }
    }

    /// The failure as an error of the run.
    pub fn error(self, failure: Failure) -> RunError {
        let Failure { operation, out_of_memory, message } = failure;
        if !out_of_memory {
            return RunError::DeviceFailed { operation, message, advice: self.go_on("as it was") };
        }
        let advice = match &self.smaller.settings {
            Some(settings) if self.smaller.resumable => {
                format!("The next smaller run: {settings}. {}", self.go_on("with these settings"))
            }
            Some(settings) => format!("The next smaller run: {settings}. {}", self.start_again()),
            None => {
                "No smaller micro-batch is left: shorten max_seq_len, or take a smaller model or a larger device".into()
            }
        };
        RunError::OutOfDeviceMemory { operation, message, table: self.smaller.table, advice }
    }

    fn go_on(&self, how: &str) -> String {
        match self.checkpoint() {
            Some((step, name)) => {
                format!("All that was saved up to step {step} is whole: go on {how} and --set name={name} --resume.")
            }
            None => "Nothing had been saved yet: start it again.".to_owned(),
        }
    }

    fn start_again(&self) -> String {
        match self.checkpoint() {
            Some((step, _)) => format!(
                "A run goes on only with the micro-batch that it began with, so start it again; what was saved up to step \
                 {step} stays."
            ),
            None => "Nothing had been saved yet.".to_owned(),
        }
    }

    /// The newest whole checkpoint's step, and the run's name.
    fn checkpoint(&self) -> Option<(u64, &str)> {
        let (folder, name) = self.saved.as_ref()?;
        let (step, _) = latest(folder).ok().flatten()?;
        Some((step, name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(resumable: bool, saved: Option<(PathBuf, String)>) -> FailureReport {
        let settings = Some("--set train.recompute=full".to_owned());
        FailureReport { smaller: SmallerRun { table: "\n  base weights".to_owned(), settings, resumable }, saved }
    }

    fn failure(out_of_memory: bool) -> Failure {
        Failure { operation: "linear".to_owned(), out_of_memory, message: "CUDA_ERROR".to_owned() }
    }

    fn run_with_a_checkpoint() -> (tempfile::TempDir, Option<(PathBuf, String)>) {
        let folder = tempfile::tempdir().unwrap();
        let checkpoint = folder.path().join("checkpoints/step-20");
        std::fs::create_dir_all(&checkpoint).unwrap();
        std::fs::write(checkpoint.join("DONE"), "").unwrap();
        let saved = Some((folder.path().to_path_buf(), "mine".to_owned()));
        (folder, saved)
    }

    #[test]
    fn out_of_memory_names_the_next_smaller_run_and_how_to_go_on() {
        let (_folder, saved) = run_with_a_checkpoint();
        let message = report(true, saved.clone()).error(failure(true)).to_string();
        for part in ["linear", "CUDA_ERROR", "base weights", "train.recompute=full", "step 20", "name=mine --resume"] {
            assert!(message.contains(part), "{part:?} is not in {message}");
        }
        let message = report(false, saved).error(failure(true)).to_string();
        assert!(message.contains("step 20 stays") && !message.contains("--resume"), "{message}");
    }

    #[test]
    fn another_failure_does_not_speak_of_memory() {
        let (_folder, saved) = run_with_a_checkpoint();
        let message = report(true, saved).error(failure(false)).to_string();
        assert!(message.contains("--resume") && !message.contains("base weights"), "{message}");
        let message = report(true, None).error(failure(false)).to_string();
        assert!(message.contains("Nothing had been saved yet"), "{message}");
    }
}
