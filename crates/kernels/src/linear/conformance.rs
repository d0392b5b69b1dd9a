//! Groups of linear modules against the reference: every kind of base, adapters, biases, fused modules, prologues and epilogues.
//!
//! Trade-off: each feature is tried in one or two groups, not in every combination.

mod scenario;

use burn_flex::Flex;
use burn_tensor::Tensor;
use firebrick_arch::Activation;
use firebrick_precision::QuantFormat;

use self::scenario::{Base, Extras, Scenario, group, heads, norm, tables};
use super::{Epilogue, Keep, Prologue, reference};
use crate::Kernels;
use crate::conformance::check::Check;

const ALL: [Keep; 3] = [Keep::Inputs, Keep::Nothing, Keep::Everything];

pub(crate) fn check<B: Kernels>(check: &mut Check<'_, B>) {
    gated_and_rotary(check);
    plain_groups(check);
    qkv(check);
    residuals(check);
    down(check);
}

fn gated_and_rotary<B: Kernels>(check: &mut Check<'_, B>) {
    let (tokens, width, head_dim) = (check.case.tokens(), check.case.intermediate_size, check.case.head_dim);
    let [gate, up, dy] = [3.0, 1.0, 1.0].map(|scale| check.random([tokens, width], scale));
    for activation in check.variants(Activation::ALL) {
        let ([gate, up], dy, name) = ([gate.clone(), up.clone()], dy.clone(), activation.name());
        let y = B::gated(gate.0.clone(), up.0.clone(), activation);
        check.compare(&format!("gated {name}"), y, reference::gated(gate.1.clone(), up.1.clone(), activation));
        let (d_gate, d_up) = B::gated_backward(gate.0, up.0, activation, dy.0);
        let expected = reference::gated_backward(gate.1, up.1, activation, dy.1);
        check.compare(&format!("gated_backward {name}: gate"), d_gate, expected.0);
        check.compare(&format!("gated_backward {name}: up"), d_up, expected.1);
    }

    let (tables, expected_tables) = tables(check);
    let x = check.random([tokens, check.case.heads * head_dim], 1.0);
    let y = B::rotary(x.0.clone(), &tables, head_dim);
    check.compare("rotary", y, reference::rotary(x.1.clone(), &expected_tables, head_dim));
    let dx = B::rotary_backward(x.0, &tables, head_dim);
    check.compare("rotary_backward", dx, reference::rotary_backward(x.1, &expected_tables, head_dim));
}

/// Two parts from one input, over every kind of base.
fn plain_groups<B: Kernels>(check: &mut Check<'_, B>) {
    let (wide, narrow) = (check.case.intermediate_size, check.case.kv_heads * check.case.head_dim);
    let plain = Extras::default();
    let (adapter, bias) = (Extras { adapter: true, ..plain }, Extras { bias: true, ..plain });
    let trained_bias = Extras { bias: true, trained_bias: true, adapter: false };
    let named = [
        ("quantized", vec![(Base::NF4, adapter), (Base::NF4, adapter)]),
        ("quantized, half adapted", vec![(Base::NF4, plain), (Base::NF4, adapter)]),
        ("quantized, biased", vec![(Base::NF4, Extras { bias: true, ..adapter }), (Base::NF4, bias)]),
        ("dense", vec![(Base::Dense, adapter), (Base::Dense, plain)]),
        ("dense, biased", vec![(Base::Dense, bias), (Base::Dense, plain)]),
        ("trained", vec![(Base::New, trained_bias), (Base::New, adapter)]),
        ("trained, added", vec![(Base::AddTo, trained_bias), (Base::AddTo, plain)]),
        ("mixed", vec![(Base::NF4, adapter), (Base::Dense, adapter)]),
        ("nvfp4", vec![(Base::Quantized(QuantFormat::Nvfp4), adapter), (Base::Quantized(QuantFormat::Nvfp4), plain)]),
        ("mxfp4", vec![(Base::Quantized(QuantFormat::Mxfp4), plain), (Base::Quantized(QuantFormat::Mxfp4), adapter)]),
        ("fp8", vec![(Base::Quantized(QuantFormat::Fp8), adapter), (Base::Quantized(QuantFormat::Fp8), plain)]),
    ];
    let width = check.case.hidden_size;
    let takes = |(base, _): &(Base, Extras)| match base {
        Base::Quantized(format) => format.check_columns(width).is_ok(),
        _ => true,
    };
    for (name, modules) in check.variants(named).into_iter().filter(|(_, modules)| modules.iter().all(takes)) {
        let widths = [wide, narrow];
        let group = group(check, &modules, &widths, &widths, check.case.hidden_size);
        let x = check.random([check.case.tokens(), check.case.hidden_size], 1.0);
        let prologue = (Prologue::None { x: x.0 }, Prologue::None { x: x.1 });
        Scenario::new(check, group, prologue, (Epilogue::None, Epilogue::None)).run(check, name, &[Keep::Inputs]);
    }
}

