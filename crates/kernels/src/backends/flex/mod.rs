//! CPU through burn-flex, with loops of our own for what is neither a GEMM nor a plain sum.
//!
//! burn-flex walks non-contiguous tensors element by element on one core and allocates for each arithmetic step; in the reference
//! bodies that took three quarters of a training step (docs/decisions.md). Here each operation is one pass over contiguous rows, on
//! all cores, compiled for the vector extension that the machine has.
//! Trade-off: only f32 has loops; tensors of other dtypes take the reference bodies.

mod attention;
mod gemm;
mod host;
mod lanes;
mod linear;
mod loss;
mod norm;
mod optimizer;
mod weights;

pub use burn_flex::Flex;

use crate::{EmbeddingOps, Kernels, MemoryOps, MoeOps};

impl MemoryOps for Flex {}
impl MoeOps for Flex {}
impl EmbeddingOps for Flex {}
impl Kernels for Flex {}
