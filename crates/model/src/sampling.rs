//! Choosing the next token from logits: greedy, temperature, the most probable tokens (top-k), nucleus (top-p).
//!
//! The random stream is ChaCha8, so one seed gives the same text on every machine that computes the same logits. Sums
//! are taken in f64 on the host; there is no batched or on-device sampling. Nucleus sampling:
//! <https://arxiv.org/abs/1904.09751>.
//! Trade-off: top-k keeps exactly k tokens, the lowest ids among equals, where transformers keeps all equals of the k-th.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::error::ModelError;

/// How tokens are chosen. Top-k comes first, then top-p of what is left, as in transformers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// 0 is greedy; above, logits are divided by it.
    pub temperature: f32,
    /// Keep the most probable tokens up to this sum of probabilities; 1 keeps every token.
    pub top_p: f32,
    /// Keep this many most probable tokens; 0 keeps every token.
    pub top_k: usize,
}

impl Sampling {
    /// The largest logit, always.
    pub const GREEDY: Self = Self { temperature: 0.0, top_p: 1.0, top_k: 0 };

    /// # Errors
    /// A temperature that is negative or not finite; a `top_p` outside (0, 1].
    pub fn check(self) -> Result<(), ModelError> {
        let Self { temperature, top_p, .. } = self;
        if !temperature.is_finite() || temperature < 0.0 {
            return Err(ModelError::Sampling { key: "temperature", got: temperature, expected: "0 (greedy) or above" });
        }
        if !(top_p > 0.0 && top_p <= 1.0) {
            return Err(ModelError::Sampling { key: "top_p", got: top_p, expected: "above 0 and at most 1" });
        }
        Ok(())
    }
}

/// Chooses tokens one at a time; holds the state of its random stream.
#[derive(Clone, Debug)]
pub struct Sampler {
    sampling: Sampling,
    random: ChaCha8Rng,
}

impl Sampler {
    /// A sampler with its own random stream.
    ///
    /// # Errors
    /// As [`Sampling::check`].
    pub fn new(sampling: Sampling, seed: u64) -> Result<Self, ModelError> {
        sampling.check()?;
        Ok(Self { sampling, random: ChaCha8Rng::seed_from_u64(seed) })
    }

    /// The sampler that always takes the largest logit, the lowest token id among equals.
    pub fn greedy() -> Self {
        Self { sampling: Sampling::GREEDY, random: ChaCha8Rng::seed_from_u64(0) }
    }

    /// The id of the next token. A logit of minus infinity masks its token.
    ///
    /// # Errors
    /// A logit that is NaN or plus infinity, or no logit above minus infinity.
    ///
    /// # Panics
    /// If `logits` is empty.
    pub fn sample(&mut self, logits: &[f32]) -> Result<u32, ModelError> {
        let best = greedy(logits)?;
        let Sampling { temperature, top_p, top_k } = self.sampling;
        if temperature == 0.0 {
            return Ok(best as u32);
        }
        // Subtracting the largest logit first keeps every exponent at or below zero.
        let weight = |logit: f32| f64::exp(f64::from(logit - logits[best]) / f64::from(temperature));
        let mut candidates = logits.iter().map(|&logit| weight(logit)).enumerate().collect::<Vec<_>>();
        if (1..candidates.len()).contains(&top_k) {
            keep_most_probable(&mut candidates, top_k);
        }
        if top_p < 1.0 {
            keep_nucleus(&mut candidates, f64::from(top_p));
        }
        let total = candidates.iter().map(|(_, weight)| weight).sum::<f64>();
        let mut left = self.random.random::<f64>() * total;
        for &(token, weight) in &candidates {
            if left < weight {
                return Ok(token as u32);
            }
            left -= weight;
        }
        // Rounding may leave a hair of `left` after the last candidate.
        Ok(best as u32)
    }
}

