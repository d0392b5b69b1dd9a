//! Memory that tensors of sections freed and later tensors reuse without a request to CubeCL. A request takes about ten microseconds
//! per tensor, which is most of the host's time in a decoding step, and nearly half of a training step over few tokens.
//!
//! All work of a section is on one stream, so memory that only this section has used may be given to its next tensor at once. Another thread may have
//! requested Burn operations on a tensor that was alive when the section began, or while it was paused. So a section takes memory that was free then,
//! or that it has given out itself since; for anything else it first orders its stream after CubeCL's. Memory is free once no tensor and no operation
//! in CubeCL's queue has it. CubeCL's pool keeps a buffer for every exact size as well, so this adds no memory. CubeCL's number of a handle then
//! stands for several tensors, one after the other; [`uses`] counts them.
//! Trade-off: Burn's own operations cannot use this memory until it is released, and do not write in place to such a tensor.

use std::cell::{Cell, RefCell};
use std::sync::{Mutex, PoisonError};

use cubecl::server::Handle;
use rustc_hash::{FxBuildHasher, FxHashMap};

use super::handle_number::{handle_number, is_only_handle, users};

/// Free and used memory by size, for reuse in sections.
#[derive(Default)]
pub(in crate::backends) struct Recycled {
    by_bytes: RefCell<FxHashMap<usize, Vec<Kept>>>,
    /// Place of each number: the bytes of its handle, and its index among those of that size.
    places: RefCell<FxHashMap<usize, (usize, usize)>>,
    /// Number of times that sections began or continued after a pause.
    now: Cell<u64>,
}

struct Kept {
    /// `None` only while [`Recycled::is_unshared`] counts the other handles.
    handle: Option<Handle>,
    /// Value of `now` when it was last free or given out; since then only this section has used it.
    since: u64,
}

impl Kept {
    fn is_free(&self) -> bool {
        self.handle.as_ref().is_some_and(is_only_handle)
    }
}

/// Available memory of a requested size.
pub(in crate::backends) enum Taken {
    /// This memory, for a new tensor.
    Memory(Handle),
    /// There is some, but other threads may have used it in the meantime.
    AfterOthers,
    Nothing,
}

/// Number of times that handles of all threads were reused, by number. Nothing is removed, because a tensor may outlive the handle in this pool.
static USES: Mutex<FxHashMap<usize, u64>> = Mutex::new(FxHashMap::with_hasher(FxBuildHasher));

/// Returns how many tensors had the memory of this number before the current one.
#[cfg(feature = "cuda")]
pub(in crate::backends) fn uses(number: usize) -> u64 {
    USES.lock().unwrap_or_else(PoisonError::into_inner).get(&number).copied().unwrap_or_default()
}

impl Recycled {
    /// Returns memory of this size that no tensor has any more.
    pub(in crate::backends) fn take(&self, bytes: usize) -> Taken {
        let by_bytes = self.by_bytes.borrow();
        let Some(of_size) = by_bytes.get(&bytes) else { return Taken::Nothing };
        let found = of_size.iter().find(|kept| kept.since == self.now.get() && kept.is_free());
        let Some(handle) = found.and_then(|kept| kept.handle.clone()) else {
            return if of_size.iter().any(Kept::is_free) { Taken::AfterOthers } else { Taken::Nothing };
        };
        let Some(number) = handle_number(&handle) else { return Taken::Nothing };
        *USES.lock().unwrap_or_else(PoisonError::into_inner).entry(number).or_default() += 1;
        Taken::Memory(handle)
    }

    /// Notes that a section begins or continues. The caller then waits for CubeCL's queue and orders the stream after it.
    pub(in crate::backends) fn begin(&self) {
        self.now.set(self.now.get() + 1);
        self.renew();
    }

