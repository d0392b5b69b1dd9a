//! Device addresses of tensors, requested from CubeCL once per tensor.
//!
//! A request is a round trip to CubeCL's queue thread (7.3 µs on an H100), and a layer reads the same weights many times. CubeCL
//! numbers its memory handles from a counter that never repeats a number in a process, and a handle keeps its place in memory for
//! as long as it lives: pools hand out whole slices and never move them. So the address is remembered by that number. An entry
//! holds no handle, so it keeps no memory alive; once the handle is gone no tensor has its number, so the entry is never read.
//!
//! What a section has read or written stays allocated until CubeCL's stream is ordered after it: CubeCL would give the memory of a tensor
//! that is dropped earlier to another thread at once, while launches of the section still use it, and Burn would write in the place of a
//! tensor that a section has dropped and another thread has. So a section holds a handle of what it resolves. What the engine recycles is
//! held there.
//!
//! Outside a section nothing is remembered.
//!
//! Debug builds check that what a launch reads and writes lies in memory that is allocated, and that no later tensor may have
//! ([`LiveTensors`]): a tensor's memory is alive in a section while the section holds it or some tensor has it (`recycled.rs`), other
//! memory as long as its buffer. An address that outlived its tensor is found by the name of the launch that got it.
//! Not supported: that check for addresses inside structures that launches take (tables of tensors), and in release builds.
//! Trade-off: if a later CubeCL does not show the number (`handle_number.rs`), every request goes to CubeCL again: slower, never wrong.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use cubecl::client::ComputeClient;
use cubecl::cuda::CudaRuntime;
use cubecl::server::Handle;
use firebrick_cuda::Context;
use rustc_hash::FxHashMap;

use super::failure::failed_allocation;
use super::handle_number::{handle_number, is_only_handle};
use super::matrix::Primitive;

/// Entries after which all are forgotten: numbers of tensors that are gone would pile up.
const MAX_ENTRIES: usize = 1 << 16;

/// Stands for the section that holds memory which `recycled.rs` holds.
const RECYCLED: u64 = u64::MAX;

/// The address of a handle's memory.
#[derive(Clone, Copy)]
struct Known {
    start: u64,
    /// The last section that holds it, and where among what it holds.
    section: u64,
    place: usize,
}

/// See the head of this file.
pub(crate) struct Addresses {
    context: Context,
    client: ComputeClient<CudaRuntime>,
    by_number: RefCell<FxHashMap<usize, Known>>,
    /// What the open section has resolved.
    held: RefCell<Vec<Option<Handle>>>,
    pub(crate) live: LiveTensors,
    /// Matrices whose rows were allocated with room: how many values of a row are theirs.
    with_room: RefCell<FxHashMap<usize, usize>>,
}

impl Addresses {
    pub(crate) fn new(context: &Context, client: &ComputeClient<CudaRuntime>) -> Self {
        Self {
            context: context.clone(),
            client: client.clone(),
            by_number: RefCell::default(),
            held: RefCell::default(),
            live: LiveTensors::default(),
            with_room: RefCell::default(),
        }
    }

    /// Device address of a tensor's first value, outside a section.
    pub(crate) fn of(&self, primitive: &Primitive) -> u64 {
        self.request(&primitive.handle)
    }

    /// The same in a section, which remembers it and holds the memory until [`Addresses::let_go`]; and whether it had to be requested.
    pub(super) fn in_section(&self, primitive: &Primitive, section: u64) -> (u64, bool) {
        let handle = &primitive.handle;
        let offset = handle.offset_start.unwrap_or(0);
        let number = handle_number(handle);
        let known = number.and_then(|number| self.by_number.borrow().get(&number).copied());
        if let Some(known) = known.filter(|known| known.section == section || known.section == RECYCLED) {
            return (known.start + offset, false);
        }
        let start = known.map_or_else(|| self.request(handle) - offset, |known| known.start);
        let place = self.hold(handle);
        self.live.note(handle, start, Some(section));
        if let Some(number) = number {
            self.insert(number, Known { start, section, place });
        }
        (start + offset, known.is_none())
    }

    fn hold(&self, handle: &Handle) -> usize {
        let mut held = self.held.borrow_mut();
        held.push(Some(handle.clone()));
        held.len() - 1
    }

