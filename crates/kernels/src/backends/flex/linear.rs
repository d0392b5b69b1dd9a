//! Gated activation and rotary embedding on the CPU, one pass each.
//!
//! GEMMs are Burn's own, so the reference body composes groups of modules and calls these functions.

use burn_flex::Flex;
use burn_tensor::Tensor;
use firebrick_arch::Activation;
use pulp::Arch;
use rayon::prelude::*;

use super::host::{Floats, TASK, is_f32, rows_per_task, tensor};
use super::lanes;
use crate::linear::{LinearOps, RotaryTables, reference};

impl LinearOps for Flex {
    fn gated(gate_nf: Tensor<Self, 2>, up_nf: Tensor<Self, 2>, activation: Activation) -> Tensor<Self, 2> {
        if !is_f32(&gate_nf) {
            return reference::gated(gate_nf, up_nf, activation);
        }
        match activation {
            Activation::Silu => gated(gate_nf, up_nf, |gate, up| gate * lanes::sigmoid(gate) * up),
            Activation::GeluTanh => gated(gate_nf, up_nf, |gate, up| gate * gelu_sigma(gate) * up),
            Activation::Sigmoid => gated(gate_nf, up_nf, |gate, up| lanes::sigmoid(gate) * up),
            Activation::ClampedSwiglu(constants) => {
                let (alpha, limit) = (constants.alpha(), constants.limit());
                gated(gate_nf, up_nf, move |gate, up| clamped_swiglu(gate, up, alpha, limit))
            }
        }
    }

    fn gated_backward(
        gate_nf: Tensor<Self, 2>,
        up_nf: Tensor<Self, 2>,
        activation: Activation,
        dy_nf: Tensor<Self, 2>,
    ) -> (Tensor<Self, 2>, Tensor<Self, 2>) {
        if !is_f32(&gate_nf) {
            return reference::gated_backward(gate_nf, up_nf, activation, dy_nf);
        }
        match activation {
            Activation::Silu => gated_backward(gate_nf, up_nf, dy_nf, silu_gradients),
            Activation::GeluTanh => gated_backward(gate_nf, up_nf, dy_nf, gelu_gradients),
            Activation::Sigmoid => gated_backward(gate_nf, up_nf, dy_nf, sigmoid_gradients),
            Activation::ClampedSwiglu(constants) => {
                let (alpha, limit) = (constants.alpha(), constants.limit());
                gated_backward(gate_nf, up_nf, dy_nf, move |gate, up, dy| {
                    clamped_swiglu_gradients(gate, up, dy, alpha, limit)
                })
            }
        }
    }

    fn rotary(x: Tensor<Self, 2>, tables: &RotaryTables<Self>, head_dim: usize, backward: bool) -> Tensor<Self, 2> {
        if is_f32(&x) {
            rotated(x, tables, head_dim, if backward { -1.0 } else { 1.0 })
        } else {
            reference::rotary(x, tables, head_dim, backward)
        }
    }
}

