//! What a plan asks of a backend before there is a device: the memory of a run, and how some of its work will be done.
//!
//! All of it is host arithmetic, compiled whether or not the backend is. `estimate.rs` asks for the lines of the backend: `cuda.rs` has those
//! of the CUDA engine, `reference.rs` those of the reference bodies, `cpu.rs` what a process on the CPU adds to them, `evaluation.rs` those of
//! what is computed between steps. `adapters.rs`, `layer.rs`, `passes.rs`, `route.rs` and `rows.rs` are about CUDA alone; its engine in
//! `backends/cuda/` decides by `route.rs`, and lays memory out and launches by `rows.rs` and `passes.rs`.
//! Trade-off: what CUDA allocates is stated here and allocated there; measurements compare the two.

mod adapters;
mod cpu;
pub(super) mod cuda;
mod estimate;
mod evaluation;
pub(super) mod layer;
pub(super) mod passes;
mod reference;
pub(super) mod route;
pub(super) mod rows;

pub use cuda::converted_weights_bytes;
pub use estimate::estimate;
pub use rows::fp8_refusal;