    /// Allows all memory that is free now to be given out. The caller then waits for CubeCL's queue and orders the stream after it.
    pub(in crate::backends) fn renew(&self) {
        let mut by_bytes = self.by_bytes.borrow_mut();
        let free = by_bytes.values_mut().flatten().filter(|kept| kept.is_free());
        free.for_each(|kept| kept.since = self.now.get());
    }

    /// Adds the memory of a tensor that a section has just allocated. Returns whether it was added.
    pub(in crate::backends) fn keep(&self, bytes: usize, handle: &Handle) -> bool {
        let (Some(number), Some(_)) = (handle_number(handle), users(handle)) else { return false };
        let kept = Kept { handle: Some(handle.clone()), since: self.now.get() };
        // There are at least two handles: if CubeCL calls that unshared, it cannot report later that the tensor is gone.
        if kept.is_free() {
            return false;
        }
        let mut by_bytes = self.by_bytes.borrow_mut();
        let of_size = by_bytes.entry(bytes).or_default();
        self.places.borrow_mut().insert(number, (bytes, of_size.len()));
        of_size.push(kept);
        true
    }

    /// Returns whether no other tensor has this tensor's memory, so that an operation may write there; `None` if it is not from this pool.
    pub(in crate::backends) fn is_unshared(&self, tensor: &Handle) -> Option<bool> {
        let number = handle_number(tensor)?;
        let (bytes, index) = self.places.borrow().get(&number).copied()?;
        let mut by_bytes = self.by_bytes.borrow_mut();
        let kept = by_bytes.get_mut(&bytes).and_then(|of_size| of_size.get_mut(index));
        let kept = kept.expect("a place is one of these");
        // Ignore this pool's own handle.
        kept.handle = None;
        let is_unshared = is_only_handle(tensor);
        // A view has offsets, but the handle in the pool must not.
        let mut whole = tensor.clone();
        (whole.offset_start, whole.offset_end) = (None, None);
        kept.handle = Some(whole);
        Some(is_unshared)
    }

    #[cfg(feature = "wgpu")]
    pub(in crate::backends) fn has(&self, handle: &Handle) -> bool {
        handle_number(handle).is_some_and(|number| self.places.borrow().contains_key(&number))
    }

    /// Returns whether some tensor has the memory of this number.
    #[cfg(feature = "cuda")]
    pub(in crate::backends) fn is_in_use(&self, number: usize) -> bool {
        let place = self.places.borrow().get(&number).copied();
        place.is_some_and(|(bytes, index)| {
            self.by_bytes
                .borrow()
                .get(&bytes)
                .is_some_and(|of_size| of_size.get(index).is_some_and(|kept| !kept.is_free()))
        })
    }

    /// Returns the bytes of all memory, and of what tensors have.
    #[cfg(feature = "wgpu")]
    pub(in crate::backends) fn bytes(&self) -> [usize; 2] {
        let by_bytes = self.by_bytes.borrow();
        let of = |is_counted: fn(&Kept) -> bool| {
            by_bytes.iter().map(|(bytes, kept)| bytes * kept.iter().filter(|kept| is_counted(kept)).count()).sum()
        };
        [of(|_| true), of(|kept| !kept.is_free())]
    }

    /// Returns unused memory to CubeCL; all work on it must have been submitted, or the device have been waited for.
    pub(in crate::backends) fn release_free(&self) {
        let mut by_bytes = self.by_bytes.borrow_mut();
        let mut places = self.places.borrow_mut();
        places.clear();
        for (&bytes, of_size) in by_bytes.iter_mut() {
            of_size.retain(|kept| !kept.is_free());
            for (index, kept) in of_size.iter().enumerate() {
                if let Some(number) = kept.handle.as_ref().and_then(handle_number) {
                    places.insert(number, (bytes, index));
                }
            }
        }
    }

    /// Returns unused memory to CubeCL, and drops the rest. No section may be open, or the device must have been waited for.
    pub(in crate::backends) fn release(&self) {
        self.by_bytes.borrow_mut().clear();
        self.places.borrow_mut().clear();
    }
}
