//! A checkpoint that a thread completes while steps go on, one at a time.
//!
//! Trade-off: a process that ends at once, by a kill or a second signal, loses the checkpoint that its thread has not completed.

use std::panic::resume_unwind;
use std::thread::JoinHandle;

use crate::error::RunError;

/// A checkpoint that a thread writes. Dropping it waits until it is complete.
pub(super) struct Background {
    pub(super) step: u64,
    /// The step of the best evaluation that it knows.
    pub(super) best: Option<u64>,
    /// Whether the run goes on without it where the disk is full.
    pub(super) may_fail: bool,
    /// `None` only while it is dropped.
    pub(super) thread: Option<JoinHandle<Result<(), RunError>>>,
}

impl Background {
    pub(super) fn is_done(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    pub(super) fn wait(mut self) -> Result<(), RunError> {
        let thread = self.thread.take().expect("it is there until it is dropped");
        thread.join().unwrap_or_else(|panic| resume_unwind(panic))
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        // Another error ends the run already.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}
