//! Gated activation and rotary embedding on the CPU, one pass each.
//!
//! GEMMs are Burn's own, so groups of modules are composed by the reference body, which calls these.
//! Trade-off: f32 only, and SiLU only; other dtypes and activations take the reference body.

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
        match activation {
            Activation::Silu if is_f32(&gate_nf) => gated_silu(gate_nf, up_nf),
            _ => reference::gated(gate_nf, up_nf, activation),
        }
    }

    fn gated_backward(
        gate_nf: Tensor<Self, 2>,
        up_nf: Tensor<Self, 2>,
        activation: Activation,
        dy_nf: Tensor<Self, 2>,
    ) -> (Tensor<Self, 2>, Tensor<Self, 2>) {
        match activation {
            Activation::Silu if is_f32(&gate_nf) => gated_silu_backward(gate_nf, up_nf, dy_nf),
            _ => reference::gated_backward(gate_nf, up_nf, activation, dy_nf),
        }
    }

    fn rotary(x: Tensor<Self, 2>, tables: &RotaryTables<Self>, head_dim: usize) -> Tensor<Self, 2> {
        if is_f32(&x) { rotated(x, tables, head_dim, 1.0) } else { reference::rotary(x, tables, head_dim) }
    }

    fn rotary_backward(dy: Tensor<Self, 2>, tables: &RotaryTables<Self>, head_dim: usize) -> Tensor<Self, 2> {
        if is_f32(&dy) { rotated(dy, tables, head_dim, -1.0) } else { reference::rotary_backward(dy, tables, head_dim) }
    }
}

/// `direction` 1 rotates, -1 rotates back.
fn rotated(x: Tensor<Flex, 2>, tables: &RotaryTables<Flex>, head_dim: usize, direction: f32) -> Tensor<Flex, 2> {
    let [tokens, width] = x.dims();
    // Columns of a head beyond the tables' pass through.
    let half = tables.cos.dims()[1];
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

fn gated_silu(gate_nf: Tensor<Flex, 2>, up_nf: Tensor<Flex, 2>) -> Tensor<Flex, 2> {
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

fn gated_silu_backward(
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
