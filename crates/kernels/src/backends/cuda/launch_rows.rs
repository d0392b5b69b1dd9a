//! Launches of the kernels that work row by row: norms, rotation, the gated activation, embedding, sums and copies.

#![allow(unsafe_code, reason = "launching device work is unsafe; the launch files are where it is answered for")]

use burn_tensor::DType;
use firebrick_cuda::{Arguments, DevicePointer, LaunchShape};

use super::engine::Engine;
use super::launch::Launch;
use super::program::Source;
use super::scratch::Purpose;
use super::tensor::{Matrix, Primitive};
use crate::RotaryTables;

/// Largest number of blocks along the first axis of a grid.
const MOST_BLOCKS: usize = (1 << 31) - 1;

/// An argument that is an address.
pub(super) fn at(address: u64) -> DevicePointer<u8> {
    DevicePointer::from_address(address)
}

/// A grid of `blocks` blocks of `threads` threads.
pub(super) fn grid(blocks: usize, threads: u32) -> LaunchShape {
    LaunchShape { grid: [blocks.clamp(1, MOST_BLOCKS) as u32, 1, 1], block: [threads, 1, 1], shared_bytes: 0 }
}

/// Threads for a row of `width` values, sixteen a thread: whole warps, 32 to `most`.
fn threads_for(width: usize, most: usize) -> u32 {
    width.div_ceil(16).next_multiple_of(32).clamp(32, most) as u32
}

impl Engine {
    /// `rms_norm(x) w`.
    pub(super) fn rms_norm(&self, x: &Matrix, weight: &Matrix, epsilon: f64) -> Matrix {
        let y = self.empty_matrix(x.rows, x.width, x.dtype);
        let launch = Launch {
            source: Source::Norm,
            dtype: x.dtype,
            name: "rms_norm",
            shape: grid(x.rows, threads_for(x.width, 512)),
            bytes: 2 * x.rows * x.width * x.element_bytes(),
        };
        let arguments = Arguments::new()
            .pointer(at(y.address))
            .pointer(at(x.address))
            .pointer(at(weight.address))
            .i32(x.width as i32)
            .f32(epsilon as f32);
        // SAFETY: y and x are dense [rows, width] of this dtype, weight is [width] f32; one block a row.
        unsafe { self.launch(launch, &arguments) };
        y
    }

    /// Gradient of the input, plus what flows past the norm; and of the weight, where asked for.
    pub(super) fn rms_norm_backward(
        &self,
        x: &Matrix,
        weight: &Matrix,
        epsilon: f64,
        dy: &Matrix,
        residual: Option<&Matrix>,
        weight_gradient: bool,
    ) -> (Matrix, Option<Primitive>) {
        let dx = self.empty_matrix(x.rows, x.width, x.dtype);
        let blocks = if weight_gradient { x.rows.min(3 * self.multiprocessors()) } else { x.rows };
        let partial = if weight_gradient { self.scratch.take(Purpose::Partial, blocks * x.width * 4) } else { 0 };
        let tensors = 3 + usize::from(residual.is_some());
        let launch = Launch {
            source: Source::Norm,
            dtype: x.dtype,
            name: "rms_norm_backward",
            shape: grid(blocks, threads_for(x.width, 256)),
            bytes: tensors * x.rows * x.width * x.element_bytes(),
        };
        let arguments = Arguments::new()
            .pointer(at(dx.address))
            .pointer(at(x.address))
            .pointer(at(weight.address))
            .pointer(at(dy.address))
            .pointer(at(residual.map_or(0, |residual| residual.address)))
            .pointer(at(partial))
            .i64(x.rows as i64)
            .i32(x.width as i32)
            .f32(epsilon as f32);
        // SAFETY: all matrices are dense [rows, width] of this dtype; the partial sums are [blocks, width] f32 or null.
        unsafe { self.launch(launch, &arguments) };
        let d_weight = weight_gradient.then(|| self.sum_columns(partial, blocks, x.width));
        (dx, d_weight)
    }

