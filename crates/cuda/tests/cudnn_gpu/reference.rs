//! Attention and its gradients from their definitions, in f64, one row of scores at a time.

use firebrick_cuda::cudnn::Element;
use half::{bf16, f16};

use crate::cases::Case;

pub(crate) fn to_bits(element: Element, value: f32) -> u16 {
    match element {
        Element::Bf16 => bf16::from_f32(value).to_bits(),
        Element::F16 => f16::from_f32(value).to_bits(),
    }
}

pub(crate) fn value_of(element: Element, bits: u16) -> f32 {
    match element {
        Element::Bf16 => bf16::from_bits(bits).to_f32(),
        Element::F16 => f16::from_bits(bits).to_f32(),
    }
}

/// A small generator (splitmix64), seeded by a name so that each case is reproducible.
struct Random(u64);

impl Random {
    fn new(name: &str) -> Self {
        Self(name.bytes().fold(0x9E37_79B9, |seed, byte| seed.wrapping_mul(31).wrapping_add(u64::from(byte))))
    }

    /// Returns a number that is uniform in -1.5 to 1.5.
    fn value(&mut self) -> f32 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((mixed >> 40) as f32 / (1 << 24) as f32 - 0.5) * 3.0
    }
}

/// Inputs as `[token, head, width]`, with values that are exact in the 16-bit type.
pub(crate) struct Problem {
    pub(crate) lengths: Vec<usize>,
    pub(crate) scale: f32,
    heads: (usize, usize),
    width: usize,
    pub(crate) query: Vec<f32>,
    pub(crate) key: Vec<f32>,
    pub(crate) value: Vec<f32>,
    pub(crate) output_gradient: Vec<f32>,
}

/// Results in the same layout; statistics are `[token, head]`.
pub(crate) struct Results {
    pub(crate) output: Vec<f64>,
    pub(crate) statistics: Vec<f64>,
    pub(crate) query_gradient: Vec<f64>,
    pub(crate) key_gradient: Vec<f64>,
    pub(crate) value_gradient: Vec<f64>,
}

impl Problem {
    pub(crate) fn random(Case { name, shape, lengths }: &Case) -> Self {
        let (mut random, tokens) = (Random::new(name), lengths.iter().sum::<usize>());
        let (heads, width, element) = ((shape.query_heads, shape.key_value_heads), shape.head_dim, shape.element);
        let mut fill = |heads: usize| -> Vec<f32> {
            (0..tokens * heads * width).map(|_| value_of(element, to_bits(element, random.value()))).collect()
        };
        let (query, key, value, output_gradient) = (fill(heads.0), fill(heads.1), fill(heads.1), fill(heads.0));
        let scale = 1.0 / (width as f32).sqrt();
        Self { lengths: lengths.clone(), scale, heads, width, query, key, value, output_gradient }
    }

    pub(crate) fn tokens(&self) -> usize {
        self.lengths.iter().sum()
    }

    pub(crate) fn solve(&self) -> Results {
        let (tokens, width) = (self.tokens(), self.width);
        let (queries, keys) = (tokens * self.heads.0 * width, tokens * self.heads.1 * width);
        let mut sums = Results {
            output: vec![0.0; queries],
            statistics: vec![0.0; tokens * self.heads.0],
            query_gradient: vec![0.0; queries],
            key_gradient: vec![0.0; keys],
            value_gradient: vec![0.0; keys],
        };
        let mut first = 0;
        for &length in &self.lengths {
            for row in first..first + length {
                for head in 0..self.heads.0 {
                    self.row(&mut sums, first, row, head);
                }
            }
            first += length;
        }
        sums
    }

    /// Computes one query of one head against the keys from `first` to itself.
    fn row(&self, sums: &mut Results, first: usize, row: usize, head: usize) {
        let (width, scale) = (self.width, f64::from(self.scale));
        let at = |token: usize, heads: usize, head: usize| {
            let start = (token * heads + head) * width;
            start..start + width
        };
        let query_at = at(row, self.heads.0, head);
        let key_head = head / (self.heads.0 / self.heads.1);
        let key_at = |token: usize| at(token, self.heads.1, key_head);
        let (query, gradient) = (&self.query[query_at.clone()], &self.output_gradient[query_at.clone()]);

        let scores: Vec<f64> = (first..=row).map(|token| scale * dot(query, &self.key[key_at(token)])).collect();
        let maximum = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = scores.iter().map(|score| (score - maximum).exp()).sum();
        let statistic = maximum + sum.ln();
        sums.statistics[row * self.heads.0 + head] = statistic;
        let probabilities: Vec<f64> = scores.iter().map(|score| (score - statistic).exp()).collect();

        let products: Vec<f64> = (first..=row).map(|token| dot(gradient, &self.value[key_at(token)])).collect();
        let mean: f64 = probabilities.iter().zip(&products).map(|(p, product)| p * product).sum();
        for (offset, (&probability, product)) in probabilities.iter().zip(products).enumerate() {
            let key_at = key_at(first + offset);
            let score = scale * probability * (product - mean);
            add(&mut sums.output[query_at.clone()], probability, &self.value[key_at.clone()]);
            add(&mut sums.value_gradient[key_at.clone()], probability, gradient);
            add(&mut sums.query_gradient[query_at.clone()], score, &self.key[key_at.clone()]);
            add(&mut sums.key_gradient[key_at], score, query);
        }
    }
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(a * b)).sum()
}

fn add(into: &mut [f64], factor: f64, values: &[f32]) {
    for (into, value) in into.iter_mut().zip(values) {
        *into += factor * f64::from(*value);
    }
}
