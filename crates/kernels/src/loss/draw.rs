//! Drawing a token from the probabilities of each row: the head of hidden states, a token by a random number, and the logarithm of its probability.
//!
//! The number picks the first token, in the order of ids, at which the sum of the probabilities that are left exceeds it. Nucleus sampling:
//! <https://arxiv.org/abs/1904.09751>; min-p: <https://arxiv.org/abs/2407.01082>.
//! Trade-off: the nucleus has all tokens that are as probable as its last one, where a sorted list would cut among equals.

use burn_tensor::{DType, Int, Tensor, backend::Backend};
use rayon::prelude::*;

use super::reference::{capped, scaled};
use crate::dtype::to_f32;
use crate::weights::reference::dense;
use crate::weights::{Weight, WeightOps};

/// From which of the probabilities tokens are drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Draw {
    /// Divisor of the logits, above 0.
    pub temperature: f32,
    /// Draw from the most probable tokens with this sum of probabilities; 1: all.
    pub top_p: f32,
    /// Draw from the tokens with at least this fraction of the largest probability; 0: all.
    pub min_p: f32,
    /// Factor of the logits, before the soft cap; 1 in most models.
    pub logit_scale: f64,
    /// The `cap` of `cap * tanh(logits / cap)`.
    pub soft_cap: Option<f64>,
}

/// Tokens that were drawn.
#[derive(Clone, Debug)]
pub struct Drawn<B: Backend> {
    /// A token of each row, `[n]`; -1 where a logit is NaN or plus infinity, or all are minus infinity.
    pub ids_n: Tensor<B, 1, Int>,
    /// Logarithms of their probabilities among all tokens at the temperature, `[n]` f32, whatever `top_p` and `min_p` leave out.
    pub log_probs_n: Tensor<B, 1>,
}

/// Implements [`LossOps::draw`](super::LossOps::draw). Goes through the host.
pub fn reference<B: WeightOps>(
    hidden_nd: Tensor<B, 2>,
    head: &Weight<B>,
    random_n: Tensor<B, 1>,
    draw: Draw,
) -> Drawn<B> {
    let (device, dtype) = (hidden_nd.device(), hidden_nd.dtype());
    let logits_nv = scaled(to_f32(hidden_nd.matmul(dense(head, dtype).transpose())), draw.logit_scale);
    let logits_nv = capped(logits_nv, draw.soft_cap);
    let width = logits_nv.dims()[1];
    let [logits, random] = [logits_nv.into_data(), random_n.into_data()];
    let [logits, random] = [&logits, &random].map(|data| data.as_slice::<f32>().expect("both are f32"));
    let rows = logits.par_chunks(width).zip(random);
    let drawn: Vec<(i32, f32)> = rows
        .map(|(row, &random)| row_token(row, random, draw).map_or((-1, f32::NAN), |(id, value)| (id as i32, value)))
        .collect();
    let (ids, log_probs): (Vec<i32>, Vec<f32>) = drawn.into_iter().unzip();
    let log_probs_n = Tensor::<B, 1>::from_data(log_probs.as_slice(), (&device, DType::F32));
    Drawn { ids_n: Tensor::from_ints(ids.as_slice(), &device), log_probs_n }
}

/// Draws from one row of logits, scaled and capped; `random` is in [0, 1). Returns the token and the logarithm of its probability; `None` if a logit is
/// NaN or plus infinity, or all are minus infinity.
pub fn row_token(logits: &[f32], random: f32, draw: Draw) -> Option<(usize, f32)> {
    let best = super::reference::first_largest(logits)?;
    // Subtracting the largest logit first keeps every exponent at or below zero.
    let weight = |logit: f32| ((f64::from(logit) - f64::from(logits[best])) / f64::from(draw.temperature)).exp();
    let weights: Vec<f64> = logits.iter().map(|&logit| weight(logit)).collect();
    let total: f64 = weights.iter().sum();
    let nucleus = if draw.top_p < 1.0 { smallest_of_nucleus(&weights, f64::from(draw.top_p) * total) } else { 0.0 };
    let floor = nucleus.max(f64::from(draw.min_p));
    let kept = || weights.iter().enumerate().filter(|(_, weight)| **weight >= floor);
    let mut left = f64::from(random) * kept().map(|(_, weight)| weight).sum::<f64>();
    let found = kept().find(|(_, weight)| {
        left -= *weight;
        left < 0.0
    });
    // Rounding may leave a tiny rest after the last one.
    let token = found.map_or(best, |(token, _)| token);
    Some((token, (weights[token].ln() - total.ln()) as f32))
}

/// Returns the weight of the last token that is needed for this sum, the most probable first. Sorts no more than necessary.
fn smallest_of_nucleus(weights: &[f64], enough: f64) -> f64 {
    let mut sorted = weights.to_vec();
    let mut count = 256.min(sorted.len());
    while count < sorted.len() {
        sorted.select_nth_unstable_by(count - 1, |left, right| right.total_cmp(left));
        if sorted[..count].iter().sum::<f64>() >= enough {
            break;
        }
        count = (8 * count).min(sorted.len());
    }
    sorted.truncate(count);
    sorted.sort_unstable_by(|left, right| right.total_cmp(left));
    let mut held = 0.0;
    let needed = sorted.iter().take_while(|weight| {
        let is_needed = held < enough;
        held += *weight;
        is_needed
    });
    needed.last().copied().unwrap_or(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Draw = Draw { temperature: 1.0, top_p: 1.0, min_p: 0.0, logit_scale: 1.0, soft_cap: None };

    #[test]
    fn a_nucleus_of_many_tokens_is_the_one_of_all_sorted() {
        let weights: Vec<f64> = (0..5000).map(|token| 1.0 / (1 + token * 7919 % 997) as f64).collect();
        for top_p in [0.001, 0.3, 0.5, 0.9, 0.999] {
            let mut sorted = weights.clone();
            sorted.sort_by(|left, right| right.total_cmp(left));
            let enough = top_p * weights.iter().sum::<f64>();
            let count = (1..=sorted.len()).find(|&count| sorted[..count].iter().sum::<f64>() >= enough).unwrap();
            assert_eq!(smallest_of_nucleus(&weights, enough), sorted[count - 1], "{top_p}");
        }
    }

    #[test]
    fn log_probabilities_are_of_all_tokens() {
        let probabilities = [0.5_f32, 0.3, 0.15, 0.05];
        for (random, draw, token) in [
            (0.0, ALL, 0),
            (0.79, ALL, 1),
            (0.96, ALL, 3),
            (0.96, Draw { top_p: 0.7, ..ALL }, 1),
            (0.63, Draw { min_p: 0.5, ..ALL }, 1),
        ] {
            let (found, log_prob) = row_token(&probabilities.map(f32::ln), random, draw).unwrap();
            assert_eq!(found, token, "{random}, {draw:?}");
            assert!((log_prob - probabilities[token].ln()).abs() < 1e-6);
        }
        assert_eq!(row_token(&[0.0, f32::NAN], 0.5, ALL), None);
    }
}
