//! Tests of the reference bodies: against Burn's autodiff, and for the guarantees of groups.
//!
//! Trade-off: f32 on the CPU only; other backends and formats are compared with these bodies in `conformance.rs`.

use burn_tensor::DType;
use firebrick_arch::SwigluConstants;
use firebrick_precision::QuantFormat;

use super::*;
use crate::linear::{Adapter, Bias, Dropout, GemmFormat, Magnitude, Module, WeightGradient, into_parts};
use crate::testing::{Plain, Recorded, assert_close, backward as recorded_backward, leaf, random};
use crate::weights::{QuantizedWeight, Weight};

const SCALE: f64 = 1.7;
const TOKENS: usize = 9;
const INPUT: usize = 32;

fn module<B: LinearOps>(columns: Range<usize>, weight: Weight<B>) -> Module<B> {
    Module { columns, weight, weight_gradient: WeightGradient::Frozen, bias: None, adapter: None }
}

fn grouped<B: LinearOps>(modules: Vec<Module<B>>, parts: Vec<usize>) -> Group<B> {
    Group { modules, parts, gemms: GemmFormat::Compute, dropout: None, rows: None }
}

/// Runs forward and backward without epilogue, with everything saved.
fn run(
    prologue: Prologue<Plain>,
    group: Group<Plain>,
    d_outputs: Vec<Tensor<Plain, 2>>,
    d_residual: Option<Tensor<Plain, 2>>,
) -> ProjectGradients<Plain> {
    let (_, saved) = project(prologue, &group, Epilogue::None, Keep::Everything);
    project_backward(*saved.unwrap(), group, d_outputs, d_residual)
}

#[test]
fn gradients_of_a_module_equal_autodiff_with_the_norms_of_magnitudes_held_constant() {
    let mask = Dropout::new(0.4, 9);
    for (dropout, has_magnitude) in [(None, false), (mask, false), (None, true), (mask, true)] {
        let (x, dy) = (random::<Plain, 2>(1, [TOKENS, INPUT]), random(5, [TOKENS, 40]));
        let (weight, a, b) =
            (random::<Plain, 2>(2, [40, INPUT]), random::<Plain, 2>(3, [4, INPUT]), random(4, [40, 4]));
        let (m, bias) = (random::<Plain, 1>(6, [40]), random::<Plain, 1>(7, [40]));
        let (rx, rw, ra, rb, rm) = (leaf(&x), leaf(&weight), leaf(&a), leaf(&b), leaf(&m));
        let all: Tensor<Recorded, 2> = rb.clone().matmul(ra.clone()).mul_scalar(SCALE).add(rw.clone());
        let norm: Tensor<Recorded, 1> = all.square().sum_dim(1).squeeze_dim::<1>(1).sqrt().detach();
        let ones = vec![1.0; TOKENS * INPUT];
        let factors = dropout.map_or(ones, |dropout| dropout.factors([TOKENS, INPUT]));
        let factors = Tensor::<Recorded, 1>::from_floats(factors.as_slice(), &rx.device());
        let read = rx.clone().mul(factors.reshape([TOKENS, INPUT]));
        // This is PEFT's formula; without a magnitude, `c` is one.
        let c = if has_magnitude { rm.clone().div(norm.clone()) } else { norm.ones_like() };
        let c: Tensor<Recorded, 2> = c.unsqueeze();
        let lora = read.clone().matmul(ra.clone().transpose()).matmul(rb.clone().transpose()).mul_scalar(SCALE);
        let base = read.matmul(rw.clone().transpose());
        let plain = rx.clone().matmul(rw.clone().transpose());
        let y = plain.add(base.mul(c.clone().sub_scalar(1.0))).add(lora.mul(c)).add(leaf(&bias).unsqueeze());
        let expected = recorded_backward(y.clone(), &dy);

        let mut pair = Adapter { a, b, scale: SCALE, magnitude: None };
        let weight = Weight::Dense(weight);
        let norm_of_all = Plain::adapted_norms(&weight, &Plain::row_squares(&weight, DType::F32), &pair, DType::F32);
        assert_close(norm_of_all.clone(), norm.inner(), 1e-6);
        pair.magnitude = has_magnitude.then_some(Magnitude { value: m, norm: norm_of_all });
        let module = Module {
            weight_gradient: if has_magnitude { WeightGradient::Frozen } else { WeightGradient::New },
            adapter: Some(pair),
            bias: Some(Bias { value: bias, trains: true }),
            ..module(0..40, weight)
        };
        let dropout = dropout.map(Mask::from);
        let group = Group { modules: vec![module], parts: vec![40], gemms: GemmFormat::Compute, dropout, rows: None };
        let (outputs, _) = project(Prologue::None { x: x.clone() }, &group, Epilogue::None, Keep::Nothing);
        assert_close(outputs.into_iter().next().unwrap(), y.inner(), 1e-5);
        let mut grads = run(Prologue::None { x }, group, vec![dy.clone()], None);
        let module = grads.modules.remove(0);
        let (da, db) = module.adapter.unwrap();
        assert_close(grads.input.plain(), rx.grad(&expected).unwrap(), 1e-5);
        assert_close(da, ra.grad(&expected).unwrap(), 1e-5);
        assert_close(db, rb.grad(&expected).unwrap(), 1e-5);
        assert_eq!([module.magnitude.is_some(), module.weight.is_none()], [has_magnitude; 2]);
        if let Some(d_weight) = module.weight {
            assert_close(d_weight, rw.grad(&expected).unwrap(), 1e-5);
        }
        if let Some(d_magnitude) = module.magnitude {
            assert_close(d_magnitude, rm.grad(&expected).unwrap(), 1e-5);
        }
        assert_close(module.bias.unwrap(), dy.sum_dim(0).squeeze_dim(0), 1e-5);
    }
}

