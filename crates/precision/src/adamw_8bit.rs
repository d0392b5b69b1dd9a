//! One step of AdamW with block-wise 8-bit moments on the host: the reference implementation for devices.
//!
//! Follows `kOptimizerStatic8bit2StateBlockwise` (ADAM) of csrc/kernels.cu in bitsandbytes. For each value, with gradient
//! g scaled by `gradient_scale`, moments m and v dequantized with the scale of their block, and t the step:
//!
//! ```text
//! v ← v·β₂ + (1 − β₂)·g²
//! m ← m·β₁ + (1 − β₁)·g
//! c₁ = 1 − β₁ᵗ,  c₂ = √(1 − β₂ᵗ)
//! p ← p − (lr·c₂/c₁) · m / (√v + c₂·ε)        which is p − lr·m̂ / (√v̂ + ε) with m̂ = m/c₁, v̂ = v/c₂²
//! p ← p · (1 − lr·decay)                      decoupled, after the update, only if decay > 0
//! ```
//!
//! Then m is quantized with the signed map and v with the unsigned one, each divided by the new largest magnitude of its
//! block of 256. If the value of a code of m has the wrong sign, the code is moved by one toward m, so that rounding never
//! reverses a direction; zero counts as positive. A value whose gradient is NaN or infinite keeps its parameter, and both
//! of its moments become 0. In a block of zeros, all codes of m are 255 (0 moved down by one wraps around), all codes of v
//! are 0, and both scales are 0.
//!
//! The kernel uses approximate powers and divisions and fused multiply-adds. Here everything is plain f32, with powers in
//! f64, so the two agree up to rounding. (The CPU version of bitsandbytes decays before the update, does not correct signs
//! and quantizes through a coarser table. It is not followed here.)
//!
//! Trade-off: not optimized for speed. It is meant to be compared with a kernel, in tests and on small states.

use crate::blockwise::{BLOCK_SIZE, BlockwiseQuantized, largest_magnitude};
use crate::dynamic_map::DynamicMap;

/// Hyperparameters of one step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamW8bit {
    /// Step size.
    pub learning_rate: f32,
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the root of the bias-corrected second moment.
    pub eps: f32,
    /// Decoupled weight decay: each parameter shrinks by the fraction `learning_rate * weight_decay`.
    pub weight_decay: f32,
    /// Multiplies every gradient first, for clipping by the global norm.
    pub gradient_scale: f32,
}

impl Default for AdamW8bit {
    /// Returns the defaults of `AdamW8bit` in bitsandbytes.
    fn default() -> Self {
        Self { learning_rate: 1e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 1e-2, gradient_scale: 1.0 }
    }
}

/// The two moments of one parameter tensor.
#[derive(Debug, Clone, PartialEq)]
pub struct AdamW8bitState {
    /// Running mean of the gradients, quantized with [`DynamicMap::signed`].
    pub first: BlockwiseQuantized,
    /// Running mean of their squares, quantized with [`DynamicMap::unsigned`].
    pub second: BlockwiseQuantized,
}

impl AdamW8bitState {
    /// Creates zero moments for `count` values.
    pub fn zeros(count: usize) -> Self {
        let absmax = vec![0.0; count.div_ceil(BLOCK_SIZE)];
        let zeros = BlockwiseQuantized { codes: vec![0; count], absmax };
        Self { first: zeros.clone(), second: zeros }
    }
}

/// Updates `parameters` and `state` in place with `gradients`; `step` counts from 1.
///
/// # Panics
/// If the buffers belong to tensors of different sizes, or at step 0, whose bias correction divides by zero.
pub fn adamw_8bit_reference(
    parameters: &mut [f32],
    gradients: &[f32],
    state: &mut AdamW8bitState,
    step: u32,
    config: &AdamW8bit,
) {
    assert!(step > 0, "steps are counted from 1");
    let (count, blocks) = (parameters.len(), parameters.len().div_ceil(BLOCK_SIZE));
    assert_eq!(
        [gradients.len(), state.first.codes.len(), state.second.codes.len()],
        [count; 3],
        "one of each per value"
    );
    assert_eq!([state.first.absmax.len(), state.second.absmax.len()], [blocks; 2], "one scale per block");
    let rates = Rates::new(step, config);
    let blocks = parameters.chunks_mut(BLOCK_SIZE).zip(gradients.chunks(BLOCK_SIZE)).enumerate();
    for (block, (parameters, gradients)) in blocks {
        let start = block * BLOCK_SIZE;
        let span = start..start + parameters.len();
        let first = MomentBlock {
            map: DynamicMap::signed(),
            codes: &mut state.first.codes[span.clone()],
            absmax: &mut state.first.absmax[block],
        };
        let second = MomentBlock {
            map: DynamicMap::unsigned(),
            codes: &mut state.second.codes[span],
            absmax: &mut state.second.absmax[block],
        };
        step_block(parameters, gradients, first, second, &rates);
    }
}

