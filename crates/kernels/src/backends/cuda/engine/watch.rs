//! Detects Burn operations that run inside a section, and prevents two threads from being inside sections of one device.
//!
//! CubeCL numbers memory handles from one counter, and a Burn operation that allocates (for its output or its arguments) increments it.
//! Not supported: allocations of several threads cannot be distinguished, so the check runs only in programs that enable it
//! ([`watch_burn_operations`]), while one thread has an engine. A Burn operation that allocates nothing is not detected. Release builds do not check.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use cubecl::server::Handle;
use cubecl::stream_id::StreamId;

use crate::backends::on_cubecl::handle_number;

/// Whether this process uses Burn on one thread only.
static IS_WATCHED: AtomicBool = AtomicBool::new(false);

/// Makes Burn operations inside a section panic in debug builds from now on. For tests in which no other thread uses Burn on a card.
pub fn watch_burn_operations() {
    IS_WATCHED.store(true, Ordering::Relaxed);
}

/// Number of engines in this process now.
static ENGINES: AtomicUsize = AtomicUsize::new(0);
/// Number of engines that this process ever had.
static ENGINES_EVER: AtomicUsize = AtomicUsize::new(0);

/// Detects Burn operations inside a section by CubeCL's handle numbers.
pub(crate) struct BurnWatch {
    /// The last number that is accounted for, and the number of engines so far at that time.
    last: Cell<Option<(usize, usize)>>,
}

impl BurnWatch {
    pub(crate) fn new() -> Self {
        ENGINES.fetch_add(1, Ordering::SeqCst);
        ENGINES_EVER.fetch_add(1, Ordering::SeqCst);
        Self { last: Cell::new(None) }
    }

    /// Accounts for all numbers that CubeCL has used so far.
    pub(super) fn restart(&self) {
        let is_on = cfg!(debug_assertions) && IS_WATCHED.load(Ordering::Relaxed) && ENGINES.load(Ordering::SeqCst) == 1;
        let ever = ENGINES_EVER.load(Ordering::SeqCst);
        self.last.set(is_on.then(next_number).flatten().map(|number| (number, ever)));
    }

    /// Panics if CubeCL has used a number since the last call.
    pub(crate) fn verify(&self) {
        let Some((last, ever)) = self.last.get() else { return };
        let found = next_number();
        if ENGINES_EVER.load(Ordering::SeqCst) != ever {
            self.last.set(None);
            return;
        }
        let is_next = found == Some(last + 1);
        assert!(is_next, "a Burn operation ran inside a section of device work; wrap it in Session::pause");
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

/// Returns the mutex of a device. One is leaked per device and process.
pub(in crate::backends::cuda) fn lock_of(device: usize) -> &'static Mutex<()> {
    static LOCKS: Mutex<Vec<(usize, &'static Mutex<()>)>> = Mutex::new(Vec::new());
    let mut locks = LOCKS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, lock)) = locks.iter().find(|(index, _)| *index == device) {
        return lock;
    }
    let lock: &'static Mutex<()> = Box::leak(Box::default());
    locks.push((device, lock));
    lock
}
