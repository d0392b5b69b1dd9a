//! The global norm, sums of gradients, and both forms of AdamW against the reference, several steps long and over many parameters, in f32 and bf16.
//!
//! Trade-off: 8-bit codes are compared by their effect on the next steps, since a value between two codes may round either way.

use burn_flex::Flex;
use burn_tensor::{DType, Int, IntDType, Tensor, TensorData, backend::Backend};
use firebrick_precision::DynamicMap;
use firebrick_precision::blockwise::BLOCK_SIZE;

use super::rounding::{self, Rounding};
use super::{AdamW, AdamWState, EightBitMoments, Moments, RangeGradient, reference};
use crate::Kernels;
use crate::conformance::check::Check;
use crate::dtype::{added, to_dtype};
use crate::memory::slices;

/// Sizes of more than one block of 8-bit moments, and of partial blocks.
const SIZES: [usize; 3] = [5, 700, 4096 + 33];

pub(crate) fn check<B: Kernels>(check: &mut Check<'_, B>) {
    let gradients = SIZES.map(|size| check.random_f32([size], 2.0));
    let (ours, expected): (Vec<_>, Vec<_>) = gradients.into_iter().unzip();
    let many: Vec<_> = (0..10).map(|i| check.random_f32([SIZES[i % SIZES.len()] + i], 2.0)).collect();
    let (of_ours, of_expected): (Vec<_>, Vec<_>) = many.into_iter().unzip();
    check.compare("squared_norm", B::squared_norm(&of_ours), reference::squared_norm(&of_expected));
    for value in [0.0, 0.25, 1.0, 400.0, 1e30, f32::INFINITY, f32::NAN] {
        for limit in [f32::MAX, 15.0] {
            let (norm, factor) = B::clip(Tensor::from_floats([value], check.device), 1.5, limit);
            let (expected_norm, expected_factor) =
                reference::clip(Tensor::from_floats([value], &check.cpu), 1.5, limit);
            let is_finite = |values: Tensor<B, 1>| values.into_data().iter::<f32>().all(f32::is_finite);
            match value.is_finite() {
                true => check.compare("clip: norm", norm, expected_norm),
                false => check.same("clip: a norm that is not finite", !is_finite(norm)),
            }
            match value.sqrt() <= limit {
                true => check.compare("clip", factor, expected_factor),
                false => check.same("clip: a step that is skipped", !is_finite(factor)),
            }
        }
    }
    for (gradient, expected) in ours.into_iter().zip(expected) {
        let earlier = check.random_f32(gradient.dims(), 1.0);
        let copy = earlier.0.clone();
        check.compare("accumulate", B::accumulate(earlier.0, gradient), earlier.1.clone().add(expected));
        check.compare("accumulate: a copy of its input", copy, earlier.1);
    }
    if check.sums().contains(&DType::BF16) {
        in_bf16(check);
    }
    ranges(check);
    // More parameters than one launch takes, of different sizes.
    let many: Vec<usize> = (0..70).map(|index| 1 + index * 37).collect();
    for (sizes, steps) in [(&SIZES[..], 3), (&many, 1)] {
        adamw(check, "adamw_foreach", sizes, steps, (zero_state, zero_state));
        adamw(check, "adamw_foreach, 8 bits", sizes, steps, (zero_8bit_state, zero_8bit_state));
    }
    skipped(check);
}

/// Tests sums in bf16, the norm of tensors in both formats, and steps of parameters in bf16 with gradients in either.
fn in_bf16<B: Kernels>(check: &mut Check<'_, B>) {
    let tensors = [DType::F32, DType::BF16, DType::BF16].map(|dtype| check.random_in(dtype, [4096 + 33], 1.0));
    let (ours, expected): (Vec<_>, Vec<_>) = tensors.into_iter().unzip();
    check.compare("squared_norm: of both formats", B::squared_norm(&ours), reference::squared_norm(&expected));
    for dtype in [DType::F32, DType::BF16] {
        for size in SIZES {
            let [sum, gradient] = [DType::BF16, dtype].map(|dtype| check.random_in(dtype, [size], 1.0));
            let expected = added(to_dtype(sum.1, DType::BF16), gradient.1);
            check.compare("accumulate: in bf16", B::accumulate(sum.0, gradient.0), expected);
        }
        for is_exact in [true, false] {
            adamw_bf16(check, dtype, is_exact, (zero_state, zero_state));
            adamw_bf16(check, dtype, is_exact, (zero_8bit_state, zero_8bit_state));
        }
    }
}

