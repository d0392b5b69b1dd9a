//! Groups of linear modules against the reference: every kind of base, adapters, biases, fused modules, prologues and epilogues.
//!
//! Trade-off: each feature is tested in one or two groups, not in every combination.

pub(crate) mod products;
mod scenario;

use burn_flex::Flex;
use burn_tensor::{DType, Int, Tensor, backend::Backend};
use firebrick_arch::{Activation, SwigluConstants};
use firebrick_precision::QuantFormat;

use self::scenario::{
    ADAPTER, BIASED, Base, Extras, Mlp, NOTHING, Scenario, gated, group, heads, norm, stacks, tables,
};
use super::{Dropout, Epilogue, HeadRole, Keep, Mask, Prologue, RowChoices, magnitude, reference};
use crate::Kernels;
use crate::conformance::check::{Check, Pair};
use crate::weights::{MatrixScales, matrix_scales};

const ALL: [Keep; 3] = [Keep::Inputs, Keep::Nothing, Keep::Everything];

pub(crate) fn check<B: Kernels>(check: &mut Check<'_, B>) {
    gated_and_rotary(check);
    plain_groups(check);
    qkv(check);
    other_parts(check);
    residuals(check);
    down(check);
    mlp(check);
    other_rotations(check);
    without_norm(check);
    dropout(check);
    scaled(check);
    magnitudes(check);
    norms_of_adapted_weights(check);
    if check.case.has_experts {
        experts(check);
    }
}

/// Tests stacks: experts with many rows, with one and without any, every kind of base, adapters, biases, dropout and both prologues.
fn experts<B: Kernels>(check: &mut Check<'_, B>) {
    let tokens = check.case.tokens();
    let few = tokens.min(1);
    let counts =
        check.variants([vec![tokens - few - few.min(tokens - few), 0, few.min(tokens - few), few], vec![0, tokens]]);
    counts.iter().for_each(|counts| experts_with_rows(check, counts));
}

fn experts_with_rows<B: Kernels>(check: &mut Check<'_, B>, counts: &[usize]) {
    let (tokens, wide, hidden) = (check.case.tokens(), check.case.intermediate_size, check.case.hidden_size);
    let is_whole = matrix_scales(QuantFormat::Nf4 { double_quant: true }, [wide, hidden]) != MatrixScales::None;
    let quantized = if is_whole { Base::NF4 } else { Base::Dense };
    let named = [
        ("quantized", [(quantized, ADAPTER), (quantized, ADAPTER)]),
        ("one adapter and biases", [(Base::Dense, BIASED), (Base::Dense, Extras { bias: true, ..NOTHING })]),
        ("trained", [(Base::New, NOTHING), (Base::AddTo, BIASED)]),
    ];
    let x = check.random([tokens, hidden], 1.0);
    // Two rows of each token, in an order that is not that of the tokens.
    let choices: Vec<i32> = (0..tokens as i32).rev().collect();
    for (name, modules) in check.variants(named) {
        for dropout in [None, Dropout::new(0.25, 99)] {
            let mut group = stacks(check, &modules, &[wide; 2], &[wide; 2], hidden, counts);
            let choices = check.ints(&choices);
            (group.0.dropout, group.1.dropout) = (by_choice(dropout, choices.0), by_choice(dropout, choices.1));
            let prologue = (Prologue::None { x: x.0.clone() }, Prologue::None { x: x.1.clone() });
            let scenario = Scenario::new(check, group, prologue, (Epilogue::None, Epilogue::None));
            scenario.run(check, &format!("experts, {name}, dropout {}", dropout.is_some()), &ALL);
        }
    }
    let group = stacks(check, &[(quantized, ADAPTER)], &[hidden], &[hidden], wide, counts);
    let prologue = gated([check.random([tokens, wide], 1.0), check.random([tokens, wide], 1.0)]);
    Scenario::new(check, group, prologue, (Epilogue::None, Epilogue::None)).run(check, "experts, down", &ALL);
}

/// Tests multiplication by a number, with and without whole vectors.
fn scaled<B: Kernels>(check: &mut Check<'_, B>) {
    for width in check.variants([check.case.hidden_size, 37]) {
        let x = check.random([check.case.tokens(), width], 1.0);
        check.compare("scaled", B::scaled(x.0, 0.37), reference::scaled(x.1, 0.37));
    }
}

