//! Attention's launches: cuDNN's plans, and our own flash kernels.

#![allow(unsafe_code, reason = "launching device work is unsafe; the launch files are where it is answered for")]

use burn_tensor::DType;
use firebrick_cuda::cudnn::{BackwardPointers, ForwardPointers, Plan};
use firebrick_cuda::{Arguments, Cudnn, LaunchShape};

use super::Cuda;
use super::attention::{Gradients, Sizes};
use super::engine::Engine;
use super::failure::check;
use super::launch::Launch;
use super::launch_rows::{at, grid};
use super::program::Source;
use super::scratch::Purpose;
use super::tensor::Matrix;
use super::trace::Cost;
use crate::Documents;

/// Whether our own kernels take heads of this width.
pub(super) fn takes(dtype: DType, head_dim: usize) -> bool {
    match dtype {
        DType::F32 => head_dim.is_multiple_of(32) && head_dim <= 256,
        _ => matches!(head_dim, 64 | 96 | 128 | 256),
    }
}

/// Tile sizes of the kernels for 16-bit values, as `flash_forward.cu` and `flash_backward.cu` have them by default.
struct Tiles {
    /// Queries of a block of the forward pass, and keys of a step.
    forward: [usize; 2],
    /// Keys of a block, queries of a step, steps in flight, warps.
    keys: [usize; 4],
    /// Queries of a block, keys of a step, steps in flight, warps.
    queries: [usize; 4],
}

impl Tiles {
    fn of(head_dim: usize) -> Self {
        if head_dim == 256 {
            Self { forward: [64, 64], keys: [64, 32, 1, 4], queries: [64, 32, 1, 4] }
        } else {
            Self { forward: [128, 64], keys: [128, 64, 2, 8], queries: [64, 64, 2, 4] }
        }
    }

    fn forward_shared(&self, head_dim: usize) -> usize {
        let [queries, keys] = self.forward;
        2 * head_dim * (queries + 2 * keys) + 4 * queries
    }

    fn keys_shared(&self, head_dim: usize) -> usize {
        let [own, step, stages, _] = self.keys;
        4 * head_dim * (own + stages * step) + 8 * stages * step + 4 * own
    }

    fn queries_shared(&self, head_dim: usize) -> usize {
        let [own, step, stages, _] = self.queries;
        4 * head_dim * (own + stages * step) + 4 * own
    }
}

/// A grid of heads by tiles.
fn tiles(heads: usize, rows: usize, tile: usize, warps: usize, shared: usize) -> LaunchShape {
    LaunchShape {
        grid: [heads as u32, rows.div_ceil(tile) as u32, 1],
        block: [32 * warps as u32, 1, 1],
        shared_bytes: shared as u32,
    }
}

impl Engine {
    /// Runs cuDNN's forward plan.
    pub(super) fn launch_attention(&self, cudnn: &Cudnn, plan: &Plan, pointers: &ForwardPointers, flops: f64) {
        self.traced("attention", Cost { flops, ..Cost::default() }, || {
            // SAFETY: the buffers are tensors that the caller holds and scratch memory of the sizes that the plan says; the
            // strides are those that the plan was made for.
            check("attention", unsafe { cudnn.forward(self.stream(), plan, pointers) });
        });
    }

    /// Runs cuDNN's backward plan.
    pub(super) fn launch_attention_backward(
        &self,
        cudnn: &Cudnn,
        plan: &Plan,
        pointers: &BackwardPointers,
        flops: f64,
    ) {
        self.traced("attention_backward", Cost { flops, ..Cost::default() }, || {
            // SAFETY: as for the forward pass; output and statistics are those that it wrote.
            check("attention", unsafe { cudnn.backward(self.stream(), plan, pointers) });
        });
    }

    /// Lengths and offsets of packed documents as cuDNN reads them, computed where they are needed.
    pub(super) fn launch_index(&self, index: u64, boundaries: u64, documents: usize, most: usize, strides: &[usize]) {
        let mut table = [0_i32; 8];
        assert!(strides.len() <= table.len(), "attention has at most {} row strides", table.len());
        for (slot, &stride) in table.iter_mut().zip(strides) {
            *slot = stride as i32;
        }
        let arguments = Arguments::new()
            .pointer(at(index))
            .pointer(at(boundaries))
            .i32(documents as i32)
            .i32(most as i32)
            .i32(strides.len() as i32)
            .value(&table);
        let launch = Launch {
            source: Source::Copy,
            dtype: DType::F32,
            name: "packed_index",
            shape: grid(1, 256),
            bytes: 4 * (most + 1) * (strides.len() + 1),
        };
        // SAFETY: the index has room for the lengths and one list of offsets a stride; boundaries has documents + 1 values.
        unsafe { self.launch(launch, &arguments) };
    }

    /// Our own forward pass; false for widths that it does not take.
    pub(super) fn own_forward(
        &self,
        sizes: &Sizes,
        [q, k, v, o]: [&Matrix; 4],
        log_sum: &Matrix,
        documents: &Documents<Cuda>,
    ) -> bool {
        if !takes(q.dtype, sizes.head_dim) {
            return false;
        }
        let boundaries = self.int_matrix(documents.cu_seqlens.clone());
        let shape = if q.dtype == DType::F32 {
            tiles(sizes.query_heads, sizes.tokens, 4, 4, 0)
        } else {
            let of = Tiles::of(sizes.head_dim);
            tiles(sizes.query_heads, sizes.tokens, of.forward[0], 4, of.forward_shared(sizes.head_dim))
        };
        let arguments = Arguments::new()
            .pointer(at(o.address))
            .pointer(at(log_sum.address))
            .pointer(at(q.address))
            .pointer(at(k.address))
            .pointer(at(v.address))
            .i64(q.stride as i64)
            .i64(k.stride as i64)
            .i64(v.stride as i64)
            .i64(o.stride as i64);
        let arguments = sizes_of(arguments, sizes, boundaries.address, documents);
        let cost = Cost { flops: sizes.forward_flops(documents), ..Cost::default() };
        // SAFETY: rows of all matrices have the strides given and the heads of `sizes`; boundaries lie in the tokens.
        unsafe { self.launch_with_cost(flash(sizes, q, "flash_forward", shape, false), cost, &arguments) };
        true
    }

