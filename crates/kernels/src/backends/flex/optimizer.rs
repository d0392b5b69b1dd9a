//! AdamW on the CPU in one pass over parameter, gradient and both moments.
//!
//! Trade-off: new vectors instead of updates in place; 8-bit moments take the reference body.

use burn_flex::Flex;
use burn_tensor::Tensor;
use pulp::Arch;
use rayon::prelude::*;

use super::host::{Floats, TASK, tensor};
use crate::optimizer::{AdamW, AdamWState, OptimizerOps};

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
        states.into_iter().zip(gradients).map(|(state, gradient)| adamw(state, gradient, scale, hyper)).collect()
    }
}

fn adamw(state: AdamWState<Flex>, gradient: Tensor<Flex, 1>, scale: f32, hyper: &AdamW) -> AdamWState<Flex> {
    let elements = state.parameter.dims()[0];
    let copy = |tensor: Tensor<Flex, 1>| Floats::of(tensor).values().to_vec();
    let (mut parameter, mut first, mut second) = (copy(state.parameter), copy(state.first), copy(state.second));
    let gradient = Floats::of(gradient);
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
    let flat = |values| tensor(values, [elements]);
    AdamWState { parameter: flat(parameter), first: flat(first), second: flat(second) }
}