/// Returns the mask of rows that come from these choices, two of each token.
fn by_choice<B: Backend>(dropout: Option<Dropout>, rows: Tensor<B, 1, Int>) -> Option<Mask<B>> {
    dropout.map(|dropout| Mask { dropout, choices: Some(RowChoices { rows, per_token: 2 }) })
}

/// Tests dropout on adapters, with and without vector loads, appended and separate, with every prologue.
fn dropout<B: Kernels>(check: &mut Check<'_, B>) {
    let mask = Dropout::new(0.25, 0x1234_5678_9abc_def0).expect("a probability above 0");
    let x = check.random([check.case.tokens(), check.case.hidden_size], 1.0);
    let odd = check.random([check.case.tokens(), 37], 1.0);
    for (name, x, mask) in [
        ("dropped", &x, mask),
        ("dropped, odd width", &odd, mask),
        ("dropped, in rows", &odd, mask.of_rows(3, 5).from_token(4)),
    ] {
        check.compare(name, B::dropped(x.0.clone(), &mask.into()), reference::dropped(x.1.clone(), &mask.into()));
    }
    let tokens = check.case.tokens() as i32;
    let rows: Vec<i32> = (0..tokens).map(|row| 7 * row % tokens).collect();
    let (rows, dropout) = (check.ints(&rows), Some(mask.of_rows(3, 5)));
    let (sorted, expected) = by_choice(dropout, rows.0).zip(by_choice(dropout, rows.1)).expect("there is a mask");
    check.compare("dropped, by expert", B::dropped(x.0.clone(), &sorted), reference::dropped(x.1.clone(), &expected));
    for (name, base) in check.variants([("quantized", Base::NF4), ("dense", Base::Dense), ("trained", Base::New)]) {
        after_norm(check, &x, [(base, ADAPTER); 2], Some(mask)).run(check, &format!("dropout, {name}"), &ALL);
    }
    after_gate(check, ADAPTER, Some(mask)).run(check, "dropout, down", &ALL);
}

/// Tests DoRA: magnitudes on some or all modules of a group, every prologue and epilogue, dense and quantized, with and without dropout.
fn magnitudes<B: Kernels>(check: &mut Check<'_, B>) {
    let case = check.case;
    let dora = Extras { magnitude: true, ..ADAPTER };
    let biased = Extras { magnitude: true, ..BIASED };
    let mask = Dropout::new(0.25, 77);
    let x = check.random([case.tokens(), case.hidden_size], 1.0);
    let named = [
        ("all", [(Base::NF4, dora), (Base::NF4, dora)]),
        ("one of two", [(Base::NF4, ADAPTER), (Base::NF4, biased)]),
        ("dense, one adapted", [(Base::Dense, dora), (Base::Dense, NOTHING)]),
        ("next to a trained weight", [(Base::New, NOTHING), (Base::Dense, biased)]),
    ];
    for (name, modules) in check.variants(named) {
        for dropout in [None, mask] {
            let name = format!("magnitudes, {name}, dropout {}", dropout.is_some());
            after_norm(check, &x, modules, dropout).run(check, &name, &ALL);
        }
    }
    let (query, kv) = (case.heads * case.head_dim, case.kv_heads * case.head_dim);
    for norms in check.variants([None, Some([case.head_dim; 2]), Some([query, kv])]) {
        let group = group(check, &[(Base::NF4, dora)], &[query + 2 * kv], &[query, kv, kv], case.hidden_size);
        let prologue = (Prologue::None { x: x.0.clone() }, Prologue::None { x: x.1.clone() });
        let heads = heads(check, norms, Some(case.head_dim));
        let epilogue = (Epilogue::Heads(heads.0), Epilogue::Heads(heads.1));
        let scenario = Scenario::new(check, group, prologue, epilogue).with_residual_path(check);
        scenario.run(check, "magnitudes, qkv", &ALL);
    }
    for dropout in [None, mask] {
        after_gate(check, dora, dropout).run(check, "magnitudes, down", &ALL);
    }
    let group = group(check, &[(Base::NF4, biased)], &[case.hidden_size], &[case.hidden_size], case.hidden_size);
    let (norm, residual) = (norm(check, case.hidden_size, true), check.random([case.tokens(), case.hidden_size], 1.0));
    let prologue = (Prologue::None { x: x.0.clone() }, Prologue::None { x: x.1.clone() });
    let epilogue = (
        Epilogue::NormResidual { norm: norm.0, residual: residual.0 },
        Epilogue::NormResidual { norm: norm.1, residual: residual.1 },
    );
    Scenario::new(check, group, prologue, epilogue).run(check, "magnitudes, output with a norm after", &ALL);
}