#[test]
fn gradients_through_norm_head_norms_and_rotation_equal_autodiff() {
    let (heads, groups, head_dim) = (4, 2, 6);
    let (query, kv) = (heads * head_dim, groups * head_dim);
    let tables = || RotaryTables::new(random::<Plain, 2>(6, [TOKENS, 3]), random(7, [TOKENS, 3]));
    let query_scale = Some(random::<Plain, 1>(12, [TOKENS]));
    for widths in [[head_dim; 2], [query, kv]] {
        head_norms_and_rotation(heads, groups, head_dim, widths, tables());
        let other = RotaryTables { interleaved: true, query_scale: query_scale.clone(), ..tables() };
        head_norms_and_rotation(heads, groups, head_dim, widths, other);
    }
}

fn recorded(tables: &RotaryTables<Plain>) -> RotaryTables<Recorded> {
    RotaryTables {
        cos: Tensor::from_inner(tables.cos.clone()),
        sin: Tensor::from_inner(tables.sin.clone()),
        interleaved: tables.interleaved,
        query_scale: tables.query_scale.clone().map(Tensor::from_inner),
    }
}

/// Tests norms and rotation of heads; `widths` are those of the query and key norms.
fn head_norms_and_rotation(
    heads: usize,
    groups: usize,
    head_dim: usize,
    widths: [usize; 2],
    tables: RotaryTables<Plain>,
) {
    let (query, kv) = (heads * head_dim, groups * head_dim);
    let x = random::<Plain, 2>(1, [TOKENS, INPUT]);
    let weight = random::<Plain, 2>(2, [query + 2 * kv, INPUT]);
    let [input_norm, q_norm, k_norm] =
        [(3, INPUT), (4, widths[0]), (5, widths[1])].map(|(seed, width)| random::<Plain, 1>(seed, [width]));
    let d_outputs: Vec<Tensor<Plain, 2>> =
        [(8, query), (9, kv), (10, kv)].map(|(seed, width)| random(seed, [TOKENS, width])).into();

    let (rx, rw, rn, rq, rk) = (leaf(&x), leaf(&weight), leaf(&input_norm), leaf(&q_norm), leaf(&k_norm));
    let norm = |weight: Tensor<Recorded, 1>| NormWeight { weight, offset: 0.0, epsilon: 1e-5, trains: true };
    let norms = Some([norm(rq.clone()), norm(rk.clone())]);
    let epilogue = HeadsEpilogue::of_qkv(head_dim, norms, Some(recorded(&tables)));
    let prologue = Prologue::Norm { x: rx.clone(), norm: norm(rn.clone()) };
    let one_module = vec![module(0..query + 2 * kv, Weight::Dense(rw.clone()))];
    let group = grouped(one_module, vec![query, kv, kv]);
    let (outputs, _) = project(prologue, &group, Epilogue::Heads(epilogue), Keep::Nothing);
    let loss = outputs
        .into_iter()
        .zip(&d_outputs)
        .map(|(y, dy)| y.mul(Tensor::from_inner(dy.clone())).sum())
        .reduce(Tensor::add)
        .unwrap();
    let expected = loss.backward();

    let norm = |weight: Tensor<Plain, 1>| NormWeight { weight, offset: 0.0, epsilon: 1e-5, trains: true };
    let epilogue = HeadsEpilogue::of_qkv(head_dim, Some([norm(q_norm), norm(k_norm)]), Some(tables));
    let trained = Module { weight_gradient: WeightGradient::New, ..module(0..query + 2 * kv, Weight::Dense(weight)) };
    let group = grouped(vec![trained], vec![query, kv, kv]);
    let residual = random::<Plain, 2>(11, [TOKENS, INPUT]);
    for keep in [Keep::Inputs, Keep::Everything] {
        let prologue = Prologue::Norm { x: x.clone(), norm: norm(input_norm.clone()) };
        let (_, saved) = project(prologue, &group, Epilogue::Heads(epilogue.clone()), keep);
        let saved = saved.unwrap();
        assert_eq!(saved.prologue_output.is_some(), keep == Keep::Everything);
        let mut grads = project_backward(*saved, group.clone(), d_outputs.clone(), Some(residual.clone()));
        let expected_input = rx.grad(&expected).unwrap().add(residual.clone());
        assert_close(grads.input.plain(), expected_input, 1e-5);
        assert_close(grads.modules.remove(0).weight.unwrap(), rw.grad(&expected).unwrap(), 1e-5);
        assert_close(grads.norm.unwrap(), rn.grad(&expected).unwrap(), 1e-5);
        let [dq, dk, dv] = into_parts(grads.head_norms);
        assert!(dv.is_none());
        let [dq, dk] = [dq, dk].map(Option::unwrap);
        assert_close(dq, rq.grad(&expected).unwrap(), 1e-5);
        assert_close(dk, rk.grad(&expected).unwrap(), 1e-5);
    }
}