    /// Whether nothing but this tensor has its memory, what this section holds apart.
    pub(crate) fn is_unshared(&self, primitive: &Primitive, section: Option<u64>) -> bool {
        let handle = &primitive.handle;
        let known = handle_number(handle).and_then(|number| self.by_number.borrow().get(&number).copied());
        let Some(known) = known.filter(|known| Some(known.section) == section) else { return is_only_handle(handle) };
        self.held.borrow_mut()[known.place] = None;
        let is_unshared = is_only_handle(handle);
        self.held.borrow_mut()[known.place] = Some(handle.clone());
        is_unshared
    }

    /// Remembers the address of memory that is recycled, so that no section has to hold it.
    pub(super) fn know_recycled(&self, handle: &Handle, start: u64) {
        if let Some(number) = handle_number(handle) {
            self.insert(number, Known { start, section: RECYCLED, place: 0 });
            self.live.note(handle, start, None);
        }
    }

    /// Lets go of what the section has resolved: CubeCL's stream is ordered after it.
    pub(super) fn let_go(&self) {
        self.held.borrow_mut().clear();
    }

    /// Forgets all addresses, since nothing is recycled any more.
    pub(crate) fn forget(&self) {
        self.by_number.borrow_mut().clear();
        self.live.clear();
    }

    /// The address from CubeCL. Waits for its queue thread, so everything requested of CubeCL before has been submitted when this
    /// returns.
    pub(super) fn request(&self, handle: &Handle) -> u64 {
        // CubeCL allocates on its queue thread and panics there; requesting the address then panics here.
        let answer = catch_unwind(AssertUnwindSafe(|| self.client.get_resource(handle.clone())));
        let problem = match answer {
            Ok(Ok(resource)) => return resource.resource().ptr,
            Ok(Err(error)) => Some(format!("{error:?}")),
            Err(_) => None,
        };
        failed_allocation(&self.context, handle.size(), problem).raise()
    }

    fn insert(&self, number: usize, known: Known) {
        let mut by_number = self.by_number.borrow_mut();
        if by_number.len() >= MAX_ENTRIES {
            by_number.clear();
        }
        by_number.insert(number, known);
    }

    /// Notes that only the first `width` values of each row are anybody's.
    pub(super) fn set_width(&self, handle: &Handle, width: usize) {
        let mut with_room = self.with_room.borrow_mut();
        if with_room.len() >= MAX_ENTRIES {
            with_room.clear();
        }
        if let Some(number) = handle_number(handle) {
            with_room.insert(number, width);
        }
    }

    /// Forgets [`Addresses::set_width`]: the memory is that of another matrix now.
    pub(super) fn forget_width(&self, handle: &Handle) {
        if let Some(number) = handle_number(handle) {
            self.with_room.borrow_mut().remove(&number);
        }
    }

    /// Whether a matrix is all that its rows hold, so that what comes after it in a row is free.
    pub(super) fn is_whole(&self, handle: &Handle, width: usize) -> bool {
        let is_first = handle.offset_start.unwrap_or(0) == 0;
        let known = || handle_number(handle).and_then(|number| self.with_room.borrow().get(&number).copied());
        is_first && known() == Some(width)
    }
}

/// Memory of tensors that sections have resolved.
#[derive(Default)]
pub(crate) struct LiveTensors {
    by_start: RefCell<BTreeMap<u64, Range>>,
}

#[derive(Clone, Copy)]
struct Range {
    bytes: u64,
    /// CubeCL's number of the handle.
    number: Option<usize>,
    /// The section that holds it; none if it is recycled.
    section: Option<u64>,
}

impl LiveTensors {
    /// A section holds the memory of a handle, or `recycled.rs` does where there is no section.
    pub(super) fn note(&self, handle: &Handle, start: u64, section: Option<u64>) {
        if cfg!(debug_assertions) {
            let range = Range { bytes: handle.size(), number: handle_number(handle), section };
            let mut by_start = self.by_start.borrow_mut();
            let end = start + range.bytes.max(1);
            while let Some((&overlapped, _)) = by_start.range(start..end).next() {
                by_start.remove(&overlapped);
            }
            by_start.insert(start, range);
        }
    }

    /// Whether bytes lie in memory that this section holds, or that a tensor has.
    pub(crate) fn holds(&self, address: u64, bytes: u64, section: u64, is_in_use: impl Fn(usize) -> bool) -> bool {
        let by_start = self.by_start.borrow();
        let Some((start, range)) = by_start.range(..=address).next_back() else { return false };
        let is_held = match range.section {
            Some(held) => held == section,
            None => range.number.is_some_and(is_in_use),
        };
        is_held && address + bytes <= start + range.bytes
    }

    /// Nothing is recycled any more.
    pub(crate) fn clear(&self) {
        self.by_start.borrow_mut().clear();
    }
}
