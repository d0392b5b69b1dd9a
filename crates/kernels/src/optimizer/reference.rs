//! Optimizer arithmetic in ordinary Burn operations: global norm, AdamW, and AdamW with 8-bit moments.
//!
//! The 8-bit step follows bitsandbytes' block-wise kernel (`kOptimizerStatic8bit2StateBlockwise`): decode both moments, update them, take the parameter
//! step with the exact moments, then decay, then encode the moments again against each block's new maximum. Rounding must not change the sign of a first
//! moment: where it would, the code moves one step towards the sign. The CPU version of bitsandbytes decays first, corrects no signs and quantizes through a
//! coarser table; it is not followed here. A skipped step is computed and then discarded, because only the device knows whether it is skipped.

use burn_tensor::{Bool, DType, Int, IntDType, Tensor, backend::Backend};
use firebrick_precision::DynamicMap;
use firebrick_precision::blockwise::BLOCK_SIZE;

use super::{AdamW, AdamWState, EightBitMoments, Moments, RangeGradient};
use crate::dtype::to_f32;
use crate::weights::WeightOps;
use crate::weights::reference::index;

/// Implements [`crate::OptimizerOps::accumulate_ranges`]; copies the sum once per call.
///
/// # Panics
/// If there is no gradient, or ranges overlap or do not fit.
pub fn accumulate_ranges<B: Backend>(
    sum: Option<Tensor<B, 1>>,
    length: usize,
    mut gradients: Vec<RangeGradient<B>>,
) -> Tensor<B, 1> {
    assert!(!gradients.is_empty(), "a sum needs a gradient");
    let device = gradients[0].gradient.device();
    let sum = sum.unwrap_or_else(|| Tensor::zeros([length], (&device, DType::F32)));
    gradients.sort_by_key(|range| range.start);
    let (mut parts, mut end) = (Vec::new(), 0);
    for RangeGradient { start, gradient, is_first } in gradients {
        assert!(start >= end, "two gradients have element {start} of a sum");
        if start > end {
            parts.push(sum.clone().narrow(0, end, start - end));
        }
        let elements = gradient.dims()[0];
        end = start + elements;
        parts.push(if is_first { gradient } else { sum.clone().narrow(0, start, elements).add(gradient) });
    }
    if end < length {
        parts.push(sum.narrow(0, end, length - end));
    }
    Tensor::cat(parts, 0)
}

/// Implements [`crate::OptimizerOps::squared_norm`].
pub fn squared_norm<B: Backend>(tensors: &[Tensor<B, 1>]) -> Tensor<B, 1> {
    let squares: Vec<_> = tensors.iter().map(|tensor| to_f32(tensor.clone()).square().sum()).collect();
    Tensor::cat(squares, 0).sum()
}

/// Implements [`crate::OptimizerOps::clip`].
pub fn clip<B: Backend>(squared_norm: Tensor<B, 1>, max_norm: f64, limit: f32) -> (Tensor<B, 1>, Tensor<B, 1>) {
    let norm = squared_norm.sqrt();
    let factor = norm.clone().add_scalar(1e-6).recip().mul_scalar(max_norm).clamp_max(1.0);
    let is_taken = norm.clone().is_finite().bool_and(norm.clone().lower_equal_elem(limit));
    (norm, factor.mask_fill(is_taken.bool_not(), f32::NAN))
}

/// Implements [`crate::OptimizerOps::adamw_foreach`].
pub fn adamw_foreach<B: WeightOps>(
    states: Vec<AdamWState<B>>,
    gradients: Vec<Tensor<B, 1>>,
    gradient_scale: Tensor<B, 1>,
    hyper: &AdamW,
) -> Vec<AdamWState<B>> {
    assert_eq!(states.len(), gradients.len(), "one gradient per parameter");
    let update = |(AdamWState { parameter, moments }, gradient)| {
        let scale = gradient_scale.clone();
        match moments {
            Moments::F32 { first, second } => adamw(parameter, [first, second], gradient, scale, hyper),
            Moments::EightBit(moments) => adamw_8bit(parameter, moments, gradient, scale, hyper),
        }
    };
    states.into_iter().zip(gradients).map(update).collect()
}