    fn sum_columns(&self, partial: u64, rows: usize, width: usize) -> Primitive {
        let out = self.empty([width], DType::F32);
        let launch = Launch {
            source: Source::Norm,
            dtype: DType::F32,
            name: "sum_columns",
            shape: grid(width.div_ceil(32), 256),
            bytes: rows * width * 4,
        };
        let arguments = Arguments::new()
            .pointer(at(super::tensor::address(&out)))
            .pointer(at(partial))
            .i32(rows as i32)
            .i32(width as i32)
            .i32(0);
        // SAFETY: out is [width] and the partial sums are [rows, width], both f32.
        unsafe { self.launch(launch, &arguments) };
        out
    }

    /// Rotates the first `heads` heads of each row of `x` into `y`, which may be `x`.
    pub(super) fn rotate(
        &self,
        y: &Matrix,
        x: &Matrix,
        tables: &RotaryTables<super::Cuda>,
        heads: usize,
        head_dim: usize,
        backward: bool,
    ) {
        let (cos, sin) = (self.flat(tables.cos.clone()), self.flat(tables.sin.clone()));
        assert!(heads * head_dim <= x.width && cos.rows == x.rows, "rotating {heads} heads of {head_dim} in {x:?}");
        let launch = Launch {
            source: Source::Rotary,
            dtype: x.dtype,
            name: "rotary",
            shape: LaunchShape { block: [64, 4, 1], ..grid(x.rows.div_ceil(4), 1) },
            bytes: 2 * x.rows * heads * head_dim * x.element_bytes(),
        };
        let arguments = Arguments::new()
            .pointer(at(y.address))
            .i64(y.stride as i64)
            .pointer(at(x.address))
            .i64(x.stride as i64)
            .pointer(at(cos.address))
            .pointer(at(sin.address))
            .i64(x.rows as i64)
            .i32(heads as i32)
            .i32(head_dim as i32)
            .i32(i32::from(backward));
        // SAFETY: rows of y and x hold at least heads * head_dim values; the tables are [rows, head_dim / 2] f32.
        unsafe { self.launch(launch, &arguments) };
    }

    /// `silu(gate) up`.
    pub(super) fn swiglu(&self, gate: &Matrix, up: &Matrix) -> Matrix {
        let y = self.empty_matrix(gate.rows, gate.width, gate.dtype);
        let launch = Launch {
            source: Source::Swiglu,
            dtype: gate.dtype,
            name: "swiglu",
            shape: rows_and_columns(gate.rows, gate.width),
            bytes: 3 * gate.rows * gate.width * gate.element_bytes(),
        };
        let arguments = Arguments::new()
            .pointer(at(y.address))
            .pointer(at(gate.address))
            .pointer(at(up.address))
            .i64(gate.stride as i64)
            .i64(up.stride as i64)
            .i64(gate.rows as i64)
            .i32(gate.width as i32);
        // SAFETY: y is dense, gate and up have the strides given, all [rows, width] of this dtype.
        unsafe { self.launch(launch, &arguments) };
        y
    }

