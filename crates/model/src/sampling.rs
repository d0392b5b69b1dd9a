//! Choosing the next token from logits: greedy, temperature, the most probable tokens (top-k), nucleus (top-p), a minimum probability
//! (min-p), and a penalty of tokens that are there already.
//!
//! The random stream is ChaCha8, so one seed gives the same text on every machine that computes the same logits. Sums
//! are taken in f64 on the host. Nucleus sampling: <https://arxiv.org/abs/1904.09751>; min-p: <https://arxiv.org/abs/2407.01082>; the
//! penalty: <https://arxiv.org/abs/1909.05858>.
//! Trade-off: top-k keeps exactly k tokens, the lowest ids among equals, where transformers keeps all equals of the k-th.

mod folder;

use std::collections::HashSet;

use firebrick_kernels::{Draw, row_token};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

pub use self::folder::FolderSampling;
use crate::error::ModelError;

/// Settings for choosing tokens. The penalty comes first, then the temperature, top-k, top-p of the remaining tokens, and min-p, as in transformers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Divisor of the logits; 0 is greedy.
    pub temperature: f32,
    /// Keep the most probable tokens up to this sum of probabilities; 1 keeps every token.
    pub top_p: f32,
    /// Keep this many most probable tokens; 0 keeps every token.
    pub top_k: usize,
    /// Keep the tokens with at least this fraction of the largest probability; 0 keeps every token.
    pub min_p: f32,
    /// Penalty of tokens that are already in the prompt or the answer: positive logits are divided by it, negative ones multiplied; 1 changes
    /// nothing.
    pub repetition_penalty: f32,
}

impl Sampling {
    /// The largest logit, always.
    pub const GREEDY: Self = Self { temperature: 0.0, top_p: 1.0, top_k: 0, min_p: 0.0, repetition_penalty: 1.0 };

    /// # Errors
    /// A temperature that is negative or not finite; a `top_p` outside (0, 1], a `min_p` outside [0, 1], a penalty that is not above 0.
    pub fn check(self) -> Result<(), ModelError> {
        self.problem().map_or(Ok(()), |(key, got, expected)| Err(ModelError::Sampling { key, got, expected }))
    }

    /// Returns the first value out of its range: key, value, and the valid range.
    fn problem(self) -> Option<(&'static str, f32, &'static str)> {
        let Self { temperature, top_p, min_p, repetition_penalty: penalty, .. } = self;
        let is_temperature = temperature.is_finite() && temperature >= 0.0;
        let rules = [
            (is_temperature, "temperature", temperature, "0 (greedy) or above"),
            (top_p > 0.0 && top_p <= 1.0, "top_p", top_p, "above 0 and at most 1, a share: 95 % is 0.95"),
            ((0.0..=1.0).contains(&min_p), "min_p", min_p, "from 0 to 1"),
            (penalty.is_finite() && penalty > 0.0, "repetition_penalty", penalty, "above 0; 1 changes nothing"),
        ];
        rules.into_iter().find(|(is_met, ..)| !is_met).map(|(_, key, got, expected)| (key, got, expected))
    }
}

/// Chooses tokens one at a time, with its own random stream.
#[derive(Clone, Debug)]
pub struct Sampler {
    sampling: Sampling,
    random: ChaCha8Rng,
    /// The tokens so far, if they are penalized.
    seen: HashSet<u32>,
}

impl Sampler {
    /// Creates a sampler with a separate random stream; the settings must pass [`Sampling::check`].
    pub fn new(sampling: Sampling, seed: u64) -> Result<Self, ModelError> {
        sampling.check()?;
        Ok(Self { sampling, random: ChaCha8Rng::seed_from_u64(seed), seen: HashSet::new() })
    }

    /// Creates the sampler that always takes the largest logit, the lowest token id among equals.
    pub fn greedy() -> Self {
        Self { sampling: Sampling::GREEDY, random: ChaCha8Rng::seed_from_u64(0), seen: HashSet::new() }
    }

