//! AdamW on the CPU in one pass over parameter, gradient and both moments, in f32 or in 8 bits.
//!
//! Trade-off: results are new vectors instead of in-place updates. Because of the codes, an 8-bit step takes several times as long as one in f32.

use burn_flex::Flex;
use burn_tensor::Tensor;
use firebrick_precision::DynamicMap;
use firebrick_precision::blockwise::BLOCK_SIZE;
use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use super::host::{Floats, TASK, bytes, tensor};
use super::lanes;
use crate::optimizer::{AdamW, AdamWState, EightBitMoments, Moments, OptimizerOps};
use crate::weights::reference::codes;

impl OptimizerOps for Flex {
    fn adamw_foreach(
        states: Vec<AdamWState<Self>>,
        gradients: Vec<Tensor<Self, 1>>,
        gradient_scale: Tensor<Self, 1>,
        hyper: &AdamW,
    ) -> Vec<AdamWState<Self>> {
        assert_eq!(states.len(), gradients.len(), "one gradient per parameter");
        let scale = Floats::of(gradient_scale).values()[0];
        if !scale.is_finite() {
            return states;
        }
        let rates = EightBitRates::new(scale, hyper);
        let update = |(AdamWState { parameter, moments }, gradient)| match moments {
            Moments::F32 { first, second } => adamw(parameter, [first, second], gradient, scale, hyper),
            Moments::EightBit(moments) => adamw_8bit(parameter, *moments, gradient, &rates),
        };
        states.into_iter().zip(gradients).map(update).collect()
    }
}

fn adamw(
    parameter: Tensor<Flex, 1>,
    moments: [Tensor<Flex, 1>; 2],
    gradient: Tensor<Flex, 1>,
    scale: f32,
    hyper: &AdamW,
) -> AdamWState<Flex> {
    let elements = parameter.dims()[0];
    let copy = |tensor: Tensor<Flex, 1>| Floats::of(tensor).values().to_vec();
    let (mut parameter, [mut first, mut second]) = (copy(parameter), moments.map(copy));
    let gradient = Floats::of(gradient);
    let (beta1, beta2) = (hyper.beta1 as f32, hyper.beta2 as f32);
    let (rest1, rest2) = ((1.0 - hyper.beta1) as f32, (1.0 - hyper.beta2) as f32);
    let (correction1, correction2) = hyper.corrections();
    let (step_size, correction2) = ((hyper.learning_rate / correction1) as f32, (1.0 / correction2) as f32);
    let (epsilon, kept) = (hyper.epsilon as f32, (1.0 - hyper.learning_rate * hyper.weight_decay) as f32);
    let state = first.par_chunks_mut(TASK).zip(second.par_chunks_mut(TASK));
    parameter.par_chunks_mut(TASK).zip(state).zip(gradient.values().par_chunks(TASK)).for_each(|((p, (m, v)), g)| {
        Arch::new().dispatch(|| {
            for (((p, m), v), g) in p.iter_mut().zip(m.iter_mut()).zip(v.iter_mut()).zip(g) {
                let g = g * scale;
                *m = beta1 * *m + rest1 * g;
                *v = beta2 * *v + rest2 * g * g;
                *p = *p * kept - step_size * *m / (v.sqrt() * correction2 + epsilon);
            }
        });
    });
    let flat = |values| tensor(values, [elements]);
    let moments = Moments::F32 { first: flat(first), second: flat(second) };
    AdamWState { parameter: flat(parameter), moments }
}

/// The factors of an 8-bit step, the same for every value. The bias corrections are folded into step size and epsilon.
#[derive(Clone, Copy)]
struct EightBitRates {
    scale: f32,
    beta: [f32; 2],
    rest: [f32; 2],
    step_size: f32,
    epsilon: f32,
    kept: f32,
}

