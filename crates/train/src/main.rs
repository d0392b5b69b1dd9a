//! The program `firebrick`. Its code is in the library, so that the binary `train` shares it.

use std::process::ExitCode;

use firebrick_data::BoundedAllocator;

/// With glibc, an operation's megabytes return to the system and are faulted in again for the next one; that took a quarter of a CPU step
/// (docs/decisions.md). Hostile chat templates are stopped by their memory.
#[global_allocator]
static ALLOCATOR: BoundedAllocator<mimalloc::MiMalloc> = BoundedAllocator(mimalloc::MiMalloc);

fn main() -> ExitCode {
    firebrick_train::main()
}
