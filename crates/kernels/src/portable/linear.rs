//! Linear layer over a frozen or trained weight, with LoRA beside it.
//!
//! Forward: `y = x Wᵀ + s (x Aᵀ) Bᵀ`. Backward, with `u = x Aᵀ` and `t = dy B`:
//! `dx = dy W + s t A`, `dA = s tᵀ x`, `dB = s dyᵀ u`, `dW = dyᵀ x`.
//! A frozen weight needs neither `x` nor a copy of itself in backward beyond its stored form.

use burn_tensor::{DType, Tensor};

use super::{to_dtype, to_f32};
use crate::{Kernels, LinearGradients, LinearOutput, LoraPair, Weight};

/// The weight as a dense matrix in `dtype`, `[o, i]`.
pub(crate) fn dense<B: Kernels>(weight: &Weight<B>, dtype: DType) -> Tensor<B, 2> {
    match weight {
        Weight::Dense(values) => to_dtype(values.clone(), dtype),
        Weight::Nf4(packed) => to_dtype(B::nf4_dequantize(packed), dtype),
    }
}

/// See [`Kernels::lora_linear`].
pub fn forward<B: Kernels>(x_ni: Tensor<B, 2>, weight: &Weight<B>, lora: Option<&LoraPair<B>>) -> LinearOutput<B> {
    let dtype = x_ni.dtype();
    let y_no = x_ni.clone().matmul(dense(weight, dtype).transpose());
    let Some(lora) = lora else { return LinearOutput { y_no, xa_nr: None } };
    let xa_nr = x_ni.matmul(to_dtype(lora.a.clone(), dtype).transpose());
    // The scale goes onto B, the smallest of the matrices.
    let scaled_b = to_dtype(lora.b.clone().mul_scalar(lora.scale), dtype);
    let y_no = y_no.add(xa_nr.clone().matmul(scaled_b.transpose()));
    LinearOutput { y_no, xa_nr: Some(xa_nr) }
}

/// See [`Kernels::lora_linear_backward`].
pub fn backward<B: Kernels>(
    x_ni: Tensor<B, 2>,
    weight: &Weight<B>,
    lora: Option<(&LoraPair<B>, Tensor<B, 2>)>,
    dy_no: Tensor<B, 2>,
    dx_so_far: Option<Tensor<B, 2>>,
    weight_gradient: bool,
) -> LinearGradients<B> {
    let dtype = dy_no.dtype();
    let mut dx_ni = dy_no.clone().matmul(dense(weight, dtype));
    if let Some(earlier) = dx_so_far {
        dx_ni = dx_ni.add(earlier);
    }
    let weight_oi = weight_gradient.then(|| to_f32(dy_no.clone().transpose().matmul(x_ni.clone())));
    let Some((pair, xa_nr)) = lora else { return LinearGradients { dx_ni, lora: None, weight_oi } };
    let scaled_b = to_dtype(pair.b.clone().mul_scalar(pair.scale), dtype);
    let dxa_nr = dy_no.clone().matmul(scaled_b);
    let dx_ni = dx_ni.add(dxa_nr.clone().matmul(to_dtype(pair.a.clone(), dtype)));
    let da_ri = to_f32(dxa_nr.transpose().matmul(x_ni));
    let db_or = to_f32(dy_no.transpose().matmul(xa_nr)).mul_scalar(pair.scale);
    LinearGradients { dx_ni, lora: Some((da_ri, db_or)), weight_oi }
}

#[cfg(test)]
mod tests {
    use firebrick_precision::{DoubleQuant, nf4::quantize};

    use super::super::testing::{Plain, Recorded, assert_close, backward as recorded_backward, leaf, random};
    use super::*;

    const SCALE: f64 = 1.7;

    fn pair(rank: usize) -> LoraPair<Plain> {
        LoraPair { a: random(3, [rank, 24]), b: random(4, [40, rank]), scale: SCALE }
    }