/// Builds gate and up: two modules after a norm, with a gradient on the residual path.
fn after_norm<B: Kernels>(
    check: &mut Check<'_, B>,
    x: &Pair<B, 2>,
    modules: [(Base, Extras); 2],
    dropout: Option<Dropout>,
) -> Scenario<B> {
    let (wide, hidden) = (check.case.intermediate_size, check.case.hidden_size);
    let mut group = group(check, &modules, &[wide; 2], &[wide; 2], hidden);
    (group.0.dropout, group.1.dropout) = (dropout.map(Mask::from), dropout.map(Mask::from));
    let norm = norm(check, hidden, false);
    let prologue = (Prologue::Norm { x: x.0.clone(), norm: norm.0 }, Prologue::Norm { x: x.1.clone(), norm: norm.1 });
    Scenario::new(check, group, prologue, (Epilogue::None, Epilogue::None)).with_residual_path(check)
}

/// Builds down: a quantized module after a gated activation, added to the residual stream.
fn after_gate<B: Kernels>(check: &mut Check<'_, B>, extras: Extras, dropout: Option<Dropout>) -> Scenario<B> {
    let (tokens, wide, hidden) = (check.case.tokens(), check.case.intermediate_size, check.case.hidden_size);
    let mut group = group(check, &[(Base::NF4, extras)], &[hidden], &[hidden], wide);
    (group.0.dropout, group.1.dropout) = (dropout.map(Mask::from), dropout.map(Mask::from));
    let prologue = gated([check.random([tokens, wide], 1.0), check.random([tokens, wide], 1.0)]);
    let residual = check.random([tokens, hidden], 1.0);
    let epilogue = (Epilogue::Residual(residual.0), Epilogue::Residual(residual.1));
    Scenario::new(check, group, prologue, epilogue)
}

/// Tests a whole MLP, whose two backwards a backend may partly fuse.
fn mlp<B: Kernels>(check: &mut Check<'_, B>) {
    // With one token, the gradients of B are products of one rounded value and have larger errors than sums.
    let tokens = check.case.tokens().max(16);
    let (wide, hidden) = (check.case.intermediate_size, check.case.hidden_size);
    let (adapted, bare) = ((Base::NF4, ADAPTER), (Base::NF4, NOTHING));
    let keeps = check.variants([Keep::Inputs, Keep::Everything]);
    for of_gate_up in check.variants([[adapted; 2], [adapted, bare], [adapted, (Base::New, adapted.1)]]) {
        for activation in check.variants([Activation::Silu, Activation::GeluTanh]) {
            for keep in keeps.iter().copied() {
                let gate_up = group(check, &of_gate_up, &[wide; 2], &[wide; 2], hidden);
                let mlp = Mlp {
                    x: check.random([tokens, hidden], 1.0),
                    norm: norm(check, hidden, true),
                    gate_up,
                    down: group(check, &[adapted], &[hidden], &[hidden], wide),
                    dy: check.random([tokens, hidden], 1.0),
                    activation,
                };
                mlp.run(check, keep);
            }
        }
    }
}

