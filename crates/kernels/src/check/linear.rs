//! Projections in groups and alone, over every kind of base, and what is fused with them.

use firebrick_precision::DoubleQuant;

use super::Check;
use crate::{Heads, Kernels, Nf4Absmax, Projection, ProjectionGradients, Weight, oracle};
use burn_flex::Flex;
use burn_tensor::{DType, IntDType, Tensor, TensorData};

pub(super) fn check<B: Kernels>(check: &mut Check<'_, B>) {
    packing(check);
    groups(check);
    heads(check);
    feed_forward(check);
}

/// Packing on the device gives the bytes of packing on the host.
fn packing<B: Kernels>(check: &mut Check<'_, B>) {
    let shape = [check.case.feed_forward, check.case.width];
    for dtype in [DType::F32, check.case.dtype] {
        let (values, reference) = check.random_in(dtype, shape, 0.2);
        let host: Vec<f32> = reference.into_data().to_vec().expect("the reference is f32");
        for double_quant in [DoubleQuant::On, DoubleQuant::Off] {
            let packed = firebrick_precision::nf4::quantize(&host, &shape, double_quant).expect("finite values");
            let uploaded = B::nf4_upload(&packed, check.device);
            let made = B::nf4_quantize(values.clone(), double_quant == DoubleQuant::On);
            check.same("nf4_quantize: codes", bytes(made.codes.clone()) == bytes(uploaded.codes.clone()));
            let nested = matches!(made.absmax, Nf4Absmax::Nested { .. });
            check.same("nf4_quantize: scales", nested == (double_quant == DoubleQuant::On));
            let expected = Flex::nf4_dequantize(&Flex::nf4_upload(&packed, &check.cpu));
            check.compare("nf4_quantize: values", B::nf4_dequantize(&made), expected.clone());
            check.compare("nf4_dequantize", B::nf4_dequantize(&uploaded), expected);
        }
    }
}

fn bytes<B: Kernels>(codes: Tensor<B, 1, burn_tensor::Int>) -> Vec<u8> {
    let data: TensorData = codes.into_data();
    // Words of eight codes are compared as they are stored.
    if data.dtype == IntDType::U8.into() { data.to_vec::<u8>().unwrap_or_default() } else { data.as_bytes().to_vec() }
}

/// A group on the device and its reference.
type Group<B> = Vec<(Projection<B>, Projection<Flex>)>;

fn groups<B: Kernels>(check: &mut Check<'_, B>) {
    let (width, wide, key) =
        (check.case.width, check.case.feed_forward, check.case.key_value_heads * check.case.head_dim);
    let shapes = [[wide, width], [key, width], [key, width]];
    let packed: Group<B> = shapes.map(|shape| check.packed_projection(shape, true)).into();
    let half_adapted: Group<B> =
        vec![check.packed_projection(shapes[0], false), check.packed_projection(shapes[1], true)];
    let dense: Group<B> =
        vec![check.dense_projection(shapes[0], true, false), check.dense_projection(shapes[1], false, false)];
    let plain: Group<B> = vec![check.dense_projection(shapes[0], false, false)];
    let trained: Group<B> =
        vec![check.dense_projection(shapes[0], false, true), check.dense_projection(shapes[1], true, true)];
    let mixed: Group<B> =
        vec![check.packed_projection(shapes[0], true), check.dense_projection(shapes[1], true, false)];
    let named = [
        ("4-bit", packed),
        ("4-bit, half adapted", half_adapted),
        ("dense", dense),
        ("one dense", plain),
        ("trained", trained),
        ("mixed", mixed),
    ];
    for (name, group) in named {
        group_check(check, name, group);
    }
}

fn group_check<B: Kernels>(check: &mut Check<'_, B>, name: &str, group: Group<B>) {
    let tokens = check.case.tokens();
    let x = check.random([tokens, check.case.width], 1.0);
    let (ours, reference): (Vec<_>, Vec<_>) = group.into_iter().unzip();
    for (got, projection) in B::project(x.0.clone(), &ours).into_iter().zip(&reference) {
        check.compare(&format!("project ({name})"), got, oracle::linear::forward(x.1.clone(), projection));
    }
    let residual = check.random([tokens, reference[0].weight.shape()[0]], 1.0);
    let sum = B::project_add(x.0.clone(), &ours[0], residual.0);
    let expected = oracle::linear::forward(x.1.clone(), &reference[0]).add(residual.1);
    check.compare(&format!("project_add ({name})"), sum, expected);

    let (dys, expected): (Vec<_>, Vec<_>) =
        reference.iter().map(|projection| check.random([tokens, projection.weight.shape()[0]], 1.0)).unzip();
    let (dx, gradients) = B::project_backward(x.0, &ours, dys);
    let (expected_dx, expected) = oracle::linear::backward(x.1, &reference, expected);
    check.compare(&format!("project_backward: input ({name})"), dx, expected_dx);
    compare_gradients(check, &format!("project_backward ({name})"), gradients, expected);
}

fn compare_gradients<B: Kernels>(
    check: &mut Check<'_, B>,
    what: &str,
    got: Vec<ProjectionGradients<B>>,
    expected: Vec<ProjectionGradients<Flex>>,
) {
    check.same(&format!("{what}: number of projections"), got.len() == expected.len());
    for (got, expected) in got.into_iter().zip(expected) {
        check.same(&format!("{what}: which gradients"), got.lora.is_some() == expected.lora.is_some());
        check.same(&format!("{what}: which gradients"), got.weight_oi.is_some() == expected.weight_oi.is_some());
        if let Some((got, expected)) = got.lora.zip(expected.lora) {
            check.same(&format!("{what}: format of A"), got.0.dtype() == DType::F32 && got.1.dtype() == DType::F32);
            check.compare(&format!("{what}: A"), got.0, expected.0);
            check.compare(&format!("{what}: B"), got.1, expected.1);
        }
        if let Some((got, expected)) = got.weight_oi.zip(expected.weight_oi) {
            check.compare(&format!("{what}: weight"), got, expected);
        }
    }
}

