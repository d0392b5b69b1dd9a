//! Linear layer over a frozen or trained weight, with LoRA beside it.
//!
//! Forward: `y = x Wᵀ + s (x Aᵀ) Bᵀ`. Backward, with `u = x Aᵀ` and `t = dy B`:
//! `dx = dy W + s t A`, `dA = s tᵀ x`, `dB = s dyᵀ u`, `dW = dyᵀ x`. `u` is computed again from the input: its r values a
//! token cost less than keeping them. A frozen weight needs no copy of itself in backward beyond its stored form.

use burn_tensor::{DType, Tensor};

use super::{to_dtype, to_f32};
use crate::{Heads, Kernels, LoraPair, Projection, ProjectionGradients, RotaryTables, SwigluProjectGradients, Weight};

/// The weight as a dense matrix in `dtype`, `[o, i]`.
pub(crate) fn dense<B: Kernels>(weight: &Weight<B>, dtype: DType) -> Tensor<B, 2> {
    match weight {
        Weight::Dense(values) => to_dtype(values.clone(), dtype),
        Weight::Nf4(packed) => to_dtype(B::nf4_dequantize(packed), dtype),
    }
}

/// One of the outputs of [`Kernels::project`].
pub fn forward<B: Kernels>(x_ni: Tensor<B, 2>, projection: &Projection<B>) -> Tensor<B, 2> {
    let dtype = x_ni.dtype();
    let y_no = x_ni.clone().matmul(dense(&projection.weight, dtype).transpose());
    let Some(lora) = &projection.lora else { return y_no };
    y_no.add(low_rank(x_ni, lora).matmul(scaled_b(lora, dtype).transpose()))
}

/// `x Aᵀ`, `[n, r]`.
fn low_rank<B: Kernels>(x_ni: Tensor<B, 2>, lora: &LoraPair<B>) -> Tensor<B, 2> {
    let dtype = x_ni.dtype();
    x_ni.matmul(to_dtype(lora.a.clone(), dtype).transpose())
}

/// The scale goes onto B, the smallest of the matrices.
fn scaled_b<B: Kernels>(lora: &LoraPair<B>, dtype: DType) -> Tensor<B, 2> {
    to_dtype(lora.b.clone().mul_scalar(lora.scale), dtype)
}

/// See [`Kernels::project_backward`].
pub fn backward<B: Kernels>(
    x_ni: Tensor<B, 2>,
    projections: &[Projection<B>],
    dys_no: Vec<Tensor<B, 2>>,
) -> (Tensor<B, 2>, Vec<ProjectionGradients<B>>) {
    assert_eq!(projections.len(), dys_no.len(), "each projection has one output, and each output one gradient");
    let mut dx_so_far: Option<Tensor<B, 2>> = None;
    let mut gradients = Vec::with_capacity(projections.len());
    for (projection, dy_no) in projections.iter().zip(dys_no) {
        let (dx_ni, gradient) = backward_of_one(x_ni.clone(), projection, dy_no);
        dx_so_far = Some(match dx_so_far {
            Some(earlier) => earlier.add(dx_ni),
            None => dx_ni,
        });
        gradients.push(gradient);
    }
    (dx_so_far.expect("a group of projections has at least one"), gradients)
}

fn backward_of_one<B: Kernels>(
    x_ni: Tensor<B, 2>,
    projection: &Projection<B>,
    dy_no: Tensor<B, 2>,
) -> (Tensor<B, 2>, ProjectionGradients<B>) {
    let dtype = dy_no.dtype();
    let dx_ni = dy_no.clone().matmul(dense(&projection.weight, dtype));
    let weight_oi = projection.weight_gradient.then(|| to_f32(dy_no.clone().transpose().matmul(x_ni.clone())));
    let Some(pair) = &projection.lora else { return (dx_ni, ProjectionGradients { lora: None, weight_oi }) };
    let dxa_nr = dy_no.clone().matmul(scaled_b(pair, dtype));
    let dx_ni = dx_ni.add(dxa_nr.clone().matmul(to_dtype(pair.a.clone(), dtype)));
    let xa_nr = low_rank(x_ni.clone(), pair);
    let da_ri = to_f32(dxa_nr.transpose().matmul(x_ni));
    let db_or = to_f32(dy_no.transpose().matmul(xa_nr)).mul_scalar(pair.scale);
    (dx_ni, ProjectionGradients { lora: Some((da_ri, db_or)), weight_oi })
}

/// See [`Kernels::project_heads`].
pub fn heads<B: Kernels>(
    x_nd: Tensor<B, 2>,
    projections: &[Projection<B>; 3],
    tables: &RotaryTables<B>,
    head_dim: usize,
) -> Heads<B> {
    let outputs = B::project(x_nd, projections);
    let [q, k, v]: [Tensor<B, 2>; 3] = outputs.try_into().expect("three projections have three outputs");
    let split = |x: Tensor<B, 2>| {
        let [tokens, width] = x.dims();
        x.reshape([tokens, width / head_dim, head_dim])
    };
    Heads { q_nhk: B::rotary(split(q), tables), k_ngk: B::rotary(split(k), tables), v_ngk: split(v) }
}

