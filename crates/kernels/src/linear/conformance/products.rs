//! The products that the reference bodies compose, each alone: every kind of base, adapters on some modules, biases, and something to add.
//!
//! Trade-off: DoRA and dropout are compositions of these, which `project` is tested with.

use burn_tensor::Tensor;

use super::Reference;
use super::scenario::{ADAPTER, BIASED, Base, Both, NOTHING, compare_modules, group};
use crate::Kernels;
use crate::conformance::check::{Check, Pair};
use crate::linear::product::{self, GradientOperands, Product, Side};
use crate::linear::{Group, LinearOps};

pub(crate) fn check<B: Kernels>(check: &mut Check<'_, B>) {
    let (inputs, outputs) = (check.case.hidden_size, check.case.intermediate_size);
    for (name, modules) in check.variants([
        ("one", vec![(Base::NF4, ADAPTER)]),
        ("quantized", vec![(Base::NF4, ADAPTER), (Base::NF4, NOTHING), (Base::NF4, BIASED)]),
        ("dense", vec![(Base::Dense, BIASED); 2]),
        ("trained", vec![(Base::New, BIASED), (Base::AddTo, NOTHING)]),
    ]) {
        let widths = [outputs, inputs, outputs];
        let widths = &widths[..modules.len()];
        let group = group(check, &modules, widths, widths, inputs);
        products(check, name, group, widths);
    }
}

/// Tests both sides with everything, with the weights alone and with the adapters alone, and the gradients of the parameters.
fn products<B: Kernels>(
    check: &mut Check<'_, B>,
    name: &str,
    (group, expected_group): Both<Group<B>, Group<Reference>>,
    widths: &[usize],
) {
    let (tokens, inputs) = (check.case.tokens(), check.case.hidden_size);
    let x = check.random([tokens, inputs], 1.0);
    let dy: Vec<Pair<B, 2>> = widths.iter().map(|&width| check.random([tokens, width], 1.0)).collect();
    let dy: (Vec<_>, Vec<_>) = dy.into_iter().unzip();
    let there = "the group has an adapter";
    let mut low_ranks = Vec::new();
    for (side, factors) in [(Side::Output, (vec![x.0.clone()], vec![x.1.clone()])), (Side::Input, dy.clone())] {
        let low_rank = B::low_rank(&factors.0, &group, side).expect(there);
        let expected = product::low_rank(&factors.1, &expected_group, side).expect(there);
        check.compare(&format!("low_rank ({name}, {side:?})"), low_rank.clone(), expected.clone());
        let is_summed = side == Side::Input || widths.len() == 1;
        let width = if side == Side::Input { inputs } else { widths[0] };
        let add = is_summed.then(|| check.random([tokens, width], 1.0)).unzip();
        for (has_weights, has_adapters) in [(true, true), (true, false), (false, true)] {
            if side == Side::Output && !has_weights {
                continue;
            }
            let low_rank = (low_rank.clone(), expected.clone());
            let (low_rank, expected) = Some(low_rank).filter(|_| has_adapters).unzip();
            let (factors, expected_factors) =
                if has_weights { (&factors.0[..], &factors.1[..]) } else { (&[][..], &[][..]) };
            let got = run(&group, side, factors, low_rank, add.0.clone(), B::product);
            let expected = run(&expected_group, side, expected_factors, expected, add.1.clone(), product::product);
            check.same(&format!("product ({name}, {side:?}): results"), got.len() == expected.len());
            for (got, expected) in got.into_iter().zip(expected) {
                let what = format!("product ({name}, {side:?}, weights {has_weights}, adapters {has_adapters})");
                check.compare(&what, got, expected);
            }
        }
        low_ranks.push((low_rank, expected));
    }
    let ((low_rank, expected_low_rank), (d_low_rank, expected_d_low_rank)) = (low_ranks.remove(0), low_ranks.remove(0));
    let got = B::parameter_gradients(operands(x.0, low_rank, dy.0, d_low_rank), group);
    let expected = operands(x.1, expected_low_rank, dy.1, expected_d_low_rank);
    let expected = product::parameter_gradients(expected, expected_group);
    compare_modules(check, &format!("parameter_gradients ({name})"), got, expected);
}

fn run<B: LinearOps>(
    group: &Group<B>,
    side: Side,
    factors: &[Tensor<B, 2>],
    low_rank: Option<Tensor<B, 2>>,
    add: Option<Tensor<B, 2>>,
    product: fn(Product<'_, B>) -> Vec<Tensor<B, 2>>,
) -> Vec<Tensor<B, 2>> {
    product(Product { has_bias: true, add, ..Product::new(group, side, factors.to_vec(), low_rank) })
}

/// Operands without magnitudes and dropout.
fn operands<B: LinearOps>(
    x: Tensor<B, 2>,
    low_rank: Tensor<B, 2>,
    dy: Vec<Tensor<B, 2>>,
    d_low_rank: Tensor<B, 2>,
) -> GradientOperands<B> {
    let (adapters_x, dz) = (x.clone(), dy.clone());
    GradientOperands { x, adapters_x, low_rank: Some(low_rank), dy, dz, d_low_rank: Some(d_low_rank) }
}
