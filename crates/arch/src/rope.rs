//! Rotary position embedding on the host: inverse frequencies with long-context scaling, and the cos and sin tables.
//!
//! The formulas and the order of their f32 operations are those of transformers' `modeling_rope_utils.py`, because a checkpoint's
//! weights were trained with that code. References: linear <https://arxiv.org/abs/2306.15595>, YaRN
//! <https://arxiv.org/abs/2309.00071>, llama3 <https://arxiv.org/abs/2407.21783>, LongRoPE <https://arxiv.org/abs/2402.13753>.
//! Not supported: scalings that change during a run. "dynamic" is refused; the factors of longrope are chosen once.

use std::f64::consts::TAU;

use serde::{Deserialize, Serialize};

/// A rotary embedding: pairs of columns of each head are turned by the position times a frequency.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rope {
    /// Base of the frequencies.
    pub theta: f64,
    /// Stretches the frequencies for long contexts.
    pub scaling: RopeScaling,
    /// Columns of each head that are rotated; even. The others pass through.
    pub rotary_dim: usize,
    /// Whether neighbors, columns `2i` and `2i + 1`, form a pair (GLM). Otherwise column `i` of the first half of the rotated columns and column
    /// `i` of the second do.
    pub interleaved: bool,
    /// Factor of rotated queries by position; `None`: 1. Requires that whole heads are rotated.
    pub query_scale: Option<QueryScale>,
}

/// Growth of queries with their position, which keeps attention sharp over long contexts (Llama 4, Ministral 3).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct QueryScale {
    /// Factor of the logarithm.
    pub beta: f64,
    /// The old context, in tokens: queries within it are not changed.
    pub original_max_position_embeddings: usize,
}

impl QueryScale {
    /// Returns `1 + beta ln(1 + floor(position / original_max_position_embeddings))`.
    pub fn at(&self, position: u32) -> f32 {
        let contexts = position as usize / self.original_max_position_embeddings;
        1.0 + self.beta as f32 * (1.0 + contexts as f32).ln()
    }
}

/// Stretching of the frequencies that keeps positions beyond the pretraining context in range.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RopeScaling {
    /// No stretching.
    #[default]
    Default,
    /// The first frequencies alone: the later pairs of columns are not rotated (Gemma 4, LFM3).
    Proportional {
        /// Pairs that are rotated.
        rotated: usize,
    },
    /// All frequencies divided by `factor`.
    Linear {
        /// New context length over the old.
        factor: f64,
    },
    /// Llama 3.1: low frequencies divided by `factor`, high ones kept, a linear blend between.
    Llama3 {
        /// Divisor of the low frequencies.
        factor: f64,
        /// The low band begins where the old context holds this many wavelengths.
        low_freq_factor: f64,
        /// The high band begins where the old context holds this many wavelengths.
        high_freq_factor: f64,
        /// The old context, in tokens.
        original_max_position_embeddings: usize,
    },
    /// YaRN: a ramp over the dimensions between kept and divided frequencies, and larger cos and sin.
    Yarn {
        /// Divisor of the low frequencies.
        factor: f64,
        /// Rotations within the old context above which a frequency is kept.
        beta_fast: f64,
        /// Rotations within the old context below which a frequency is divided.
        beta_slow: f64,
        /// The old context, in tokens.
        original_max_position_embeddings: usize,
        /// Factor of cos and sin.
        attention_factor: f64,
        /// Whether the ends of the ramp are rounded outwards to whole dimensions.
        truncate: bool,
    },
    /// LongRoPE: a separate divisor for each frequency, from one of two lists, and larger cos and sin.
    LongRope {
        /// Divisors for sequences within the old context, one per column pair.
        short_factor: Vec<f64>,
        /// Divisors for longer sequences.
        long_factor: Vec<f64>,
        /// The old context, in tokens.
        original_max_position_embeddings: usize,
        /// Factor of cos and sin, with either list.
        attention_factor: f64,
    },
}

/// The list of divisors that a [`RopeScaling::LongRope`] uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LongRopeFactors {
    /// `short_factor`: the sequence lies within the old context.
    Short,
    /// `long_factor`: it does not.
    Long,
}

impl RopeScaling {
    /// Returns the list that sequences of `sequence_tokens` tokens use; `None` for scalings without such lists.
    pub fn long_rope_factors(&self, sequence_tokens: usize) -> Option<LongRopeFactors> {
        let Self::LongRope { original_max_position_embeddings, .. } = self else { return None };
        let is_long = sequence_tokens > *original_max_position_embeddings;
        Some(if is_long { LongRopeFactors::Long } else { LongRopeFactors::Short })
    }
}

