//! A file as memory: read-only, and seen as 32-bit words.
//!
//! The only `unsafe` of this crate. Gives up big-endian machines (files are little-endian and read as they lie) and
//! protection from someone who truncates or rewrites a file while it is mapped: a cut ends the process with SIGBUS.
//! Firebrick itself never writes into a finished file, it only renames new ones over it, which leaves the mapped one whole.
#![allow(unsafe_code)]

use std::fs::File;
use std::io::Result as IoResult;

use memmap2::Mmap;

#[cfg(target_endian = "big")]
compile_error!("token files are little-endian and read as they lie in memory");

/// The bytes of a file, paged in by the operating system as they are touched and dropped when memory is short.
#[derive(Debug)]
pub(super) struct Map(Mmap);

impl Map {
    /// Maps the whole file as it is now.
    pub(super) fn of(file: &File) -> IoResult<Self> {
        // SAFETY: the map is read-only. Its bytes stay the same as long as nobody writes into the file or cuts it;
        // files are mapped only after their header says that they are finished, and from then on are only replaced
        // by renaming, which keeps the old one's pages. Words of any value are valid `u8`s and `u32`s, so even a
        // file that a stranger changes gives wrong numbers, which indexing checks, and no invalid values.
        Ok(Self(unsafe { Mmap::map(file)? }))
    }

    /// All bytes.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// The same as words of four bytes; up to three bytes at the end are left out.
    pub(super) fn words(&self) -> &[u32] {
        // SAFETY: every bit pattern is a `u32`, and `align_to` itself keeps the middle aligned and within the bytes.
        let (before, words, _) = unsafe { self.0.align_to::<u32>() };
        assert!(before.is_empty(), "a map begins at a page");
        words
    }
}