#[test]
fn gradients_through_a_norm_after_the_gemm_equal_autodiff() {
    let (x, dy) = (random::<Plain, 2>(1, [TOKENS, INPUT]), random::<Plain, 2>(2, [TOKENS, 40]));
    let (weight, scale) = (random::<Plain, 2>(3, [40, INPUT]), random::<Plain, 1>(4, [40]));
    let (residual, past) = (random::<Plain, 2>(5, [TOKENS, 40]), random::<Plain, 2>(6, [TOKENS, INPUT]));
    let (rx, rw, rn) = (leaf(&x), leaf(&weight), leaf(&scale));
    let group = grouped(vec![module(0..40, Weight::Dense(rw.clone()))], vec![40]);
    let norm = NormWeight { weight: rn.clone(), offset: 1.0, epsilon: 1e-5, trains: true };
    let epilogue = Epilogue::NormResidual { norm, residual: Tensor::from_inner(residual.clone()) };
    let (outputs, saved) = project(Prologue::None { x: rx.clone() }, &group, epilogue, Keep::Nothing);
    assert!(saved.is_none());
    let expected = recorded_backward(outputs.into_iter().next().unwrap(), &dy);

    let trained = Module { weight_gradient: WeightGradient::New, ..module(0..40, Weight::Dense(weight)) };
    let group = grouped(vec![trained], vec![40]);
    let epilogue = Epilogue::NormResidual {
        norm: NormWeight { weight: scale, offset: 1.0, epsilon: 1e-5, trains: true },
        residual,
    };
    let (_, saved) = project(Prologue::None { x }, &group, epilogue, Keep::Inputs);
    let mut grads = project_backward(*saved.unwrap(), group, vec![dy], Some(past.clone()));
    assert_close(grads.input.plain(), rx.grad(&expected).unwrap().add(past), 1e-5);
    assert_close(grads.modules.remove(0).weight.unwrap(), rw.grad(&expected).unwrap(), 1e-5);
    assert_close(grads.output_norm.unwrap(), rn.grad(&expected).unwrap(), 1e-5);
}

