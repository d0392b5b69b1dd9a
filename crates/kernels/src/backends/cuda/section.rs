//! Sections: stretches of work on the engine's stream, ordered against CubeCL's stream only where they begin and end.
//!
//! At most one thread per device is inside a section: each device has a mutex that an outermost section holds. CubeCL's pool gives
//! memory that is freed to the next request at once, whichever thread asks, while kernels that read it may still be queued. Inside
//! one section the order of our stream makes that right; between two sections the events do. A pause releases the mutex, so a
//! thread that waits for another rank in a pause does not block it.
//!
//! For the same reason no Burn operation may run in a section, on any thread; `watch.rs` checks that in debug builds.
//! Trade-off: a thread that only wants to upload waits for the section of another one.

use std::sync::PoisonError;

use burn_tensor::DType;
use firebrick_cuda::CudaError;

use super::engine::Engine;
use super::failure::{check, check_launch};
use super::watch::lock_of;

impl Engine {
    /// Number of the running outermost section: what is derived from parameters is valid within one.
    pub(super) fn section_number(&self) -> u64 {
        self.sections.get()
    }

    /// Runs `work` with the stream ordered after all earlier work of CubeCL, and later work of CubeCL after it. Inside another
    /// section this is a plain call.
    pub(super) fn section<R>(&self, work: impl FnOnce() -> R) -> R {
        if self.is_in_section() {
            return work();
        }
        self.sections.set(self.sections.get() + 1);
        let open = Open::new(self);
        let result = work();
        self.copies.settle(self.stream());
        self.collectives.settle(self.stream());
        open.close();
        result
    }

    /// Runs ordinary Burn operations in the middle of a section: after the work so far, and before the work that follows.
    pub(super) fn pause<R>(&self, work: impl FnOnce() -> R) -> R {
        let depth = self.depth.replace(0);
        if depth > 0 {
            self.watch.verify();
            check("pausing a section", self.end());
        }
        let result = work();
        if depth > 0 {
            self.begin();
        }
        self.depth.set(depth);
        result
    }

    /// Waits for the device's turn, and orders the stream after CubeCL's work so far.
    fn begin(&self) {
        let turn = lock_of(self.device().index).lock().unwrap_or_else(PoisonError::into_inner);
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

    /// Blocks until CubeCL's queue thread has given the driver everything that was requested so far.
    fn wait_until_submitted(&self) {
        let mut marker = self.marker.borrow_mut();
        let marker = marker.get_or_insert_with(|| self.empty([1], DType::F32));
        self.addresses.request(marker);
    }
}

/// An outermost section. It ends on the error paths too, so that a failure never lets CubeCL run ahead of work already submitted.
struct Open<'a> {
    engine: &'a Engine,
    is_closed: bool,
}

impl<'a> Open<'a> {
    fn new(engine: &'a Engine) -> Self {
        engine.begin();
        engine.depth.set(1);
        Self { engine, is_closed: false }
    }

    fn close(mut self) {
        self.engine.watch.verify();
        self.is_closed = true;
        *self.engine.saved_low_rank.borrow_mut() = None;
        *self.engine.prepared_factors.borrow_mut() = None;
        self.engine.depth.set(0);
        check("ending a section", self.engine.end());
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        if !self.is_closed {
            self.engine.depth.set(0);
            self.engine.repeats.drop_waiting();
            self.engine.scratch.forget_contents();
            *self.engine.prepared_rows.borrow_mut() = None;
            *self.engine.prepared_factors.borrow_mut() = None;
            self.engine.fp8_scales.clear();
            self.engine.kept.clear();
            self.engine.recycled.release();
            *self.engine.saved_low_rank.borrow_mut() = None;
            // Copies between host and device may still use memory that unwinding frees. A failure here means that the context
            // is lost: the failure that is already on its way reports that better.
            let _ = self.engine.copies.synchronize();
            let _ = self.engine.collectives.synchronize();
            let _ = self.engine.end();
        }
    }
}
