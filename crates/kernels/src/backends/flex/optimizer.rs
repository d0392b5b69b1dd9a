//! AdamW in one pass over parameter, gradient and both moments.

use burn_flex::Flex;
use burn_tensor::Tensor;
use pulp::Arch;
use rayon::prelude::*;

use super::host::{Floats, tensor};
use crate::AdamW;

/// Values that one task works on.
const TASK: usize = 16 * 1024;

pub(super) fn adamw(
    parameter: Tensor<Flex, 1>,
    gradient: Tensor<Flex, 1>,
    (first, second): (Tensor<Flex, 1>, Tensor<Flex, 1>),
    gradient_scale: Tensor<Flex, 1>,
    hyper: &AdamW,
) -> (Tensor<Flex, 1>, (Tensor<Flex, 1>, Tensor<Flex, 1>)) {
    let elements = parameter.dims()[0];
    let copy = |tensor: Tensor<Flex, 1>| Floats::of(tensor).values().to_vec();
    let (mut parameter, mut first, mut second) = (copy(parameter), copy(first), copy(second));
    let (gradient, scale) = (Floats::of(gradient), Floats::of(gradient_scale).values()[0]);
    let (beta1, beta2) = (hyper.beta1 as f32, hyper.beta2 as f32);
    let (rest1, rest2) = ((1.0 - hyper.beta1) as f32, (1.0 - hyper.beta2) as f32);
    let step_size = (hyper.learning_rate / (1.0 - hyper.beta1.powf(hyper.step as f64))) as f32;
    let correction2 = (1.0 / (1.0 - hyper.beta2.powf(hyper.step as f64)).sqrt()) as f32;
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
    (tensor(parameter, [elements]), (tensor(first, [elements]), tensor(second, [elements])))
}
