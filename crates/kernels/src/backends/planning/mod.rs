//! Host arithmetic that a plan needs of a backend before there is a device: the memory of a run, and how some of its work will be done.
//!
//! It is compiled even if the backend is not. `estimate.rs` collects the lines of a backend: `cuda.rs` has those of the CUDA engine,
//! `reference.rs` those of the reference bodies, `cpu.rs` those of a process on the CPU, and `evaluation.rs` those of the work between
//! steps. `adapters.rs`, `flash.rs`, `layer.rs`, `passes.rs`, `route.rs`, `rows.rs` and `wide.rs` are about CUDA alone; its engine in
//! `backends/cuda/` decides by `route.rs`, and lays out memory and launches kernels by `rows.rs`, `passes.rs`, `flash.rs` and `wide.rs`.
//! Trade-off: CUDA allocations are stated here and made there; measurements compare the two.

mod adapters;
mod cpu;
pub(super) mod cuda;
mod estimate;
mod evaluation;
pub(super) mod flash;
mod layer;
pub(super) mod passes;
mod reference;
pub(super) mod route;
pub(super) mod rows;
pub(super) mod wide;

pub use cuda::converted_weights_bytes;
pub use estimate::estimate;
pub use route::PLANNED_SHARED_BYTES;
pub use rows::fp8_refusal;
