//! Notices Burn operations that run inside a section, and keeps two threads from being inside sections of one device.
//!
//! CubeCL numbers memory handles from one counter, and a Burn operation that allocates (for its output or its arguments) moves it.
//! Not supported: allocations of several threads cannot be distinguished, so only a program that asks for it is checked
//! ([`watch_burn_operations`]), while one thread has an engine. A Burn operation that allocates nothing is not noticed. Release builds do not
//! check.
//! Trade-off: a leaked mutex per device and process.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use cubecl::server::Handle;
use cubecl::stream_id::StreamId;

use super::handle_number::handle_number;

/// Whether this process uses Burn on one thread only.
static IS_WATCHED: AtomicBool = AtomicBool::new(false);

/// From now on, a Burn operation that runs inside a section panics in debug builds. For tests: no other thread may use Burn on a card.
pub fn watch_burn_operations() {
    IS_WATCHED.store(true, Ordering::Relaxed);
}

/// Engines in this process now.
static ENGINES: AtomicUsize = AtomicUsize::new(0);
/// Engines that this process ever had.
static ENGINES_EVER: AtomicUsize = AtomicUsize::new(0);

/// Notices Burn operations inside a section; see the head of this file.
pub(crate) struct BurnWatch {
    /// The last number that is accounted for, and the engines there had been by then.
    last: Cell<Option<(usize, usize)>>,
}

impl BurnWatch {
    pub(crate) fn new() -> Self {
        ENGINES.fetch_add(1, Ordering::SeqCst);
        ENGINES_EVER.fetch_add(1, Ordering::SeqCst);
        Self { last: Cell::new(None) }
    }

    /// Takes what CubeCL has numbered so far as known.
    pub(super) fn restart(&self) {
        let is_on = cfg!(debug_assertions) && IS_WATCHED.load(Ordering::Relaxed) && ENGINES.load(Ordering::SeqCst) == 1;
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
