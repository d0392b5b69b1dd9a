//! Device addresses of tensors, requested from CubeCL once per tensor.
//!
//! A request is a round trip to CubeCL's queue thread (7.3 µs on an H100), and a layer reads the same weights many times. CubeCL
//! numbers its memory handles from a counter that never repeats a number in a process, and a handle keeps its place in memory as long
//! as it lives: pools hand out whole slices and never move them. So addresses are cached by that number. An entry holds no handle, so
//! it keeps no memory alive; once the handle is gone, no tensor has its number, so the entry is never read.
//!
//! All memory that a section has read or written stays allocated until CubeCL's stream is ordered after the section. CubeCL would give
//! the memory of a tensor that is dropped earlier to another thread at once, while launches of the section still use it, and Burn
//! would write in place to a tensor that a section has dropped and another thread still has. So a section holds a handle of each
//! tensor that it resolves; `recycled.rs` holds the memory that the engine recycles.
//!
//! Outside a section nothing is cached.
//!
//! Debug builds check that launches only read and write memory that is allocated, and that no later tensor may have ([`LiveTensors`]):
//! a tensor's memory is alive in a section while the section holds it or some tensor has it (`recycled.rs`), other memory as long as
//! its buffer. The error for an address that outlived its tensor names the launch that used it.
//! Not supported: that check for addresses inside structures that launches take (tables of tensors), and in release builds.
//! Trade-off: if a later CubeCL does not show the number (`handle_number.rs`), every request goes to CubeCL, which is slower, but never wrong.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use cubecl::client::ComputeClient;
use cubecl::cuda::CudaRuntime;
use cubecl::server::Handle;
use firebrick_cuda::Context;
use rustc_hash::FxHashMap;

use super::failure::failed_allocation;
use super::matrix::Primitive;
use crate::backends::on_cubecl::{handle_number, is_only_handle};

/// Number of entries after which all are dropped, because those of freed tensors accumulate.
const MAX_ENTRIES: usize = 1 << 16;

/// Section number of memory that `recycled.rs` holds.
const RECYCLED: u64 = u64::MAX;

/// The address of a handle's memory.
#[derive(Clone, Copy)]
struct Known {
    start: u64,
    /// The last section that holds it, and its index in `held`.
    section: u64,
    place: usize,
}

/// Cached addresses, and the handles that the open section holds.
pub(crate) struct Addresses {
    context: Context,
    client: ComputeClient<CudaRuntime>,
    by_number: RefCell<FxHashMap<usize, Known>>,
    /// Handles that the open section has resolved.
    held: RefCell<Vec<Option<Handle>>>,
    pub(crate) live: LiveTensors,
    /// Used values per row of matrices that were allocated with room for more.
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

    /// Returns the device address of a tensor's first value, outside a section.
    pub(crate) fn of(&self, primitive: &Primitive) -> u64 {
        self.request(&primitive.handle)
    }

    /// Returns the address inside a section, caches it and holds the memory until [`Addresses::let_go`]; also returns whether it was requested.
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

    /// Returns whether no other tensor has this tensor's memory, ignoring the section's own handle.
    pub(crate) fn is_unshared(&self, primitive: &Primitive, section: Option<u64>) -> bool {
        let handle = &primitive.handle;
        let known = handle_number(handle).and_then(|number| self.by_number.borrow().get(&number).copied());
        let Some(known) = known.filter(|known| Some(known.section) == section) else { return is_only_handle(handle) };
        self.held.borrow_mut()[known.place] = None;
        let is_unshared = is_only_handle(handle);
        self.held.borrow_mut()[known.place] = Some(handle.clone());
        is_unshared
    }

    /// Caches the address of recycled memory, so that no section has to hold it.
    pub(super) fn know_recycled(&self, handle: &Handle, start: u64) {
        if let Some(number) = handle_number(handle) {
            self.insert(number, Known { start, section: RECYCLED, place: 0 });
            self.live.note(handle, start, None);
        }
    }

    /// Releases the handles that the section has resolved, once CubeCL's stream is ordered after it.
    pub(super) fn let_go(&self) {
        self.held.borrow_mut().clear();
    }

    /// Drops all addresses, since nothing is recycled any more.
    pub(crate) fn forget(&self) {
        self.by_number.borrow_mut().clear();
        self.live.clear();
    }

    /// Requests the address from CubeCL. Waits for its queue thread, so all earlier requests to CubeCL have been submitted when this returns.
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

    /// Records that only the first `width` values of each row are used.
    pub(super) fn set_width(&self, handle: &Handle, width: usize) {
        let mut with_room = self.with_room.borrow_mut();
        if with_room.len() >= MAX_ENTRIES {
            with_room.clear();
        }
        if let Some(number) = handle_number(handle) {
            with_room.insert(number, width);
        }
    }

    /// Removes the record of [`Addresses::set_width`], since another matrix has the memory now.
    pub(super) fn forget_width(&self, handle: &Handle) {
        if let Some(number) = handle_number(handle) {
            self.with_room.borrow_mut().remove(&number);
        }
    }

    /// Returns whether a matrix has all used values of its rows, so that the rest of each row is free.
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
    /// The section that holds it; `None` if it is recycled.
    section: Option<u64>,
}

impl LiveTensors {
    /// Records that a section holds a handle's memory, or `recycled.rs` if there is no section.
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

    /// Returns whether the bytes are in memory that this section holds, or that a tensor has.
    pub(crate) fn holds(&self, address: u64, bytes: u64, section: u64, is_in_use: impl Fn(usize) -> bool) -> bool {
        let by_start = self.by_start.borrow();
        let Some((start, range)) = by_start.range(..=address).next_back() else { return false };
        let is_held = match range.section {
            Some(held) => held == section,
            None => range.number.is_some_and(is_in_use),
        };
        is_held && address + bytes <= start + range.bytes
    }

    /// Drops all records, since nothing is recycled any more.
    pub(crate) fn clear(&self) {
        self.by_start.borrow_mut().clear();
    }
}