/// Tests the norms of adapted rows: the backend's method against a pass over the whole weight.
fn norms_of_adapted_weights<B: Kernels>(check: &mut Check<'_, B>) {
    let (wide, hidden, dtype) = (check.case.intermediate_size, check.case.hidden_size, check.case.dtype);
    for (name, base) in check.variants([("quantized", Base::NF4), ("dense", Base::Dense)]) {
        let (group, expected) = group(check, &[(base, ADAPTER)], &[wide], &[wide], hidden);
        let (module, expected) = (&group.modules[0], &expected.modules[0]);
        let squares = B::row_squares(&module.weight, dtype);
        let expected_squares = magnitude::row_squares(&expected.weight);
        check.compare(&format!("row_squares, {name}"), squares.clone(), expected_squares);
        let there = "the module has an adapter";
        let pair = module.adapter.as_ref().expect(there);
        let norms = B::adapted_norms(&module.weight, &squares, pair, dtype);
        let expected = magnitude::adapted_norms(&expected.weight, expected.adapter.as_ref().expect(there));
        check.compare(&format!("adapted_norms, {name}"), norms, expected);
    }
}

fn gated_and_rotary<B: Kernels>(check: &mut Check<'_, B>) {
    let (tokens, width, head_dim) = (check.case.tokens(), check.case.intermediate_size, check.case.head_dim);
    let [gate, up, dy] = [3.0, 1.0, 1.0].map(|scale| check.random([tokens, width], scale));
    let other = Activation::ClampedSwiglu(SwigluConstants::new(1.0, 0.75));
    for activation in check.variants(Activation::ALL.into_iter().chain([other])) {
        let ([gate, up], dy) = ([gate.clone(), up.clone()], dy.clone());
        let name = if activation == other { "clamped_swiglu with other constants" } else { activation.name() };
        let y = B::gated(gate.0.clone(), up.0.clone(), activation);
        check.compare(&format!("gated {name}"), y, reference::gated(gate.1.clone(), up.1.clone(), activation));
        let (d_gate, d_up) = B::gated_backward(gate.0, up.0, activation, dy.0);
        let expected = reference::gated_backward(gate.1, up.1, activation, dy.1);
        check.compare(&format!("gated_backward {name}: gate"), d_gate, expected.0);
        check.compare(&format!("gated_backward {name}: up"), d_up, expected.1);
    }

    let part = part_of(head_dim);
    for (name, rotated, interleaved) in check.variants([
        ("rotary", head_dim, false),
        ("rotary of a part of the head", part, false),
        ("rotary of neighbors", head_dim, true),
        ("rotary of neighbors in a part of the head", part, true),
    ]) {
        let (mut tables, mut expected_tables) = tables(check, rotated);
        (tables.interleaved, expected_tables.interleaved) = (interleaved, interleaved);
        let x = check.random([tokens, check.case.heads * head_dim], 1.0);
        let y = B::rotary(x.0.clone(), &tables, head_dim, false);
        check.compare(name, y, reference::rotary(x.1.clone(), &expected_tables, head_dim, false));
        let dx = B::rotary(x.0, &tables, head_dim, true);
        let expected = reference::rotary(x.1, &expected_tables, head_dim, true);
        check.compare(&format!("{name}, backward"), dx, expected);
    }
}

/// Returns three quarters of a head, as an even number of columns.
fn part_of(head_dim: usize) -> usize {
    (head_dim * 3 / 8 * 2).max(2)
}

