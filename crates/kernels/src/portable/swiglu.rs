//! SwiGLU: `y = g σ(g) u`. Backward, with `σ = σ(g)`: `dg = dy u σ (1 + g (1 - σ))`, `du = dy g σ`.

use burn_tensor::{Tensor, activation::sigmoid, backend::Backend};

use super::{to_dtype, to_f32};

/// See [`crate::Kernels::swiglu`].
pub fn forward<B: Backend>(gate_nf: Tensor<B, 2>, up_nf: Tensor<B, 2>) -> Tensor<B, 2> {
    let dtype = gate_nf.dtype();
    let gate_nf = to_f32(gate_nf);
    to_dtype(sigmoid(gate_nf.clone()).mul(gate_nf).mul(to_f32(up_nf)), dtype)
}

/// See [`crate::Kernels::swiglu_backward`].
pub fn backward<B: Backend>(
    gate_nf: Tensor<B, 2>,
    up_nf: Tensor<B, 2>,
    dy_nf: Tensor<B, 2>,
) -> (Tensor<B, 2>, Tensor<B, 2>) {
    let dtype = gate_nf.dtype();
    let (gate_nf, dy_nf) = (to_f32(gate_nf), to_f32(dy_nf));
    let sigma = sigmoid(gate_nf.clone());
    let silu = gate_nf.mul(sigma.clone());
    // 1 + g (1 - σ) times σ is σ + silu (1 - σ).
    let slope = silu.clone().mul(sigma.clone().neg().add_scalar(1.0)).add(sigma);
    let d_gate = dy_nf.clone().mul(to_f32(up_nf)).mul(slope);
    (to_dtype(d_gate, dtype), to_dtype(dy_nf.mul(silu), dtype))
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Plain, assert_close, backward as recorded_backward, leaf, random};
    use super::*;

    #[test]
    fn swiglu_backward_equals_autodiff() {
        let gate = random::<Plain, 2>(1, [6, 17]).mul_scalar(6.0);
        let (up, dy) = (random::<Plain, 2>(2, [6, 17]), random(3, [6, 17]));
        let (rg, ru) = (leaf(&gate), leaf(&up));
        let expected = recorded_backward(forward(rg.clone(), ru.clone()), &dy);
        let (d_gate, d_up) = backward(gate, up, dy);
        assert_close(d_gate, rg.grad(&expected).unwrap(), 1e-5);
        assert_close(d_up, ru.grad(&expected).unwrap(), 1e-5);
    }
}
