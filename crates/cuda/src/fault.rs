//! A failure of the device on purpose, for tests of what a job does when one of its cards fails.
//!
//! Trade-off: the context is lost with everything in it, so only a process that may end can use this.

use std::sync::Arc;

use crate::{Arguments, Compiler, Context, CudaError, Driver, LaunchShape, Module, Program, Stream};

const SOURCE: &str = r#"extern "C" __global__ void trap() { asm("trap;"); }"#;

/// Runs a kernel that traps in the primary context of a device. It and every later call of the process in that context fail.
/// Errors: the kernel cannot be compiled or launched.
pub fn fail_device(ordinal: usize) -> Result<(), CudaError> {
    let driver = Driver::load()?;
    let context = Context::retain(&driver, ordinal)?;
    let stream = Arc::new(Stream::new(&context)?);
    let program = Program { name: "trap.cu".to_owned(), source: SOURCE.to_owned(), options: Vec::new() };
    let image = Compiler::load()?.compile(&program, driver.device(ordinal)?.compute_capability)?;
    let kernel = Module::load(&context, &image)?.kernel("trap")?;
    let shape = LaunchShape { grid: [1, 1, 1], block: [1, 1, 1], shared_bytes: 0, starts_early: false };
    // SAFETY: the kernel takes no arguments and touches no memory.
    unsafe { kernel.launch(&stream, shape, &Arguments::new()) }
}