    #[test]
    fn linear_backward_equals_autodiff_with_and_without_lora() {
        let (x, weight, dy) = (random::<Plain, 2>(1, [9, 24]), random(2, [40, 24]), random(5, [9, 40]));
        let pair = pair(4);
        let (rx, rw, ra, rb) = (leaf(&x), leaf(&weight), leaf(&pair.a), leaf(&pair.b));
        let recorded_pair = LoraPair::<Recorded> { a: ra.clone(), b: rb.clone(), scale: SCALE };
        let y = forward(rx.clone(), &Weight::Dense(rw.clone()), Some(&recorded_pair)).y_no;
        let expected = recorded_backward(y, &dy);

        let base = Weight::Dense(weight);
        let xa = forward(x.clone(), &base, Some(&pair)).xa_nr.unwrap();
        let found = backward(x.clone(), &base, Some((&pair, xa)), dy.clone(), None, true);
        assert_close(found.dx_ni, rx.grad(&expected).unwrap(), 1e-5);
        let (da, db) = found.lora.unwrap();
        assert_close(da, ra.grad(&expected).unwrap(), 1e-5);
        assert_close(db, rb.grad(&expected).unwrap(), 1e-5);
        assert_close(found.weight_oi.unwrap(), rw.grad(&expected).unwrap(), 1e-5);

        let plain = backward(x, &base, None, dy.clone(), None, false);
        assert!(plain.lora.is_none() && plain.weight_oi.is_none());
        assert_close(plain.dx_ni, dy.matmul(dense(&base, DType::F32)), 1e-5);
    }

    #[test]
    fn input_gradients_of_layers_that_share_an_input_add_up() {
        let (x, dy, earlier) = (random::<Plain, 2>(1, [5, 24]), random(2, [5, 40]), random::<Plain, 2>(3, [5, 24]));
        let base = Weight::Dense(random(4, [40, 24]));
        let alone = backward(x.clone(), &base, None, dy.clone(), None, false).dx_ni;
        let added = backward(x, &base, None, dy, Some(earlier.clone()), false).dx_ni;
        assert_close(added, alone.add(earlier), 1e-6);
    }

    #[test]
    fn nf4_weight_computes_what_its_dequantized_values_compute() {
        let device = Default::default();
        let values: Vec<f32> = random::<Plain, 1>(7, [40 * 24]).into_data().to_vec().unwrap();
        for double_quant in [DoubleQuant::On, DoubleQuant::Off] {
            let packed = quantize(&values, &[40, 24], double_quant).unwrap();
            let host = Tensor::<Plain, 1>::from_floats(packed.dequantize().as_slice(), &device).reshape([40, 24]);
            let base = Weight::Nf4(Plain::nf4_upload(&packed, &device));
            assert_close(dense(&base, DType::F32), host.clone(), 1e-6);
            let (x, dy) = (random::<Plain, 2>(8, [6, 24]), random(9, [6, 40]));
            let from_packed = backward(x.clone(), &base, None, dy.clone(), None, false).dx_ni;
            let from_dense = backward(x.clone(), &Weight::Dense(host.clone()), None, dy, None, false).dx_ni;
            assert_close(from_packed, from_dense, 1e-5);
            let y = forward(x.clone(), &base, None).y_no;
            assert_close(y, forward(x, &Weight::Dense(host), None).y_no, 1e-5);
        }
    }

    #[test]
    fn nf4_weight_holds_about_four_bits_a_value() {
        let values: Vec<f32> = random::<Plain, 1>(7, [256 * 512]).into_data().to_vec().unwrap();
        let packed = quantize(&values, &[256, 512], DoubleQuant::On).unwrap();
        let weight = Plain::nf4_upload(&packed, &Default::default());
        let bits = weight.bytes() as f64 * 8.0 / (256.0 * 512.0);
        assert!((4.12..4.14).contains(&bits), "{bits}");
    }
}
