//! Groups of linear modules on CUDA: `forward.rs` and `backward.rs` implement the operation, `few_rows.rs` its forward over few rows.
//!
//! The `Route` of a group (`backends/planning/route.rs`) determines how it is computed; every function here gets it
//! with the group (`modules.rs`). `operands/` converts weights to the form that a GEMM reads, `adapters/` implements
//! LoRA. `gated.rs`, `heads.rs` and `prologue_backward.rs` run before and after the GEMM.

mod adapters;
mod backward;
mod few_rows;
mod forward;
mod gated;
mod heads;
pub(super) mod modules;
pub(super) mod operands;
mod prologue_backward;
