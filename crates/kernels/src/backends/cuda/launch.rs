//! Every launch of this backend ends here: the one place where an address becomes a device access.
//!
//! What makes them sound, for all of them: addresses come from tensors that the caller holds (or from scratch memory, which
//! lives as long as the engine), sizes and strides are those of the same tensors, and everything runs on one stream in the
//! order of the calls, so memory that is given back after a call is reused only by later work of the same stream.

#![allow(unsafe_code, reason = "launching device work is unsafe; the launch files are where it is answered for")]

use burn_tensor::DType;
use firebrick_cuda::{Arguments, LaunchShape, Matmul, Pointers};

use super::engine::Engine;
use super::failure::check;
use super::gemm::Block;
use super::program::Source;
use super::trace::Cost;

/// Which kernel, and how much it moves.
#[derive(Clone, Copy, Debug)]
pub(super) struct Launch {
    pub source: Source,
    pub dtype: DType,
    pub name: &'static str,
    pub shape: LaunchShape,
    /// Bytes that cannot be avoided, for the trace.
    pub bytes: usize,
}

impl Engine {
    /// Launches a kernel on our stream.
    ///
    /// # Safety
    /// The arguments are those that the kernel of this name declares, in its order; every address is valid for what the
    /// kernel reads and writes there, until the stream has run it.
    pub(super) unsafe fn launch(&self, launch: Launch, arguments: &Arguments) {
        let cost = Cost { bytes: launch.bytes as f64, ..Cost::default() };
        // SAFETY: handed on to the caller.
        unsafe { self.launch_with_cost(launch, cost, arguments) };
    }

    /// The same, for a kernel whose work is counted in products.
    ///
    /// # Safety
    /// As for [`Engine::launch`].
    pub(super) unsafe fn launch_with_cost(&self, launch: Launch, cost: Cost, arguments: &Arguments) {
        let kernel = self.programs.kernel(launch.source, launch.dtype, launch.name);
        self.traced(launch.name, cost, || {
            if launch.shape.shared_bytes > 48 << 10 {
                check(launch.name, kernel.set_dynamic_shared_memory(launch.shape.shared_bytes));
            }
            // SAFETY: the caller's promise is the one that is asked for.
            check(launch.name, unsafe { kernel.launch(self.stream(), launch.shape, arguments) });
        });
    }

    /// Runs a planned product on our stream.
    pub(super) fn launch_matmul(&self, matmul: &Matmul, alpha: f32, beta: f32, [a, b, c, d]: [Block; 4]) {
        let pointers = Pointers::new(a.address, b.address, c.address, d.address);
        // SAFETY: the blocks lie in tensors or scratch memory that the caller holds, with the strides that the descriptor
        // repeats; the library reads and writes nothing else but its workspace.
        let ran = unsafe { self.blas.borrow().run(self.stream(), matmul, alpha, beta, pointers) };
        check("a matrix product", ran);
    }
}