/// Tests two parts from one input, with every kind of base.
fn plain_groups<B: Kernels>(check: &mut Check<'_, B>) {
    let (wide, narrow) = (check.case.intermediate_size, check.case.kv_heads * check.case.head_dim);
    let bias = Extras { bias: true, ..NOTHING };
    let trained_bias = Extras { trained_bias: true, ..bias };
    let named = [
        ("quantized", vec![(Base::NF4, ADAPTER), (Base::NF4, ADAPTER)]),
        ("quantized, half adapted", vec![(Base::NF4, NOTHING), (Base::NF4, ADAPTER)]),
        ("quantized, biased", vec![(Base::NF4, Extras { bias: true, ..ADAPTER }), (Base::NF4, bias)]),
        ("dense", vec![(Base::Dense, ADAPTER), (Base::Dense, NOTHING)]),
        ("dense, biased", vec![(Base::Dense, bias), (Base::Dense, NOTHING)]),
        ("trained", vec![(Base::New, trained_bias), (Base::New, ADAPTER)]),
        ("trained, added", vec![(Base::AddTo, trained_bias), (Base::AddTo, NOTHING)]),
        ("trained in bf16", vec![(Base::Narrow, trained_bias), (Base::Narrow, NOTHING)]),
        ("mixed", vec![(Base::NF4, ADAPTER), (Base::Dense, ADAPTER)]),
        ("nvfp4", vec![(Base::Quantized(QuantFormat::Nvfp4), ADAPTER), (Base::Quantized(QuantFormat::Nvfp4), NOTHING)]),
        ("mxfp4", vec![(Base::Quantized(QuantFormat::Mxfp4), NOTHING), (Base::Quantized(QuantFormat::Mxfp4), ADAPTER)]),
        ("fp8", vec![(Base::Quantized(QuantFormat::Fp8), ADAPTER), (Base::Quantized(QuantFormat::Fp8), NOTHING)]),
    ];
    let (width, is_bf16) = (check.case.hidden_size, check.case.dtype == DType::BF16);
    let takes = |(base, _): &(Base, Extras)| match base {
        Base::Quantized(format) => format.check_columns(width).is_ok(),
        Base::Narrow => is_bf16,
        _ => true,
    };
    for (name, modules) in check.variants(named).into_iter().filter(|(_, modules)| modules.iter().all(takes)) {
        let widths = [wide, narrow];
        let group = group(check, &modules, &widths, &widths, check.case.hidden_size);
        let x = check.random([check.case.tokens(), check.case.hidden_size], 1.0);
        let prologue = (Prologue::None { x: x.0 }, Prologue::None { x: x.1 });
        Scenario::new(check, group, prologue, (Epilogue::None, Epilogue::None)).run(
            check,
            name,
            &[Keep::Inputs, Keep::LowRank],
        );
    }
}

/// Tests queries, keys and values: norm before, head norms and rotation after; separate and fused modules.
fn qkv<B: Kernels>(check: &mut Check<'_, B>) {
    let case = check.case;
    let (query, kv) = (case.heads * case.head_dim, case.kv_heads * case.head_dim);
    let parts = [query, kv, kv];
    let (per_head, whole) = (Some([case.head_dim; 2]), Some([query, kv]));
    let (all_columns, part) = (Some(case.head_dim), Some(part_of(case.head_dim)));
    let three = |base, extras| vec![(base, extras); 3];
    type Named<'a> = (&'a str, Vec<(Base, Extras)>, &'a [usize], Option<[usize; 2]>, Option<usize>);
    let one = [query + 2 * kv];
    let two = [query, 2 * kv];
    let cases: [Named<'_>; 12] = [
        ("qkv", three(Base::NF4, ADAPTER), &parts, None, all_columns),
        ("qkv, head norms", three(Base::NF4, ADAPTER), &parts, per_head, all_columns),
        ("qkv, head norms, no rotation", three(Base::Dense, NOTHING), &parts, per_head, None),
        ("qkv, no rotation", three(Base::NF4, ADAPTER), &parts, None, None),
        ("qkv, norms over all heads", three(Base::NF4, ADAPTER), &parts, whole, all_columns),
        ("qkv, norms over all heads, no rotation", three(Base::New, BIASED), &parts, whole, None),
        ("qkv, biased", three(Base::Dense, BIASED), &parts, None, all_columns),
        ("qkv in one module", vec![(Base::New, BIASED)], &one, per_head, all_columns),
        ("qkv in one quantized module", vec![(Base::NF4, ADAPTER)], &one, None, all_columns),
        ("q and fused kv", vec![(Base::NF4, ADAPTER), (Base::AddTo, NOTHING)], &two, None, all_columns),
        ("qkv in one module, part of the head rotated", vec![(Base::NF4, ADAPTER)], &one, None, part),
        ("qkv, head norms, part of the head rotated", three(Base::Dense, ADAPTER), &parts, per_head, part),
    ];
    let keeps = check.variants(ALL);
    for (name, modules, widths, head_norms, rotates) in check.variants(cases) {
        let group = group(check, &modules, widths, &parts, case.hidden_size);
        let x = check.random([case.tokens(), case.hidden_size], 1.0);
        let norm = norm(check, case.hidden_size, head_norms.is_some());
        let prologue = (Prologue::Norm { x: x.0, norm: norm.0 }, Prologue::Norm { x: x.1, norm: norm.1 });
        let heads = heads(check, head_norms, rotates);
        let epilogue = (Epilogue::Heads(heads.0), Epilogue::Heads(heads.1));
        Scenario::new(check, group, prologue, epilogue).with_residual_path(check).run(check, name, &keeps);
    }
}

