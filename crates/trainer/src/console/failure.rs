//! The message for a device that fails in the middle of a run: expected memory, next smaller run, what is saved, and how to continue.

use std::path::PathBuf;

use firebrick_parallel::ParallelError;

use crate::console::shell::shell_quoted;
use crate::error::RunError;
use crate::plan::{Plan, SmallerRun};
use crate::state::checkpoint_folder::latest;

/// A failure of device work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The operation.
    pub operation: String,
    /// Whether memory ran out, so a smaller run may work.
    pub out_of_memory: bool,
    /// The library's message.
    pub message: String,
}

/// The report on a failed run, prepared before the run: how to continue it.
#[derive(Clone, Debug)]
pub struct FailureReport {
    smaller: SmallerRun,
    /// The run folder; `None` for work that saves nothing.
    folder: Option<PathBuf>,
}

impl FailureReport {
    /// Creates the report for a run of this plan, which saves to `folder`.
    pub fn new(plan: &Plan, folder: Option<PathBuf>) -> Self {
        Self { smaller: plan.smaller.clone(), folder }
    }

    /// Returns the failure as an error of the run.
    pub fn error(self, failure: Failure) -> RunError {
        let Failure { operation, out_of_memory, message } = failure;
        if !out_of_memory {
            return RunError::DeviceFailed { operation, message, advice: self.next_start("as it was") };
        }
        let advice = match &self.smaller.settings {
            Some(settings) => {
                format!("The next smaller run: {settings}. {}", self.next_start("with these settings"))
            }
            None => {
                "No smaller micro-batch is left: shorten max_seq_len, or take a smaller model or a larger device".into()
            }
        };
        RunError::Refused(format!(
            "the device ran out of memory in {operation}: {message}. The plan expected this to fit; another process may be using \
             memory too. Expected was{}\n{advice}",
            self.smaller.table
        ))
    }

    /// Returns the loss of another rank as an error of the run. Only rank 0 says what is saved, since it may be saving while the others end.
    pub fn lost(self, lost: &ParallelError, is_main: bool) -> RunError {
        let advice = match &self.folder {
            Some(folder) if !is_main => format!(
                "The log of rank 0 says what is saved; if anything is, start it again as it was, with --resume {}.",
                shell_quoted(&folder.display().to_string())
            ),
            _ => self.next_start("as it was"),
        };
        RunError::Refused(format!("{lost}. {advice}"))
    }

    fn next_start(&self, how: &str) -> String {
        let saved = self.folder.as_ref().and_then(|folder| Some((folder, latest(folder).ok().flatten()?)));
        match saved {
            Some((folder, (step, _))) => format!(
                "Everything up to step {step} is saved: start it again {how}, with --resume {}.",
                shell_quoted(&folder.display().to_string())
            ),
            None => format!("Nothing was saved yet: start it again {how}."),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::checkpoint_folder::CheckpointWriter;

    fn report(folder: Option<PathBuf>) -> FailureReport {
        let settings = Some("--set train.recompute=full".to_owned());
        FailureReport { smaller: SmallerRun { table: "\n  base weights".to_owned(), settings }, folder }
    }

    fn failure(out_of_memory: bool) -> Failure {
        Failure { operation: "linear".to_owned(), out_of_memory, message: "CUDA_ERROR".to_owned() }
    }

    fn run_with_a_checkpoint() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        CheckpointWriter::begin(folder.path(), 20, 0).unwrap().commit(1).unwrap();
        folder
    }

    #[test]
    fn out_of_memory_names_the_next_smaller_run() {
        let folder = run_with_a_checkpoint();
        let message = report(Some(folder.path().to_owned())).error(failure(true)).to_string();
        for part in ["linear", "CUDA_ERROR", "base weights", "train.recompute=full", "step 20", "--resume"] {
            assert!(message.contains(part), "{part:?} is not in {message}");
        }
        let message = report(None).error(failure(true)).to_string();
        assert!(message.contains("start it again with these settings") && !message.contains("--resume"), "{message}");
    }

    #[test]
    fn another_failure_does_not_mention_memory() {
        let folder = run_with_a_checkpoint();
        let message = report(Some(folder.path().to_owned())).error(failure(false)).to_string();
        assert!(message.contains("--resume") && !message.contains("base weights"), "{message}");
        let message = report(None).error(failure(false)).to_string();
        assert!(message.contains("Nothing was saved yet"), "{message}");
    }
}