    /// Returns the sampler in its state after the tokens of a prompt.
    #[must_use]
    pub fn after(mut self, prompt: &[u32]) -> Self {
        if self.penalizes() {
            self.seen.extend(prompt);
        }
        self
    }

    /// Returns the sampler at the beginning of one of the streams of its seed: one per text, so that a text does not depend on those next to it.
    #[must_use]
    pub fn in_stream(mut self, stream: u64) -> Self {
        self.random.set_stream(stream);
        self
    }

    /// Returns whether the sampler always takes the largest unmodified logit.
    pub fn is_greedy(&self) -> bool {
        self.sampling.temperature == 0.0 && !self.penalizes()
    }

    fn penalizes(&self) -> bool {
        self.sampling.repetition_penalty != 1.0
    }

    /// Chooses the next token. A logit of minus infinity masks its token.
    ///
    /// # Errors
    /// A logit that is NaN or plus infinity, or no logit above minus infinity.
    ///
    /// # Panics
    /// If `logits` is empty.
    pub fn sample(&mut self, logits: &[f32]) -> Result<u32, ModelError> {
        if !self.penalizes() {
            return self.choose(logits);
        }
        let mut penalized = logits.to_vec();
        for &token in &self.seen {
            if let Some(logit) = penalized.get_mut(token as usize) {
                let penalty = self.sampling.repetition_penalty;
                *logit = if *logit < 0.0 { *logit * penalty } else { *logit / penalty };
            }
        }
        let token = self.choose(&penalized)?;
        self.seen.insert(token);
        Ok(token)
    }

    /// Returns from which probabilities the device may draw tokens; `None` if the choice depends on more than the logits, or takes the largest.
    pub(crate) fn draw(&self, logit_scale: f64, soft_cap: Option<f64>) -> Option<Draw> {
        let Sampling { temperature, top_p, top_k, min_p, .. } = self.sampling;
        let is_drawn = temperature > 0.0 && top_k == 0 && !self.penalizes();
        is_drawn.then_some(Draw { temperature, top_p, min_p, logit_scale, soft_cap })
    }

    /// Returns the next number of the random stream, in [0, 1).
    pub(crate) fn next_random(&mut self) -> f32 {
        self.random.random()
    }

    fn choose(&mut self, logits: &[f32]) -> Result<u32, ModelError> {
        let best = greedy(logits)?;
        let Sampling { temperature, top_p, top_k, min_p, .. } = self.sampling;
        if temperature == 0.0 {
            return Ok(best as u32);
        }
        let draw = Draw { temperature, top_p, min_p, logit_scale: 1.0, soft_cap: None };
        let random = self.next_random();
        let of = |logits: &[f32]| row_token(logits, random, draw).map_or(best, |(token, _)| token) as u32;
        let is_cut = (1..logits.len()).contains(&top_k);
        Ok(if is_cut { of(&most_probable(logits, top_k)) } else { of(logits) })
    }
}

/// Returns the first index of the largest logit.
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