/// Queries, keys and values: norm before, head norms and rotation after; separate and fused modules.
fn qkv<B: Kernels>(check: &mut Check<'_, B>) {
    let case = check.case;
    let (query, kv) = (case.heads * case.head_dim, case.kv_heads * case.head_dim);
    let parts = [query, kv, kv];
    let plain = Extras::default();
    let (adapter, all) = (Extras { adapter: true, ..plain }, Extras { adapter: true, bias: true, trained_bias: true });
    let cases: [(&str, Vec<_>, &[usize], bool, bool); 6] = [
        ("qkv", vec![(Base::NF4, adapter); 3], &parts, false, true),
        ("qkv, head norms", vec![(Base::NF4, adapter); 3], &parts, true, true),
        ("qkv, head norms, no rotation", vec![(Base::Dense, plain); 3], &parts, true, false),
        ("qkv, biased", vec![(Base::Dense, all); 3], &parts, false, true),
        ("qkv in one module", vec![(Base::New, all)], &[query + 2 * kv], true, true),
        ("q and fused kv", vec![(Base::NF4, adapter), (Base::AddTo, plain)], &[query, 2 * kv], false, true),
    ];
    let keeps = check.variants(ALL);
    for (name, modules, widths, head_norms, rotates) in check.variants(cases) {
        let group = group(check, &modules, widths, &parts, case.hidden_size);
        let x = check.random([case.tokens(), case.hidden_size], 1.0);
        let norm = norm(check, case.hidden_size, head_norms);
        let prologue = (Prologue::Norm { x: x.0, norm: norm.0 }, Prologue::Norm { x: x.1, norm: norm.1 });
        let heads = heads(check, head_norms, rotates);
        let epilogue = (Epilogue::Heads(heads.0), Epilogue::Heads(heads.1));
        Scenario::new(check, group, prologue, epilogue).with_residual_path(check).run(check, name, &keeps);
    }
}

/// One module whose output is added to the residual stream.
fn residuals<B: Kernels>(check: &mut Check<'_, B>) {
    let case = check.case;
    let (query, hidden) = (case.heads * case.head_dim, case.hidden_size);
    let keeps = check.variants(ALL);
    for (name, base) in check.variants([("output", Base::NF4), ("output, trained", Base::AddTo)]) {
        let modules = [(base, Extras { adapter: true, bias: true, trained_bias: true })];
        let group = group(check, &modules, &[hidden], &[hidden], query);
        let (x, residual) = (check.random([case.tokens(), query], 1.0), check.random([case.tokens(), hidden], 1.0));
        let prologue = (Prologue::None { x: x.0 }, Prologue::None { x: x.1 });
        let epilogue = (Epilogue::Residual(residual.0), Epilogue::Residual(residual.1));
        Scenario::new(check, group, prologue, epilogue).run(check, name, &keeps);
    }
}

/// The down projection of a gated MLP. Gate and up may be columns of one GEMM's output, which the backward may then overwrite.
fn down<B: Kernels>(check: &mut Check<'_, B>) {
    let case = check.case;
    let (width, hidden) = (case.intermediate_size, case.hidden_size);
    let activation = Activation::Silu;
    let keeps = check.variants(ALL);
    for is_joined in check.variants([true, false]) {
        let modules = [(Base::NF4, Extras { adapter: true, ..Extras::default() })];
        let group = group(check, &modules, &[hidden], &[hidden], width);
        let joined = check.random([case.tokens(), 2 * width], 2.0);
        let residual = check.random([case.tokens(), hidden], 1.0);
        let [gate, up] = [0, width].map(|start| joined.0.clone().narrow(1, start, width));
        let [expected_gate, expected_up] = [0, width].map(|start| joined.1.clone().narrow(1, start, width));
        let [gate, up] = if is_joined { [gate, up] } else { [gate, up].map(contiguous) };
        let prologue = (
            Prologue::Gated { gate: gate.clone(), up, activation },
            Prologue::Gated { gate: expected_gate.clone(), up: expected_up, activation },
        );
        let epilogue = (Epilogue::Residual(residual.0), Epilogue::Residual(residual.1));
        Scenario::new(check, group, prologue, epilogue).run(check, "down", &keeps);
        check.compare("down: a copy of its gate", gate, expected_gate);
    }
}

/// A tensor of its own instead of a view.
fn contiguous<B: Kernels>(x: Tensor<B, 2>) -> Tensor<B, 2> {
    Tensor::cat(vec![x], 0).mul_scalar(1.0)
}

/// What a scenario is compared with.
type Reference = Flex;