impl EightBitRates {
    fn new(scale: f32, hyper: &AdamW) -> Self {
        let betas = [hyper.beta1, hyper.beta2];
        let (correction1, root) = hyper.corrections();
        Self {
            scale,
            beta: betas.map(|beta| beta as f32),
            rest: betas.map(|beta| (1.0 - beta) as f32),
            step_size: (hyper.learning_rate * root / correction1) as f32,
            epsilon: (root * hyper.epsilon) as f32,
            kept: (1.0 - hyper.learning_rate * hyper.weight_decay) as f32,
        }
    }
}

/// The codes of some blocks of a moment, and the absmax of each block.
struct Moment<'a> {
    codes: &'a mut [u8],
    absmax: &'a mut [f32],
}

fn adamw_8bit(
    parameter: Tensor<Flex, 1>,
    moments: EightBitMoments<Flex>,
    gradient: Tensor<Flex, 1>,
    rates: &EightBitRates,
) -> AdamWState<Flex> {
    let device = parameter.device();
    let mut parameter = Floats::of(parameter).values().to_vec();
    let gradient = Floats::of(gradient);
    let [mut first, mut second] = [moments.first_codes, moments.second_codes]
        .map(|codes| bytes(&codes).to_contiguous().as_slice::<u8>().expect("codes are bytes here").to_vec());
    let [mut first_absmax, mut second_absmax] =
        [moments.first_absmax, moments.second_absmax].map(|absmax| Floats::of(absmax).values().to_vec());
    let blocks = TASK / BLOCK_SIZE;
    let values = parameter.par_chunks_mut(TASK).zip(gradient.values().par_chunks(TASK));
    let first_moments = first.par_chunks_mut(TASK).zip(first_absmax.par_chunks_mut(blocks));
    let second_moments = second.par_chunks_mut(TASK).zip(second_absmax.par_chunks_mut(blocks));
    values.zip(first_moments).zip(second_moments).for_each(|(((p, g), (codes, absmax)), of_second)| {
        let moments = [Moment { codes, absmax }, Moment { codes: of_second.0, absmax: of_second.1 }];
        Arch::new().dispatch(Blocks { p, g, moments, rates: *rates });
    });
    let absmax = |values: Vec<f32>| {
        let blocks = values.len();
        tensor(values, [blocks])
    };
    let elements = parameter.len();
    let moments = EightBitMoments {
        first_codes: codes(first, &device),
        first_absmax: absmax(first_absmax),
        second_codes: codes(second, &device),
        second_absmax: absmax(second_absmax),
    };
    AdamWState { parameter: tensor(parameter, [elements]), moments: Moments::EightBit(Box::new(moments)) }
}

struct Blocks<'a> {
    p: &'a mut [f32],
    g: &'a [f32],
    moments: [Moment<'a>; 2],
    rates: EightBitRates,
}

/// Not a closure, because one of this size is not inlined into the dispatch, and so not compiled for the machine's vector extension.
impl WithSimd for Blocks<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, _: S) {
        let maps = [DynamicMap::signed(), DynamicMap::unsigned()];
        for (block, (p, g)) in self.p.chunks_mut(BLOCK_SIZE).zip(self.g.chunks(BLOCK_SIZE)).enumerate() {
            let start = block * BLOCK_SIZE;
            let mut moments = [[0.0_f32; BLOCK_SIZE]; 2];
            for ((values, Moment { codes, absmax }), map) in moments.iter_mut().zip(&self.moments).zip(maps) {
                let scale = absmax[block];
                // The last block's padding beyond the tensor stays zero.
                for (value, &code) in values.iter_mut().zip(&codes[start..start + p.len()]) {
                    *value = map.values()[usize::from(code)] * scale;
                }
            }
            update(p, g, &mut moments, self.rates);
            for ((values, Moment { codes, absmax }), map) in moments.iter_mut().zip(&mut self.moments).zip(maps) {
                absmax[block] = normalize(values, map);
                for (code, &mut value) in codes[start..start + BLOCK_SIZE].iter_mut().zip(values) {
                    *code = map.nearest(value);
                }
            }
        }
    }
}

