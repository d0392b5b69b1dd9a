//! The errors that end a run early, in one enum: what failed, what was expected and found, where, and what to do next.
//!
//! Errors of the crates below pass through unchanged; `main` prints the chain once. Trade-off: errors that no caller distinguishes are texts, written
//! where they are found.

use std::error::Error;
use std::io::{self, ErrorKind};
use std::path::Path;

use crate::storage::StorageError;

/// The reasons why a command could not do its work.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // of fields, which the messages name
pub enum RunError {
    /// An error that needs only a message, since no caller distinguishes it.
    #[error("{0}")]
    Refused(String),
    /// The recipe.
    #[error(transparent)]
    Config(#[from] crate::config::ConfigError),
    /// The Hub or its cache.
    #[error(transparent)]
    Hub(#[from] firebrick_hub::HubError),
    /// The data or the tokenizer.
    #[error(transparent)]
    Data(#[from] firebrick_data::DataError),
    /// The model's config, or a LoRA target that it does not have.
    #[error(transparent)]
    Arch(#[from] firebrick_arch::ArchError),
    /// The model folder or an adapter.
    #[error(transparent)]
    Model(#[from] firebrick_model::ModelError),
    /// A saved optimizer state.
    #[error(transparent)]
    Optimizer(#[from] firebrick_optim::OptimError),
    /// The other ranks.
    #[error(transparent)]
    Parallel(#[from] firebrick_parallel::ParallelError),
    /// The run folder or a checkpoint folder.
    #[error(transparent)]
    Storage(#[from] StorageError),
    /// A reward that cannot be computed.
    #[error(transparent)]
    Reward(#[from] crate::grpo::reward::RewardError),
    /// A tracking server that does not take the run.
    #[error(transparent)]
    Mlflow(#[from] crate::metrics::MlflowError),
    /// The device failed for another reason.
    #[error(
        "the device failed in {operation}: {message}. {advice} If it fails again, look at the driver's log (`dmesg`, \
         `nvidia-smi -q`), reinstall the driver, or train on the CPU with backend = \"flex\""
    )]
    DeviceFailed {
        operation: String,
        message: String,
        /// What is saved and how to continue.
        advice: String,
    },
    /// The numbers of a step are wrong, so nothing of the step may be saved.
    #[error("{0}")]
    WrongNumbers(String),
    /// A chat's messages cannot be read, or its answers cannot be written.
    #[error("the terminal is gone: {0}")]
    Terminal(io::Error),
}

impl RunError {
    /// Returns whether a disk had no room for what was to be written.
    pub fn is_disk_full(&self) -> bool {
        if let Self::Storage(StorageError::DiskFull { .. } | StorageError::DiskOfOtherRankFull { .. }) = self {
            return true;
        }
        let mut causes = std::iter::successors(Some(self as &(dyn Error + 'static)), |&error| error.source());
        let is_full = |error: &io::Error| matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded);
        causes.any(|error| error.downcast_ref::<io::Error>().is_some_and(is_full))
    }

    /// Returns this error of writing in `folder`; if the disk is full, one that says what is free there.
    pub fn of_disk(self, folder: &Path) -> Self {
        let is_bare = !matches!(self, Self::Storage(_)) && self.is_disk_full();
        if is_bare { StorageError::writing(folder, 0, ErrorKind::StorageFull.into()).into() } else { self }
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use firebrick_arch::ArchError;
    use firebrick_model::ModelError;

    use super::*;

    #[test]
    fn a_full_disk_is_recognized_in_every_error_and_nothing_else_is_taken_for_one() {
        let path = PathBuf::from("file");
        let errors = |kind: ErrorKind| -> [RunError; 3] {
            let source = || io::Error::from(kind);
            [
                StorageError::writing(Path::new("file"), 9, source()).into(),
                StorageError::io("rename to", Path::new("file"), source()).into(),
                ModelError::from(ArchError::io("write", &path)(source())).into(),
            ]
        };
        for kind in [ErrorKind::StorageFull, ErrorKind::QuotaExceeded] {
            assert!(errors(kind).iter().all(RunError::is_disk_full), "{kind}");
        }
        assert!(!errors(ErrorKind::PermissionDenied).iter().any(RunError::is_disk_full));
        assert!(RunError::from(StorageError::DiskOfOtherRankFull { path }).is_disk_full());
    }
}