/// Returns the logits of the `count` most probable tokens, the lowest ids among equals; minus infinity is in the place of the others.
fn most_probable(logits: &[f32], count: usize) -> Vec<f32> {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    let more_probable = |left: &usize, right: &usize| logits[*right].total_cmp(&logits[*left]).then(left.cmp(right));
    order.select_nth_unstable_by(count - 1, more_probable);
    let mut kept = vec![f32::NEG_INFINITY; logits.len()];
    order[..count].iter().for_each(|&token| kept[token] = logits[token]);
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    fn logits() -> [f32; 4] {
        [0.5, 0.3, 0.15, 0.05].map(f32::ln)
    }

    fn sampler(temperature: f32, top_p: f32, top_k: usize, seed: u64) -> Sampler {
        Sampler::new(Sampling { temperature, top_p, top_k, ..Sampling::GREEDY }, seed).unwrap()
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
    fn a_top_k_of_one_is_greedy_at_any_temperature() {
        for temperature in [0.1, 1.0, 100.0] {
            let mut sampler = sampler(temperature, 1.0, 1, 3);
            for logits in [[0.0, 3.0, 1.0, 3.0], [-1.0, -9.0, -2.0, -1.0]] {
                let expected = Sampler::greedy().sample(&logits).unwrap();
                assert!((0..50).all(|_| sampler.sample(&logits).unwrap() == expected), "{logits:?}");
            }
        }
    }

    /// Computes the probabilities of temperature, top-k and top-p by sorting and dividing, as in their definitions.
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
    fn frequencies_are_the_defined_probabilities() {
        for (temperature, top_p, top_k) in [
            (1.0, 1.0, 4),
            (0.5, 1.0, 4),
            (1.0, 0.79, usize::MAX),
            (1.0, 0.01, 4),
            (1.0, 1.0, 3),
            // Of two tokens the first has 0.625: enough for 0.6, which is more than its share of all four.
            (1.0, 0.6, 2),
            (1.0, 0.6, 4),
            (0.7, 0.9, 3),
            (1.5, 0.95, 4),
            (2.0, 1.0, 2),
            (0.3, 0.5, 4),
        ] {
            let sampling = Sampling { temperature, top_p, top_k, ..Sampling::GREEDY };
            let expected = by_definition(&logits(), sampling);
            assert_close(&frequencies(Sampler::new(sampling, 11).unwrap(), 40_000), &expected);
        }
        for all in [4, 5, usize::MAX] {
            assert_eq!(frequencies(sampler(1.0, 1.0, all, 7), 100), frequencies(sampler(1.0, 1.0, 0, 7), 100));
        }
    }

    #[test]
    fn min_p_is_relative_to_the_largest_probability() {
        let of = |min_p| Sampler::new(Sampling { temperature: 1.0, min_p, ..Sampling::GREEDY }, 7).unwrap();
        assert_close(&frequencies(of(0.5), 40_000), &[0.625, 0.375, 0.0, 0.0]);
        assert_close(&frequencies(of(0.29), 40_000), &[0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0.0]);
        assert_close(&frequencies(of(1.0), 100), &[1.0, 0.0, 0.0, 0.0]);
    }

    /// transformers' RepetitionPenaltyLogitsProcessor gives these values by its definition.
    #[test]
    fn tokens_that_are_there_are_penalized() {
        let greedy = Sampling { repetition_penalty: 2.0, ..Sampling::GREEDY };
        let after = |prompt: &[u32]| Sampler::new(greedy, 0).unwrap().after(prompt);
        assert_eq!(after(&[]).sample(&[3.0, 2.0, -1.0]).unwrap(), 0);
        assert_eq!(after(&[0]).sample(&[3.0, 2.0, -1.0]).unwrap(), 1, "3 / 2 is less than 2");
        assert_eq!(after(&[0, 1]).sample(&[-3.0, -2.0, -3.5]).unwrap(), 2, "-2 * 2 is less than -3.5");
        let mut sampler = after(&[]);
        assert_eq!([0; 3].map(|_| sampler.sample(&[3.0, 2.0, 1.6]).unwrap()), [0, 1, 2], "its own tokens count");
        assert!(!sampler.is_greedy() && Sampler::greedy().is_greedy());
    }

    #[test]
    fn a_seed_and_a_stream_give_one_sequence() {
        let draw = |seed, stream| {
            let mut sampler = sampler(1.0, 0.9, 0, seed).in_stream(stream);
            (0..32).map(|_| sampler.sample(&logits()).unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(draw(3, 5), draw(3, 5));
        assert!(draw(3, 5) != draw(4, 5) && draw(3, 5) != draw(3, 6));
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
            let sampling = Sampling { temperature, top_p, ..Sampling::GREEDY };
            assert!(matches!(Sampler::new(sampling, 0), Err(ModelError::Sampling { .. })));
        }
        for (min_p, repetition_penalty) in [(-0.1, 1.0), (1.5, 1.0), (f32::NAN, 1.0), (0.0, 0.0), (0.0, f32::INFINITY)]
        {
            let sampling = Sampling { min_p, repetition_penalty, ..Sampling::GREEDY };
            assert!(matches!(Sampler::new(sampling, 0), Err(ModelError::Sampling { .. })));
        }
    }
}
