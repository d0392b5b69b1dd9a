//! Reads the number of a CubeCL memory handle, from a counter that never repeats a number in a process.
//!
//! CubeCL shows it only in the `Debug` text of a handle. A step of a 1B model needs it 6,000 times, and formatting 6,000 texts would
//! take a sixth of the host's time. So texts are compared once with the memory of some handles, and if the number is at the expected
//! place, it is read from there. It is written before a handle exists, and never again.
//!
//! If handles or counted pointers have another layout (a later CubeCL or Rust), the text is formatted each time. The text also contains the handle's
//! place, which CubeCL's queue thread writes when it reserves the memory. Inside a section that has happened, since a section waits for that thread
//! before it begins, and the engine requests the address of its own allocations before it reads the number. The count of users is read from memory as
//! well: bindings of operations in CubeCL's queue count as users but not as handles.
//! Trade-off: the comparison depends on how CubeCL 0.10 prints a handle.

#![allow(unsafe_code, reason = "a handle's number is read from its memory")]
#![deny(clippy::undocumented_unsafe_blocks)]

use std::fmt::{self, Write};
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};

use cubecl::server::Handle;
use cubecl::stream_id::StreamId;

/// Words of a handle's memory part: two counted pointers, to the data that all clones share and to their count.
const WORDS: usize = 2;
/// Words of counts before the data of a counted pointer (two in `Arc`).
const COUNTS: usize = 2;
/// Number of handles whose text and memory are compared.
const COMPARED: usize = 8;

/// Index of the word that points to the number; `None`: it is read from the text.
static WORD: LazyLock<Option<usize>> = LazyLock::new(find_word);

/// Finds where numbers are stored, once. This uses up some numbers, so it must not run in a section, where `watch` counts them.
pub(in crate::backends) fn prepare() {
    LazyLock::force(&WORD);
}

/// Identifies the tensor that has some memory, in a section.
#[cfg(feature = "cuda")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::backends) struct Owner {
    pub section: u64,
    pub number: usize,
    /// Number of tensors that had it before.
    pub uses: u64,
}

/// Returns the number of a handle; `None` if CubeCL no longer shows it in the expected place.
pub(in crate::backends) fn handle_number(handle: &Handle) -> Option<usize> {
    match *WORD {
        // SAFETY: `find_word` saw a number after the counts that this word points to, and all values of a type have one layout.
        Some(word) => Some(unsafe { words(handle)[word].add(COUNTS).read() }),
        None => number_in_text(handle),
    }
}

/// Counts the users of a handle's memory: handles, the pool, and operations whose operands CubeCL has not resolved yet,
/// which are submitted only after a wait for its queue. `None` if the number is not read from memory.
pub(super) fn users(handle: &Handle) -> Option<usize> {
    WORD.map(|word| {
        // SAFETY: `find_word` saw that this word points to the count of what has the memory, which all threads change as an atomic, and which
        // the handle keeps alive.
        let users = unsafe { AtomicUsize::from_ptr(words(handle)[word].cast_mut()) };
        users.load(Ordering::Acquire)
    })
}

/// Returns whether only this handle and the pool use its memory: no other handle, and no operation in CubeCL's queue.
pub(in crate::backends) fn is_only_handle(handle: &Handle) -> bool {
    handle.can_mut() && users(handle).is_none_or(|users| users <= 2)
}

/// Returns the pointers of a handle's memory.
///
/// # Safety
/// The memory part must consist of [`WORDS`] pointers.
unsafe fn words(handle: &Handle) -> [*const usize; WORDS] {
    // SAFETY: the caller's promise; pointers are copied, nothing is owned.
    unsafe { ptr::read((&raw const handle.memory).cast()) }
}