    /// Our own backward pass; false for widths that it does not take.
    pub(super) fn own_backward(
        &self,
        sizes: &Sizes,
        [q, k, v, o, d_o]: [&Matrix; 5],
        log_sum: &Matrix,
        gradients: &Gradients,
        documents: &Documents<Cuda>,
    ) -> bool {
        if !takes(q.dtype, sizes.head_dim) {
            return false;
        }
        let boundaries = self.int_matrix(documents.cu_seqlens.clone());
        let delta = self.scratch.take(Purpose::Partial, sizes.query_heads * sizes.tokens * 4);
        let [dot_shape, keys_shape, queries_shape] = backward_shapes(sizes, q.dtype);
        let flops = sizes.forward_flops(documents);

        let dot = Arguments::new()
            .pointer(at(delta))
            .pointer(at(o.address))
            .pointer(at(d_o.address))
            .i64(o.stride as i64)
            .i64(d_o.stride as i64)
            .i32(sizes.tokens as i32);
        let inputs = |arguments: Arguments| {
            [q, k, v, d_o]
                .into_iter()
                .fold(arguments, |arguments, x| arguments.pointer(at(x.address)))
                .pointer(at(log_sum.address))
                .pointer(at(delta))
        };
        let strides = |arguments: Arguments, own: &[&Matrix]| {
            own.iter().chain(&[q, k, v, d_o]).fold(arguments, |arguments, x| arguments.i64(x.stride as i64))
        };
        let [dq, dk, dv] = &gradients.parts;
        let keys = inputs(Arguments::new().pointer(at(dk.address)).pointer(at(dv.address)));
        let keys = sizes_of(strides(keys, &[dk, dv]), sizes, boundaries.address, documents);
        let queries = inputs(Arguments::new().pointer(at(dq.address)));
        let queries = sizes_of(strides(queries, &[dq]), sizes, boundaries.address, documents);
        let cost = |share: f64| Cost { flops: share * flops, ..Cost::default() };
        // SAFETY: as for the forward pass; each gradient has the rows and heads of its tensor; delta is written before it is
        // read.
        unsafe {
            self.launch_with_cost(flash(sizes, q, "flash_backward_dot", dot_shape, true), cost(0.0), &dot);
            self.launch_with_cost(flash(sizes, q, "flash_backward_keys", keys_shape, true), cost(1.5), &keys);
            self.launch_with_cost(flash(sizes, q, "flash_backward_queries", queries_shape, true), cost(1.0), &queries);
        }
        true
    }
}

/// Grids of the three kernels of the backward pass.
fn backward_shapes(sizes: &Sizes, dtype: DType) -> [LaunchShape; 3] {
    let Sizes { tokens, query_heads, key_value_heads, head_dim } = *sizes;
    if dtype == DType::F32 {
        return [query_heads, key_value_heads, query_heads].map(|heads| tiles(heads, tokens, 4, 4, 0));
    }
    let of = Tiles::of(head_dim);
    let mut keys = tiles(key_value_heads, tokens, of.keys[0], of.keys[3], of.keys_shared(head_dim));
    // At 256 the sums of both gradients do not fit the registers together.
    keys.grid[2] = if head_dim == 256 { 2 } else { 1 };
    let queries = tiles(query_heads, tokens, of.queries[0], of.queries[3], of.queries_shared(head_dim));
    [tiles(query_heads, tokens, 64, 8, 0), keys, queries]
}

fn sizes_of(arguments: Arguments, sizes: &Sizes, boundaries: u64, documents: &Documents<Cuda>) -> Arguments {
    arguments
        .pointer(at(boundaries))
        .i32(documents.count() as i32)
        .i32(sizes.tokens as i32)
        .i32(sizes.query_heads as i32)
        .i32(sizes.key_value_heads as i32)
        .f32(sizes.scale())
}

fn flash(sizes: &Sizes, q: &Matrix, name: &'static str, shape: LaunchShape, backward: bool) -> Launch {
    let source = match (q.dtype, backward) {
        (DType::F32, _) => Source::FlashF32(sizes.head_dim),
        (_, false) => Source::FlashForward(sizes.head_dim),
        (_, true) => Source::FlashBackward(sizes.head_dim),
    };
    Launch { source, dtype: q.dtype, name, shape, bytes: 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_memory_is_what_the_sources_say() {
        let bytes = |head_dim| {
            let of = Tiles::of(head_dim);
            [of.forward_shared(head_dim), of.keys_shared(head_dim), of.queries_shared(head_dim)]
        };
        assert_eq!(bytes(64), [33_280, 67_072, 49_408]);
        assert_eq!(bytes(96), [49_664, 99_840, 73_984]);
        assert_eq!(bytes(128), [66_048, 132_608, 98_560]);
        assert_eq!(bytes(256), [98_560, 98_816, 98_560]);
    }
}
