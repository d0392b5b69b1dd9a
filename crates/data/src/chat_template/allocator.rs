//! An allocator that stops a thread once the thread holds more memory than it may, instead of letting the process run out of it.
//!
//! The engine of chat templates allocates what a template tells it to, and Rust has no way to refuse: a failed allocation ends the process, and an
//! allocator must not panic. So a thread over its budget sleeps forever, inside the allocation; the thread that waits for it sees a flag and reports
//! an error. Trade-off: the sleeping thread keeps its memory until the process ends, so the caller must stop after the first.

#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout};
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::Duration;

/// An allocator that bounds the memory of chat templates: install it in a program that renders templates of others.
///
/// ```
/// #[global_allocator]
/// static ALLOCATOR: firebrick_data::BoundedAllocator<std::alloc::System> =
///     firebrick_data::BoundedAllocator(std::alloc::System);
/// ```
///
/// In a program without it, text, time and instructions of templates are bounded, but a hostile template can use all memory and overflow a stack,
/// either of which ends the process. Other threads than those that render are not counted.
#[derive(Debug, Default)]
pub struct BoundedAllocator<A>(pub A);

/// What a thread may still allocate.
#[derive(Clone, Copy)]
pub(super) struct Budget {
    pub(super) bytes: usize,
    /// Allocations that exist at once. A value that is nested has at least one per level, so this bounds recursion.
    pub(super) allocations: usize,
    /// Set when the thread wants more.
    pub(super) is_exceeded: &'static AtomicBool,
}

thread_local! {
    static BUDGET: Cell<Option<Budget>> = const { Cell::new(None) };
}

impl Budget {
    /// Runs `work` within the budget. Does not return if it is exceeded.
    pub(super) fn run<T>(self, work: impl FnOnce() -> T) -> T {
        BUDGET.set(Some(self));
        let result = work();
        BUDGET.set(None);
        result
    }
}

#[inline]
fn allocate(bytes: usize) {
    let Some(budget) = BUDGET.get() else { return };
    match (budget.bytes.checked_sub(bytes), budget.allocations.checked_sub(1)) {
        (Some(bytes), Some(allocations)) => BUDGET.set(Some(Budget { bytes, allocations, ..budget })),
        _ => stop(budget),
    }
}

#[inline]
fn free(bytes: usize) {
    let Some(budget) = BUDGET.get() else { return };
    let (bytes, allocations) = (budget.bytes.saturating_add(bytes), budget.allocations.saturating_add(1));
    BUDGET.set(Some(Budget { bytes, allocations, ..budget }));
}

#[cold]
fn stop(budget: Budget) -> ! {
    BUDGET.set(None);
    budget.is_exceeded.store(true, Ordering::Release);
    loop {
        sleep(Duration::from_secs(3600));
    }
}

// SAFETY: every call goes to the inner allocator with the same arguments; counting touches only a thread-local without a destructor.
unsafe impl<A: GlobalAlloc> GlobalAlloc for BoundedAllocator<A> {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        allocate(layout.size());
        // SAFETY: the caller's.
        unsafe { self.0.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        allocate(layout.size());
        // SAFETY: the caller's.
        unsafe { self.0.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, place: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // Both exist at once if the inner allocator moves it.
        allocate(size);
        // SAFETY: the caller's.
        let moved = unsafe { self.0.realloc(place, layout, size) };
        free(layout.size());
        moved
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        free(layout.size());
        // SAFETY: the caller's.
        unsafe { self.0.dealloc(place, layout) };
    }
}
