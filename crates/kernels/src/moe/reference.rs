//! Routing in ordinary Burn operations; the host chooses experts and orders rows.
//!
//! With scores `s`, the chosen ones `s_j` with sum `S`, a factor `c`, and weights `w_j = c s_j / (S + ε)` or `c s_j`:
//! `ds_j = (c dw_j - Σ dw_i w_i) / (S + ε)` or `c dw_j`, and zero for experts that were not chosen. A scale `g` of experts makes `g_j w_j` of `w_j`, so
//! that `dw_j` becomes `g_j dw_j`, and the sum above stays that of the weights as they are. Through a softmax,
//! `dlogit_e = s_e (ds_e - Σ s_j ds_j)`; through a sigmoid, `dlogit_e = s_e (1 - s_e) ds_e`. The correction decides the choice, which has no
//! gradient. A softmax over the chosen logits alone is `exp l_j / Σ exp l_i = s_j / S` of the softmax over all: the same path.
//! Trade-off: all scores are copied to the host, which suits backends without kernels of their own, since experts are few.

use std::cmp::Ordering;

use burn_tensor::activation::{sigmoid, softmax};
use burn_tensor::{IndexingUpdateOp, Int, Tensor, TensorData, backend::Backend};

use firebrick_arch::{ExpertGroups, RouterScores, RouterSpec};

use super::{Combined, Routing};
use crate::dtype::{plus, to_dtype, to_f32, weighted};
use crate::linear::ExpertRows;

/// Implements [`super::MoeOps::route`].
pub fn route<B: Backend>(
    logits_ne: Tensor<B, 2>,
    top_k: usize,
    router: RouterSpec,
    correction_e: Option<Tensor<B, 1>>,
    scale_e: Option<Tensor<B, 1>>,
) -> Routing<B> {
    let ([tokens, experts], device) = (logits_ne.dims(), logits_ne.device());
    check(experts, top_k, router.groups);
    let logits_ne = to_f32(logits_ne);
    let scores_ne = match router.scores {
        RouterScores::Softmax => softmax(logits_ne, 1),
        RouterScores::Sigmoid => sigmoid(logits_ne),
    };
    let corrected_ne = match correction_e {
        Some(correction_e) => scores_ne.clone().add(to_f32(correction_e).unsqueeze()),
        None => scores_ne.clone(),
    };
    let host = corrected_ne.to_data().to_vec::<f32>().expect("scores are f32");
    let chosen: Vec<usize> = host.chunks(experts).flat_map(|row| choose(row, top_k, router.groups)).collect();
    let order = Order::of(&chosen, experts);

    let ints = |values: Vec<usize>| -> Tensor<B, 1, Int> {
        let values: Vec<i32> = values.into_iter().map(|value| value as i32).collect();
        Tensor::from_data(TensorData::from(values.as_slice()), &device)
    };
    let tokens_s = ints(order.choices.iter().map(|choice| choice / top_k).collect());
    let experts_nk = ints(chosen).reshape([tokens, top_k]);
    let scores_nk = scores_ne.clone().gather(1, experts_nk.clone());
    let weights_nk = match router.normalizes {
        true => scores_nk.clone().div(scores_nk.sum_dim(1).add_scalar(router.epsilon)),
        false => scores_nk,
    };
    let scale_nk = scale_e.as_ref().map(|scale_e| of_chosen(scale_e, &experts_nk));
    let weights_nk = weighted(weights_nk.mul_scalar(router.scale), scale_nk);
    Routing {
        scores_ne,
        experts_nk,
        weights_nk,
        scale_e,
        router,
        rows_nk: ints(order.rows_of_choices).reshape([tokens, top_k]),
        choices_s: ints(order.choices),
        tokens_s,
        rows: ExpertRows::of_counts(order.rows, &device),
    }
}