/// Returns how the parameter `index` of this size is rounded.
fn rounding_of<B: Kernels>(is_exact: bool, index: usize, size: usize, device: &B::Device) -> Rounding<B> {
    if !is_exact {
        return Rounding::Stochastic(rounding::rounding_key(3, 1, &index.to_string()));
    }
    let lower = B::packed_codes(vec![0; 2 * size]);
    let dtype = lower.dtype;
    Rounding::Exact(Tensor::from_data(lower, (device, dtype)))
}

fn adamw_bf16<B: Kernels>(
    check: &mut Check<'_, B>,
    of_gradients: DType,
    is_exact: bool,
    (zero, zero_on_cpu): (Start<B>, Start<Flex>),
) {
    // More than one launch takes.
    let sizes: Vec<usize> = (0..40).map(|index| 1 + index * 37).chain(SIZES).collect();
    let (mut states, mut expected) = (Vec::new(), Vec::new());
    for (index, &size) in sizes.iter().enumerate() {
        let (values, on_cpu) = check.random_f32([size], 1.0);
        // Moments are those of parameters in f32.
        let (of_ours, of_expected) = (zero(values.clone()), zero_on_cpu(on_cpu.clone()));
        let (parameter, rounding) = rounding::narrowed(values, rounding_of(is_exact, index, size, check.device));
        states.push((AdamWState { parameter, ..of_ours }, rounding));
        let (parameter, rounding) = rounding::narrowed(on_cpu, rounding_of(is_exact, index, size, &check.cpu));
        expected.push((AdamWState { parameter, ..of_expected }, rounding));
    }
    for step in 1..=3 {
        let gradients = sizes.iter().map(|&size| check.random_in(of_gradients, [size], 1.0));
        let (gradients, on_cpu): (Vec<_>, Vec<_>) = gradients.unzip();
        states = B::adamw_bf16_foreach(states, gradients, half(check.device), &hyper(step));
        expected = rounding::adamw_bf16_foreach(expected, on_cpu, half(&check.cpu), &hyper(step));
    }
    let before: Vec<_> = states.iter().map(|(state, _)| bits(state)).collect();
    let infinite = Tensor::from_floats([f32::INFINITY], check.device);
    let gradients = sizes.iter().map(|&size| check.random_in(of_gradients, [size], 1.0).0).collect();
    states = B::adamw_bf16_foreach(states, gradients, infinite, &hyper(4));
    check.same("adamw_bf16: a skipped step", states.iter().map(|(state, _)| bits(state)).eq(before));
    let name = if is_exact { "adamw_bf16: the f32 of its halves" } else { "adamw_bf16: rounded at random" };
    for ((state, rounding), (expected, of_expected)) in states.into_iter().zip(expected) {
        check.same("adamw_bf16: format", state.parameter.dtype() == DType::BF16);
        let expected = rounding::widened(expected.parameter, &of_expected);
        check.compare(name, rounding::widened(state.parameter, &rounding), expected);
    }
}

/// Tests more ranges than one launch takes, aligned and unaligned, written and then added to, with a gap that is never written.
fn ranges<B: Kernels>(check: &mut Check<'_, B>) {
    let (mut starts, mut length) = (Vec::new(), 0);
    for index in 0..70 {
        let elements = if index % 3 == 0 { 64 * (index + 1) } else { 1 + index * 37 };
        starts.push((length, elements));
        length += elements + index % 2 * 3;
    }
    let (mut ours, mut expected) = (None, None);
    for round in 0..3 {
        let (mut gradients, mut references) = (Vec::new(), Vec::new());
        for &(start, elements) in &starts {
            let (gradient, reference) = check.random_f32([elements], 1.0);
            gradients.push(RangeGradient { start, gradient, is_first: round == 0 });
            references.push(RangeGradient { start, gradient: reference, is_first: round == 0 });
        }
        ours = Some(B::accumulate_ranges(ours, length, gradients));
        expected = Some(reference::accumulate_ranges(expected, length, references));
    }
    let (Some(ours), Some(expected)) = (ours, expected) else { return };
    let ours = slices(ours, &starts);
    for (ours, expected) in ours.into_iter().zip(slices(expected, &starts)) {
        check.compare("accumulate_ranges", ours, expected);
    }
}

/// Tests that a non-finite gradient scale changes no bit, whatever the gradients are.
fn skipped<B: Kernels>(check: &mut Check<'_, B>) {
    let device = check.device;
    for (scale, bad) in [(f32::NAN, 0.5), (f32::INFINITY, f32::NAN)] {
        let scale = || Tensor::from_floats([scale], device);
        for size in SIZES {
            let gradient = |fill: f32| Tensor::<B, 1>::full([size], fill, (device, DType::F32));
            let start = check.random_f32([size], 1.0).0;
            let ones = || Tensor::ones([1], device);
            for state in [zero_state(start.clone()), zero_8bit_state(start)] {
                let state = B::adamw_foreach(vec![state], vec![gradient(0.1)], ones(), &hyper(1));
                let after = B::adamw_foreach(state.clone(), vec![gradient(bad)], scale(), &hyper(2));
                check.same("adamw_foreach: a skipped step", bits(&state[0]) == bits(&after[0]));
            }
        }
    }
}

