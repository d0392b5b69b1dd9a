//! The portable bodies: each operation in ordinary Burn tensor ops, forward and hand-written backward.
//!
//! They are the default of every backend and the oracle of every faster version. They give up fusion: each arithmetic step is
//! a pass over memory. They keep the memory bounds that the training step relies on (no full logits, nothing of `n²` outside
//! one document).

pub mod attention;
pub mod cross_entropy;
pub mod embedding;
pub mod linear;
pub mod nf4;
pub mod norm;
pub mod optimizer;
pub mod rotary;
pub mod swiglu;
#[cfg(test)]
pub(crate) mod testing;

use burn_tensor::{DType, FloatDType, Tensor, backend::Backend};

/// The tensor in f32; free if it is already.
pub(crate) fn to_f32<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> Tensor<B, D> {
    if tensor.dtype() == DType::F32 { tensor } else { tensor.cast(FloatDType::F32) }
}

/// The tensor in `dtype`; free if it is already.
pub(crate) fn to_dtype<B: Backend, const D: usize>(tensor: Tensor<B, D>, dtype: DType) -> Tensor<B, D> {
    if tensor.dtype() == dtype { tensor } else { tensor.cast(dtype) }
}
