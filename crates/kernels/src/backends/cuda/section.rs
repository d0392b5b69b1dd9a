//! Sections: stretches of work on the engine's stream, ordered against CubeCL's stream only where they begin and end.
//!
//! At most one thread per device is inside a section: each device has a mutex that an outermost section holds. CubeCL's pool gives
//! memory that is freed to the next request at once, whichever thread asks, while kernels that read it may still be queued. Inside
//! one section the order of our stream makes that right; between two sections the events do. A pause releases the mutex, so a
//! thread that waits for another rank in a pause does not block it.
//!
//! For the same reason no Burn operation may run in a section, on any thread. Debug builds check that on the thread of the section:
//! CubeCL numbers memory handles from one counter, and a Burn operation that allocates (for its output or its arguments) moves it.
//! Not supported: the check is off while more than one thread has an engine, since their allocations cannot be distinguished, and
//! a Burn operation that allocates nothing is not noticed.

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use burn_tensor::DType;
use cubecl::server::Handle;
use cubecl::stream_id::StreamId;
use firebrick_cuda::CudaError;

use super::address::handle_number;
use super::engine::Engine;
use super::failure::check;

/// Engines in this process now.
static ENGINES: AtomicUsize = AtomicUsize::new(0);
/// Engines that this process ever had.
static ENGINES_EVER: AtomicUsize = AtomicUsize::new(0);

/// Notices Burn operations inside a section; see the head of this file.
pub(super) struct BurnWatch {
    /// The last number that is accounted for, and the engines there had been by then.
    last: Cell<Option<(usize, usize)>>,
}

impl BurnWatch {
    pub(super) fn new() -> Self {
        ENGINES.fetch_add(1, Ordering::SeqCst);
        ENGINES_EVER.fetch_add(1, Ordering::SeqCst);
        Self { last: Cell::new(None) }
    }

    /// Takes what CubeCL has numbered so far as known.
    pub(super) fn restart(&self) {
        let is_on = cfg!(debug_assertions) && ENGINES.load(Ordering::SeqCst) == 1;
        let ever = ENGINES_EVER.load(Ordering::SeqCst);
        self.last.set(is_on.then(next_number).flatten().map(|number| (number, ever)));
    }

    /// Panics if CubeCL has numbered anything since the last call.
    pub(super) fn verify(&self) {
        let Some((last, ever)) = self.last.get() else { return };
        let found = next_number();
        if ENGINES_EVER.load(Ordering::SeqCst) != ever {
            self.last.set(None);
            return;
        }
        let is_next = found == Some(last + 1);
        assert!(is_next, "a Burn operation ran inside a section of device work; wrap it in MemoryOps::pause");
        self.last.set(found.map(|number| (number, ever)));
    }
}

impl Drop for BurnWatch {
    fn drop(&mut self) {
        ENGINES.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Uses up one number of CubeCL's counter.
fn next_number() -> Option<usize> {
    handle_number(&Handle::new(StreamId::current(), 1))
}

/// The mutex of a device. One is leaked per device and process.
pub(super) fn lock_of(device: usize) -> &'static Mutex<()> {
    static LOCKS: Mutex<Vec<(usize, &'static Mutex<()>)>> = Mutex::new(Vec::new());
    let mut locks = LOCKS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, lock)) = locks.iter().find(|(index, _)| *index == device) {
        return lock;
    }
    let lock: &'static Mutex<()> = Box::leak(Box::default());
    locks.push((device, lock));
    lock
}

impl Engine {
    /// Whether a section is open, and not paused.
    pub(super) fn is_in_section(&self) -> bool {
        self.depth.get() > 0
    }

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
        self.copies.settle(self);
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
        let ended = self.handoff.end();
        *self.turn.borrow_mut() = None;
        ended
    }

    /// Blocks until CubeCL's queue thread has given the driver everything that was requested so far.
    fn wait_until_submitted(&self) {
        let mut marker = self.marker.borrow_mut();
        let marker = marker.get_or_insert_with(|| self.empty([1], DType::F32));
        self.request_address(marker);
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
        self.engine.depth.set(0);
        check("ending a section", self.engine.end());
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        if !self.is_closed {
            self.engine.depth.set(0);
            self.engine.scratch.forget_contents();
            *self.engine.saved_low_rank.borrow_mut() = None;
            // Copies between host and device may still use memory that unwinding frees. A failure here means that the context
            // is lost: the failure that is already on its way reports that better.
            let _ = self.engine.copies.synchronize();
            let _ = self.engine.end();
        }
    }
}
