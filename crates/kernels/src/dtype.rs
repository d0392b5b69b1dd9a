//! Steps that cost nothing where there is nothing to do: casts to a dtype that is there, absent factors, no soft cap.

use burn_tensor::{DType, FloatDType, Tensor, backend::Backend};

/// Casts to f32.
pub(crate) fn to_f32<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> Tensor<B, D> {
    if tensor.dtype() == DType::F32 { tensor } else { tensor.cast(FloatDType::F32) }
}

/// Casts to `dtype`.
pub(crate) fn to_dtype<B: Backend, const D: usize>(tensor: Tensor<B, D>, dtype: DType) -> Tensor<B, D> {
    if tensor.dtype() == dtype { tensor } else { tensor.cast(dtype) }
}

/// Adds values to a sum, in f32, and rounds the new sum to the format of the old one.
pub(crate) fn added<B: Backend, const D: usize>(sum: Tensor<B, D>, values: Tensor<B, D>) -> Tensor<B, D> {
    let dtype = sum.dtype();
    to_dtype(to_f32(sum).add(to_f32(values)), dtype)
}

/// Multiplies values by their weights, if there are any.
pub(crate) fn weighted<B: Backend, const D: usize>(
    values: Tensor<B, D>,
    weights: Option<Tensor<B, D>>,
) -> Tensor<B, D> {
    match weights {
        Some(weights) => values.mul(weights),
        None => values,
    }
}

/// Adds other values, if there are any.
pub(crate) fn plus<B: Backend, const D: usize>(values: Tensor<B, D>, others: Option<Tensor<B, D>>) -> Tensor<B, D> {
    match others {
        Some(others) => values.add(others),
        None => values,
    }
}

/// Computes `cap * tanh(logits / cap)`, or returns the logits if there is no cap.
pub fn capped<B: Backend, const D: usize>(logits: Tensor<B, D>, soft_cap: Option<f64>) -> Tensor<B, D> {
    match soft_cap {
        Some(cap) => logits.div_scalar(cap).tanh().mul_scalar(cap),
        None => logits,
    }
}
