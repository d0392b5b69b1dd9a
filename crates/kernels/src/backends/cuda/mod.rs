//! NVIDIA GPUs: tensors in CubeCL's memory, GEMMs by cuBLASLt, attention by cuDNN, everything else by hand-written CUDA C++.
//!
//! All work goes to one stream of the engine, which meets CubeCL's stream only at the edges of a section (`section.rs`). Files are
//! named by subject; each implements the trait of its subject for [`Cuda`] and launches the kernels in `source/`.
//! `memory_lines.rs` is host arithmetic and compiles without the cargo feature `cuda`.
//! Trade-off: two threads may use one device, but only one of them can be inside a section at a time.

#![cfg_attr(
    feature = "cuda",
    allow(unsafe_code, reason = "launching device work is unsafe; this folder is where it is justified")
)]
#![deny(clippy::undocumented_unsafe_blocks)]

pub mod memory_lines;

#[cfg(feature = "cuda")]
mod address;
#[cfg(feature = "cuda")]
mod attention;
#[cfg(feature = "cuda")]
mod columns;
#[cfg(feature = "cuda")]
mod comm;
#[cfg(feature = "cuda")]
mod copy;
#[cfg(feature = "cuda")]
mod cudnn;
#[cfg(feature = "cuda")]
mod embedding;
#[cfg(feature = "cuda")]
mod engine;
#[cfg(feature = "cuda")]
mod failure;
#[cfg(feature = "cuda")]
mod flash;
#[cfg(feature = "cuda")]
mod gated;
#[cfg(feature = "cuda")]
mod gemm;
#[cfg(feature = "cuda")]
mod heads;
#[cfg(feature = "cuda")]
mod launch;
#[cfg(feature = "cuda")]
mod linear;
#[cfg(feature = "cuda")]
mod linear_backward;
#[cfg(feature = "cuda")]
mod loss;
#[cfg(feature = "cuda")]
mod memory;
#[cfg(feature = "cuda")]
mod norm;
#[cfg(feature = "cuda")]
mod offload;
#[cfg(feature = "cuda")]
mod optimizer;
#[cfg(feature = "cuda")]
mod program;
#[cfg(feature = "cuda")]
mod quantize;
#[cfg(feature = "cuda")]
mod scratch;
#[cfg(feature = "cuda")]
mod section;
#[cfg(feature = "cuda")]
mod self_test;
#[cfg(feature = "cuda")]
mod tables;
#[cfg(feature = "cuda")]
mod tensor;
#[cfg(feature = "cuda")]
mod trace;
#[cfg(feature = "cuda")]
mod weights;

#[cfg(feature = "cuda")]
pub use engine::{Cuda, probe, refuse_cudnn, scratch_bytes};
#[cfg(feature = "cuda")]
pub use failure::DeviceFailure;

#[cfg(feature = "cuda")]
impl crate::Kernels for Cuda {
    fn self_test(device: &Self::Device, dtype: burn_tensor::DType, head_dim: usize) -> Option<Result<(), String>> {
        Some(self_test::run(device, dtype, head_dim))
    }

    fn trace<R>(device: &Self::Device, work: impl FnOnce() -> R) -> (R, Vec<crate::TracedOperation>) {
        let engine = engine::engine(device);
        engine.trace.start();
        let result = work();
        (result, engine.trace.finish(&engine))
    }
}