fn heads<B: Kernels>(check: &mut Check<'_, B>) {
    let case = check.case;
    let (query, key) = (case.query_heads * case.head_dim, case.key_value_heads * case.head_dim);
    let (tokens, width, head_dim) = (case.tokens(), case.width, case.head_dim);
    let group = [query, key, key].map(|outputs| check.packed_projection([outputs, width], true));
    let (ours, reference): (Vec<_>, Vec<_>) = group.into_iter().unzip();
    let ours: [Projection<B>; 3] = ours.try_into().expect("three projections");
    let reference: [Projection<Flex>; 3] = reference.try_into().expect("three projections");
    let (tables, reference_tables) = check.tables();
    let x = check.random([tokens, width], 1.0);
    let got = B::project_heads(x.0.clone(), &ours, &tables, head_dim);
    let expected = oracle::linear::heads(x.1.clone(), &reference, &reference_tables, head_dim);
    check.compare("project_heads: queries", got.q_nhk, expected.q_nhk);
    check.compare("project_heads: keys", got.k_ngk, expected.k_ngk);
    check.compare("project_heads: values", got.v_ngk, expected.v_ngk);

    let dq = check.random([tokens, case.query_heads, head_dim], 1.0);
    let [dk, dv] = [(), ()].map(|()| check.random([tokens, case.key_value_heads, head_dim], 1.0));
    let kept = dq.0.clone();
    let d_heads = Heads { q_nhk: dq.0, k_ngk: dk.0, v_ngk: dv.0 };
    let expected_heads = Heads { q_nhk: dq.1.clone(), k_ngk: dk.1, v_ngk: dv.1 };
    let (dx, gradients) = B::project_heads_backward(x.0, &ours, &tables, d_heads);
    let (expected_dx, expected) = oracle::linear::heads_backward(x.1, &reference, &reference_tables, expected_heads);
    check.compare("project_heads_backward: input", dx, expected_dx);
    compare_gradients(check, "project_heads_backward", gradients, expected);
    check.compare("project_heads_backward: a copy of its input", kept, dq.1);

    let x = check.random([tokens, case.query_heads, head_dim], 1.0);
    let turned = B::rotary(x.0.clone(), &tables);
    check.compare("rotary", turned, oracle::rotary::forward(x.1.clone(), &reference_tables));
    let back = B::rotary_backward(x.0, &tables);
    check.compare("rotary_backward", back, oracle::rotary::backward(x.1, &reference_tables));
}

fn feed_forward<B: Kernels>(check: &mut Check<'_, B>) {
    let (tokens, width, wide) = (check.case.tokens(), check.case.width, check.case.feed_forward);
    let (gate, up) = (check.random([tokens, wide], 3.0), check.random([tokens, wide], 1.0));
    let (residual, dy) = (check.random([tokens, width], 1.0), check.random([tokens, width], 1.0));
    let (down, reference) = check.packed_projection([width, wide], true);
    let activated = B::swiglu(gate.0.clone(), up.0.clone());
    let expected_activated = oracle::swiglu::forward(gate.1.clone(), up.1.clone());
    check.compare("swiglu", activated.clone(), expected_activated.clone());
    let d_activated = check.random([tokens, wide], 1.0);
    let (d_gate, d_up) = B::swiglu_backward(gate.0.clone(), up.0.clone(), d_activated.0);
    let (expected_gate, expected_up) = oracle::swiglu::backward(gate.1.clone(), up.1.clone(), d_activated.1);
    check.compare("swiglu_backward: gate", d_gate, expected_gate);
    check.compare("swiglu_backward: up", d_up, expected_up);

    for keep in [false, true] {
        let (y, kept) = B::swiglu_project_add(gate.0.clone(), up.0.clone(), &down, residual.0.clone(), keep);
        let expected = oracle::linear::forward(expected_activated.clone(), &reference).add(residual.1.clone());
        check.compare("swiglu_project_add", y, expected);
        check.same("swiglu_project_add: what is kept", kept.is_some() == keep);

        // Gate and up as columns of one product, which the backward may then overwrite.
        let joined = Tensor::cat(vec![gate.0.clone(), up.0.clone()], 1);
        let parts = [joined.clone().narrow(1, 0, wide), joined.narrow(1, wide, wide)];
        for [own_gate, own_up] in [[gate.0.clone(), up.0.clone()], parts] {
            let found = B::swiglu_project_backward(own_gate, own_up, kept.clone(), &down, dy.0.clone());
            let (gate, up) = (gate.1.clone(), up.1.clone());
            let expected = oracle::linear::swiglu_backward(gate, up, None, &reference, dy.1.clone());
            check.compare("swiglu_project_backward: gate", found.d_gate_nf, expected.d_gate_nf);
            check.compare("swiglu_project_backward: up", found.d_up_nf, expected.d_up_nf);
            compare_gradients(check, "swiglu_project_backward", vec![found.projection], vec![expected.projection]);
        }
    }
    check.compare("swiglu_project_backward: a copy of its input", gate.0, gate.1);
    check.same("projection shapes", matches!(&down.weight, Weight::Nf4(weight) if weight.shape == [width, wide]));
}
