//! A token file as 32-bit words: memory-mapped read-only, or the same words in memory.
//!
//! The only `unsafe` code of this crate. Not supported: big-endian machines (files are little-endian and used without
//! conversion), and protection against a process that truncates or rewrites a file while it is mapped: truncation ends
//! the process with SIGBUS. Firebrick never writes into a finished file. It only renames new files over it, which
//! leaves the mapped file intact.
#![allow(unsafe_code)]

use std::fmt::{Debug, Formatter, Result as FormatResult};
use std::fs::File;
use std::io::Result as IoResult;

use memmap2::Mmap;

#[cfg(target_endian = "big")]
compile_error!("token files are little-endian and read as they lie in memory");

/// The content of a token file.
pub(super) enum Words {
    /// Words that this process built.
    Memory(Vec<u32>),
    /// Paged in by the operating system on access and dropped when memory is short.
    Mapped(Mmap),
}

impl Words {
    /// Maps the whole file at its current length.
    pub(super) fn of_file(file: &File) -> IoResult<Self> {
        // SAFETY: the map is read-only. Its bytes stay the same as long as no process writes into the file or truncates
        // it; files are mapped only after their header says that they are finished, and from then on are only replaced
        // by renaming, which keeps the old file's pages. All bit patterns are valid `u8`s and `u32`s, so even a file
        // that another program changes gives wrong numbers, which indexing checks, and no invalid values.
        Ok(Self::Mapped(unsafe { Mmap::map(file)? }))
    }

    pub(super) fn bytes(&self) -> &[u8] {
        match self {
            // SAFETY: every bit pattern is a valid `u8`, and a byte needs no alignment.
            Self::Memory(words) => unsafe { words.align_to::<u8>() }.1,
            Self::Mapped(bytes) => bytes,
        }
    }

    /// Returns the bytes as words of four; up to three bytes at the end are left out.
    pub(super) fn words(&self) -> &[u32] {
        match self {
            Self::Memory(words) => words,
            Self::Mapped(bytes) => {
                // SAFETY: every bit pattern is a valid `u32`, and `align_to` keeps the middle aligned and within the bytes.
                let (before, words, _) = unsafe { bytes.align_to::<u32>() };
                assert!(before.is_empty(), "a map begins at a page boundary");
                words
            }
        }
    }
}

impl Debug for Words {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> FormatResult {
        write!(formatter, "{} bytes", self.bytes().len())
    }
}