impl Rope {
    /// Describes an embedding as in most families: pairs across the halves of the rotated columns, queries rotated like keys.
    pub fn new(theta: f64, scaling: RopeScaling, rotary_dim: usize) -> Self {
        Self { theta, scaling, rotary_dim, interleaved: false, query_scale: None }
    }

    /// Returns the angle per position of each of the `rotary_dim / 2` column pairs, and the factor of cos and sin, for sequences of up to
    /// `sequence_tokens` tokens. Only longrope depends on that length; transformers uses the longest sequence of each batch instead.
    pub fn inverse_frequencies(&self, sequence_tokens: usize) -> (Vec<f32>, f32) {
        let periods = periods(self.rotary_dim, self.theta);
        let plain = periods.iter().map(|period| 1.0 / period);
        match self.scaling {
            RopeScaling::Default => (plain.collect(), 1.0),
            RopeScaling::Proportional { rotated } => {
                let kept = |(pair, frequency)| if pair < rotated { frequency } else { 0.0 };
                (plain.enumerate().map(kept).collect(), 1.0)
            }
            RopeScaling::LongRope { ref short_factor, ref long_factor, attention_factor, .. } => {
                let factors = match self.scaling.long_rope_factors(sequence_tokens) {
                    Some(LongRopeFactors::Long) => long_factor,
                    Some(LongRopeFactors::Short) | None => short_factor,
                };
                let scaled = periods.iter().zip(factors).map(|(period, &factor)| 1.0 / (factor as f32 * period));
                (scaled.collect(), attention_factor as f32)
            }
            RopeScaling::Linear { factor } => (plain.map(|frequency| frequency / factor as f32).collect(), 1.0),
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings } => {
                let (factor, low, high) = (factor as f32, low_freq_factor as f32, high_freq_factor as f32);
                let context = original_max_position_embeddings as f32;
                let low_wavelength = (original_max_position_embeddings as f64 / low_freq_factor) as f32;
                let high_wavelength = (original_max_position_embeddings as f64 / high_freq_factor) as f32;
                let scaled = plain.map(|frequency| {
                    let wavelength = TAU as f32 / frequency;
                    if wavelength > low_wavelength {
                        frequency / factor
                    } else if wavelength < high_wavelength {
                        frequency
                    } else {
                        let smooth = (context / wavelength - low) / (high - low);
                        (1.0 - smooth) * frequency / factor + smooth * frequency
                    }
                });
                (scaled.collect(), 1.0)
            }
            RopeScaling::Yarn {
                factor,
                beta_fast,
                beta_slow,
                original_max_position_embeddings,
                attention_factor,
                truncate,
            } => {
                let context = original_max_position_embeddings as f64;
                let (from, to) = self.yarn_ramp(beta_fast, beta_slow, context, truncate);
                let scaled = periods.iter().enumerate().map(|(pair, period)| {
                    let kept = 1.0 - ((pair as f32 - from as f32) / (to - from) as f32).clamp(0.0, 1.0);
                    1.0 / (factor as f32 * period) * (1.0 - kept) + 1.0 / period * kept
                });
                (scaled.collect(), attention_factor as f32)
            }
        }
    }

    /// Returns the column pairs between which YaRN passes from kept to divided frequencies.
    fn yarn_ramp(&self, beta_fast: f64, beta_slow: f64, context: f64, truncate: bool) -> (f64, f64) {
        let rotary_dim = self.rotary_dim as f64;
        // The pair that turns `rotations` times within the old context.
        let pair = |rotations: f64| rotary_dim * (context / (rotations * TAU)).ln() / (2.0 * self.theta.ln());
        let (mut from, mut to) = (pair(beta_fast), pair(beta_slow));
        if truncate {
            (from, to) = (from.floor(), to.ceil());
        }
        (from, to) = (from.max(0.0), to.min(rotary_dim - 1.0));
        // A ramp without extent would divide by zero.
        (from, if from == to { to + 0.001 } else { to })
    }
}

/// Returns the positions per radian of each column pair: `theta^(2i / rotary_dim)`. The power is computed in f64 and rounded once, which is within
/// one unit in the last place of any f32 library's own power.
fn periods(rotary_dim: usize, theta: f64) -> Vec<f32> {
    let exponents = (0..rotary_dim / 2).map(|pair| (2 * pair) as f32 / rotary_dim as f32);
    exponents.map(|exponent| f64::from(theta as f32).powf(f64::from(exponent)) as f32).collect()
}

