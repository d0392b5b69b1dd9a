//! Casts that cost nothing if the dtype is already right.

use burn_tensor::{DType, FloatDType, Tensor, backend::Backend};

/// Casts to f32.
pub(crate) fn to_f32<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> Tensor<B, D> {
    if tensor.dtype() == DType::F32 { tensor } else { tensor.cast(FloatDType::F32) }
}

/// Casts to `dtype`.
pub(crate) fn to_dtype<B: Backend, const D: usize>(tensor: Tensor<B, D>, dtype: DType) -> Tensor<B, D> {
    if tensor.dtype() == dtype { tensor } else { tensor.cast(dtype) }
}
