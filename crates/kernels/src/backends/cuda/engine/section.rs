//! Sections: periods of work on the engine's stream that is ordered against CubeCL's stream only at their beginning and end (`Device::section`).
//!
//! At most one thread per device is inside a section: each device has a mutex that the outermost section holds. A pause
//! releases it, so a thread that waits for another rank in a pause does not block others. Other threads may run Burn
//! operations at any time (`mod.rs` lists the invariants that make this safe). The thread inside a section must not
//! request any, because its stream would not wait for them, nor they for it; `watch.rs` checks that in debug builds.
//! Trade-off: a thread that only wants to upload waits for another thread's section.

use std::sync::PoisonError;

use firebrick_cuda::CudaError;

use super::Engine;
use super::failure::{check, check_launch};
use super::watch::lock_of;

/// Sections in which no parameter changes.
pub(crate) struct KeepsContents<'a> {
    engine: &'a Engine,
    before: Option<u64>,
}

impl Drop for KeepsContents<'_> {
    fn drop(&mut self) {
        self.engine.unchanged_since.set(self.before);
    }
}

impl Engine {
    /// Returns the number of the current outermost section, within which values derived from parameters are valid.
    pub(crate) fn section_number(&self) -> u64 {
        self.sections.get()
    }

    /// Lets contents of buffers stay valid from one section to the next, until the result is dropped: what they are computed from does not change.
    pub(crate) fn keep_contents(&self) -> KeepsContents<'_> {
        KeepsContents { before: self.unchanged_since.replace(Some(self.section_number() + 1)), engine: self }
    }

    fn count_section(&self) {
        self.sections.set(self.sections.get() + 1);
        self.scratch.enter(self.section_number());
    }

    /// Begins an outermost section, with the stream ordered after all earlier work of CubeCL.
    pub(crate) fn open(&self) {
        self.count_section();
        self.begin();
        self.depth.set(1);
    }

    /// Ends the outermost section, with later work of CubeCL ordered after it.
    pub(crate) fn close(&self) {
        self.depth.set(0);
        let ended = self.end();
        self.addresses.let_go();
        check("ending a section", ended);
    }

    /// Ends the outermost section after a failure, so that CubeCL never overtakes submitted work. `drop_states` drops what the subjects keep.
    pub(crate) fn abandon(&self, drop_states: impl FnOnce()) {
        self.depth.set(0);
        self.repeats.drop_waiting();
        self.scratch.forget_contents();
        drop_states();
        // A failure here means that the context is lost, which the failure already unwinding reports better.
        let _ = self.end();
        self.recycled.release();
        self.addresses.forget();
        self.addresses.let_go();
    }

    /// Runs ordinary Burn operations in the middle of a section, after the work so far and before the work that follows.
    pub(crate) fn pause<R>(&self, work: impl FnOnce() -> R) -> R {
        let (depth, number) = (self.depth.replace(0), self.section_number());
        if depth > 0 {
            self.watch.verify();
            check("pausing a section", self.end());
        }
        let result = work();
        if depth > 0 {
            if self.section_number() != number {
                // Sections inside the pause have released the memory that this one held.
                self.count_section();
            }
            self.begin();
        }
        self.depth.set(depth);
        result
    }

    /// Locks the device, and orders the stream after CubeCL's work so far.
    fn begin(&self) {
        let turn = lock_of(self.device().index).lock().unwrap_or_else(PoisonError::into_inner);
        self.recycled.begin();
        self.wait_until_submitted();
        check("starting a section", self.handoff.begin());
        self.watch.restart();
        *self.turn.borrow_mut() = Some(turn);
    }

    fn end(&self) -> Result<(), CudaError> {
        let submitted = self.repeats.flush();
        let ended = self.handoff.end();
        *self.turn.borrow_mut() = None;
        check_launch(submitted);
        ended
    }

    /// Blocks until CubeCL's queue thread has submitted all earlier requests to the driver.
    pub(crate) fn wait_until_submitted(&self) {
        let mut marker = self.marker.borrow_mut();
        let marker = marker.get_or_insert_with(|| self.client.empty(4));
        self.addresses.request(marker);
    }
}