/// Rotates if `direction` is 1, rotates back if it is -1.
fn rotated(x: Tensor<Flex, 2>, tables: &RotaryTables<Flex>, head_dim: usize, direction: f32) -> Tensor<Flex, 2> {
    let [tokens, width] = x.dims();
    // Columns of a head beyond those of the tables pass through.
    let (half, interleaved) = (tables.cos.dims()[1], tables.interleaved);
    let (x, cos, sin) = (Floats::of(x), Floats::of(tables.cos.clone()), Floats::of(tables.sin.clone()));
    let mut y = vec![0.0; tokens * width];
    let rows = rows_per_task(width);
    let (task, table_task) = (rows * width, rows * half);
    let inputs = x.values().par_chunks(task).zip(cos.values().par_chunks(table_task));
    y.par_chunks_mut(task).zip(inputs).zip(sin.values().par_chunks(table_task)).for_each(|((y, (x, cos)), sin)| {
        Arch::new().dispatch(|| {
            for (token, (y, x)) in y.chunks_exact_mut(width).zip(x.chunks_exact(width)).enumerate() {
                let (cos, sin) = (&cos[token * half..][..half], &sin[token * half..][..half]);
                for (y, x) in y.chunks_exact_mut(head_dim).zip(x.chunks_exact(head_dim)) {
                    let ((y, y_rest), (x, rest)) = (y.split_at_mut(2 * half), x.split_at(2 * half));
                    y_rest.copy_from_slice(rest);
                    if interleaved {
                        for (index, (y, x)) in y.chunks_exact_mut(2).zip(x.chunks_exact(2)).enumerate() {
                            let sin = direction * sin[index];
                            y[0] = x[0] * cos[index] - x[1] * sin;
                            y[1] = x[1] * cos[index] + x[0] * sin;
                        }
                        continue;
                    }
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
    tensor(y, [tokens, width])
}

#[inline(always)]
fn sigmoid_gradients(gate: f32, up: f32, dy: f32) -> [f32; 2] {
    let sigma = lanes::sigmoid(gate);
    [dy * up * sigma * (1.0 - sigma), dy * sigma]
}

#[inline(always)]
fn silu_gradients(gate: f32, up: f32, dy: f32) -> [f32; 2] {
    let sigma = lanes::sigmoid(gate);
    [dy * up * sigma * (1.0 + gate * (1.0 - sigma)), dy * gate * sigma]
}

/// `2 sqrt(2 / pi)`.
const GELU_LINEAR: f32 = 1.595_769_2;
/// Coefficient of the cubic term.
const GELU_CUBIC: f32 = 0.044_715;

/// Computes `(1 + tanh(u)) / 2`, the logistic function of `2 u`.
#[inline(always)]
fn gelu_sigma(gate: f32) -> f32 {
    lanes::sigmoid(GELU_LINEAR * gate * (1.0 + GELU_CUBIC * gate * gate))
}

#[inline(always)]
fn gelu_gradients(gate: f32, up: f32, dy: f32) -> [f32; 2] {
    let sigma = gelu_sigma(gate);
    let slope = GELU_LINEAR * (1.0 + 3.0 * GELU_CUBIC * gate * gate);
    [dy * up * sigma * (1.0 + gate * (1.0 - sigma) * slope), dy * gate * sigma]
}

#[inline(always)]
fn clamped_swiglu(gate: f32, up: f32, alpha: f32, limit: f32) -> f32 {
    let gate = gate.min(limit);
    gate * lanes::sigmoid(alpha * gate) * (up.clamp(-limit, limit) + 1.0)
}

#[inline(always)]
fn clamped_swiglu_gradients(gate: f32, up: f32, dy: f32, alpha: f32, limit: f32) -> [f32; 2] {
    let (clamped, factor) = (gate.min(limit), up.clamp(-limit, limit) + 1.0);
    let sigma = lanes::sigmoid(alpha * clamped);
    let slope = sigma * (1.0 + alpha * clamped * (1.0 - sigma));
    let [of_gate, of_up] = [gate <= limit, up.abs() <= limit].map(|inside| if inside { dy } else { 0.0 });
    [of_gate * factor * slope, of_up * clamped * sigma]
}

/// Applies `activation`, which is inlined, so that the loop is compiled with it for each vector extension.
fn gated(
    gate_nf: Tensor<Flex, 2>,
    up_nf: Tensor<Flex, 2>,
    activation: impl Fn(f32, f32) -> f32 + Copy + Send + Sync,
) -> Tensor<Flex, 2> {
    let shape = gate_nf.dims();
    let (gate, up) = (Floats::of(gate_nf), Floats::of(up_nf));
    let mut y = vec![0.0; shape[0] * shape[1]];
    y.par_chunks_mut(TASK).zip(gate.values().par_chunks(TASK)).zip(up.values().par_chunks(TASK)).for_each(
        |((y, gate), up)| {
            Arch::new().dispatch(|| {
                for ((y, gate), up) in y.iter_mut().zip(gate).zip(up) {
                    *y = activation(*gate, *up);
                }
            });
        },
    );
    tensor(y, shape)
}

fn gated_backward(
    gate_nf: Tensor<Flex, 2>,
    up_nf: Tensor<Flex, 2>,
    dy_nf: Tensor<Flex, 2>,
    gradients: impl Fn(f32, f32, f32) -> [f32; 2] + Copy + Send + Sync,
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
                [*d_gate, *d_up] = gradients(*gate, *up, *dy);
            }
        });
    });
    (tensor(d_gate, shape), tensor(d_up, shape))
}