/// Tests queries alone, queries next to what keys and values are made of, and values that are normalized, too.
fn other_parts<B: Kernels>(check: &mut Check<'_, B>) {
    use HeadRole::{Key, Query, Value};
    let case = check.case;
    let (query, kv) = (case.heads * case.head_dim, case.kv_heads * case.head_dim);
    for (name, base, roles) in check.variants([
        ("q", Base::NF4, &[Query][..]),
        ("q and a shared part", Base::New, &[Query, Value][..]),
        ("qkv, normalized values", Base::NF4, &[Query, Key, Value][..]),
    ]) {
        let parts: Vec<usize> = roles.iter().map(|role| if *role == Query { query } else { kv }).collect();
        let group = group(check, &vec![(base, BIASED); parts.len()], &parts, &parts, case.hidden_size);
        let x = check.random([case.tokens(), case.hidden_size], 1.0);
        let (mut heads, mut expected) = heads(check, Some([case.head_dim; 2]), Some(case.head_dim));
        if roles.contains(&Key) {
            let norm = norm(check, case.head_dim, false);
            (heads.parts[2].norm, expected.parts[2].norm) = (Some(norm.0), Some(norm.1));
        }
        heads.parts.retain(|part| roles.contains(&part.role));
        expected.parts.retain(|part| roles.contains(&part.role));
        let prologue = (Prologue::None { x: x.0 }, Prologue::None { x: x.1 });
        let epilogue = (Epilogue::Heads(heads), Epilogue::Heads(expected));
        let scenario = Scenario::new(check, group, prologue, epilogue).with_residual_path(check);
        scenario.run(check, name, &[Keep::Inputs, Keep::Nothing]);
    }
}

/// Tests pairs of neighboring columns, and queries with a factor per token.
fn other_rotations<B: Kernels>(check: &mut Check<'_, B>) {
    let case = check.case;
    let (query, kv) = (case.heads * case.head_dim, case.kv_heads * case.head_dim);
    let (parts, part) = ([query, kv, kv], part_of(case.head_dim));
    let (per_head, whole) = (Some([case.head_dim; 2]), Some([query, kv]));
    let keeps = check.variants([Keep::Inputs, Keep::Everything]);
    for (name, head_norms, rotates, interleaved, is_scaled) in check.variants([
        ("neighbors", None, part, true, false),
        ("neighbors, head norms", per_head, part, true, false),
        ("scaled queries", None, case.head_dim, false, true),
        ("scaled queries, head norms", per_head, case.head_dim, false, true),
        ("scaled queries of neighbors, norms over all heads", whole, case.head_dim, true, true),
    ]) {
        let group = group(check, &[(Base::NF4, ADAPTER); 3], &parts, &parts, case.hidden_size);
        let x = check.random([case.tokens(), case.hidden_size], 1.0);
        let scale = check.random_f32([case.tokens()], 2.0);
        let (mut heads, mut expected) = heads(check, head_norms, Some(rotates));
        if let Some((tables, expected)) = heads.rotary.as_mut().zip(expected.rotary.as_mut()) {
            (tables.interleaved, expected.interleaved) = (interleaved, interleaved);
            (tables.query_scale, expected.query_scale) = (is_scaled.then_some(scale.0), is_scaled.then_some(scale.1));
        }
        let prologue = (Prologue::None { x: x.0 }, Prologue::None { x: x.1 });
        let epilogue = (Epilogue::Heads(heads), Epilogue::Heads(expected));
        let scenario = Scenario::new(check, group, prologue, epilogue).with_residual_path(check);
        scenario.run(check, &format!("qkv, {name}"), &keeps);
    }
}

