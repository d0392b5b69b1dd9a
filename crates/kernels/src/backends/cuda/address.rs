//! Device addresses of tensors, requested from CubeCL once per tensor.
//!
//! A request is a round trip to CubeCL's queue thread (7.3 µs on an H100), and a layer reads the same weights many times. CubeCL
//! numbers its memory handles from a counter that never repeats a number in a process, and a handle keeps its place in memory for
//! as long as it lives: pools hand out whole slices and never move them. So the address is remembered by that number. An entry
//! holds no handle, so it keeps no memory alive; once the handle is gone no tensor has its number, so the entry is never read.
//!
//! Outside a section nothing is remembered.
//! Trade-off: if a later CubeCL does not show the number (`handle_number.rs`), every request goes to CubeCL again: slower, never wrong.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};

use cubecl::server::Handle;
use firebrick_cuda::Context;
use rustc_hash::FxHashMap;

use super::failure::failed_allocation;
use super::handle_number::handle_number;
use super::matrix::Primitive;

/// Entries after which all are forgotten: numbers of tensors that are gone would pile up.
const MAX_ENTRIES: usize = 1 << 16;

/// See the head of this file.
pub(super) struct Addresses {
    context: Context,
    by_number: RefCell<FxHashMap<usize, u64>>,
    /// Matrices whose rows were allocated with room: how many values of a row are theirs.
    with_room: RefCell<FxHashMap<usize, usize>>,
}

impl Addresses {
    pub(super) fn new(context: &Context) -> Self {
        Self { context: context.clone(), by_number: RefCell::default(), with_room: RefCell::default() }
    }

    /// Device address of a tensor's first value; inside a section it is remembered.
    pub(super) fn of(&self, primitive: &Primitive, is_in_section: bool) -> u64 {
        let offset = primitive.handle.offset_start.unwrap_or(0);
        if !is_in_section {
            return self.request(primitive);
        }
        let number = handle_number(&primitive.handle);
        if let Some(start) = number.and_then(|number| self.get(number)) {
            return start + offset;
        }
        let address = self.request(primitive);
        if let Some(number) = number {
            self.insert(number, address - offset);
        }
        address
    }

    /// Requests the address of a tensor that was allocated just now, and remembers it.
    pub(super) fn resolve_new(&self, primitive: &Primitive) {
        let address = self.request(primitive);
        if let Some(number) = handle_number(&primitive.handle) {
            self.insert(number, address);
        }
    }

    /// The address from CubeCL. Waits for its queue thread, so everything requested of CubeCL before has been submitted when this
    /// returns.
    pub(super) fn request(&self, primitive: &Primitive) -> u64 {
        // CubeCL allocates on its queue thread and panics there; requesting the address then panics here.
        let answer = catch_unwind(AssertUnwindSafe(|| primitive.client.get_resource(primitive.handle.clone())));
        let problem = match answer {
            Ok(Ok(resource)) => return resource.resource().ptr,
            Ok(Err(error)) => Some(format!("{error:?}")),
            Err(_) => None,
        };
        failed_allocation(&self.context, primitive.handle.size(), problem).raise()
    }

    fn get(&self, number: usize) -> Option<u64> {
        self.by_number.borrow().get(&number).copied()
    }

    fn insert(&self, number: usize, address: u64) {
        let mut by_number = self.by_number.borrow_mut();
        if by_number.len() >= MAX_ENTRIES {
            by_number.clear();
        }
        by_number.insert(number, address);
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
