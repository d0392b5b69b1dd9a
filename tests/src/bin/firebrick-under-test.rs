//! The program `firebrick` for the tests here that start processes: cargo gives a test only the binaries of its own package.
//!
//! Trade-off: it is linked once more, without the program's allocator.

use std::process::ExitCode;

fn main() -> ExitCode {
    firebrick_train::main()
}