/// Tests queries, keys and values, and a group of two parts, without a norm before them, but with a residual path.
fn without_norm<B: Kernels>(check: &mut Check<'_, B>) {
    let case = check.case;
    let (query, kv, wide) = (case.heads * case.head_dim, case.kv_heads * case.head_dim, case.intermediate_size);
    for base in check.variants([Base::NF4, Base::New]) {
        let x = check.random([case.tokens(), case.hidden_size], 1.0);
        let prologue = || (Prologue::None { x: x.0.clone() }, Prologue::None { x: x.1.clone() });
        let parts = [query, kv, kv];
        let qkv = group(check, &[(base, ADAPTER); 3], &parts, &parts, case.hidden_size);
        let heads = heads(check, Some([query, kv]), Some(case.head_dim));
        let epilogue = (Epilogue::Heads(heads.0), Epilogue::Heads(heads.1));
        let scenario = Scenario::new(check, qkv, prologue(), epilogue).with_residual_path(check);
        scenario.run(check, "qkv without a norm before", &[Keep::Inputs, Keep::Everything]);
        let gate_up = group(check, &[(base, ADAPTER); 2], &[wide; 2], &[wide; 2], case.hidden_size);
        let scenario =
            Scenario::new(check, gate_up, prologue(), (Epilogue::None, Epilogue::None)).with_residual_path(check);
        scenario.run(check, "gate and up without a norm before", &[Keep::Inputs, Keep::Everything]);
    }
}

/// Tests a module whose output is added to the residual stream, as it is and normalized.
fn residuals<B: Kernels>(check: &mut Check<'_, B>) {
    let case = check.case;
    let (query, hidden) = (case.heads * case.head_dim, case.hidden_size);
    let keeps = check.variants(ALL);
    for (name, base) in check.variants([("output", Base::NF4), ("output, trained", Base::AddTo)]) {
        for is_normed in [false, true] {
            let group = group(check, &[(base, BIASED)], &[hidden], &[hidden], query);
            let (x, residual) = (check.random([case.tokens(), query], 1.0), check.random([case.tokens(), hidden], 1.0));
            let prologue = (Prologue::None { x: x.0 }, Prologue::None { x: x.1 });
            let norm = norm(check, hidden, base == Base::AddTo);
            let epilogue = if is_normed {
                (
                    Epilogue::NormResidual { norm: norm.0, residual: residual.0 },
                    Epilogue::NormResidual { norm: norm.1, residual: residual.1 },
                )
            } else {
                (Epilogue::Residual(residual.0), Epilogue::Residual(residual.1))
            };
            let name = format!("{name}, normalized {is_normed}");
            Scenario::new(check, group, prologue, epilogue).run(check, &name, &keeps);
        }
    }
}

/// Tests the down projection of a gated MLP. Gate and up may be columns of one GEMM's output, which the backward may then overwrite.
fn down<B: Kernels>(check: &mut Check<'_, B>) {
    let case = check.case;
    let (width, hidden) = (case.intermediate_size, case.hidden_size);
    let keeps = check.variants(ALL);
    for is_joined in check.variants([true, false]) {
        let group = group(check, &[(Base::NF4, ADAPTER)], &[hidden], &[hidden], width);
        let joined = check.random([case.tokens(), 2 * width], 2.0);
        let residual = check.random([case.tokens(), hidden], 1.0);
        let [gate, up] = [0, width].map(|start| joined.0.clone().narrow(1, start, width));
        let [expected_gate, expected_up] = [0, width].map(|start| joined.1.clone().narrow(1, start, width));
        let [gate, up] = if is_joined { [gate, up] } else { [gate, up].map(contiguous) };
        let prologue = gated([(gate.clone(), expected_gate.clone()), (up, expected_up)]);
        let epilogue = (Epilogue::Residual(residual.0), Epilogue::Residual(residual.1));
        Scenario::new(check, group, prologue, epilogue).run(check, "down", &keeps);
        check.compare("down: a copy of its gate", gate, expected_gate);
    }
}

/// Copies a view into a separate tensor.
fn contiguous<B: Kernels>(x: Tensor<B, 2>) -> Tensor<B, 2> {
    Tensor::cat(vec![x], 0).mul_scalar(1.0)
}

/// The backend that scenarios are compared with.
type Reference = Flex;