/// The first index of the largest logit.
fn greedy(logits: &[f32]) -> Result<usize, ModelError> {
    assert!(!logits.is_empty(), "there is always at least one token");
    let mut best = 0;
    for (index, &value) in logits.iter().enumerate() {
        if value.is_nan() || value == f32::INFINITY {
            return Err(ModelError::NotFinite { index, value });
        }
        if value > logits[best] {
            best = index;
        }
    }
    match logits[best] {
        value if value.is_finite() => Ok(best),
        value => Err(ModelError::NotFinite { index: best, value }),
    }
}

/// Keeps the `count` most probable tokens, the lowest ids among equals, in the order of their ids.
fn keep_most_probable(candidates: &mut Vec<(usize, f64)>, count: usize) {
    candidates.select_nth_unstable_by(count - 1, |left, right| right.1.total_cmp(&left.1).then(left.0.cmp(&right.0)));
    candidates.truncate(count);
    candidates.sort_unstable_by_key(|&(token, _)| token);
}

/// Keeps the smallest set of most probable tokens that holds at least `top_p` of the mass; at least one.
fn keep_nucleus(candidates: &mut Vec<(usize, f64)>, top_p: f64) {
    let enough = top_p * candidates.iter().map(|(_, weight)| weight).sum::<f64>();
    // The sort is stable: among equals the lowest id comes first.
    candidates.sort_by(|(_, left), (_, right)| right.total_cmp(left));
    let mut held = 0.0;
    let kept = candidates.iter().take_while(|(_, weight)| {
        let needed = held < enough;
        held += weight;
        needed
    });
    let kept = kept.count();
    candidates.truncate(kept.max(1));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn logits() -> [f32; 4] {
        [0.5, 0.3, 0.15, 0.05].map(f32::ln)
    }

    fn sampler(temperature: f32, top_p: f32, top_k: usize, seed: u64) -> Sampler {
        Sampler::new(Sampling { temperature, top_p, top_k }, seed).unwrap()
    }

    fn frequencies(mut sampler: Sampler, draws: usize) -> Vec<f64> {
        let mut counts = vec![0.0; logits().len()];
        for _ in 0..draws {
            counts[sampler.sample(&logits()).unwrap() as usize] += 1.0 / draws as f64;
        }
        counts
    }

    fn assert_close(got: &[f64], expected: &[f64]) {
        assert!(got.iter().zip(expected).all(|(got, expected)| (got - expected).abs() < 0.01), "{got:?} {expected:?}");
    }

    #[test]
    fn greedy_takes_the_lowest_id_among_equals() {
        assert_eq!(Sampler::greedy().sample(&[0.0, 3.0, 1.0, 3.0]).unwrap(), 1);
    }

    #[test]
    fn temperature_one_draws_the_softmax() {
        assert_close(&frequencies(sampler(1.0, 1.0, 0, 7), 40_000), &[0.5, 0.3, 0.15, 0.05]);
    }

    #[test]
    fn temperature_raises_probabilities_to_its_inverse() {
        let total = 0.25 + 0.09 + 0.0225 + 0.0025;
        let expected = [0.25, 0.09, 0.0225, 0.0025].map(|weight| weight / total);
        assert_close(&frequencies(sampler(0.5, 1.0, 0, 7), 40_000), &expected);
    }

    #[test]
    fn top_p_keeps_the_smallest_set_that_holds_enough() {
        assert_close(&frequencies(sampler(1.0, 0.79, 0, 7), 40_000), &[0.625, 0.375, 0.0, 0.0]);
        assert_close(&frequencies(sampler(1.0, 0.01, 0, 7), 100), &[1.0, 0.0, 0.0, 0.0]);
    }

    #[test]
    fn a_top_k_of_one_is_greedy_at_any_temperature() {
        for temperature in [0.1, 1.0, 100.0] {
            let mut sampler = sampler(temperature, 1.0, 1, 3);
            for logits in [[0.0, 3.0, 1.0, 3.0], [-1.0, -9.0, -2.0, -1.0]] {
                let expected = Sampler::greedy().sample(&logits).unwrap();
                assert!((0..50).all(|_| sampler.sample(&logits).unwrap() == expected), "{logits:?}");
            }
        }
    }

    #[test]
    fn top_k_renormalizes_what_it_keeps_and_top_p_counts_from_there() {
        assert_close(&frequencies(sampler(1.0, 1.0, 2, 7), 40_000), &[0.625, 0.375, 0.0, 0.0]);
        assert_close(&frequencies(sampler(1.0, 1.0, 3, 7), 40_000), &[0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0.0]);
        // Of two tokens the first has 0.625: enough for 0.6, which is more than its share of all four.
        assert_close(&frequencies(sampler(1.0, 0.6, 2, 7), 1_000), &[1.0, 0.0, 0.0, 0.0]);
        assert_close(&frequencies(sampler(1.0, 0.6, 0, 7), 40_000), &[0.625, 0.375, 0.0, 0.0]);
        for all in [4, 5, usize::MAX] {
            assert_eq!(frequencies(sampler(1.0, 1.0, all, 7), 100), frequencies(sampler(1.0, 1.0, 0, 7), 100));
        }
    }

    /// Probabilities of temperature, top-k and top-p by sorting and dividing, as their definitions say.
    fn by_definition(logits: &[f32], sampling: Sampling) -> Vec<f64> {
        let powers: Vec<f64> = logits.iter().map(|&l| (f64::from(l) / f64::from(sampling.temperature)).exp()).collect();
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|&a, &b| powers[b].total_cmp(&powers[a]));
        order.truncate(sampling.top_k);
        let of = |order: &[usize]| order.iter().map(|&token| powers[token]).sum::<f64>();
        let enough = (1..=order.len()).find(|&n| of(&order[..n]) >= f64::from(sampling.top_p) * of(&order)).unwrap();
        order.truncate(enough);
        (0..logits.len()).map(|token| if order.contains(&token) { powers[token] / of(&order) } else { 0.0 }).collect()
    }

    #[test]
    fn frequencies_are_the_probabilities_of_the_definitions() {
        for (temperature, top_p, top_k) in [(0.7, 0.9, 3), (1.5, 0.95, 4), (2.0, 1.0, 2), (0.3, 0.5, 4)] {
            let sampling = Sampling { temperature, top_p, top_k };
            let expected = by_definition(&logits(), sampling);
            assert_close(&frequencies(Sampler::new(sampling, 11).unwrap(), 40_000), &expected);
        }
    }

    #[test]
    fn one_seed_gives_one_sequence() {
        let draw = |seed| {
            let mut sampler = sampler(1.0, 0.9, 0, seed);
            (0..32).map(|_| sampler.sample(&logits()).unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(draw(3), draw(3));
        assert_ne!(draw(3), draw(4));
    }

    #[test]
    fn masked_tokens_are_never_drawn() {
        let mut sampler = sampler(5.0, 1.0, 0, 1);
        assert!((0..200).all(|_| sampler.sample(&[f32::NEG_INFINITY, 0.0, f32::NEG_INFINITY]).unwrap() == 1));
    }

    #[test]
    fn logits_that_are_not_finite_are_an_error() {
        for logits in [[0.0, f32::NAN], [f32::INFINITY, 0.0], [f32::NEG_INFINITY; 2]] {
            assert!(matches!(Sampler::greedy().sample(&logits), Err(ModelError::NotFinite { .. })));
        }
    }

    #[test]
    fn settings_out_of_range_are_refused() {
        for (temperature, top_p) in [(-1.0, 1.0), (f32::NAN, 1.0), (1.0, 0.0), (1.0, 1.1), (1.0, f32::NAN)] {
            let sampling = Sampling { temperature, top_p, top_k: 0 };
            assert!(matches!(Sampler::new(sampling, 0), Err(ModelError::Sampling { .. })));
        }
    }
}
