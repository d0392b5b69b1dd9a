//! Groups of linear modules on CUDA: `forward.rs` and `backward.rs` are the operation, `few_rows.rs` its forward over few rows.
//!
//! Which way a group takes is its `Route` (`backends/planning/route.rs`), which every function here gets with the group (`modules.rs`).
//! `operands/` makes weights what a GEMM reads, `adapters/` has what LoRA adds. `gated.rs`, `heads.rs` and `prologue_backward.rs` are
//! what runs before and after the GEMM.
//! Trade-off: the ways are in several files.

mod adapters;
mod backward;
mod few_rows;
mod forward;
mod gated;
mod heads;
mod modules;
pub(super) mod operands;
mod prologue_backward;