/// Computes `p (1 - lr wd) - lr m̂ / (sqrt(v̂) + eps)`, decay first, as torch does.
fn adamw<B: Backend>(
    parameter: Tensor<B, 1>,
    moments: [Tensor<B, 1>; 2],
    gradient: Tensor<B, 1>,
    gradient_scale: Tensor<B, 1>,
    hyper: &AdamW,
) -> AdamWState<B> {
    let (old, [old_first, old_second]) = (parameter.clone(), moments.clone());
    let is_skipped = is_skipped(&gradient_scale, parameter.dims()[0]);
    let gradient = to_f32(gradient).mul(gradient_scale);
    let [first, second] = moments;
    let (first, second) = update_moments(gradient, first, second, hyper);
    let (correction1, correction2) = hyper.corrections();
    let denominator = second.clone().sqrt().div_scalar(correction2).add_scalar(hyper.epsilon);
    let update = first.clone().div(denominator).mul_scalar(hyper.learning_rate / correction1);
    let decayed = parameter.mul_scalar(1.0 - hyper.learning_rate * hyper.weight_decay);
    AdamWState {
        parameter: decayed.sub(update).mask_where(is_skipped.clone(), old),
        moments: Moments::F32 {
            first: first.mask_where(is_skipped.clone(), old_first),
            second: second.mask_where(is_skipped, old_second),
        },
    }
}

/// Returns whether a non-finite scale skips the step, as a mask of `[elements]`.
fn is_skipped<B: Backend>(gradient_scale: &Tensor<B, 1>, elements: usize) -> Tensor<B, 1, Bool> {
    gradient_scale.clone().is_finite().bool_not().expand([elements])
}

fn adamw_8bit<B: WeightOps>(
    parameter: Tensor<B, 1>,
    moments: Box<EightBitMoments<B>>,
    gradient: Tensor<B, 1>,
    gradient_scale: Tensor<B, 1>,
    hyper: &AdamW,
) -> AdamWState<B> {
    let device = parameter.device();
    let signed = Tensor::<B, 1>::from_floats(DynamicMap::signed().values().as_slice(), &device);
    let unsigned = Tensor::<B, 1>::from_floats(DynamicMap::unsigned().values().as_slice(), &device);
    let elements = parameter.dims()[0];
    let (old, is_step_skipped) = (moments.clone(), |elements| is_skipped(&gradient_scale, elements));
    let first = decode(&signed, moments.first_codes, moments.first_absmax, elements);
    let second = decode(&unsigned, moments.second_codes, moments.second_absmax, elements);
    // A non-finite gradient leaves its parameter unchanged and sets both of its moments to 0.
    let gradient = to_f32(gradient);
    let skipped = gradient.clone().is_finite().bool_not();
    let gradient = gradient.mask_fill(skipped.clone(), 0.0).mul(gradient_scale.clone());
    let (first, second) = update_moments(gradient, first, second, hyper);
    let (first, second) = (first.mask_fill(skipped.clone(), 0.0), second.mask_fill(skipped.clone(), 0.0));

    let (correction1, correction2) = hyper.corrections();
    let denominator = second.clone().sqrt().add_scalar(correction2 * hyper.epsilon);
    let update = first.clone().div(denominator).mul_scalar(hyper.learning_rate * correction2 / correction1);
    let updated = parameter.clone().sub(update).mul_scalar(1.0 - hyper.learning_rate * hyper.weight_decay);
    let parameter = updated.mask_where(skipped.bool_or(is_step_skipped(elements)), parameter);

    let (first_codes, first_absmax) = encode(first, &signed, DynamicMap::signed(), true);
    let (second_codes, second_absmax) = encode(second, &unsigned, DynamicMap::unsigned(), false);
    let blocks = first_absmax.dims()[0];
    let (of_codes, of_scales) = (is_step_skipped(blocks * BLOCK_SIZE), is_step_skipped(blocks));
    let moments = EightBitMoments {
        first_codes: first_codes.mask_where(of_codes.clone(), old.first_codes),
        first_absmax: first_absmax.mask_where(of_scales.clone(), old.first_absmax),
        second_codes: second_codes.mask_where(of_codes, old.second_codes),
        second_absmax: second_absmax.mask_where(of_scales, old.second_absmax),
    };
    AdamWState { parameter, moments: Moments::EightBit(Box::new(moments)) }
}

