//! The program `firebrick`. Its code is in the library, so that the binary `train` shares it.
//!
//! Trade-off: an allocator is a choice of a program, so each binary names it.

use std::process::ExitCode;

/// glibc returns an operation's megabytes to the system and faults them in again for the next one; that took a quarter of a
/// CPU step (docs/decisions.md).
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    firebrick_train::main()
}