/// Returns what each choice has of a vector over experts.
fn of_chosen<B: Backend>(vector_e: &Tensor<B, 1>, experts_nk: &Tensor<B, 2, Int>) -> Tensor<B, 2> {
    let [tokens, top_k] = experts_nk.dims();
    to_f32(vector_e.clone()).select(0, experts_nk.clone().reshape([tokens * top_k])).reshape([tokens, top_k])
}

/// Checks that a token can be given this many experts.
pub(crate) fn check(experts: usize, top_k: usize, groups: Option<ExpertGroups>) {
    let available = groups.map_or(experts, |groups| groups.chosen * (experts / groups.count));
    assert!((1..=available).contains(&top_k), "{top_k} of {available} experts per token");
    if let Some(ExpertGroups { count, chosen }) = groups {
        let is_even = count <= ExpertGroups::MAX && experts.is_multiple_of(count) && experts >= 2 * count;
        assert!(is_even && chosen <= count, "{chosen} of {count} groups of {experts} experts");
    }
}

/// Returns the experts with the `count` largest scores, the largest first, among all or among those of the groups with the largest sums of their two
/// largest scores.
fn choose(scores: &[f32], count: usize, groups: Option<ExpertGroups>) -> Vec<usize> {
    let Some(groups) = groups else { return largest(scores, 0..scores.len(), count) };
    let size = scores.len() / groups.count;
    let of_group = |group: usize| group * size..(group + 1) * size;
    let sum = |group| largest(scores, of_group(group), 2).into_iter().map(|expert| comparable(scores[expert])).sum();
    let sums: Vec<f32> = (0..groups.count).map(sum).collect();
    let chosen = largest(&sums, 0..groups.count, groups.chosen);
    largest(scores, chosen.into_iter().flat_map(of_group), count)
}

/// Returns the indices of the `count` largest values among these, the largest first; of equal values, the lower index comes first.
fn largest(values: &[f32], indices: impl Iterator<Item = usize>, count: usize) -> Vec<usize> {
    let mut indices: Vec<usize> = indices.collect();
    let descending = |&a: &usize, &b: &usize| match comparable(values[b]).total_cmp(&comparable(values[a])) {
        Ordering::Equal => a.cmp(&b),
        other => other,
    };
    indices.sort_unstable_by(descending);
    indices.truncate(count);
    indices
}

fn comparable(value: f32) -> f32 {
    if value.is_nan() { f32::INFINITY } else { value }
}

/// Choices sorted by expert and then by token.
struct Order {
    choices: Vec<usize>,
    rows_of_choices: Vec<usize>,
    rows: Vec<usize>,
}

impl Order {
    fn of(chosen: &[usize], experts: usize) -> Self {
        let mut rows = vec![0; experts];
        chosen.iter().for_each(|&expert| rows[expert] += 1);
        let mut next: Vec<usize> = rows
            .iter()
            .scan(0, |end, &count| {
                *end += count;
                Some(*end - count)
            })
            .collect();
        let (mut choices, mut rows_of_choices) = (vec![0; chosen.len()], vec![0; chosen.len()]);
        for (choice, &expert) in chosen.iter().enumerate() {
            choices[next[expert]] = choice;
            rows_of_choices[choice] = next[expert];
            next[expert] += 1;
        }
        Self { choices, rows_of_choices, rows }
    }
}

