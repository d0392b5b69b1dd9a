//! Memory that tensors of sections freed and later ones get again, without asking CubeCL: about ten microseconds for each tensor, which
//! is most of what a decoding step would cost the host, and nearly half of a training step over few tokens.
//!
//! The same rule as for CubeCL's own pool makes it right: all work of a section is on one stream, and sections are ordered among each
//! other, so what is freed after a call is reused only by later work. CubeCL's pool keeps a buffer for every exact size as well, so no
//! memory is added. CubeCL's number of a handle then stands for one tensor after the other; [`uses`] counts them.
//! Trade-off: Burn's own operations cannot have this memory until it is released, and do not write in the place of such a tensor.

use std::cell::RefCell;
use std::sync::{Mutex, PoisonError};

use cubecl::server::Handle;
use rustc_hash::{FxBuildHasher, FxHashMap};

use super::handle_number::handle_number;
use super::matrix::Primitive;

/// See the head of this file.
#[derive(Default)]
pub(super) struct Recycled {
    by_bytes: RefCell<FxHashMap<usize, Vec<Option<Handle>>>>,
    /// By number: the bytes of a handle, and its index among those of that size.
    places: RefCell<FxHashMap<usize, (usize, usize)>>,
}

/// How often handles were used again, by number, of all threads. A tensor may outlive the handle that is kept here, so nothing is
/// removed.
static USES: Mutex<FxHashMap<usize, u64>> = Mutex::new(FxHashMap::with_hasher(FxBuildHasher));

/// How many tensors had the memory of this number before the one that has it.
pub(super) fn uses(number: usize) -> u64 {
    USES.lock().unwrap_or_else(PoisonError::into_inner).get(&number).copied().unwrap_or_default()
}

impl Recycled {
    /// Memory of this size that no tensor has any more.
    pub(super) fn take(&self, bytes: usize) -> Option<Handle> {
        let free = self.by_bytes.borrow().get(&bytes)?.iter().flatten().find(|kept| kept.can_mut()).cloned()?;
        let number = handle_number(&free)?;
        *USES.lock().unwrap_or_else(PoisonError::into_inner).entry(number).or_default() += 1;
        Some(free)
    }

    /// Keeps the memory of a tensor that was allocated just now.
    pub(super) fn keep(&self, bytes: usize, handle: &Handle) {
        let Some(number) = handle_number(handle) else { return };
        let kept = handle.clone();
        // Two handles at least: if CubeCL calls that unshared, it cannot say later that the tensor is gone.
        if !kept.can_mut() {
            let mut by_bytes = self.by_bytes.borrow_mut();
            let of_size = by_bytes.entry(bytes).or_default();
            self.places.borrow_mut().insert(number, (bytes, of_size.len()));
            of_size.push(Some(kept));
        }
    }

    /// Whether nothing but this tensor has its memory, so that an operation that takes it may write there.
    pub(super) fn is_unshared(&self, tensor: &Primitive) -> bool {
        let place = handle_number(&tensor.handle).and_then(|number| self.places.borrow().get(&number).copied());
        let Some((bytes, index)) = place else { return tensor.handle.can_mut() };
        let mut by_bytes = self.by_bytes.borrow_mut();
        let kept = by_bytes.get_mut(&bytes).and_then(|of_size| of_size.get_mut(index));
        let kept = kept.expect("a place is one of these");
        // The handle of this pool does not count.
        *kept = None;
        let is_unshared = tensor.handle.can_mut();
        // A view has offsets, which the whole memory has not.
        let mut whole = tensor.handle.clone();
        (whole.offset_start, whole.offset_end) = (None, None);
        *kept = Some(whole);
        is_unshared
    }

    /// Returns what no tensor has to CubeCL, and forgets the rest.
    pub(super) fn release(&self) {
        self.by_bytes.borrow_mut().clear();
        self.places.borrow_mut().clear();
    }
}
