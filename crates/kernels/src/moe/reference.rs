//! Routing in ordinary Burn operations; the host chooses experts and orders rows.
//!
//! With probabilities `p`, the chosen ones `p_j` with sum `S`, and weights `w_j = p_j / S` or `p_j`: `dp_j = (dw_j - Σ dw_i w_i) / S` or
//! `dw_j`, and `dlogit_e = p_e (dp_e - Σ p_j dp_j)`, where `dp` is zero for experts that were not chosen.
//! Trade-off: all probabilities are copied to the host, which suits backends without kernels of their own, since experts are few.

use std::cmp::Ordering;

use burn_tensor::activation::softmax;
use burn_tensor::{IndexingUpdateOp, Int, Tensor, TensorData, backend::Backend};

use super::Routing;
use crate::dtype::{to_dtype, to_f32};
use crate::linear::ExpertRows;

/// Implements [`super::MoeOps::route`].
pub fn route<B: Backend>(logits_ne: Tensor<B, 2>, top_k: usize, normalizes: bool) -> Routing<B> {
    let ([tokens, experts], device) = (logits_ne.dims(), logits_ne.device());
    assert!((1..=experts).contains(&top_k), "{top_k} of {experts} experts per token");
    let probabilities_ne = softmax(to_f32(logits_ne), 1);
    let host = probabilities_ne.to_data().to_vec::<f32>().expect("probabilities are f32");
    let chosen: Vec<usize> = host.chunks(experts).flat_map(|row| largest(row, top_k)).collect();
    let order = Order::of(&chosen, experts);

    let ints = |values: Vec<usize>| -> Tensor<B, 1, Int> {
        let values: Vec<i32> = values.into_iter().map(|value| value as i32).collect();
        Tensor::from_data(TensorData::from(values.as_slice()), &device)
    };
    let tokens_s = ints(order.choices.iter().map(|choice| choice / top_k).collect());
    let experts_nk = ints(chosen).reshape([tokens, top_k]);
    let largest_nk = probabilities_ne.clone().gather(1, experts_nk.clone());
    let weights_nk = match normalizes {
        true => largest_nk.clone().div(largest_nk.sum_dim(1)),
        false => largest_nk,
    };
    Routing {
        probabilities_ne,
        experts_nk,
        weights_nk,
        normalizes,
        rows_nk: ints(order.rows_of_choices).reshape([tokens, top_k]),
        choices_s: ints(order.choices),
        tokens_s,
        rows: ExpertRows::of_counts(order.rows, &device),
    }
}

/// Returns the indices of the `count` largest values, the largest first; of equal values, the lower index comes first.
fn largest(values: &[f32], count: usize) -> Vec<usize> {
    let mut indices: Vec<usize> = (0..values.len()).collect();
    let descending = |&a: &usize, &b: &usize| match values[b].total_cmp(&values[a]) {
        Ordering::Equal => a.cmp(&b),
        other => other,
    };
    indices.sort_unstable_by(descending);
    indices.truncate(count);
    indices
}

/// Choices sorted by expert and then by token.
struct Order {
    choices: Vec<usize>,
    rows_of_choices: Vec<usize>,
    rows: Vec<usize>,
}

impl Order {
    /// Sorts the experts of all choices.
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
    let p_ne = routing.probabilities_ne.clone();
    let p_nk = p_ne.clone().gather(1, routing.experts_nk.clone());
    let dp_nk = if routing.normalizes {
        let mean_n1 = d_weights_nk.clone().mul(routing.weights_nk.clone()).sum_dim(1);
        d_weights_nk.sub(mean_n1).div(p_nk.clone().sum_dim(1))
    } else {
        d_weights_nk
    };
    let through_n1 = p_nk.mul(dp_nk.clone()).sum_dim(1);
    let dp_ne = p_ne.zeros_like().scatter(1, routing.experts_nk.clone(), dp_nk, IndexingUpdateOp::Add);
    to_dtype(p_ne.mul(dp_ne.sub(through_n1)), like_nd.dtype())
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
pub fn combine<B: Backend>(
    y_sd: Tensor<B, 2>,
    routing: &Routing<B>,
    residual_nd: Option<Tensor<B, 2>>,
) -> Tensor<B, 2> {
    let dtype = y_sd.dtype();
    let Some(residual_nd) = residual_nd else {
        return to_dtype(of_choices(y_sd, routing).sum_dim(1).squeeze_dim(1), dtype);
    };
    let weights: Tensor<B, 3> = routing.weights_nk.clone().unsqueeze_dim(2);
    let sum_nd: Tensor<B, 2> = of_choices(y_sd, routing).mul(weights).sum_dim(1).squeeze_dim(1);
    to_dtype(sum_nd.add(to_f32(residual_nd)), dtype)
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
    use crate::testing::{Plain, Recorded, assert_close, backward as recorded_backward, leaf, random};

    const TOKENS: usize = 9;
    const EXPERTS: usize = 5;
    const TOP_K: usize = 3;

    #[test]
    fn the_largest_come_first_and_of_equal_ones_the_lower_index() {
        assert_eq!(largest(&[0.1, 0.4, 0.1, 0.4], 3), [1, 3, 0]);
        assert_eq!(largest(&[0.0; 3], 2), [0, 1]);
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
        normalizes: bool,
    ) -> Tensor<Recorded, 2> {
        let p_nk = softmax(logits_ne, 1).gather(1, experts_nk.clone());
        let weights_nk = if normalizes { p_nk.clone().div(p_nk.sum_dim(1)) } else { p_nk };
        let factors_nk = experts_nk.float().add_scalar(1.0);
        x_nd.clone().mul(weights_nk.mul(factors_nk).sum_dim(1)).add(x_nd)
    }

    #[test]
    fn the_backward_through_weights_and_rows_equals_autodiff() {
        for normalizes in [true, false] {
            let logits = random::<Plain, 2>(1, [TOKENS, EXPERTS]).mul_scalar(3.0);
            let (x, dy) = (random::<Plain, 2>(2, [TOKENS, 4]), random::<Plain, 2>(3, [TOKENS, 4]));
            let routing = route(logits.clone(), TOP_K, normalizes);
            assert_eq!(routing.rows.counts().iter().sum::<usize>(), TOKENS * TOP_K);
            let (recorded_logits, recorded_x) = (leaf(&logits), leaf(&x));
            let experts = Tensor::from_inner(routing.experts_nk.clone());
            let expected = recorded(recorded_logits.clone(), recorded_x.clone(), experts, normalizes);

            let factor = |expert: usize| 1.0 + expert as f32;
            let apply = |rows_sd: Tensor<Plain, 2>| {
                let (has_rows, ranges): (Vec<_>, Vec<_>) = routing.rows.ranges().into_iter().unzip();
                let parts = Plain::slices(rows_sd, &ranges).into_iter().zip(has_rows);
                Plain::join_rows(parts.map(|(part, e)| part.mul_scalar(factor(e))).collect())
            };
            let y_sd = apply(dispatch(x.clone(), &routing));
            let y = combine(y_sd.clone(), &routing, Some(x.clone()));
            assert_close(y, expected.clone().inner(), 1e-5);

            let gradients = recorded_backward(expected, &dy);
            let (dy_sd, d_weights_nk) = combine_backward(y_sd, &routing, dy.clone());
            let dx = combine(apply(dy_sd), &routing, None).add(dy);
            assert_close(dx.clone(), recorded_x.grad(&gradients).unwrap(), 1e-5);
            let d_logits = route_backward(&routing, d_weights_nk, &dx);
            assert_close(d_logits, recorded_logits.grad(&gradients).unwrap(), 1e-5);
        }
    }
}