fn bits<B: Backend>(state: &AdamWState<B>) -> Vec<TensorData> {
    let moments = match &state.moments {
        Moments::F32 { first, second } => vec![first.to_data(), second.to_data()],
        Moments::EightBit(moments) => {
            let codes = |codes: &Tensor<B, 1, Int>| codes.clone().cast(IntDType::I32).into_data();
            let EightBitMoments { first_codes, first_absmax, second_codes, second_absmax } = &**moments;
            vec![codes(first_codes), first_absmax.to_data(), codes(second_codes), second_absmax.to_data()]
        }
    };
    [state.parameter.to_data()].into_iter().chain(moments).collect()
}

fn hyper(step: u64) -> AdamW {
    AdamW { learning_rate: 1e-2, beta1: 0.9, beta2: 0.99, epsilon: 1e-8, weight_decay: 0.1, step }
}

fn half<B: Backend>(device: &B::Device) -> Tensor<B, 1> {
    Tensor::from_floats([0.5], device)
}

/// Builds the state of a parameter before the first step.
type Start<B> = fn(Tensor<B, 1>) -> AdamWState<B>;

fn adamw<B: Kernels>(
    check: &mut Check<'_, B>,
    name: &str,
    sizes: &[usize],
    steps: u64,
    (zero, zero_on_cpu): (Start<B>, Start<Flex>),
) {
    let parameters: Vec<_> = sizes.iter().map(|&size| check.random_f32([size], 1.0)).collect();
    let (mut states, mut expected): (Vec<_>, Vec<_>) =
        parameters.iter().map(|(ours, expected)| (zero(ours.clone()), zero_on_cpu(expected.clone()))).unzip();
    for step in 1..=steps {
        let (gradients, expected_gradients): (Vec<_>, Vec<_>) =
            sizes.iter().map(|&size| check.random_f32([size], 1.0)).unzip();
        states = B::adamw_foreach(states, gradients, half(check.device), &hyper(step));
        expected = reference::adamw_foreach(expected, expected_gradients, half(&check.cpu), &hyper(step));
    }
    for (state, expected) in states.into_iter().zip(expected) {
        check.compare(&format!("{name}: parameter"), state.parameter, expected.parameter);
        let (ours, expected) = match (state.moments, expected.moments) {
            (Moments::F32 { first, second }, Moments::F32 { first: one, second: two }) => ([first, second], [one, two]),
            (Moments::EightBit(ours), Moments::EightBit(expected)) => {
                ([ours.first_absmax, ours.second_absmax], [expected.first_absmax, expected.second_absmax])
            }
            _ => return check.same(&format!("{name}: format of the moments"), false),
        };
        for (what, (ours, expected)) in ["first", "second"].into_iter().zip(ours.into_iter().zip(expected)) {
            check.compare(&format!("{name}: {what} moments or their scales"), ours, expected);
        }
    }
    for (parameter, expected) in parameters {
        check.compare(&format!("{name}: a copy of its input"), parameter, expected);
    }
}

pub(super) fn zero_state<B: Backend>(parameter: Tensor<B, 1>) -> AdamWState<B> {
    let zeros = || Tensor::zeros(parameter.dims(), &parameter.device());
    AdamWState { moments: Moments::F32 { first: zeros(), second: zeros() }, parameter }
}

pub(crate) fn zero_8bit_state<B: Kernels>(parameter: Tensor<B, 1>) -> AdamWState<B> {
    let (blocks, device) = (parameter.dims()[0].div_ceil(BLOCK_SIZE), parameter.device());
    let zero_codes = |map: &DynamicMap| {
        let codes = B::packed_codes(vec![map.nearest(0.0); blocks * BLOCK_SIZE]);
        let dtype = codes.dtype;
        Tensor::from_data(codes, (&device, dtype))
    };
    let moments = EightBitMoments {
        first_codes: zero_codes(DynamicMap::signed()),
        first_absmax: Tensor::zeros([blocks], &device),
        second_codes: zero_codes(DynamicMap::unsigned()),
        second_absmax: Tensor::zeros([blocks], &device),
    };
    AdamWState { parameter, moments: Moments::EightBit(Box::new(moments)) }
}
