//! RMSNorm on the CPU: one pass over the rows forward, one backward.

use burn_flex::Flex;
use burn_tensor::Tensor;
use pulp::Arch;
use rayon::prelude::*;

use super::host::{Floats, is_f32, rows_per_task, tensor};
use super::lanes;
use crate::dtype::plus;
use crate::norm::{NormOps, NormWeight, reference};

impl NormOps for Flex {
    fn rms_norm(
        x_nd: Tensor<Self, 2>,
        norm: &NormWeight<Self>,
        residual_nd: Option<Tensor<Self, 2>>,
    ) -> Tensor<Self, 2> {
        let y_nd = if is_f32(&x_nd) { forward(x_nd, norm) } else { reference::forward(x_nd, norm) };
        plus(y_nd, residual_nd)
    }

    fn rms_norm_backward(
        x_nd: Tensor<Self, 2>,
        norm: &NormWeight<Self>,
        dy_nd: Tensor<Self, 2>,
        d_residual_nd: Option<Tensor<Self, 2>>,
    ) -> (Tensor<Self, 2>, Option<Tensor<Self, 1>>) {
        let backward = if is_f32(&x_nd) { backward } else { reference::backward };
        backward(x_nd, norm, dy_nd, d_residual_nd)
    }
}

fn factors(norm: &NormWeight<Flex>) -> Tensor<Flex, 1> {
    let weight = norm.weight.clone();
    if norm.offset == 0.0 { weight } else { weight.add_scalar(norm.offset) }
}

fn forward(x_nd: Tensor<Flex, 2>, norm: &NormWeight<Flex>) -> Tensor<Flex, 2> {
    let [tokens, width] = x_nd.dims();
    let (x, weight, epsilon) = (Floats::of(x_nd), Floats::of(factors(norm)), norm.epsilon);
    let mut y = vec![0.0; tokens * width];
    let task = rows_per_task(width) * width;
    y.par_chunks_mut(task).zip(x.values().par_chunks(task)).for_each(|(y, x)| {
        Arch::new().dispatch(|| {
            for (y, x) in y.chunks_exact_mut(width).zip(x.chunks_exact(width)) {
                let rstd = reciprocal_deviation(x, epsilon);
                for ((y, x), w) in y.iter_mut().zip(x).zip(weight.values()) {
                    *y = x * rstd * w;
                }
            }
        });
    });
    tensor(y, [tokens, width])
}

#[inline(always)]
fn reciprocal_deviation(x: &[f32], epsilon: f64) -> f32 {
    1.0 / (lanes::dot(x, x) / x.len() as f32 + epsilon as f32).sqrt()
}

fn backward(
    x_nd: Tensor<Flex, 2>,
    norm: &NormWeight<Flex>,
    dy_nd: Tensor<Flex, 2>,
    d_residual_nd: Option<Tensor<Flex, 2>>,
) -> (Tensor<Flex, 2>, Option<Tensor<Flex, 1>>) {
    let [tokens, width] = x_nd.dims();
    let (weight_gradient, epsilon) = (norm.trains, norm.epsilon);
    let (x, weight, dy) = (Floats::of(x_nd), Floats::of(factors(norm)), Floats::of(dy_nd));
    let mut dx = match d_residual_nd {
        Some(residual) => Floats::of(residual).values().to_vec(),
        None => vec![0.0; tokens * width],
    };
    let task = rows_per_task(width) * width;
    // Each task's part of the weight gradient; they are summed in order below, so that the result does not depend on the schedule.
    let partial: Vec<Vec<f32>> = dx
        .par_chunks_mut(task)
        .zip(x.values().par_chunks(task))
        .zip(dy.values().par_chunks(task))
        .map(|((dx, x), dy)| {
            let mut d_weight = vec![0.0; if weight_gradient { width } else { 0 }];
            Arch::new().dispatch(|| {
                for ((dx, x), dy) in dx.chunks_exact_mut(width).zip(x.chunks_exact(width)).zip(dy.chunks_exact(width)) {
                    norm_row_backward(dx, x, dy, weight.values(), epsilon, &mut d_weight);
                }
            });
            d_weight
        })
        .collect();
    let d_weight = weight_gradient.then(|| {
        let mut total = vec![0.0; width];
        for part in partial {
            total.iter_mut().zip(part).for_each(|(total, part)| *total += part);
        }
        tensor(total, [width])
    });
    (tensor(dx, [tokens, width]), d_weight)
}

/// Adds the gradient of one row to `dx`, and to `d_weight` unless that is empty.
#[inline(always)]
fn norm_row_backward(dx: &mut [f32], x: &[f32], dy: &[f32], weight: &[f32], epsilon: f64, d_weight: &mut [f32]) {
    let rstd = reciprocal_deviation(x, epsilon);
    let mut projection = [0.0f32; 16];
    for (index, ((x, dy), w)) in x.iter().zip(dy).zip(weight).enumerate() {
        projection[index % 16] += dy * w * x;
    }
    let projection = projection.iter().sum::<f32>() * rstd * rstd / x.len() as f32;
    for (((dx, x), dy), w) in dx.iter_mut().zip(x).zip(dy).zip(weight) {
        *dx += rstd * (dy * w - x * projection);
    }
    for ((d_weight, x), dy) in d_weight.iter_mut().zip(x).zip(dy) {
        *d_weight += dy * x * rstd;
    }
}
