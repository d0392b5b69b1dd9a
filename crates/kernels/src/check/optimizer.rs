//! The global norm, sums of gradients, and both forms of AdamW, several steps long.

use burn_tensor::{DType, Int, Tensor, TensorData};
use firebrick_precision::DynamicMap;

use super::Check;
use crate::{AdamW, EightBitMoments, EightBitUpdate, Kernels, oracle};

/// More than one block of 8-bit moments, and not whole blocks.
const SIZES: [usize; 3] = [5, 700, 4096 + 33];

pub(super) fn check<B: Kernels>(check: &mut Check<'_, B>) {
    let gradients = SIZES.map(|size| check.random_f32([size], 2.0));
    let (ours, reference): (Vec<_>, Vec<_>) = gradients.into_iter().unzip();
    check.compare("squared_norm", B::squared_norm(&ours), oracle::optimizer::squared_norm(&reference));
    for (gradient, expected) in ours.into_iter().zip(reference) {
        let earlier = check.random_f32(gradient.dims(), 1.0);
        let kept = earlier.0.clone();
        check.compare("accumulate", B::accumulate(earlier.0, gradient), earlier.1.clone().add(expected));
        check.compare("accumulate: a copy of its input", kept, earlier.1);
    }
    for size in SIZES {
        adamw(check, size);
        adamw_8bit(check, size);
    }
    adamw_8bit_many(check);
}

fn hyper(step: u64) -> AdamW {
    AdamW { learning_rate: 1e-2, beta1: 0.9, beta2: 0.99, epsilon: 1e-8, weight_decay: 0.1, step }
}

fn adamw<B: Kernels>(check: &mut Check<'_, B>, size: usize) {
    let mut parameter = check.random_f32([size], 1.0);
    let zeros = check.random_f32([size], 0.0);
    let mut moments = ((zeros.0.clone(), zeros.0), (zeros.1.clone(), zeros.1));
    let scale = (Tensor::from_floats([0.5], check.device), Tensor::from_floats([0.5], &check.cpu));
    for step in 1..=3 {
        let gradient = check.random_f32([size], 1.0);
        let ours = B::adamw(parameter.0, gradient.0, moments.0, scale.0.clone(), &hyper(step));
        let expected = oracle::optimizer::adamw(parameter.1, gradient.1, moments.1, scale.1.clone(), &hyper(step));
        (parameter, moments) = ((ours.0, expected.0), (ours.1, expected.1));
    }
    check.compare("adamw: parameter", parameter.0, parameter.1);
    check.compare("adamw: first moment", moments.0.0, moments.1.0);
    check.compare("adamw: second moment", moments.0.1, moments.1.1);
}

fn adamw_8bit<B: Kernels>(check: &mut Check<'_, B>, size: usize) {
    let mut parameter = check.random_f32([size], 1.0);
    let mut moments = (zero_moments::<B>(size, check.device), zero_moments(size, &check.cpu));
    let scale = (Tensor::from_floats([0.5], check.device), Tensor::from_floats([0.5], &check.cpu));
    for step in 1..=3 {
        let gradient = check.random_f32([size], 1.0);
        let ours = B::adamw_8bit(parameter.0, gradient.0, moments.0, scale.0.clone(), &hyper(step));
        let expected = oracle::optimizer::adamw_8bit(parameter.1, gradient.1, moments.1, scale.1.clone(), &hyper(step));
        (parameter, moments) = ((ours.0, expected.0), (ours.1, expected.1));
    }
    check.compare("adamw_8bit: parameter", parameter.0, parameter.1);
    check.compare("adamw_8bit: first scales", moments.0.first_absmax, moments.1.first_absmax);
    check.compare("adamw_8bit: second scales", moments.0.second_absmax, moments.1.second_absmax);
}

/// More parameters than one launch takes, of different sizes; those that somebody else holds stay as they are.
fn adamw_8bit_many<B: Kernels>(check: &mut Check<'_, B>) {
    let scale = (Tensor::from_floats([0.5], check.device), Tensor::from_floats([0.5], &check.cpu));
    let sizes: Vec<usize> = (0..70).map(|index| 1 + index * 37).collect();
    let parameters: Vec<_> = sizes.iter().map(|&size| check.random_f32([size], 1.0)).collect();
    let (mut ours, mut expected) = (Vec::new(), Vec::new());
    for (parameter, reference) in &parameters {
        let size = reference.dims()[0];
        let gradient = check.random_f32([size], 1.0);
        let moments = zero_moments::<B>(size, check.device);
        ours.push(EightBitUpdate { parameter: parameter.clone(), gradient: gradient.0, moments });
        let moments = zero_moments(size, &check.cpu);
        let scale = scale.1.clone();
        expected.push(oracle::optimizer::adamw_8bit(reference.clone(), gradient.1, moments, scale, &hyper(1)));
    }
    for ((ours, _), (expected, _)) in B::adamw_8bit_many(ours, scale.0, &hyper(1)).into_iter().zip(expected) {
        check.compare("adamw_8bit_many: parameter", ours, expected);
    }
    for (parameter, reference) in parameters {
        check.compare("adamw_8bit_many: a copy of its input", parameter, reference);
    }
}

fn zero_moments<B: Kernels>(size: usize, device: &B::Device) -> EightBitMoments<B> {
    let blocks = size.div_ceil(256);
    let dtype: DType = B::code_dtype().into();
    let codes = |map: &DynamicMap| -> Tensor<B, 1, Int> {
        let values = vec![map.nearest(0.0); blocks * 256];
        let shape = [values.len()];
        Tensor::from_data(TensorData::new(values, shape).convert_dtype(dtype), (device, dtype))
    };
    EightBitMoments {
        first_codes: codes(DynamicMap::signed()),
        first_absmax: Tensor::zeros([blocks], device),
        second_codes: codes(DynamicMap::unsigned()),
        second_absmax: Tensor::zeros([blocks], device),
    }
}