#[test]
fn gated_backward_equals_autodiff() {
    // Beyond the limits of a clamp on all sides.
    let gate = random::<Plain, 2>(1, [6, 17]).mul_scalar(9.0);
    let (up, dy) = (random::<Plain, 2>(2, [6, 17]).mul_scalar(9.0), random(3, [6, 17]));
    let (rg, ru) = (leaf(&gate), leaf(&up));
    let other = Activation::ClampedSwiglu(SwigluConstants::new(1.0, 1.5));
    for activation in Activation::ALL.into_iter().chain([other]) {
        let expected = recorded_backward(gated(rg.clone(), ru.clone(), activation), &dy);
        let (d_gate, d_up) = gated_backward(gate.clone(), up.clone(), activation, dy.clone());
        assert_close(d_gate, rg.grad(&expected).unwrap(), 1e-5);
        assert_close(d_up, ru.grad(&expected).unwrap(), 1e-5);
    }
}

#[test]
fn rotary_backward_equals_autodiff() {
    let (x, dy) = (random::<Plain, 2>(1, [5, 24]), random::<Plain, 2>(2, [5, 24]));
    for (half, interleaved) in [(4, false), (3, false), (1, false), (4, true), (3, true)] {
        let plain = RotaryTables::new(random::<Plain, 2>(3, [5, half]), random(4, [5, half]));
        let tables = RotaryTables { interleaved, ..plain };
        let rx = leaf(&x);
        let expected = recorded_backward(rotary(rx.clone(), &recorded(&tables), 8, false), &dy);
        assert_close(rotary(dy.clone(), &tables, 8, true), rx.grad(&expected).unwrap(), 1e-5);
    }
}

#[test]
fn columns_beyond_the_tables_pass_through_and_the_others_rotate_as_a_smaller_head() {
    let tables = RotaryTables::new(random::<Plain, 2>(3, [5, 3]), random(4, [5, 3]));
    let x = random::<Plain, 2>(1, [5, 8]);
    let y = rotary(x.clone(), &tables, 8, false);
    assert_close(y.clone().narrow(1, 0, 6), rotary(x.clone().narrow(1, 0, 6), &tables, 6, false), 1e-6);
    assert_eq!(y.narrow(1, 6, 2).into_data(), x.narrow(1, 6, 2).into_data());
}

#[test]
fn neighbors_rotate_as_the_halves_of_a_head_whose_columns_are_reordered() {
    let tables = RotaryTables::new(random::<Plain, 2>(3, [5, 3]), random(4, [5, 3]));
    let x = random::<Plain, 2>(1, [5, 8]);
    let order = Tensor::from_ints([0, 2, 4, 1, 3, 5, 6, 7], &x.device());
    let expected = rotary(x.clone().select(1, order.clone()), &tables, 8, false);
    let y = rotary(x, &RotaryTables { interleaved: true, ..tables }, 8, false);
    assert_close(y.select(1, order), expected, 1e-6);
}

#[test]
fn rotating_back_undoes_rotating() {
    let angles = random::<Plain, 2>(1, [6, 4]).mul_scalar(3.0);
    let tables = RotaryTables::new(angles.clone().cos(), angles.sin());
    let x = random::<Plain, 2>(2, [6, 16]);
    assert_close(rotary(rotary(x.clone(), &tables, 8, false), &tables, 8, true), x, 1e-5);
}