/// The factors of a step, the same for every value.
struct Rates {
    config: AdamW8bit,
    /// −lr·c₂/c₁
    step_size: f32,
    /// c₂·ε
    eps: f32,
}

impl Rates {
    fn new(step: u32, config: &AdamW8bit) -> Self {
        // In f64, because 1 − 0.999 loses half of its digits in f32.
        let correction = |beta: f32| 1.0 - f64::from(beta).powf(f64::from(step));
        let (correction1, correction2) = (correction(config.beta1), correction(config.beta2).sqrt());
        Self {
            config: *config,
            step_size: (-f64::from(config.learning_rate) * correction2 / correction1) as f32,
            eps: (correction2 * f64::from(config.eps)) as f32,
        }
    }
}

/// One block of one moment.
struct MomentBlock<'a> {
    map: &'static DynamicMap,
    codes: &'a mut [u8],
    absmax: &'a mut f32,
}

impl MomentBlock<'_> {
    fn value(&self, index: usize) -> f32 {
        self.map.values()[usize::from(self.codes[index])] * *self.absmax
    }
}

fn step_block(
    parameters: &mut [f32],
    gradients: &[f32],
    first: MomentBlock<'_>,
    second: MomentBlock<'_>,
    rates: &Rates,
) {
    let config = &rates.config;
    let (mut means, mut squares) = ([0.0_f32; BLOCK_SIZE], [0.0_f32; BLOCK_SIZE]);
    for (index, (parameter, &gradient)) in parameters.iter_mut().zip(gradients).enumerate() {
        if !gradient.is_finite() {
            continue;
        }
        let gradient = gradient * config.gradient_scale;
        let square = second.value(index) * config.beta2 + (1.0 - config.beta2) * gradient * gradient;
        let mean = first.value(index) * config.beta1 + (1.0 - config.beta1) * gradient;
        (means[index], squares[index]) = (mean, square);
        *parameter += rates.step_size * (mean / (square.sqrt() + rates.eps));
        if config.weight_decay > 0.0 {
            *parameter *= 1.0 - config.learning_rate * config.weight_decay;
        }
    }
    let count = parameters.len();
    store_block(first, &means[..count], keep_sign);
    store_block(second, &squares[..count], |_, code, _| code);
}

/// Quantizes the new values of one moment. The final code is `adjust(map, code, value)`.
fn store_block(block: MomentBlock<'_>, values: &[f32], adjust: impl Fn(&DynamicMap, u8, f32) -> u8) {
    *block.absmax = largest_magnitude(values);
    for (code, &value) in block.codes.iter_mut().zip(values) {
        // In a block of zeros this is 0 / 0 = NaN, whose code is 0.
        *code = adjust(block.map, block.map.nearest(value / *block.absmax), value);
    }
}