/// Returns the cos and the sin tables, each `[positions, rotary_dim / 2]` row by row, times `attention_scaling`. Angles are f32 products, as in
/// transformers.
pub fn tables(positions: &[u32], inverse_frequencies: &[f32], attention_scaling: f32) -> (Vec<f32>, Vec<f32>) {
    let angles = || positions.iter().flat_map(|&position| inverse_frequencies.iter().map(move |f| position as f32 * f));
    (
        angles().map(|angle| angle.cos() * attention_scaling).collect(),
        angles().map(|angle| angle.sin() * attention_scaling).collect(),
    )
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::config::tests::rope;

    fn floats(text: &str) -> Vec<f32> {
        text.split_whitespace().map(|number| number.parse().unwrap()).collect()
    }

    /// What the parameters give is compared with transformers in `tests/tests/numbers/forward.rs`.
    #[test]
    fn older_keys_and_an_absent_factor_mean_the_same() {
        let linear = |key: &str| json!({ key: "linear", "factor": 4 });
        let yarn = |factor: Option<f64>| json!({"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": 4096});
        let pairs = [[linear("type"), linear("rope_type")], [yarn(None), yarn(Some(4.0))]];
        for [one, other] in pairs.map(|pair| pair.map(|parameters| rope(parameters).unwrap())) {
            assert_eq!(one, other);
        }
    }

    #[test]
    fn longrope_has_its_long_factors_for_sequences_beyond_the_old_context() {
        let parameters = json!({
            "rope_type": "longrope", "short_factor": vec![1.0; 16], "long_factor": vec![2.0; 16],
            "original_max_position_embeddings": 4096
        });
        let [rope, plain] = [parameters, json!({"rope_type": "default"})].map(|parameters| rope(parameters).unwrap());
        let (plain, _) = plain.inverse_frequencies(64);
        for (tokens, divisor) in [(1, 1.0), (4096, 1.0), (4097, 2.0)] {
            let (got, scaling) = rope.inverse_frequencies(tokens);
            // sqrt(1 + ln(16384 / 4096) / ln(4096)).
            assert!((scaling - 1.080_123_4).abs() < 1e-6, "{scaling}");
            for (got, plain) in got.iter().zip(&plain) {
                assert!((got * divisor - plain).abs() <= 3e-7 * plain, "{tokens} tokens: got {got}, plain {plain}");
            }
        }
    }

    #[test]
    fn queries_within_the_old_context_are_not_scaled() {
        let scale = QueryScale { beta: 0.1, original_max_position_embeddings: 16 };
        assert_eq!([0, 15].map(|position| scale.at(position)), [1.0; 2]);
        assert!((scale.at(16) - (1.0 + 0.1 * 2_f32.ln())).abs() < 1e-7);
        assert_eq!(scale.at(16), scale.at(31));
        assert!((scale.at(1000) - (1.0 + 0.1 * 63_f32.ln())).abs() < 1e-7);
    }

    #[test]
    fn tables_equal_transformers() {
        // Computed by transformers 5.23.0 for a head_dim of 32: `LlamaRotaryEmbedding(config).inv_freq`, and every fifth column of its results at
        // positions 0, 1, 4097.
        const YARN: &str = "\
            1 0.562341332 0.316227764 0.177827939 0.100000001 0.0562341288 0.0282346234 0.0139721958 0.00678571407 \
            0.00321337907 0.00146820047 0.00063509983 0.000250000012 0.000140585325 7.90569466e-05 4.44569851e-05";
        const COS: &str = "\
            1.13862944 1.13862944 1.13862944 1.13862944 0.615204155 1.13682961 1.13862824 1.13862944 1.06435883 \
            -0.561646819 1.09799278 1.11979461";
        const SIN: &str = "\
            0 0 0 0 0.958123624 0.0639960915 0.00167173566 5.06200304e-05 0.404496223 -0.990469515 -0.30147776 \
            0.206245467";
        let (got_cos, got_sin) = tables(&[0, 1, 4097], &floats(YARN), 1.138_629_4);
        assert_eq!((got_cos.len(), got_sin.len()), (48, 48));
        for (table, expected) in [(got_cos, COS), (got_sin, SIN)] {
            let got = table.chunks(16).flat_map(|row| row.iter().step_by(5));
            for (got, expected) in got.zip(floats(expected)) {
                assert!((got - expected).abs() < 3e-7, "got {got}, expected {expected}");
            }
        }
    }
}