fn update_moments<B: Backend>(
    gradient: Tensor<B, 1>,
    first: Tensor<B, 1>,
    second: Tensor<B, 1>,
    hyper: &AdamW,
) -> (Tensor<B, 1>, Tensor<B, 1>) {
    let first = first.mul_scalar(hyper.beta1).add(gradient.clone().mul_scalar(1.0 - hyper.beta1));
    let second = second.mul_scalar(hyper.beta2).add(gradient.square().mul_scalar(1.0 - hyper.beta2));
    (first, second)
}

/// Decodes `[blocks * 256]` codes and `[blocks]` scales to `[elements]` values.
fn decode<B: Backend>(
    map: &Tensor<B, 1>,
    codes: Tensor<B, 1, Int>,
    absmax: Tensor<B, 1>,
    elements: usize,
) -> Tensor<B, 1> {
    let blocks = absmax.dims()[0];
    let values = map.clone().select(0, index(codes)).reshape([blocks, BLOCK_SIZE]);
    values.mul(absmax.reshape([blocks, 1])).reshape([blocks * BLOCK_SIZE]).narrow(0, 0, elements)
}

/// Encodes to the nearest codes of a map of 256 ascending values, block by block; `keep_sign` moves back a code that rounded past zero.
fn encode<B: WeightOps>(
    values: Tensor<B, 1>,
    map: &Tensor<B, 1>,
    host_map: &DynamicMap,
    keep_sign: bool,
) -> (Tensor<B, 1, Int>, Tensor<B, 1>) {
    let (device, elements) = (values.device(), values.dims()[0]);
    let blocks = elements.div_ceil(BLOCK_SIZE);
    let padding = blocks * BLOCK_SIZE - elements;
    let padded = if padding == 0 { values } else { Tensor::cat(vec![values, Tensor::zeros([padding], &device)], 0) };
    let padded = padded.reshape([blocks, BLOCK_SIZE]);
    let absmax_b1 = padded.clone().abs().max_dim(1);
    // A block of zeros has no scale; any positive divisor keeps its values at zero.
    let divisor = absmax_b1.clone().clamp_min(f32::MIN_POSITIVE);
    let normalized = padded.div(divisor).reshape([blocks * BLOCK_SIZE]);

    let thresholds = Tensor::<B, 1>::from_floats(host_map.midpoints().as_slice(), &device);
    let mut code = count_below(&thresholds, &normalized);
    if keep_sign {
        let decoded = map.clone().select(0, code.clone());
        let too_high = normalized.clone().lower_elem(0.0).bool_and(decoded.clone().greater_equal_elem(0.0));
        let too_low = normalized.greater_elem(0.0).bool_and(decoded.lower_elem(0.0));
        code = code.add(too_low.int()).sub(too_high.int());
    }
    let stored: IntDType = B::CODE_DTYPE;
    (code.cast(stored), absmax_b1.reshape([blocks]))
}