/// Implements [`super::MoeOps::route_backward`].
pub fn route_backward<B: Backend>(
    routing: &Routing<B>,
    d_weights_nk: Tensor<B, 2>,
    like_nd: &Tensor<B, 2>,
) -> Tensor<B, 2> {
    let RouterSpec { scores, normalizes, epsilon, scale, .. } = routing.router;
    let s_ne = routing.scores_ne.clone();
    let s_nk = s_ne.clone().gather(1, routing.experts_nk.clone());
    let scale_nk = routing.scale_e.as_ref().map(|scale_e| of_chosen(scale_e, &routing.experts_nk));
    let scaled_nk = weighted(d_weights_nk.clone().mul_scalar(scale), scale_nk);
    let ds_nk = if normalizes {
        let mean_n1 = d_weights_nk.mul(routing.weights_nk.clone()).sum_dim(1);
        scaled_nk.sub(mean_n1).div(s_nk.clone().sum_dim(1).add_scalar(epsilon))
    } else {
        scaled_nk
    };
    let all =
        |of_chosen_nk| s_ne.zeros_like().scatter(1, routing.experts_nk.clone(), of_chosen_nk, IndexingUpdateOp::Add);
    let d_logits_ne = match scores {
        RouterScores::Softmax => {
            let through_n1 = s_nk.mul(ds_nk.clone()).sum_dim(1);
            s_ne.clone().mul(all(ds_nk).sub(through_n1))
        }
        RouterScores::Sigmoid => all(s_nk.clone().mul(s_nk.neg().add_scalar(1.0)).mul(ds_nk)),
    };
    to_dtype(d_logits_ne, like_nd.dtype())
}

/// Implements [`super::MoeOps::dispatch`].
pub fn dispatch<B: Backend>(x_nd: Tensor<B, 2>, routing: &Routing<B>) -> Tensor<B, 2> {
    x_nd.select(0, routing.tokens_s.clone())
}

/// Gathers the rows of each token's choices in f32, `[n, k, d]`.
fn of_choices<B: Backend>(rows_sd: Tensor<B, 2>, routing: &Routing<B>) -> Tensor<B, 3> {
    let ([tokens, top_k], [rows, width]) = (routing.rows_nk.dims(), rows_sd.dims());
    to_f32(rows_sd).select(0, routing.rows_nk.clone().reshape([rows])).reshape([tokens, top_k, width])
}

/// Implements [`super::MoeOps::combine`].
pub fn combine<B: Backend>(y_sd: Tensor<B, 2>, routing: &Routing<B>, combined: Combined<B>) -> Tensor<B, 2> {
    let dtype = y_sd.dtype();
    let weights = || -> Tensor<B, 3> { routing.weights_nk.clone().unsqueeze_dim(2) };
    let (weights, residual_nd) = match combined {
        Combined::Rows => (None, None),
        Combined::Weighted => (Some(weights()), None),
        Combined::WeightedOnto(residual_nd) => (Some(weights()), Some(residual_nd)),
    };
    let sum_nd: Tensor<B, 2> = weighted(of_choices(y_sd, routing), weights).sum_dim(1).squeeze_dim(1);
    to_dtype(plus(sum_nd, residual_nd.map(to_f32)), dtype)
}