/// Moves the code by one toward `value` if the value of `code` has another sign.
fn keep_sign(map: &DynamicMap, code: u8, value: f32) -> u8 {
    if map.values()[usize::from(code)].is_sign_negative() == value.is_sign_negative() {
        code
    } else if value > 0.0 {
        code.wrapping_add(1)
    } else {
        code.wrapping_sub(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_values::Draws;

    /// Takes one AdamW step as the paper defines it, in f64 and without quantizing the moments.
    fn adamw_f64(parameters: &mut [f64], moments: &mut [(f64, f64)], gradients: &[f32], step: i32, config: &AdamW8bit) {
        let [lr, beta1, beta2, eps, decay] =
            [config.learning_rate, config.beta1, config.beta2, config.eps, config.weight_decay].map(f64::from);
        for ((parameter, moment), &gradient) in parameters.iter_mut().zip(moments).zip(gradients) {
            let gradient = f64::from(gradient * config.gradient_scale);
            moment.0 = beta1 * moment.0 + (1.0 - beta1) * gradient;
            moment.1 = beta2 * moment.1 + (1.0 - beta2) * gradient * gradient;
            let (mean, square) = (moment.0 / (1.0 - beta1.powi(step)), moment.1 / (1.0 - beta2.powi(step)));
            *parameter = (*parameter - lr * mean / (square.sqrt() + eps)) * (1.0 - lr * decay);
        }
    }

    #[test]
    fn first_step_equals_plain_adamw_up_to_rounding() {
        let mut draws = Draws(7);
        for config in
            [AdamW8bit::default(), AdamW8bit { weight_decay: 0.0, gradient_scale: 0.25, ..Default::default() }]
        {
            let mut parameters = draws.vector(700, 1.0);
            let gradients = draws.vector(700, 0.1);
            let mut exact: Vec<f64> = parameters.iter().map(|&value| f64::from(value)).collect();
            let mut state = AdamW8bitState::zeros(700);
            adamw_8bit_reference(&mut parameters, &gradients, &mut state, 1, &config);
            adamw_f64(&mut exact, &mut vec![(0.0, 0.0); 700], &gradients, 1, &config);
            for (got, expected) in parameters.iter().zip(&exact) {
                assert!((f64::from(*got) - expected).abs() < 3e-7, "{got} against {expected}");
            }
        }
    }

    #[test]
    fn many_steps_stay_near_exact_adamw() {
        let mut draws = Draws(8);
        let config = AdamW8bit { learning_rate: 1e-2, ..Default::default() };
        let target = draws.vector(512, 1.0);
        let mut parameters = vec![0.0_f32; 512];
        let (mut exact, mut moments) = (vec![0.0_f64; 512], vec![(0.0, 0.0); 512]);
        let mut state = AdamW8bitState::zeros(512);
        for step in 1..=300 {
            let gradients: Vec<f32> = parameters.iter().zip(&target).map(|(p, t)| p - t).collect();
            adamw_8bit_reference(&mut parameters, &gradients, &mut state, step, &config);
            let gradients: Vec<f32> = exact.iter().zip(&target).map(|(p, t)| *p as f32 - t).collect();
            adamw_f64(&mut exact, &mut moments, &gradients, step as i32, &config);
        }
        let error = |values: &mut dyn Iterator<Item = f64>| {
            values.zip(&target).map(|(value, &t)| (value - f64::from(t)).powi(2)).sum::<f64>() / 512.0
        };
        let start = error(&mut std::iter::repeat_n(0.0, 512));
        let with_8_bits = error(&mut parameters.iter().map(|&value| f64::from(value)));
        let with_64_bits = error(&mut exact.iter().copied());
        assert!(with_8_bits < start / 50.0, "started at {start}, ended at {with_8_bits}");
        assert!(with_8_bits < with_64_bits + start / 100.0, "8 bits {with_8_bits}, 64 bits {with_64_bits}");
    }

    #[test]
    fn rounding_never_reverses_the_sign_of_the_first_moment() {
        let mut draws = Draws(9);
        let mut gradients = draws.vector(1000, 1.0);
        for (index, gradient) in gradients.iter_mut().enumerate() {
            *gradient *= 10_f32.powi(-(index as i32 % 12));
        }
        let mut state = AdamW8bitState::zeros(1000);
        adamw_8bit_reference(&mut vec![0.0; 1000], &gradients, &mut state, 1, &AdamW8bit::default());
        for (back, gradient) in state.first.dequantize(DynamicMap::signed()).iter().zip(&gradients) {
            assert!(*back == 0.0 && *gradient >= 0.0 || back.signum() == gradient.signum(), "{gradient} became {back}");
        }
    }

    #[test]
    fn a_gradient_that_is_not_finite_changes_nothing() {
        let gradients = Draws(10).vector(300, 1.0);
        let (mut clean, mut hit) = (vec![1.0; 300], vec![1.0; 300]);
        let (mut clean_state, mut hit_state) = (AdamW8bitState::zeros(300), AdamW8bitState::zeros(300));
        let mut damaged = gradients.clone();
        (damaged[7], damaged[8]) = (f32::NAN, f32::INFINITY);
        let config = AdamW8bit::default();
        adamw_8bit_reference(&mut clean, &gradients, &mut clean_state, 1, &config);
        adamw_8bit_reference(&mut hit, &damaged, &mut hit_state, 1, &config);
        assert_eq!(hit[7..9], [1.0, 1.0]);
        assert_eq!((&hit[..7], &hit[9..]), (&clean[..7], &clean[9..]));
        assert_eq!(hit_state.second.codes[7..9], [0, 0]);
    }

    #[test]
    fn zero_gradients_leave_zero_moments() {
        let mut state = AdamW8bitState::zeros(10);
        let mut parameters = vec![2.0; 10];
        let config = AdamW8bit { weight_decay: 0.0, ..Default::default() };
        for step in 1..4 {
            adamw_8bit_reference(&mut parameters, &[0.0; 10], &mut state, step, &config);
        }
        assert_eq!(parameters, [2.0; 10]);
        assert_eq!((state.first.absmax[0], state.second.absmax[0]), (0.0, 0.0));
        assert_eq!((state.first.codes[0], state.second.codes[0]), (255, 0));
    }
}