/// Counts for each value how many of the 255 ascending thresholds lie below it: a binary search in eight lookups.
fn count_below<B: Backend>(thresholds: &Tensor<B, 1>, values: &Tensor<B, 1>) -> Tensor<B, 1, Int> {
    let mut count = Tensor::<B, 1, Int>::zeros([values.dims()[0]], &values.device());
    for step in [128i64, 64, 32, 16, 8, 4, 2, 1] {
        let probed = thresholds.clone().select(0, count.clone().add_scalar(step - 1));
        count = count.add(values.clone().greater(probed).int().mul_scalar(step));
    }
    count
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::testing::{Plain, assert_close, random};

    const HYPER: AdamW =
        AdamW { learning_rate: 1e-2, beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.1, step: 1 };

    fn one() -> Tensor<Plain, 1> {
        Tensor::ones([1], &Default::default())
    }

    fn host(tensor: &Tensor<Plain, 1>) -> Vec<f32> {
        tensor.to_data().to_vec().unwrap()
    }

    #[test]
    fn squared_norm_is_the_sum_of_all_squares() {
        let (a, b) = (random::<Plain, 1>(1, [100]), random::<Plain, 1>(2, [7]));
        let expected: f32 = host(&a).iter().chain(&host(&b)).map(|value| value * value).sum();
        assert_close(squared_norm(&[a, b]), Tensor::from_floats([expected], &Default::default()), 1e-5);
    }

    fn in_f32(moments: Moments<Plain>) -> [Tensor<Plain, 1>; 2] {
        let Moments::F32 { first, second } = moments else { panic!("moments keep their format") };
        [first, second]
    }

    #[test]
    fn adamw_follows_its_formula_over_several_steps() {
        let device = Default::default();
        let zeros = || Tensor::zeros([50], &device);
        let (mut parameter, mut moments) = (random::<Plain, 1>(1, [50]), [zeros(), zeros()]);
        let mut expected: Vec<f64> = host(&parameter).into_iter().map(f64::from).collect();
        let (mut m, mut v) = (vec![0.0f64; 50], vec![0.0f64; 50]);
        for step in 1..=5u64 {
            let gradient = random::<Plain, 1>(10 + step, [50]);
            let hyper = AdamW { step, ..HYPER };
            let state = adamw(parameter, moments, gradient.clone(), one().mul_scalar(0.5), &hyper);
            (parameter, moments) = (state.parameter, in_f32(state.moments));
            for (index, g) in host(&gradient).into_iter().map(|g| f64::from(g) * 0.5).enumerate() {
                m[index] = 0.9 * m[index] + 0.1 * g;
                v[index] = 0.999 * v[index] + 0.001 * g * g;
                let (m_hat, v_hat) =
                    (m[index] / (1.0 - 0.9f64.powi(step as i32)), v[index] / (1.0 - 0.999f64.powi(step as i32)));
                expected[index] = expected[index] * (1.0 - 1e-3) - 1e-2 * m_hat / (v_hat.sqrt() + 1e-8);
            }
        }
        let expected: Vec<f32> = expected.into_iter().map(|value| value as f32).collect();
        assert_close(parameter, Tensor::from_floats(expected.as_slice(), &device), 1e-5);
    }

    #[test]
    fn codes_of_8_bit_moments_are_the_nearest_values_of_the_map() {
        // The last two blocks have zeros alone.
        let values = Tensor::cat(vec![random::<Plain, 1>(3, [600]), Tensor::zeros([500], &Default::default())], 0);
        for (map, keep_sign) in [(DynamicMap::signed(), true), (DynamicMap::unsigned(), false)] {
            let values = if keep_sign { values.clone() } else { values.clone().abs() };
            let device_map = Tensor::from_floats(map.values().as_slice(), &Default::default());
            let (codes, absmax) = encode(values.clone(), &device_map, map, keep_sign);
            let decoded = host(&decode(&device_map, codes, absmax.clone(), 1100));
            for (index, (&value, decoded)) in host(&values).iter().zip(decoded).enumerate() {
                let scale = host(&absmax)[index / BLOCK_SIZE];
                let nearest =
                    map.values().iter().map(|code| (code * scale - value).abs()).fold(f32::INFINITY, f32::min);
                assert!((decoded - value).abs() <= nearest + 1e-6 || value.signum() == decoded.signum());
                assert!(!keep_sign || value * decoded >= 0.0, "sign of {value} became {decoded}");
                assert!(value != 0.0 || decoded == 0.0, "zero became {decoded}");
            }
        }
    }
}
