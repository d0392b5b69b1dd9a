//! A check of debug builds: what a launch reads and writes lies in memory that is allocated, and that no later tensor may have.
//!
//! A tensor's memory is alive in a section while the section holds it (`address.rs`) or some tensor has it (`recycled.rs`); other memory
//! as long as its buffer. An address that outlived its tensor is found here by the name of the launch that got it.
//! Not supported: addresses inside structures that launches take (tables of tensors), and release builds.

use std::cell::RefCell;
use std::collections::BTreeMap;

use cubecl::server::Handle;

use super::handle_number::handle_number;

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