    /// Gradients of gate and up, in their own memory where nobody else holds it; with `again`, `dy` is overwritten by
    /// `silu(gate) up`.
    pub(super) fn swiglu_backward(&self, gate: Primitive, up: Primitive, dy: &Matrix, again: bool) -> [Primitive; 2] {
        let (gate, up) = (self.matrix_of(gate), self.matrix_of(up));
        let shape = [gate.rows, gate.width];
        let tensors = 5 + usize::from(again);
        let (gate_block, up_block) = ((gate.address, gate.stride), (up.address, up.stride));
        let (dtype, bytes) = (gate.dtype, tensors * gate.rows * gate.width * gate.element_bytes());
        // Writing over the inputs halves the widest point of a layer's backward. It is only right where these two views
        // are all that is left of their buffer.
        let joined = self.adjacent(&[&gate, &up]) && {
            drop(up);
            gate.tensor.handle.can_mut()
        };
        let target = if joined { gate } else { self.empty_matrix(shape[0], 2 * shape[1], dtype) };
        let d_up = target.address + (shape[1] * dtype.size()) as u64;
        let launch = Launch {
            source: Source::Swiglu,
            dtype,
            name: "swiglu_backward",
            shape: rows_and_columns(shape[0], shape[1]),
            bytes,
        };
        let arguments = Arguments::new()
            .pointer(at(target.address))
            .pointer(at(d_up))
            .i64(target.stride as i64)
            .pointer(at(gate_block.0))
            .pointer(at(up_block.0))
            .i64(gate_block.1 as i64)
            .i64(up_block.1 as i64)
            .pointer(at(dy.address))
            .pointer(at(if again { dy.address } else { 0 }))
            .i64(shape[0] as i64)
            .i32(shape[1] as i32);
        // SAFETY: the target has room for both gradients side by side; inputs have the strides given; dy is dense. Inputs
        // whose buffer is not the target stay alive: their memory is reused only by later work of this stream.
        unsafe { self.launch(launch, &arguments) };
        [0, shape[1]].map(|start| self.columns(&target, start, &shape))
    }

    /// Rows of a table, in `dtype`.
    pub(super) fn embed(&self, table: &Matrix, ids: &Matrix, dtype: DType) -> Matrix {
        let y = self.empty_matrix(ids.width, table.width, dtype);
        let name = if table.dtype == dtype { "embed_from_t" } else { "embed_from_f32" };
        assert!(table.dtype == dtype || table.dtype == DType::F32, "a table of {:?} into {dtype:?}", table.dtype);
        let launch = Launch {
            source: Source::Embedding,
            dtype,
            name,
            shape: grid(ids.width, threads_for(table.width, 256)),
            bytes: ids.width * table.width * (table.element_bytes() + dtype.size()),
        };
        let arguments = Arguments::new()
            .pointer(at(y.address))
            .pointer(at(table.address))
            .pointer(at(ids.address))
            .i64(ids.width as i64)
            .i32(table.width as i32);
        // SAFETY: ids are [n] i32 below the table's rows (the tokenizer's and the model's vocabularies were compared at the
        // start); y is [n, width].
        unsafe { self.launch(launch, &arguments) };
        y
    }

    /// Rows of `dy` summed by id into `[vocab_size, width]` f32.
    pub(super) fn embed_backward(&self, ids: &Matrix, dy: &Matrix, vocab_size: usize) -> Matrix {
        let table = self.empty_matrix(vocab_size, dy.width, DType::F32);
        self.fill(table.address, vocab_size * dy.width, 0.0);
        let launch = Launch {
            source: Source::Embedding,
            dtype: dy.dtype,
            name: "embed_backward",
            shape: grid(ids.width, 256),
            bytes: dy.rows * dy.width * (dy.element_bytes() + 4),
        };
        let arguments = Arguments::new()
            .pointer(at(table.address))
            .pointer(at(ids.address))
            .pointer(at(dy.address))
            .i64(ids.width as i64)
            .i32(dy.width as i32);
        // SAFETY: as for `embed`; one block a token, and only the first of equal ids writes their row.
        unsafe { self.launch(launch, &arguments) };
        table
    }
}

fn rows_and_columns(rows: usize, width: usize) -> LaunchShape {
    let columns = if rows < 1024 { width.div_ceil(4096) as u32 } else { 1 };
    LaunchShape { grid: [rows.clamp(1, MOST_BLOCKS) as u32, columns, 1], block: [256, 1, 1], shared_bytes: 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_come_in_whole_warps() {
        assert_eq!([1, 64, 4096, 100_000].map(|width| threads_for(width, 512)), [32, 32, 256, 512]);
        assert!((1..5000).all(|width| threads_for(width, 256).is_multiple_of(32)));
    }
}
