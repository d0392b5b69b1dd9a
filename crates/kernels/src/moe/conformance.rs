//! Routing against its reference: a few experts and many, one of which no token chooses; scores, weights and choices of every kind.
//!
//! Trade-off: scores that differ by less than rounding are avoided, so only the reference's own tests cover ties.

use super::{Combined, Routing, reference};
use crate::Kernels;
use crate::conformance::check::{Check, Pair};
use crate::memory::slices;
use burn_flex::Flex;
use burn_tensor::{DType, Int, Tensor};
use firebrick_arch::{ExpertGroups, RouterScores, RouterSpec};

pub(crate) fn check<B: Kernels>(check: &mut Check<'_, B>) {
    let [softmax, normalized] = [false, true].map(RouterSpec::softmax);
    let sigmoid = RouterSpec { scores: RouterScores::Sigmoid, scale: 2.5, ..normalized };
    let grouped =
        |count, chosen| RouterSpec { corrects: true, groups: Some(ExpertGroups { count, chosen }), ..sigmoid };
    let variants = check.variants([
        (8, 2, normalized),
        (128, 8, softmax),
        (5, 5, normalized),
        (1, 1, RouterSpec::gate()),
        (70, 3, normalized),
        (40, 4, RouterSpec { scale: 0.5, scaled: true, ..softmax }),
        (128, 8, RouterSpec { scaled: true, ..normalized }),
        (128, 8, RouterSpec { corrects: true, ..sigmoid }),
        (9, 2, RouterSpec { normalizes: false, ..sigmoid }),
        (256, 8, grouped(8, 4)),
        (12, 3, grouped(3, 2)),
        (64, 2, RouterSpec { groups: Some(ExpertGroups { count: 32, chosen: 1 }), ..normalized }),
    ]);
    for (experts, top_k, router) in variants {
        routing(check, experts, top_k, router);
    }
}

/// Returns a correction that moves some experts past others, by amounts that no two scores differ by; the last expert stays the last.
fn correction<B: Kernels>(check: &Check<'_, B>, experts: usize) -> Pair<B, 1> {
    let moved = |expert: usize| 0.11 * ((expert * 7) % 5) as f32 + 0.0013 * expert as f32;
    let value = |expert: usize| if expert + 1 == experts { -0.5 } else { moved(expert) };
    let values: Vec<f32> = (0..experts).map(value).collect();
    check.on_both(DType::F32, [experts], values)
}

/// Returns logits that per token permute well-separated values; of several experts, the last is never chosen.
fn logits<B: Kernels>(check: &Check<'_, B>, experts: usize, top_k: usize) -> Pair<B, 2> {
    let tokens = check.case.tokens();
    let spare = usize::from(experts > top_k);
    let value = |token: usize, expert: usize| match expert {
        expert if expert + spare == experts && spare > 0 => -4.0,
        expert => ((expert * 31 + token * 17) % (experts - spare)) as f32 * (6.0 / experts as f32) - 2.0,
    };
    let values = (0..tokens).flat_map(|token| (0..experts).map(move |expert| value(token, expert))).collect();
    check.on_both(check.case.dtype, [tokens, experts], values)
}

fn routing<B: Kernels>(check: &mut Check<'_, B>, experts: usize, top_k: usize, router: RouterSpec) {
    let (tokens, width) = (check.case.tokens(), check.case.hidden_size);
    let logits = logits(check, experts, top_k);
    let (correction, on_cpu) = router.corrects.then(|| correction(check, experts)).unzip();
    let (scale, scale_on_cpu) = router.scaled.then(|| check.random_within([experts], 0.5..1.5)).unzip();
    let got = B::route(logits.0, top_k, router, correction, scale);
    let expected = reference::route(logits.1, top_k, router, on_cpu, scale_on_cpu);
    same_routing(check, &got, &expected);
    check.compare("route: scores", got.scores_ne.clone(), expected.scores_ne.clone());
    check.compare("route: weights", got.weights_nk.clone(), expected.weights_nk.clone());

    let x = check.random([tokens, width], 1.0);
    let rows = B::dispatch(x.0.clone(), &got);
    let expected_rows = reference::dispatch(x.1.clone(), &expected);
    check.compare("dispatch", rows.clone(), expected_rows.clone());
    let (_, ranges): (Vec<_>, Vec<_>) = got.rows.ranges().into_iter().unzip();
    let joined = B::join_rows(slices(rows.clone(), &ranges));
    check.compare("slices and join_rows", joined, expected_rows);
    let dy = check.random([tokens * top_k, width], 1.0);
    let sums = B::combine(dy.0.clone(), &got, Combined::Rows);
    let expected_sums = reference::combine(dy.1.clone(), &expected, Combined::Rows);
    check.compare("combine: the backward of dispatch", sums, expected_sums);

    let (y, residual) = (dy, x);
    let sums = B::combine(y.0.clone(), &got, Combined::Weighted);
    check.compare("combine: alone", sums, reference::combine(y.1.clone(), &expected, Combined::Weighted));
    let sums = B::combine(y.0.clone(), &got, Combined::WeightedOnto(residual.0));
    check.compare("combine", sums, reference::combine(y.1.clone(), &expected, Combined::WeightedOnto(residual.1)));
    let d_sum = check.random([tokens, width], 1.0);
    let (d_rows, d_weights) = B::combine_backward(y.0, &got, d_sum.0.clone());
    let (expected_rows, expected_weights) = reference::combine_backward(y.1, &expected, d_sum.1.clone());
    check.compare("combine_backward: rows", d_rows, expected_rows);
    check.compare("combine_backward: weights", d_weights, expected_weights);

    let d_weights = check.random_f32([tokens, top_k], 1.0);
    let d_logits = B::route_backward(&got, d_weights.0, &d_sum.0);
    check.same("route_backward: format", d_logits.dtype() == check.case.dtype);
    check.compare("route_backward", d_logits, reference::route_backward(&expected, d_weights.1, &d_sum.1));
    let zeros = B::zeros([1, 37], DType::F32, check.device);
    check.same("zeros: format", zeros.dtype() == DType::F32);
    check.compare("zeros", zeros, Tensor::<Flex, 2>::zeros([1, 37], &check.cpu));
}

fn same_routing<B: Kernels>(check: &mut Check<'_, B>, got: &Routing<B>, expected: &Routing<Flex>) {
    fn host<C: burn_tensor::backend::Backend, const D: usize>(tensor: &Tensor<C, D, Int>) -> Vec<i64> {
        tensor.to_data().iter::<i64>().collect()
    }
    check.same("route: experts", host(&got.experts_nk) == host(&expected.experts_nk));
    check.same("route: rows of choices", host(&got.rows_nk) == host(&expected.rows_nk));
    check.same("route: choices of rows", host(&got.choices_s) == host(&expected.choices_s));
    check.same("route: tokens of rows", host(&got.tokens_s) == host(&expected.tokens_s));
    check.same("route: rows of each expert", got.rows.counts() == expected.rows.counts());
}
