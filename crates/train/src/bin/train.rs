//! The program `firebrick` under its other name: `cargo run --bin train`.
//!
//! Trade-off: a second link of the same code.

use std::process::ExitCode;

/// As in `main.rs`.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    firebrick_train::main()
}
