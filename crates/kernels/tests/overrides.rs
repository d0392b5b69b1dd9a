//! Every override of a backend against the portable body it replaces.
#![cfg(feature = "flex")]

use burn_tensor::{DType, Distribution, Int, Tensor};
use firebrick_kernels::backend::Flex;
use firebrick_kernels::{AdamW, Documents, Kernels, RotaryTables, oracle};
use firebrick_precision::{DoubleQuant, nf4::quantize};

fn random<const D: usize>(shape: [usize; D]) -> Tensor<Flex, D> {
    Tensor::random(shape, Distribution::Uniform(-1.0, 1.0), &Default::default())
}

#[track_caller]
fn assert_close<const D: usize>(got: &Tensor<Flex, D>, expected: &Tensor<Flex, D>) {
    assert_eq!(got.dims(), expected.dims());
    let host = |tensor: &Tensor<Flex, D>| tensor.to_data().to_vec::<f32>().unwrap();
    let (got, expected) = (host(got), host(expected));
    let size = expected.iter().fold(1e-3f32, |size, value| size.max(value.abs()));
    for (index, (g, e)) in got.iter().zip(&expected).enumerate() {
        assert!((g - e).abs() <= 2e-6 * size * 4.0, "element {index}: got {g}, expected {e}");
    }
}

#[test]
fn norms_equal_the_portable_body() {
    for shape in [[1, 8], [5, 33], [700, 64]] {
        let (x, weight, dy, residual) = (random(shape), random([shape[1]]), random(shape), random(shape));
        assert_close(
            &Flex::rms_norm(x.clone(), weight.clone(), 1e-5),
            &oracle::norm::forward(x.clone(), weight.clone(), 1e-5),
        );
        for residual in [None, Some(residual)] {
            let arguments = (x.clone(), weight.clone(), dy.clone(), residual);
            let (x, w, dy, r) = arguments.clone();
            let (dx, dw) = Flex::rms_norm_backward(x, w, 1e-5, dy, r, true);
            let (x, w, dy, r) = arguments;
            let (expected_dx, expected_dw) = oracle::norm::backward(x, w, 1e-5, dy, r, true);
            assert_close(&dx, &expected_dx);
            assert_close(&dw.unwrap(), &expected_dw.unwrap());
        }
    }
}

#[test]
fn norms_take_strided_views() {
    let wide = random([12, 40]);
    let view = wide.narrow(1, 8, 16);
    let weight = random([16]);
    assert_close(&Flex::rms_norm(view.clone(), weight.clone(), 1e-6), &oracle::norm::forward(view, weight, 1e-6));
}

#[test]
fn rotary_equals_the_portable_body() {
    let (x, tables) = (random([301, 3, 10]), RotaryTables { cos: random([301, 5]), sin: random([301, 5]) });
    assert_close(&Flex::rotary(x.clone(), &tables), &oracle::rotary::forward(x.clone(), &tables));
    assert_close(&Flex::rotary_backward(x.clone(), &tables), &oracle::rotary::backward(x, &tables));
}

#[test]
fn swiglu_equals_the_portable_body() {
    let (gate, up, dy) = (random([130, 257]).mul_scalar(20.0), random([130, 257]), random([130, 257]));
    assert_close(&Flex::swiglu(gate.clone(), up.clone()), &oracle::swiglu::forward(gate.clone(), up.clone()));
    let (d_gate, d_up) = Flex::swiglu_backward(gate.clone(), up.clone(), dy.clone());
    let (expected_gate, expected_up) = oracle::swiglu::backward(gate, up, dy);
    assert_close(&d_gate, &expected_gate);
    assert_close(&d_up, &expected_up);
}

#[test]
fn cross_entropy_equals_the_portable_body() {
    let logits = random([9, 1000]).mul_scalar(15.0);
    let targets = Tensor::<Flex, 1, Int>::from_ints([0, 999, 5, 5, 17, 3, 500, 998, 1], &Default::default());
    let (loss, gradient) = Flex::cross_entropy(logits.clone(), targets.clone(), Some(0.125));
    let (expected, expected_gradient) = oracle::cross_entropy::of_logits(logits.clone(), targets.clone(), Some(0.125));
    assert_close(&loss, &expected);
    assert_close(&gradient.unwrap(), &expected_gradient.unwrap());
    assert!(Flex::cross_entropy(logits, targets, None).1.is_none());
}

#[test]
fn attention_equals_the_portable_body_over_documents_of_every_length() {
    let boundaries = [0, 1, 3, 66, 67, 197, 330];
    let documents = Documents::<Flex>::new(&boundaries, &Default::default());
    for (heads, groups, width) in [(4, 4, 16), (6, 2, 32), (4, 1, 10)] {
        let (q, d_o) = (random([330, heads, width]).mul_scalar(3.0), random([330, heads, width]));
        let (k, v) = (random([330, groups, width]).mul_scalar(3.0), random([330, groups, width]));
        let found = Flex::packed_attention(q.clone(), k.clone(), v.clone(), &documents);
        let expected = oracle::attention::forward(q.clone(), k.clone(), v.clone(), &documents);
        assert_close(&found.o_nhk, &expected.o_nhk);
        assert_close(&found.log_sum_exp_hn, &expected.log_sum_exp_hn);
        let (dq, dk, dv) =
            Flex::packed_attention_backward(q.clone(), k.clone(), v.clone(), &found, d_o.clone(), &documents);
        let (expected_dq, expected_dk, expected_dv) = oracle::attention::backward(q, k, v, &expected, d_o, &documents);
        assert_close(&dq, &expected_dq);
        assert_close(&dk, &expected_dk);
        assert_close(&dv, &expected_dv);
    }
}

#[test]
fn nf4_look_up_equals_the_portable_body() {
    for shape in [[40, 24], [64, 512], [3, 7]] {
        let values: Vec<f32> = random(shape).into_data().to_vec().unwrap();
        for double_quant in [DoubleQuant::On, DoubleQuant::Off] {
            let weight = Flex::nf4_upload(&quantize(&values, &shape, double_quant).unwrap(), &Default::default());
            let found = Flex::nf4_dequantize(&weight);
            assert_eq!(found.to_data(), oracle::nf4::dequantize(&weight).to_data(), "bit for bit");
        }
    }
}

#[test]
fn adamw_equals_the_portable_body() {
    let hyper = AdamW { learning_rate: 1e-2, beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.1, step: 3 };
    let (p, g, m) = (random([40_001]), random([40_001]), random([40_001]));
    let (v, scale) = (random([40_001]).abs(), random([1]));
    let (found, (found_m, found_v)) = Flex::adamw(p.clone(), g.clone(), (m.clone(), v.clone()), scale.clone(), &hyper);
    let (expected, (expected_m, expected_v)) = oracle::optimizer::adamw(p, g, (m, v), scale, &hyper);
    assert_close(&found, &expected);
    assert_close(&found_m, &expected_m);
    assert_close(&found_v, &expected_v);
}

#[test]
fn half_precision_takes_the_portable_body() {
    let (x, weight) = (random([4, 16]).cast(DType::BF16), random([16]));
    let found = Flex::rms_norm(x.clone(), weight.clone(), 1e-5);
    assert_eq!(found.dtype(), DType::BF16);
    assert_eq!(found.to_data(), oracle::norm::forward(x, weight, 1e-5).to_data());
}