#[test]
fn a_fused_module_computes_what_separate_ones_compute() {
    let x = random::<Plain, 2>(1, [5, INPUT]);
    let weight = random::<Plain, 2>(2, [16 + 8 + 8, INPUT]);
    let parts = vec![16, 8, 8];
    let d_outputs: Vec<Tensor<Plain, 2>> =
        parts.iter().enumerate().map(|(seed, &width)| random(3 + seed as u64, [5, width])).collect();
    let cut = |columns: Range<usize>| {
        let rows = weight.clone().narrow(0, columns.start, columns.len());
        Module { weight_gradient: WeightGradient::New, ..module(columns, Weight::Dense(rows)) }
    };
    let of = |cuts: &[Range<usize>]| {
        let group = grouped(cuts.iter().cloned().map(cut).collect(), parts.clone());
        let (outputs, saved) = project(Prologue::None { x: x.clone() }, &group, Epilogue::None, Keep::Inputs);
        let grads = project_backward(*saved.unwrap(), group, d_outputs.clone(), None);
        let weights = grads.modules.into_iter().map(|module| module.weight.unwrap()).collect();
        (Tensor::cat(outputs, 1), grads.input.plain(), Tensor::cat(weights, 0))
    };
    let (y, dx, dw) = of(&[0..16, 16..24, 24..32]);
    for cuts in [vec![0, 32], vec![0, 20, 32]] {
        let cuts: Vec<_> = cuts.windows(2).map(|edges| edges[0]..edges[1]).collect();
        let (fused_y, fused_dx, fused_dw) = of(&cuts);
        assert_close(fused_y, y.clone(), 1e-6);
        assert_close(fused_dx, dx.clone(), 1e-6);
        assert_close(fused_dw, dw.clone(), 1e-6);
    }
}

#[test]
fn a_weight_gradient_is_added_to_the_sum_that_was_given() {
    let (x, dy) = (random::<Plain, 2>(1, [5, INPUT]), random::<Plain, 2>(2, [5, 8]));
    let weight = Weight::Dense(random::<Plain, 2>(3, [8, INPUT]));
    let earlier = random::<Plain, 2>(4, [8, INPUT]);
    let gradient = |weight_gradient| {
        let modules = vec![Module { weight_gradient, ..module(0..8, weight.clone()) }];
        let group = grouped(modules, vec![8]);
        run(Prologue::None { x: x.clone() }, group, vec![dy.clone()], None).modules.remove(0).weight.unwrap()
    };
    let expected = earlier.clone().add(gradient(WeightGradient::New));
    assert_close(gradient(WeightGradient::AddTo(earlier)), expected, 1e-6);
}

#[test]
fn a_quantized_weight_computes_what_its_dequantized_values_compute() {
    let device = Default::default();
    let values: Vec<f32> = random::<Plain, 1>(7, [40 * INPUT]).into_data().to_vec().unwrap();
    for format in QuantFormat::ALL {
        let quantized = format.quantize(&values, &[40, INPUT]).unwrap();
        let host = Tensor::<Plain, 1>::from_floats(quantized.dequantize().as_slice(), &device).reshape([40, INPUT]);
        let (x, dy) = (random::<Plain, 2>(8, [6, INPUT]), random::<Plain, 2>(9, [6, 40]));
        let of = |weight: Weight<Plain>| {
            let group = grouped(vec![module(0..40, weight)], vec![40]);
            let (y, saved) = project(Prologue::None { x: x.clone() }, &group, Epilogue::None, Keep::Inputs);
            (y[0].clone(), project_backward(*saved.unwrap(), group, vec![dy.clone()], None).input.plain())
        };
        let (y, dx) = of(Weight::Quantized(QuantizedWeight::<Plain>::upload(&quantized, &device)));
        let (expected_y, expected_dx) = of(Weight::Dense(host));
        assert_close(y, expected_y, 1e-5);
        assert_close(dx, expected_dx, 1e-5);
    }
}

#[test]
#[should_panic(expected = "a gated prologue has no residual path")]
fn a_residual_gradient_past_a_gated_prologue_is_a_bug() {
    let weight = Weight::Dense(random::<Plain, 2>(3, [8, INPUT]));
    let group = grouped(vec![module(0..8, weight)], vec![8]);
    let x = random::<Plain, 2>(1, [5, INPUT]);
    let prologue = Prologue::Gated { gate: x.clone(), up: x.clone(), activation: Activation::Silu };
    run(prologue, group, vec![random(2, [5, 8])], Some(x));
}