/// See [`Kernels::project_heads_backward`].
pub fn heads_backward<B: Kernels>(
    x_nd: Tensor<B, 2>,
    projections: &[Projection<B>; 3],
    tables: &RotaryTables<B>,
    d_heads: Heads<B>,
) -> (Tensor<B, 2>, Vec<ProjectionGradients<B>>) {
    let join = |x: Tensor<B, 3>| {
        let [tokens, heads, head_dim] = x.dims();
        x.reshape([tokens, heads * head_dim])
    };
    let dq = B::rotary_backward(d_heads.q_nhk, tables);
    let dk = B::rotary_backward(d_heads.k_ngk, tables);
    B::project_backward(x_nd, projections, vec![join(dq), join(dk), join(d_heads.v_ngk)])
}

/// See [`Kernels::swiglu_project_backward`].
pub fn swiglu_backward<B: Kernels>(
    gate_nf: Tensor<B, 2>,
    up_nf: Tensor<B, 2>,
    activated_nf: Option<Tensor<B, 2>>,
    projection: &Projection<B>,
    dy_nd: Tensor<B, 2>,
) -> SwigluProjectGradients<B> {
    let activated_nf = activated_nf.unwrap_or_else(|| B::swiglu(gate_nf.clone(), up_nf.clone()));
    let (d_activated, gradients) = B::project_backward(activated_nf, std::slice::from_ref(projection), vec![dy_nd]);
    let (d_gate_nf, d_up_nf) = B::swiglu_backward(gate_nf, up_nf, d_activated);
    let projection = gradients.into_iter().next().expect("one projection has one set of gradients");
    SwigluProjectGradients { d_gate_nf, d_up_nf, projection }
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

    fn projection<B: Kernels>(weight: Weight<B>, lora: Option<LoraPair<B>>) -> Projection<B> {
        Projection { weight, lora, weight_gradient: false }
    }

    #[test]
    fn linear_backward_equals_autodiff_with_and_without_lora() {
        let (x, weight, dy) = (random::<Plain, 2>(1, [9, 24]), random(2, [40, 24]), random(5, [9, 40]));
        let pair = pair(4);
        let (rx, rw, ra, rb) = (leaf(&x), leaf(&weight), leaf(&pair.a), leaf(&pair.b));
        let recorded_pair = LoraPair::<Recorded> { a: ra.clone(), b: rb.clone(), scale: SCALE };
        let recorded = projection(Weight::Dense(rw.clone()), Some(recorded_pair));
        let expected = recorded_backward(forward(rx.clone(), &recorded), &dy);

        let base = Weight::Dense(weight);
        let trained = Projection { weight_gradient: true, ..projection(base.clone(), Some(pair)) };
        let (dx, found) = backward_of_one(x.clone(), &trained, dy.clone());
        assert_close(dx, rx.grad(&expected).unwrap(), 1e-5);
        let (da, db) = found.lora.unwrap();
        assert_close(da, ra.grad(&expected).unwrap(), 1e-5);
        assert_close(db, rb.grad(&expected).unwrap(), 1e-5);
        assert_close(found.weight_oi.unwrap(), rw.grad(&expected).unwrap(), 1e-5);

        let (dx, plain) = backward_of_one(x, &projection(base.clone(), None), dy.clone());
        assert!(plain.lora.is_none() && plain.weight_oi.is_none());
        assert_close(dx, dy.matmul(dense(&base, DType::F32)), 1e-5);
    }

    #[test]
    fn input_gradients_of_layers_that_share_an_input_add_up() {
        let (x, first, second) = (random::<Plain, 2>(1, [5, 24]), random(2, [5, 40]), random(3, [5, 16]));
        let group = [
            projection(Weight::Dense(random(4, [40, 24])), None),
            projection(Weight::Dense(random(5, [16, 24])), None),
        ];
        let alone = |index: usize, dy: &Tensor<Plain, 2>| backward_of_one(x.clone(), &group[index], dy.clone()).0;
        let expected = alone(0, &first).add(alone(1, &second));
        let (together, gradients) = backward(x.clone(), &group, vec![first, second]);
        assert_eq!(gradients.len(), 2);
        assert_close(together, expected, 1e-6);
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
            let (packed, dense) = (projection(base, None), projection(Weight::Dense(host), None));
            let from_packed = backward_of_one(x.clone(), &packed, dy.clone()).0;
            let from_dense = backward_of_one(x.clone(), &dense, dy).0;
            assert_close(from_packed, from_dense, 1e-5);
            assert_close(forward(x.clone(), &packed), forward(x, &dense), 1e-5);
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
