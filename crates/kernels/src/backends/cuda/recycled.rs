//! Memory that operations of a section freed and others of the same section get again, without asking CubeCL: about ten microseconds
//! for each tensor, most of what a decoding step would cost the host.
//!
//! The same rule as for CubeCL's own pool makes it right: all work of a section is on one stream, so what is freed after a call is
//! reused only by later work.
//! Trade-off: within such a section nothing returns to the pool, so it is for work that asks for few sizes over and over.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;

use cubecl::server::Handle;

/// See the head of this file.
#[derive(Default)]
pub(super) struct Recycled {
    is_on: Cell<bool>,
    by_bytes: RefCell<HashMap<usize, Vec<Handle>>>,
}

impl Recycled {
    /// Begins to keep what is allocated.
    pub(super) fn start(&self) {
        self.is_on.set(true);
    }

    /// Returns all of it to CubeCL.
    pub(super) fn stop(&self) {
        self.is_on.set(false);
        self.by_bytes.borrow_mut().clear();
    }

    /// Memory of this size that no tensor has any more.
    pub(super) fn take(&self, bytes: usize) -> Option<Handle> {
        if !self.is_on.get() {
            return None;
        }
        let by_bytes = self.by_bytes.borrow();
        by_bytes.get(&bytes)?.iter().find(|handle| handle.can_mut()).cloned()
    }

    /// Keeps the memory of a tensor that was allocated just now.
    pub(super) fn keep(&self, bytes: usize, handle: &Handle) {
        if !self.is_on.get() {
            return;
        }
        let kept = handle.clone();
        // Two handles at least: if CubeCL calls that unshared, it cannot say later that the tensor is gone.
        if !kept.can_mut() {
            self.by_bytes.borrow_mut().entry(bytes).or_default().push(kept);
        }
    }
}