/// Compares the texts of some handles with their memory. Reads through a pointer only after texts and pointers look as expected.
fn find_word() -> Option<usize> {
    let handles: [Handle; COMPARED] = std::array::from_fn(|_| Handle::new(StreamId::current(), 1));
    let memory = &handles[0].memory;
    let has_two_words =
        (size_of_val(memory), align_of_val(memory)) == (WORDS * size_of::<usize>(), align_of::<usize>());
    if !has_two_words || !counts_come_first() || !handles.iter().all(shows_two_counted_parts) {
        return None;
    }
    // SAFETY: the memory has the size and alignment of two words.
    let pointers = |handle: &Handle| unsafe { words(handle) };
    // Pointers are aligned, equal in clones, and different between handles. Of consecutive numbers, not all are aligned.
    let is_pointer = |pointer: *const usize| !pointer.is_null() && pointer.is_aligned();
    let are_pointers = handles.iter().all(|handle| {
        let of_handle = pointers(handle);
        let is_own =
            |other: &Handle| ptr::eq(other, handle) || of_handle.iter().zip(pointers(other)).all(|(a, b)| *a != b);
        of_handle.into_iter().all(is_pointer) && pointers(&handle.clone()) == of_handle && handles.iter().all(is_own)
    });
    if !are_pointers {
        return None;
    }
    // A binding counts as one more user of the shared data, but not as a handle.
    let _bindings = handles.each_ref().map(|handle| handle.memory.clone().binding());
    // SAFETY: both are pointers to counts, of which the first is that of users. No other thread changes it: these handles are new.
    let counts = |handle: &Handle| pointers(handle).map(|pointer| unsafe { pointer.read() });
    let is_shared =
        |word: &usize| handles.iter().all(|handle| counts(handle)[*word] == 2 && counts(handle)[1 - word] == 1);
    let word = (0..WORDS).find(is_shared)?;
    // SAFETY: what handles share has a number in it, as their texts show, and as it is aligned like its counts, it takes at least a word.
    let number = |handle: &Handle| unsafe { pointers(handle)[word].add(COUNTS).read() };
    handles.iter().all(|handle| number_in_text(handle) == Some(number(handle))).then_some(word)
}

/// Returns whether a counted pointer points to [`COUNTS`] words of counts followed by the data.
fn counts_come_first() -> bool {
    let counted = Arc::new([0_usize; 2]);
    // SAFETY: an `Arc` of a sized type is one pointer; it is copied, and not read through.
    let pointer: *const usize = unsafe { ptr::read((&raw const counted).cast()) };
    pointer.wrapping_add(COUNTS) == Arc::as_ptr(&counted).cast()
}

/// Returns whether the text of a handle's memory shows a number that clones share, and a count of handles.
fn shows_two_counted_parts(handle: &Handle) -> bool {
    let text = format!("{:?}", handle.memory);
    let shared = "ManagedMemoryHandle { descriptor: ManagedMemoryDescriptor { id: ManagedMemoryId { value: ";
    text.starts_with(shared) && text.ends_with(", handle_count: () }")
}

fn number_in_text(handle: &Handle) -> Option<usize> {
    let mut first = FirstNumber(None);
    // The error only ends the formatting early.
    let _ = write!(first, "{:?}", handle.memory);
    first.0
}

/// Takes the first number out of formatted text and stops the formatting there.
struct FirstNumber(Option<usize>);

impl Write for FirstNumber {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        if text.as_bytes().first().is_some_and(u8::is_ascii_digit) {
            self.0 = text.parse().ok();
            return Err(fmt::Error);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_handle_has_a_number_of_its_own_that_its_clones_share() {
        let new = || Handle::new(StreamId::current(), 1);
        let (first, second) = (new(), new());
        let number = handle_number(&first).expect("CubeCL shows the number of a handle");
        assert_eq!(handle_number(&first.clone()), Some(number));
        assert!(handle_number(&second).is_some_and(|other| other > number));
    }

    #[test]
    fn clones_and_bindings_are_users() {
        let handle = Handle::new(StreamId::current(), 1);
        assert_eq!(users(&handle), Some(1), "no pool has it");
        let clone = handle.clone();
        let binding = handle.clone().binding();
        assert_eq!(users(&handle), Some(3));
        assert!(handle.can_mut() && !is_only_handle(&handle), "an operation waits");
        drop(binding);
        assert!(is_only_handle(&handle));
        drop(clone);
    }

    #[test]
    fn the_number_that_is_read_is_the_one_in_the_text() {
        assert!(WORD.is_some(), "this CubeCL lays handles out as the head of this file says");
        for _ in 0..1000 {
            let handle = Handle::new(StreamId::current(), 1).offset_start(4);
            assert_eq!(handle_number(&handle), number_in_text(&handle));
        }
    }
}
