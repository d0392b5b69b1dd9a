//! Operations whose rows do not meet: norms, rotary embedding, SwiGLU, cross entropy, NF4 look-up. One pass each.

use burn_flex::Flex;
use burn_tensor::{Int, Tensor};
use firebrick_precision::nf4::LEVELS;
use pulp::Arch;
use rayon::prelude::*;

use super::host::{Floats, bytes, indices, tensor};
use super::lanes;
use crate::{Nf4Weight, RotaryTables, portable};

/// Values that one task works on: enough to pay for handing it to another core.
const TASK: usize = 16 * 1024;

/// Rows of `width` that make one task.
fn rows_per_task(width: usize) -> usize {
    (TASK / width).max(1)
}

pub(super) fn rms_norm(x_nd: Tensor<Flex, 2>, weight_d: Tensor<Flex, 1>, epsilon: f64) -> Tensor<Flex, 2> {
    let [tokens, width] = x_nd.dims();
    let (x, weight) = (Floats::of(x_nd), Floats::of(weight_d));
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

pub(super) fn rms_norm_backward(
    x_nd: Tensor<Flex, 2>,
    weight_d: Tensor<Flex, 1>,
    epsilon: f64,
    dy_nd: Tensor<Flex, 2>,
    dx_residual: Option<Tensor<Flex, 2>>,
    weight_gradient: bool,
) -> (Tensor<Flex, 2>, Option<Tensor<Flex, 1>>) {
    let [tokens, width] = x_nd.dims();
    let (x, weight, dy) = (Floats::of(x_nd), Floats::of(weight_d), Floats::of(dy_nd));
    let mut dx = match dx_residual {
        Some(residual) => Floats::of(residual).values().to_vec(),
        None => vec![0.0; tokens * width],
    };
    let task = rows_per_task(width) * width;
    // Each task's part of the weight gradient; summed in order below, so that the result does not hang on the schedule.
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

/// `direction` 1 rotates, -1 rotates back.
pub(super) fn rotary(x_nhk: Tensor<Flex, 3>, tables: &RotaryTables<Flex>, direction: f32) -> Tensor<Flex, 3> {
    let [tokens, heads, head_dim] = x_nhk.dims();
    let half = head_dim / 2;
    let (x, cos, sin) = (Floats::of(x_nhk), Floats::of(tables.cos.clone()), Floats::of(tables.sin.clone()));
    let mut y = vec![0.0; tokens * heads * head_dim];
    let rows = rows_per_task(heads * head_dim);
    let (task, table_task) = (rows * heads * head_dim, rows * half);
    let inputs = x.values().par_chunks(task).zip(cos.values().par_chunks(table_task));
    y.par_chunks_mut(task).zip(inputs).zip(sin.values().par_chunks(table_task)).for_each(|((y, (x, cos)), sin)| {
        Arch::new().dispatch(|| {
            for (token, (y, x)) in
                y.chunks_exact_mut(heads * head_dim).zip(x.chunks_exact(heads * head_dim)).enumerate()
            {
                let (cos, sin) = (&cos[token * half..][..half], &sin[token * half..][..half]);
                for (y, x) in y.chunks_exact_mut(head_dim).zip(x.chunks_exact(head_dim)) {
                    let ((y_first, y_second), (first, second)) = (y.split_at_mut(half), x.split_at(half));
                    for index in 0..half {
                        let sin = direction * sin[index];
                        y_first[index] = first[index] * cos[index] - second[index] * sin;
                        y_second[index] = second[index] * cos[index] + first[index] * sin;
                    }
                }
            }
        });
    });
    tensor(y, [tokens, heads, head_dim])
}

pub(super) fn swiglu(gate_nf: Tensor<Flex, 2>, up_nf: Tensor<Flex, 2>) -> Tensor<Flex, 2> {
    let shape = gate_nf.dims();
    let (gate, up) = (Floats::of(gate_nf), Floats::of(up_nf));
    let mut y = vec![0.0; shape[0] * shape[1]];
    y.par_chunks_mut(TASK).zip(gate.values().par_chunks(TASK)).zip(up.values().par_chunks(TASK)).for_each(
        |((y, gate), up)| {
            Arch::new().dispatch(|| {
                for ((y, gate), up) in y.iter_mut().zip(gate).zip(up) {
                    *y = gate * lanes::sigmoid(*gate) * up;
                }
            });
        },
    );
    tensor(y, shape)
}

pub(super) fn swiglu_backward(
    gate_nf: Tensor<Flex, 2>,
    up_nf: Tensor<Flex, 2>,
    dy_nf: Tensor<Flex, 2>,
) -> (Tensor<Flex, 2>, Tensor<Flex, 2>) {
    let shape = gate_nf.dims();
    let (gate, up, dy) = (Floats::of(gate_nf), Floats::of(up_nf), Floats::of(dy_nf));
    let (mut d_gate, mut d_up) = (vec![0.0; shape[0] * shape[1]], vec![0.0; shape[0] * shape[1]]);
    let outputs = d_gate.par_chunks_mut(TASK).zip(d_up.par_chunks_mut(TASK));
    let inputs = gate.values().par_chunks(TASK).zip(up.values().par_chunks(TASK)).zip(dy.values().par_chunks(TASK));
    outputs.zip(inputs).for_each(|((d_gate, d_up), ((gate, up), dy))| {
        Arch::new().dispatch(|| {
            let outputs = d_gate.iter_mut().zip(d_up.iter_mut());
            for ((d_gate, d_up), ((gate, up), dy)) in outputs.zip(gate.iter().zip(up).zip(dy)) {
                let sigma = lanes::sigmoid(*gate);
                *d_gate = dy * up * sigma * (1.0 + gate * (1.0 - sigma));
                *d_up = dy * gate * sigma;
            }
        });
    });
    (tensor(d_gate, shape), tensor(d_up, shape))
}

pub(super) fn cross_entropy(
    logits_cv: Tensor<Flex, 2>,
    targets_c: Tensor<Flex, 1, Int>,
    gradient_scale: Option<f64>,
) -> (Tensor<Flex, 1>, Option<Tensor<Flex, 2>>) {
    let [rows, vocabulary] = logits_cv.dims();
    let (logits, targets) = (Floats::of(logits_cv), indices(targets_c));
    let scale = gradient_scale.unwrap_or(1.0) as f32;
    let mut gradient = vec![0.0; rows * vocabulary];
    let losses: Vec<f32> = gradient
        .par_chunks_mut(vocabulary)
        .zip(logits.values().par_chunks(vocabulary))
        .zip(&targets)
        .map(|((gradient, logits), &target)| {
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
    let loss_sum = losses.iter().map(|&loss| f64::from(loss)).sum::<f64>() as f32;
    (tensor(vec![loss_sum], [1]), gradient_scale.map(|_| tensor(gradient, [rows, vocabulary])))
}

pub(super) fn nf4_dequantize(weight: &Nf4Weight<Flex>) -> Tensor<Flex, 2> {
    let [rows, columns] = weight.shape;
    let (codes, scales) = (bytes(&weight.codes), Floats::of(portable::nf4::absmax(weight)));
    let codes: &[u8] = codes.as_slice().expect("codes of this backend are contiguous bytes");
    let block = weight.block_size;
    let mut values = vec![0.0; scales.values().len() * block];
    let blocks_per_task = TASK / block;
    values
        .par_chunks_mut(blocks_per_task * block)
        .zip(codes.par_chunks(blocks_per_task * block / 2))
        .zip(scales.values().par_chunks(blocks_per_task))
        .for_each(|((values, codes), scales)| {
            let blocks = values.chunks_exact_mut(block).zip(codes.chunks_exact(block / 2)).zip(scales);
            for ((values, codes), scale) in blocks {
                let levels = LEVELS.map(|level| level * scale);
                for (pair, code) in values.chunks_exact_mut(2).zip(codes) {
                    pair[0] = levels[usize::from(code >> 4)];
                    pair[1] = levels[usize::from(code & 15)];
                }
            }
        });
    values.truncate(rows * columns);
    tensor(values, [rows, columns])
}
