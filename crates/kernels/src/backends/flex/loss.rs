//! Cross entropy of a chunk of logits on the CPU: losses and gradient in one pass per row.
//!
//! Trade-off: the gradient's memory also stores the exponentials, so it is allocated even if only the loss is needed. Soft caps take separate passes.

use burn_flex::Flex;
use burn_tensor::{Int, Tensor};
use pulp::Arch;
use rayon::prelude::*;

use super::host::{Floats, indices, tensor};
use super::lanes;
use crate::loss::{LossOps, reference};

impl LossOps for Flex {
    fn cross_entropy(
        logits_cv: Tensor<Self, 2>,
        targets_c: Tensor<Self, 1, Int>,
        weights_c: Option<Tensor<Self, 1>>,
        gradient_scale: Option<f64>,
        soft_cap: Option<f64>,
    ) -> (Tensor<Self, 1>, Option<Tensor<Self, 2>>) {
        let Some(cap) = soft_cap else { return losses_and_gradient(logits_cv, targets_c, weights_c, gradient_scale) };
        let capped_cv = reference::capped(logits_cv, soft_cap);
        let (losses_c, gradient_cv) = losses_and_gradient(capped_cv.clone(), targets_c, weights_c, gradient_scale);
        let through_cap =
            |gradient_cv: Tensor<Self, 2>| gradient_cv.mul(capped_cv.div_scalar(cap).square().neg().add_scalar(1.0));
        (losses_c, gradient_cv.map(through_cap))
    }
}

/// Computes losses `[c]`, and the gradient of their weighted sum times the scale.
fn losses_and_gradient(
    logits_cv: Tensor<Flex, 2>,
    targets_c: Tensor<Flex, 1, Int>,
    weights_c: Option<Tensor<Flex, 1>>,
    gradient_scale: Option<f64>,
) -> (Tensor<Flex, 1>, Option<Tensor<Flex, 2>>) {
    let [rows, vocabulary] = logits_cv.dims();
    let (logits, targets) = (Floats::of(logits_cv), indices(targets_c));
    let scale = gradient_scale.unwrap_or(1.0) as f32;
    let scales: Vec<f32> = match weights_c {
        Some(weights) => Floats::of(weights).values().iter().map(|weight| weight * scale).collect(),
        None => vec![scale; rows],
    };
    let mut gradient = vec![0.0; rows * vocabulary];
    let losses: Vec<f32> = gradient
        .par_chunks_mut(vocabulary)
        .zip(logits.values().par_chunks(vocabulary))
        .zip(targets.par_iter().zip(&scales))
        .map(|((gradient, logits), (&target, &scale))| {
            Arch::new().dispatch(|| {
                let largest = lanes::max(logits);
                for (gradient, logit) in gradient.iter_mut().zip(logits) {
                    *gradient = lanes::exp(logit - largest);
                }
                let sum = lanes::sum(gradient);
                let factor = scale / sum;
                gradient.iter_mut().for_each(|gradient| *gradient *= factor);
                gradient[target] -= scale;
                sum.ln() - (logits[target] - largest)
            })
        })
        .collect();
    (tensor(losses, [rows]), gradient_scale.map(|_| tensor(gradient, [rows, vocabulary])))
}
