//! The program `firebrick` under its other name: `cargo run --bin train`.
//!
//! Trade-off: the same code is linked a second time.

use std::process::ExitCode;

/// The allocator of `main.rs`, for the same reason.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    firebrick_train::main()
}
