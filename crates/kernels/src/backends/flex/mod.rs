//! CPU through burn-flex, with own loops for what is neither a matrix product nor a plain sum.
//!
//! burn-flex walks non-contiguous tensors element by element on one core and allocates for each arithmetic step; in the
//! portable bodies that took three quarters of a training step (docs/decisions.md). Here each operation is one pass over
//! contiguous rows, on all cores, compiled for the vector extension that the machine has. Tensors that are not f32 take the
//! portable bodies.

mod attention;
mod host;
mod lanes;
mod launch_gemm;
mod optimizer;
mod rows;

pub use burn_flex::Flex;
use burn_tensor::{DType, Int, Tensor};

use crate::portable;
use crate::{AdamW, AttentionOutput, Documents, Kernels, Nf4Weight, RotaryTables};

/// Whether the own loops can take this tensor.
fn is_f32<const D: usize>(tensor: &Tensor<Flex, D>) -> bool {
    tensor.dtype() == DType::F32
}

impl Kernels for Flex {
    fn nf4_dequantize(weight: &Nf4Weight<Self>) -> Tensor<Self, 2> {
        rows::nf4_dequantize(weight)
    }

    fn rms_norm(x_nd: Tensor<Self, 2>, weight_d: Tensor<Self, 1>, epsilon: f64) -> Tensor<Self, 2> {
        if is_f32(&x_nd) {
            rows::rms_norm(x_nd, weight_d, epsilon)
        } else {
            portable::norm::forward(x_nd, weight_d, epsilon)
        }
    }

    fn rms_norm_backward(
        x_nd: Tensor<Self, 2>,
        weight_d: Tensor<Self, 1>,
        epsilon: f64,
        dy_nd: Tensor<Self, 2>,
        dx_residual: Option<Tensor<Self, 2>>,
        weight_gradient: bool,
    ) -> (Tensor<Self, 2>, Option<Tensor<Self, 1>>) {
        if is_f32(&x_nd) {
            rows::rms_norm_backward(x_nd, weight_d, epsilon, dy_nd, dx_residual, weight_gradient)
        } else {
            portable::norm::backward(x_nd, weight_d, epsilon, dy_nd, dx_residual, weight_gradient)
        }
    }

    fn rotary(x_nhk: Tensor<Self, 3>, tables: &RotaryTables<Self>) -> Tensor<Self, 3> {
        if is_f32(&x_nhk) { rows::rotary(x_nhk, tables, 1.0) } else { portable::rotary::forward(x_nhk, tables) }
    }

    fn rotary_backward(dy_nhk: Tensor<Self, 3>, tables: &RotaryTables<Self>) -> Tensor<Self, 3> {
        if is_f32(&dy_nhk) { rows::rotary(dy_nhk, tables, -1.0) } else { portable::rotary::backward(dy_nhk, tables) }
    }

    fn packed_attention(
        q_nhk: Tensor<Self, 3>,
        k_ngk: Tensor<Self, 3>,
        v_ngk: Tensor<Self, 3>,
        documents: &Documents<Self>,
    ) -> AttentionOutput<Self> {
        if is_f32(&q_nhk) {
            attention::forward(q_nhk, k_ngk, v_ngk, documents)
        } else {
            portable::attention::forward(q_nhk, k_ngk, v_ngk, documents)
        }
    }

    fn packed_attention_backward(
        q_nhk: Tensor<Self, 3>,
        k_ngk: Tensor<Self, 3>,
        v_ngk: Tensor<Self, 3>,
        output: &AttentionOutput<Self>,
        do_nhk: Tensor<Self, 3>,
        documents: &Documents<Self>,
    ) -> (Tensor<Self, 3>, Tensor<Self, 3>, Tensor<Self, 3>) {
        if is_f32(&q_nhk) {
            attention::backward(q_nhk, k_ngk, v_ngk, output, do_nhk, documents)
        } else {
            portable::attention::backward(q_nhk, k_ngk, v_ngk, output, do_nhk, documents)
        }
    }

    fn swiglu(gate_nf: Tensor<Self, 2>, up_nf: Tensor<Self, 2>) -> Tensor<Self, 2> {
        if is_f32(&gate_nf) { rows::swiglu(gate_nf, up_nf) } else { portable::swiglu::forward(gate_nf, up_nf) }
    }

    fn swiglu_backward(
        gate_nf: Tensor<Self, 2>,
        up_nf: Tensor<Self, 2>,
        dy_nf: Tensor<Self, 2>,
    ) -> (Tensor<Self, 2>, Tensor<Self, 2>) {
        if is_f32(&gate_nf) {
            rows::swiglu_backward(gate_nf, up_nf, dy_nf)
        } else {
            portable::swiglu::backward(gate_nf, up_nf, dy_nf)
        }
    }

    fn cross_entropy(
        logits_cv: Tensor<Self, 2>,
        targets_c: Tensor<Self, 1, Int>,
        gradient_scale: Option<f64>,
    ) -> (Tensor<Self, 1>, Option<Tensor<Self, 2>>) {
        rows::cross_entropy(logits_cv, targets_c, gradient_scale)
    }

    fn adamw(
        parameter: Tensor<Self, 1>,
        gradient: Tensor<Self, 1>,
        moments: (Tensor<Self, 1>, Tensor<Self, 1>),
        gradient_scale: Tensor<Self, 1>,
        hyper: &AdamW,
    ) -> (Tensor<Self, 1>, (Tensor<Self, 1>, Tensor<Self, 1>)) {
        optimizer::adamw(parameter, gradient, moments, gradient_scale, hyper)
    }
}
