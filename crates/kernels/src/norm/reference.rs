//! RMSNorm in ordinary Burn operations: `y = x * rstd * w` with `rstd = 1 / sqrt(mean(x²) + eps)` and `w` the weight plus its offset,
//! in f32 whatever the input.
//!
//! Backward, with `x̂ = x * rstd` and `g = dy * w`: `dx = rstd * (g - x̂ * mean(g * x̂))`, `dw = Σ dy * x̂`.
//! Trade-off: only the input is saved, and the backward recomputes `rstd` with one more reduction.

use burn_tensor::{Tensor, backend::Backend};

use super::NormWeight;
use crate::dtype::{plus, to_dtype, to_f32};

fn reciprocal_deviation<B: Backend>(x_nd: &Tensor<B, 2>, epsilon: f64) -> Tensor<B, 2> {
    x_nd.clone().square().mean_dim(1).add_scalar(epsilon).sqrt().recip()
}

/// Returns weight plus offset, `[1, d]`.
fn factors<B: Backend>(norm: &NormWeight<B>) -> Tensor<B, 2> {
    let weight_d = to_f32(norm.weight.clone());
    if norm.offset == 0.0 { weight_d.unsqueeze() } else { weight_d.add_scalar(norm.offset).unsqueeze() }
}

/// Implements [`crate::NormOps::rms_norm`] without a residual.
pub fn forward<B: Backend>(x_nd: Tensor<B, 2>, norm: &NormWeight<B>) -> Tensor<B, 2> {
    let dtype = x_nd.dtype();
    let x_nd = to_f32(x_nd);
    let rstd_n1 = reciprocal_deviation(&x_nd, norm.epsilon);
    to_dtype(x_nd.mul(rstd_n1).mul(factors(norm)), dtype)
}

/// Implements [`crate::NormOps::rms_norm_backward`].
pub fn backward<B: Backend>(
    x_nd: Tensor<B, 2>,
    norm: &NormWeight<B>,
    dy_nd: Tensor<B, 2>,
    d_residual_nd: Option<Tensor<B, 2>>,
) -> (Tensor<B, 2>, Option<Tensor<B, 1>>) {
    let dtype = x_nd.dtype();
    let (x_nd, dy_nd) = (to_f32(x_nd), to_f32(dy_nd));
    let rstd_n1 = reciprocal_deviation(&x_nd, norm.epsilon);
    let normed_nd = x_nd.mul(rstd_n1.clone());
    let d_weight = norm.trains.then(|| dy_nd.clone().mul(normed_nd.clone()).sum_dim(0).squeeze_dim(0));
    let g_nd = dy_nd.mul(factors(norm));
    let projection_n1 = g_nd.clone().mul(normed_nd.clone()).mean_dim(1);
    let dx_nd = g_nd.sub(normed_nd.mul(projection_n1)).mul(rstd_n1);
    (to_dtype(plus(dx_nd, d_residual_nd.map(to_f32)), dtype), d_weight)
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::testing::{Plain, Recorded, assert_close, backward as recorded_backward, leaf, random};

    #[test]
    fn rms_norm_backward_equals_autodiff() {
        let (x, weight, dy) = (random::<Plain, 2>(1, [7, 33]), random::<Plain, 1>(2, [33]), random(3, [7, 33]));
        for offset in [0.0, 1.0] {
            let (rx, rw) = (leaf(&x), leaf(&weight));
            let recorded = NormWeight::<Recorded> { weight: rw.clone(), offset, epsilon: 1e-5, trains: true };
            let expected = recorded_backward(forward(rx.clone(), &recorded), &dy);
            let residual = random::<Plain, 2>(4, [7, 33]);
            let norm = NormWeight { weight: weight.clone(), offset, epsilon: 1e-5, trains: true };
            let (dx, dw) = backward(x.clone(), &norm, dy.clone(), Some(residual.clone()));
            assert_close(dx, rx.grad(&expected).unwrap().add(residual), 1e-5);
            assert_close(dw.unwrap(), rw.grad(&expected).unwrap(), 1e-5);
        }
    }

    #[test]
    fn rms_norm_of_a_constant_row_is_its_sign_times_the_weight() {
        let x = Tensor::<Plain, 2>::full([2, 8], -3.0, &Default::default());
        let weight = random::<Plain, 1>(5, [8]);
        let norm = |weight| NormWeight { weight, offset: 0.0, epsilon: 0.0, trains: false };
        let y = forward(x.clone(), &norm(weight.clone()));
        assert_close(y.clone(), weight.clone().neg().unsqueeze::<2>().expand([2, 8]), 1e-6);
        let less_one = NormWeight { offset: 1.0, ..norm(weight.sub_scalar(1.0)) };
        assert_close(forward(x, &less_one), y, 1e-6);
    }
}