/// Updates a block's parameters and moments. A non-finite gradient leaves its parameter unchanged and sets both of its moments to 0.
#[inline(always)]
fn update(p: &mut [f32], g: &[f32], [means, squares]: &mut [[f32; BLOCK_SIZE]; 2], rates: EightBitRates) {
    for (((p, m), v), &g) in p.iter_mut().zip(means).zip(squares).zip(g) {
        let is_finite = g.is_finite();
        let g = if is_finite { g * rates.scale } else { 0.0 };
        let (mean, square) = (rates.beta[0] * *m + rates.rest[0] * g, rates.beta[1] * *v + rates.rest[1] * g * g);
        let updated = (*p - rates.step_size * mean / (square.sqrt() + rates.epsilon)) * rates.kept;
        *p = if is_finite { updated } else { *p };
        *m = if is_finite { mean } else { 0.0 };
        *v = if is_finite { square } else { 0.0 };
    }
}

/// Divides the values of a block by their absmax, and returns it. A block of zeros has no scale; any positive divisor keeps its values at zero. A
/// negative value whose code would be that of zero becomes the next value below zero, because rounding must not reverse a direction.
#[inline(always)]
fn normalize(values: &mut [f32; BLOCK_SIZE], map: &DynamicMap) -> f32 {
    let mut magnitudes = *values;
    magnitudes.iter_mut().for_each(|value| *value = value.abs());
    let largest = lanes::max(&magnitudes).max(0.0);
    let divisor = largest.max(f32::MIN_POSITIVE);
    let below_zero = map.values()[usize::from(map.nearest(0.0).saturating_sub(1))];
    for value in values {
        let normalized = *value / divisor;
        *value = if (normalized < 0.0) & (normalized > below_zero) { below_zero } else { normalized };
    }
    largest
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optimizer::conformance::zero_8bit_state;
    use crate::testing::{assert_close, random};

    #[test]
    fn codes_keep_the_sign_of_a_value_however_small() {
        let map = DynamicMap::signed();
        let mut values = [0.0_f32; BLOCK_SIZE];
        values[..5].copy_from_slice(&[2.0, -2e-12, 2e-12, -0.0, f32::NAN]);
        assert_eq!(normalize(&mut values, map), 2.0);
        assert_eq!(
            values[..6].iter().map(|&value| map.nearest(value)).collect::<Vec<_>>(),
            [255, 126, 127, 127, 0, 127]
        );
    }

    #[test]
    fn a_step_in_8_bits_equals_the_reference_body() {
        let elements = 3 * TASK + 300;
        let start: AdamWState<Flex> = zero_8bit_state(random(1, [elements]));
        let (mut ours, mut expected) = (vec![start.clone()], vec![start]);
        for step in 1..=4 {
            let hyper = AdamW { learning_rate: 1e-2, beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.1, step };
            let gradients = || vec![random::<Flex, 1>(10 + step, [elements])];
            let scale = || Tensor::<Flex, 1>::from_floats([0.5], &Default::default());
            ours = Flex::adamw_foreach(ours, gradients(), scale(), &hyper);
            expected = crate::optimizer::reference::adamw_foreach(expected, gradients(), scale(), &hyper);
        }
        assert_close(ours[0].parameter.clone(), expected[0].parameter.clone(), 1e-5);
        let [ours, expected] = [ours, expected].map(|mut states| match states.remove(0).moments {
            Moments::EightBit(moments) => *moments,
            Moments::F32 { .. } => panic!("moments keep their format"),
        });
        assert_close(ours.first_absmax, expected.first_absmax, 1e-5);
        let differ = |ours: Tensor<Flex, 1, burn_tensor::Int>, expected: Tensor<Flex, 1, burn_tensor::Int>| {
            let [ours, expected] = [ours, expected].map(|codes| codes.into_data().iter::<i64>().collect::<Vec<_>>());
            ours.iter().zip(&expected).filter(|(ours, expected)| ours != expected).count()
        };
        // Occasionally, rounding of the last bit moves a value over a decision threshold.
        let most = elements / 1000;
        assert!(differ(ours.first_codes, expected.first_codes) < most);
        assert!(differ(ours.second_codes, expected.second_codes) < most);
    }
}
