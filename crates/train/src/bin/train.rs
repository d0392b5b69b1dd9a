//! The program `firebrick` under its other name: `cargo run --bin train`.

use std::process::ExitCode;

use firebrick_data::BoundedAllocator;

/// The allocator of `main.rs`, for the same reason.
#[global_allocator]
static ALLOCATOR: BoundedAllocator<mimalloc::MiMalloc> = BoundedAllocator(mimalloc::MiMalloc);

fn main() -> ExitCode {
    firebrick_train::main()
}