/// Implements [`super::MoeOps::combine_backward`].
pub fn combine_backward<B: Backend>(
    y_sd: Tensor<B, 2>,
    routing: &Routing<B>,
    dy_nd: Tensor<B, 2>,
) -> (Tensor<B, 2>, Tensor<B, 2>) {
    let (dtype, [rows, _]) = (y_sd.dtype(), y_sd.dims());
    let dy_nd = to_f32(dy_nd);
    let dy_n1d: Tensor<B, 3> = dy_nd.clone().unsqueeze_dim(1);
    let d_weights_nk = of_choices(y_sd, routing).mul(dy_n1d).sum_dim(2).squeeze_dim(2);
    let weights_s = routing.weights_nk.clone().reshape([rows]).select(0, routing.choices_s.clone());
    let d_rows_sd = dy_nd.select(0, routing.tokens_s.clone()).mul(weights_s.unsqueeze_dim(1));
    (to_dtype(d_rows_sd, dtype), d_weights_nk)
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::MemoryOps;
    use crate::memory::slices;
    use crate::testing::{Plain, Recorded, assert_close, backward as recorded_backward, leaf, random};

    const TOKENS: usize = 9;
    const EXPERTS: usize = 5;
    const TOP_K: usize = 3;
    const DEEPSEEK: RouterSpec =
        RouterSpec { scores: RouterScores::Sigmoid, normalizes: true, ..RouterSpec::softmax(true) };

    #[test]
    fn the_largest_come_first_and_of_equal_ones_the_lower_index() {
        let largest = |values: &[f32], count| largest(values, 0..values.len(), count);
        assert_eq!(largest(&[0.1, 0.4, 0.1, 0.4], 3), [1, 3, 0]);
        assert_eq!(largest(&[0.0; 3], 2), [0, 1]);
        assert_eq!(largest(&[0.0, f32::NAN, 1.0, -f32::NAN], 3), [1, 3, 2], "what is not a number comes first");
    }

    #[test]
    fn experts_are_those_of_the_groups_with_the_largest_sums_of_two() {
        let groups = |count, chosen| Some(ExpertGroups { count, chosen });
        let scores = [0.9, 0.0, 0.0, 0.5, 0.6, 0.1, 0.4, 0.4, 0.3];
        assert_eq!(choose(&scores, 2, None), [0, 4]);
        assert_eq!(choose(&scores, 2, groups(3, 1)), [4, 3], "0.5 + 0.6 is more than 0.9 + 0.0");
        assert_eq!(choose(&scores, 4, groups(3, 2)), [0, 4, 3, 5]);
        assert_eq!(choose(&[0.5; 8], 3, groups(4, 2)), [0, 1, 2], "of equal groups, the lower index comes first");
    }

    #[test]
    fn a_correction_decides_the_choice_and_not_the_weights() {
        let logits = Tensor::<Plain, 2>::from_data([[2.0, 1.0, 0.0, -1.0]], &Default::default());
        let correction = Tensor::<Plain, 1>::from_data([-1.0, 0.0, 0.5, 0.0], &Default::default());
        let router = RouterSpec { corrects: true, scale: 2.0, ..DEEPSEEK };
        let routing = route(logits, 2, router, Some(correction), None);
        assert_eq!(routing.experts_nk.to_data().iter::<i64>().collect::<Vec<_>>(), [2, 1]);
        let score = |logit: f32| 1.0 / (1.0 + (-logit).exp());
        let [first, second] = [score(0.0), score(1.0)].map(|of| 2.0 * of / (score(0.0) + score(1.0)));
        assert_close(routing.weights_nk, Tensor::from_data([[first, second]], &Default::default()), 1e-6);
    }

    #[test]
    fn a_softmax_over_the_chosen_logits_is_the_normalized_softmax_over_all() {
        let logits = random::<Plain, 2>(1, [TOKENS, EXPERTS]).mul_scalar(5.0);
        let routing = route(logits.clone(), TOP_K, RouterSpec::softmax(true), None, None);
        let alone = softmax(logits.gather(1, routing.experts_nk), 1);
        assert_close(routing.weights_nk, alone, 1e-6);
    }

    #[test]
    fn rows_are_those_of_one_expert_after_the_other_in_the_order_of_tokens() {
        let order = Order::of(&[2, 0, 0, 2, 2, 1], 4);
        assert_eq!(order.rows, [2, 1, 3, 0]);
        assert_eq!(order.choices, [1, 2, 5, 0, 3, 4]);
        assert_eq!(order.rows_of_choices, [3, 0, 1, 4, 5, 2]);
    }

    /// Computes the output of experts that multiply their rows by `1 + expert`, along a recorded route.
    fn recorded(
        logits_ne: Tensor<Recorded, 2>,
        x_nd: Tensor<Recorded, 2>,
        experts_nk: Tensor<Recorded, 2, Int>,
        router: RouterSpec,
        scale_e: Option<Tensor<Recorded, 1>>,
    ) -> Tensor<Recorded, 2> {
        let scores_ne = match router.scores {
            RouterScores::Softmax => softmax(logits_ne, 1),
            RouterScores::Sigmoid => sigmoid(logits_ne),
        };
        let s_nk = scores_ne.gather(1, experts_nk.clone());
        let weights_nk = if router.normalizes { s_nk.clone().div(s_nk.sum_dim(1)) } else { s_nk };
        let scale_nk = scale_e.map(|scale_e| of_chosen(&scale_e, &experts_nk));
        let weights_nk = weighted(weights_nk.mul_scalar(router.scale), scale_nk);
        let factors_nk = experts_nk.float().add_scalar(1.0);
        x_nd.clone().mul(weights_nk.mul(factors_nk).sum_dim(1)).add(x_nd)
    }

    #[test]
    fn the_backward_through_weights_and_rows_equals_autodiff() {
        let softmax = [true, false].map(RouterSpec::softmax);
        let sigmoid = [true, false].map(|normalizes| RouterSpec { normalizes, scale: 2.5, ..DEEPSEEK });
        // Tokens choose freely; all choose the same three experts; all choose the same one.
        let cases = [(TOP_K, [0.0; EXPERTS]), (TOP_K, [9.0, 0.0, 9.0, 0.0, 9.0]), (1, [0.0, 0.0, 9.0, 0.0, 0.0])];
        let routers = softmax.into_iter().chain(sigmoid);
        let cases = routers.flat_map(|router| cases.map(|case| (router, case)));
        for ((router, (top_k, more)), is_scaled) in cases.flat_map(|case| [false, true].map(|scaled| (case, scaled))) {
            let scale = Tensor::<Plain, 1>::from_data([0.5, 2.0, -1.5, 0.0, 3.0], &Default::default());
            let scale = is_scaled.then_some(scale);
            let more = Tensor::<Plain, 1>::from_data(more, &Default::default());
            let logits = random::<Plain, 2>(1, [TOKENS, EXPERTS]).mul_scalar(3.0).add(more.clone().unsqueeze());
            let (x, dy) = (random::<Plain, 2>(2, [TOKENS, 4]), random::<Plain, 2>(3, [TOKENS, 4]));
            let routing = route(logits.clone(), top_k, router, None, scale.clone());
            let counts = routing.rows.counts();
            assert_eq!(counts.iter().sum::<usize>(), TOKENS * top_k);
            let favored = more.to_data().iter::<f32>().collect::<Vec<_>>();
            let is_full = |expert: usize| favored[expert] > 0.0 && counts[expert] == TOKENS;
            assert_eq!(
                (0..EXPERTS).filter(|&expert| is_full(expert)).count(),
                favored.iter().filter(|&&v| v > 0.0).count()
            );
            let (recorded_logits, recorded_x) = (leaf(&logits), leaf(&x));
            let experts = Tensor::from_inner(routing.experts_nk.clone());
            let scale = scale.map(Tensor::from_inner);
            let expected = recorded(recorded_logits.clone(), recorded_x.clone(), experts, router, scale);

            let factor = |expert: usize| 1.0 + expert as f32;
            let apply = |rows_sd: Tensor<Plain, 2>| {
                let (has_rows, ranges): (Vec<_>, Vec<_>) = routing.rows.ranges().into_iter().unzip();
                let parts = slices(rows_sd, &ranges).into_iter().zip(has_rows);
                Plain::join_rows(parts.map(|(part, e)| part.mul_scalar(factor(e))).collect())
            };
            let y_sd = apply(dispatch(x.clone(), &routing));
            let y = combine(y_sd.clone(), &routing, Combined::WeightedOnto(x.clone()));
            assert_close(y, expected.clone().inner(), 1e-5);
            let y = combine(y_sd.clone(), &routing, Combined::Weighted).add(x.clone());
            assert_close(y, expected.clone().inner(), 1e-5);

            let gradients = recorded_backward(expected, &dy);
            let (dy_sd, d_weights_nk) = combine_backward(y_sd, &routing, dy.clone());
            let dx = combine(apply(dy_sd), &routing, Combined::Rows).add(dy);
            assert_close(dx.clone(), recorded_x.grad(&gradients).unwrap(), 1e-5);
            let d_logits = route_backward(&routing, d_weights_nk, &dx);
            assert_close(d_logits, recorded_logits.grad(&gradients).unwrap(), 1e-5);
        }
    }
}
