//! The loss of completions and its derivative by their log-probabilities.
//!
//! ```text
//! ratio = exp(log p - old log p)        of a token, or of the mean over a completion
//! loss  = -min(ratio A, clamp(ratio, 1 - epsilon, 1 + epsilon_high) A) + beta KL
//! KL    = ratio (exp(ref - log p) - (ref - log p) - 1)
//! ```
//!
//! A loss type says what a token's loss is divided by; a new one is a variant here. Denominators are those of a whole step, over all micro-batches and
//! ranks, so that accumulation changes nothing.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What the losses of tokens are divided by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum LossType {
    /// The tokens of all completions of the step.
    #[default]
    Dapo,
    /// Each completion's by its own tokens, then by the number of completions: long ones count less per token.
    Grpo,
    /// The number of completions times `max_completion_length`, whatever their lengths.
    DrGrpo,
}

impl LossType {
    /// Returns the weight of each of a completion's `tokens` in the loss of the step.
    fn token_weight(self, tokens: usize, step: Denominators, max_completion_length: usize) -> f64 {
        let of = |count: f64| 1.0 / count.max(1.0);
        match self {
            Self::Dapo => of(step.tokens as f64),
            Self::Grpo => of(step.completions as f64) * of(tokens as f64),
            Self::DrGrpo => of(step.completions as f64 * max_completion_length as f64),
        }
    }
}

/// What has a ratio of probabilities, and is clipped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ImportanceSampling {
    /// Each token.
    #[default]
    Token,
    /// Each completion: the geometric mean over its tokens (GSPO).
    Sequence,
}

/// The loss of a recipe.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Objective {
    /// What the losses of tokens are divided by.
    pub loss_type: LossType,
    /// What has a ratio.
    pub level: ImportanceSampling,
    /// How far below 1 a ratio counts.
    pub epsilon: f64,
    /// How far above 1 a ratio counts.
    pub epsilon_high: f64,
    /// Weight of the distance from the reference.
    pub beta: f64,
    /// Maximum number of tokens of a completion.
    pub max_completion_length: usize,
}

/// What the losses of a step are divided by, over all micro-batches and ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Denominators {
    /// Tokens of completions that are not masked.
    pub tokens: u64,
    /// Completions, masked or not.
    pub completions: u64,
}

/// A completion that is not masked, with a log-probability per token.
#[derive(Clone, Copy, Debug)]
pub struct Completion<'a> {
    /// Those of the model that is trained.
    pub log_probs: &'a [f32],
    /// Those of the model that the completion was sampled from, by the kernels of training; `None`: the same.
    pub old: Option<&'a [f32]>,
    /// Those of the reference, if there is one.
    pub reference: Option<&'a [f32]>,
    /// How much better it is than the others of its prompt.
    pub advantage: f64,
}

/// Sums over completions and their tokens, to be added up over a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sums {
    /// The loss of the step.
    pub loss: f64,
    /// Distances from the reference, over tokens.
    pub kl: f64,
    /// Ratios that are clipped below 1 and above 1.
    pub clipped: [f64; 2],
    /// Number of ratios.
    pub ratios: f64,
    /// Number of tokens.
    pub tokens: f64,
}

impl Sums {
    /// Adds those of another part of the step.
    pub fn add(&mut self, other: &Self) {
        self.loss += other.loss;
        self.kl += other.kl;
        self.clipped = std::array::from_fn(|side| self.clipped[side] + other.clipped[side]);
        self.ratios += other.ratios;
        self.tokens += other.tokens;
    }
}

impl Objective {
    /// Computes the part of a completion in the step's loss; `d_log_probs` becomes the derivative of that loss by its log-probabilities.
    ///
    /// # Panics
    /// If the lists differ in length.
    pub fn part(&self, completion: &Completion<'_>, step: Denominators, d_log_probs: &mut [f32]) -> Sums {
        let (own, advantage) = (completion.log_probs, completion.advantage);
        let count = own.len();
        for other in [completion.old, completion.reference].into_iter().flatten() {
            assert_eq!(other.len(), count, "log-probabilities of each token");
        }
        assert_eq!(d_log_probs.len(), count, "a derivative per token");
        let log_ratio = |token: usize| completion.old.map_or(0.0, |old| f64::from(own[token]) - f64::from(old[token]));
        let mean = (0..count).map(log_ratio).sum::<f64>() / count.max(1) as f64;
        let is_by_sequence = self.level == ImportanceSampling::Sequence;
        let ratio = |token: usize| if is_by_sequence { mean } else { log_ratio(token) }.exp();
        let weight = self.loss_type.token_weight(count, step, self.max_completion_length);

        let mut sums = Sums { tokens: count as f64, ..Sums::default() };
        // Derivatives by the logarithm of each token's ratio.
        let mut of_ratios = vec![0.0; count];
        for token in 0..count {
            let ratio = ratio(token);
            let (loss, of_ratio) = self.clipped(ratio, advantage);
            sums.loss += weight * loss;
            of_ratios[token] = weight * of_ratio;
            d_log_probs[token] = 0.0;
            if let Some(reference) = completion.reference.filter(|_| self.beta != 0.0) {
                let difference = f64::from(reference[token]) - f64::from(own[token]);
                let kl = ratio * (difference.exp() - difference - 1.0);
                sums.kl += kl;
                sums.loss += weight * self.beta * kl;
                of_ratios[token] += weight * self.beta * kl;
                d_log_probs[token] = (weight * self.beta * ratio * (1.0 - difference.exp())) as f32;
            }
        }
        let shared = of_ratios.iter().sum::<f64>() / count.max(1) as f64;
        for (token, d_log_prob) in d_log_probs.iter_mut().enumerate() {
            *d_log_prob += if is_by_sequence { shared } else { of_ratios[token] } as f32;
        }
        sums.ratios = if is_by_sequence { 1.0 } else { count as f64 };
        for token in 0..sums.ratios as usize {
            let side = self.clipped_side(ratio(token), advantage);
            if let Some(side) = side {
                sums.clipped[side] += 1.0;
            }
        }
        sums
    }

    /// Returns the loss of a ratio, and its derivative by the ratio's logarithm.
    fn clipped(&self, ratio: f64, advantage: f64) -> (f64, f64) {
        let bounded = ratio.clamp(1.0 - self.epsilon, 1.0 + self.epsilon_high);
        if bounded * advantage < ratio * advantage {
            (-bounded * advantage, 0.0)
        } else {
            (-ratio * advantage, -ratio * advantage)
        }
    }

    /// Returns whether a ratio is clipped below (0) or above (1).
    fn clipped_side(&self, ratio: f64, advantage: f64) -> Option<usize> {
        if ratio < 1.0 - self.epsilon && advantage < 0.0 {
            return Some(0);
        }
        (ratio > 1.0 + self.epsilon_high && advantage > 0.0).then_some(1)
    }
}
