//! The optimizer's arithmetic: the global norm, AdamW in f32 and with 8-bit moments.
//!
//! Each call updates the state that the previous one left, in place if the backend can, as a run does.
//! Trade-off: the checked call updates a copy of the state, since the reference still needs its input.

use std::cell::Cell;

use burn_tensor::{DType, Int, Tensor, TensorData};
use firebrick_kernels::backends::Flex;
use firebrick_kernels::optimizer::reference;
use firebrick_kernels::{AdamW, AdamWState, EightBitMoments, Kernels, Moments};
use firebrick_precision::DynamicMap;
use firebrick_precision::blockwise::BLOCK_SIZE;

use super::{Scale, Setting, random, tolerance};
use crate::case::{Case, Comparison, Output, Prepared, axis, key, to_reference, work};

const HYPER: AdamW = AdamW { learning_rate: 1e-3, beta1: 0.9, beta2: 0.99, epsilon: 1e-8, weight_decay: 0.1, step: 1 };

/// An operation: its pass and format, operations per parameter, bytes per parameter.
type Operation = (&'static str, &'static str, f64, f64);
const SQUARED_NORM: Operation = ("squared_norm", "f32", 2.0, 4.0);
/// AdamW reads and writes parameter and moments, and reads the gradient.
const ADAMW: Operation = ("adamw", "f32", 15.0, 28.0);
const ADAMW_8BIT: Operation = ("adamw_8bit", "int8_blockwise", 25.0, 12.0 + 4.0 + 16.0 / BLOCK_SIZE as f64);

pub(super) fn cases<B: Kernels>(setting: &Setting<B>) -> Vec<Case<B>> {
    // The parameters of an adapter on all projections, and of a layer.
    let (small, large) = match setting.scale {
        Scale::Small => (1 << 20, 1 << 22),
        Scale::Medium => (1 << 22, 1 << 24),
        Scale::Large => (1 << 24, 1 << 27),
    };
    let sizes = setting.sweep(&[small], &[small, large]);
    let of_size = |size| [SQUARED_NORM, ADAMW, ADAMW_8BIT].map(|operation| case(setting, operation, size));
    sizes.into_iter().flat_map(of_size).collect()
}

fn case<B: Kernels>(setting: &Setting<B>, operation: Operation, elements: usize) -> Case<B> {
    let (device, (pass, format, flops, bytes)) = (setting.device.clone(), operation);
    let count = elements as f64;
    let prepare = move || {
        if operation == SQUARED_NORM { squared_norm(elements, &device) } else { update(operation, elements, &device) }
    };
    Case {
        key: key("optimizer", pass, "one flat parameter", format, &[("parameters", elements)]),
        work: work(count, "parameters", flops * count, bytes * count),
        axis: axis("parameters", elements),
        tolerance: tolerance(DType::F32),
        set_bytes: bytes * count,
        prepare: Box::new(prepare),
    }
}

fn squared_norm<B: Kernels>(elements: usize, device: &B::Device) -> Prepared<B> {
    let gradient = random::<B, 1>([elements], 1.0, DType::F32, device);
    let (tensors, device) = ([gradient.clone()], device.clone());
    let call = move || Output::Tensors(vec![B::section(&device, || B::squared_norm(&tensors)).unsqueeze_dim(0)]);
    Prepared::new(call, move |output: Output<B>| {
        let expected = reference::squared_norm(&[to_reference(gradient)]).unsqueeze_dim(0);
        vec![Comparison::of_tensors("sum", output.tensors().remove(0), expected)]
    })
}

/// Creates the state before the first step.
fn state<B: Kernels>(operation: Operation, parameter: Tensor<B, 1>) -> AdamWState<B> {
    let ([elements], device) = (parameter.dims(), parameter.device());
    let zeros = |elements| Tensor::zeros([elements], (&device, DType::F32));
    if operation == ADAMW {
        return AdamWState { parameter, moments: Moments::F32 { first: zeros(elements), second: zeros(elements) } };
    }
    let blocks = elements.div_ceil(BLOCK_SIZE);
    let moments = EightBitMoments {
        first_codes: zero_codes::<B>(DynamicMap::signed(), blocks, &device),
        first_absmax: zeros(blocks),
        second_codes: zero_codes::<B>(DynamicMap::unsigned(), blocks, &device),
        second_absmax: zeros(blocks),
    };
    AdamWState { parameter, moments: Moments::EightBit(Box::new(moments)) }
}

fn zero_codes<B: Kernels>(map: &DynamicMap, blocks: usize, device: &B::Device) -> Tensor<B, 1, Int> {
    let (dtype, length) = (DType::from(B::CODE_DTYPE), blocks * BLOCK_SIZE);
    let codes = TensorData::new(vec![map.nearest(0.0); length], [length]).convert_dtype(dtype);
    Tensor::from_data(codes, (device, dtype))
}

fn update<B: Kernels>(operation: Operation, elements: usize, device: &B::Device) -> Prepared<B> {
    let parameter = random::<B, 1>([elements], 1.0, DType::F32, device);
    let gradient = random::<B, 1>([elements], 1.0, DType::F32, device);
    let scale = Tensor::<B, 1>::ones([1], (device, DType::F32));
    let last = Cell::new(Some(state(operation, parameter.clone())));
    let (of_call, device) = (gradient.clone(), device.clone());
    let call = move || {
        let before = vec![last.take().expect("the last call left a state")];
        let update = || B::adamw_foreach(before, vec![of_call.clone()], scale.clone(), &HYPER).remove(0);
        let after = B::section(&device, update);
        let updated = after.parameter.clone().unsqueeze_dim(0);
        last.set(Some(after));
        Output::Tensors(vec![updated])
    };
    let check = move |output: Output<B>| {
        // The first whole blocks: blocks do not depend on each other.
        let checked = elements.min(64 * BLOCK_SIZE);
        let part = |x: Tensor<B, 1>| to_reference(x.narrow(0, 0, checked));
        let scale = Tensor::<Flex, 1>::ones([1], &Default::default());
        let before = state::<Flex>(operation, part(parameter.clone()));
        let after = reference::adamw_foreach(vec![before], vec![part(gradient)], scale, &HYPER).remove(0).parameter;
        let before = part(parameter);
        let got = to_reference(output.tensors().remove(0).narrow(1, 0, checked)).flatten::<1>(0, 1);
        // The change is compared, not the parameter: a step is a thousandth of it, and no update at all would pass.
        vec![Comparison::of_tensors("change of the parameter", got.sub(before.clone()), after.sub(before))]
    };
    Prepared::new(call, check)
}
