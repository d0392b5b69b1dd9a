//! The flash attention kernels: which heads they take, their tiles, and their launches. Kernels: `source/flash*.cu`.
//!
//! O(tokens) memory, any documents, sliding windows, soft caps, the same bits every time.
//! Trade-off: about half of cuDNN's speed on an H100.

use burn_tensor::DType;
use firebrick_cuda::{Arguments, LaunchShape};

use super::attention_case::{BackwardInputs, Gradients, Inputs, Sizes};
use super::engine::Engine;
use super::launch::{Launch, at};
use super::matrix::{Cuda, MatrixView};
use super::program::{FlashVariant, Source};
use super::scratch::ScratchSlot;
use super::trace::Cost;
use crate::Documents;
use crate::backends::cuda_attention::flash_takes;

/// Whether the kernels take heads of this width.
pub(super) fn takes(dtype: DType, head_dim: usize) -> bool {
    flash_takes(dtype == DType::F32, head_dim)
}

/// Tile sizes of the kernels for 16-bit values, as `flash_forward.cu` and `flash_backward.cu` have them by default.
struct Tiles {
    /// Queries per block of the forward pass, and keys per step.
    forward: [usize; 2],
    /// Keys per block, queries per step, steps in flight, warps.
    keys: [usize; 4],
    /// Queries per block, keys per step, steps in flight, warps.
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

/// A grid of rows by heads: f32 kernels have rows along the axis that has no limit.
fn f32_rows(heads: usize, rows: usize) -> LaunchShape {
    LaunchShape { grid: [rows.div_ceil(4) as u32, heads as u32, 1], block: [128, 1, 1], shared_bytes: 0 }
}

impl Engine {
    /// Forward pass; statistics are `[heads, tokens]`.
    pub(super) fn flash_forward(
        &self,
        sizes: &Sizes,
        inputs: Inputs<'_>,
        o: &MatrixView,
        log_sum_exp: &MatrixView,
        documents: &Documents<Cuda>,
    ) {
        let Inputs { q, k, v } = inputs;
        let boundaries = self.int_matrix(documents.cu_seqlens.clone());
        let shape = if q.dtype == DType::F32 {
            f32_rows(sizes.query_heads, sizes.tokens)
        } else {
            let of = Tiles::of(sizes.head_dim);
            tiles(sizes.query_heads, sizes.tokens, of.forward[0], 4, of.forward_shared(sizes.head_dim))
        };
        let arguments = Arguments::new()
            .pointer(at(o.address))
            .pointer(at(log_sum_exp.address))
            .pointer(at(q.address))
            .pointer(at(k.address))
            .pointer(at(v.address))
            .i64(q.stride as i64)
            .i64(k.stride as i64)
            .i64(v.stride as i64)
            .i64(o.stride as i64);
        let arguments = size_arguments(arguments, sizes, boundaries.address, documents);
        let cost = Cost { flops: sizes.forward_flops(documents), ..Cost::default() };
        // SAFETY: rows of all matrices have the strides given and the heads of `sizes`; boundaries lie in the tokens.
        unsafe { self.launch_with_cost(flash(sizes, q.dtype, "flash_forward", shape, false), cost, &arguments) };
    }

    /// Backward pass, from statistics `[heads, tokens]`.
    pub(super) fn flash_backward(
        &self,
        sizes: &Sizes,
        inputs: BackwardInputs<'_>,
        gradients: &Gradients,
        documents: &Documents<Cuda>,
    ) {
        let BackwardInputs { forward: Inputs { q, k, v }, o, d_o, log_sum_exp } = inputs;
        let boundaries = self.int_matrix(documents.cu_seqlens.clone());
        let delta = self.scratch.take(ScratchSlot::Partial, sizes.query_heads * sizes.tokens * 4);
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
                .pointer(at(log_sum_exp.address))
                .pointer(at(delta))
        };
        let strides = |arguments: Arguments, written: &[&MatrixView]| {
            written.iter().chain(&[q, k, v, d_o]).fold(arguments, |arguments, x| arguments.i64(x.stride as i64))
        };
        let Gradients { dq, dk, dv } = gradients;
        let keys = inputs(Arguments::new().pointer(at(dk.address)).pointer(at(dv.address)));
        let keys = size_arguments(strides(keys, &[dk, dv]), sizes, boundaries.address, documents);
        let queries = inputs(Arguments::new().pointer(at(dq.address)));
        let queries = size_arguments(strides(queries, &[dq]), sizes, boundaries.address, documents);
        let cost = |share: f64| Cost { flops: share * flops, ..Cost::default() };
        let launch = |name, shape| flash(sizes, q.dtype, name, shape, true);
        // SAFETY: as for the forward pass; each gradient has the rows and heads of its tensor; delta is written before it is
        // read.
        unsafe {
            self.launch_with_cost(launch("flash_backward_dot", dot_shape), cost(0.0), &dot);
            self.launch_with_cost(launch("flash_backward_keys", keys_shape), cost(1.5), &keys);
            self.launch_with_cost(launch("flash_backward_queries", queries_shape), cost(1.0), &queries);
        }
    }
}

/// Grids of the three kernels of the backward pass.
fn backward_shapes(sizes: &Sizes, dtype: DType) -> [LaunchShape; 3] {
    let Sizes { tokens, query_heads, key_value_heads, head_dim, .. } = *sizes;
    if dtype == DType::F32 {
        return [query_heads, key_value_heads, query_heads].map(|heads| f32_rows(heads, tokens));
    }
    let of = Tiles::of(head_dim);
    let mut keys = tiles(key_value_heads, tokens, of.keys[0], of.keys[3], of.keys_shared(head_dim));
    // At 256 the sums of both gradients do not fit the registers together.
    keys.grid[2] = if head_dim == 256 { 2 } else { 1 };
    let queries = tiles(query_heads, tokens, of.queries[0], of.queries[3], of.queries_shared(head_dim));
    [tiles(query_heads, tokens, 64, 8, 0), keys, queries]
}

/// Documents, sizes, scale and window. Without a window a query may see all tokens.
fn size_arguments(arguments: Arguments, sizes: &Sizes, boundaries: u64, documents: &Documents<Cuda>) -> Arguments {
    arguments
        .pointer(at(boundaries))
        .i32(documents.count() as i32)
        .i32(sizes.tokens as i32)
        .i32(sizes.query_heads as i32)
        .i32(sizes.key_value_heads as i32)
        .f32(sizes.scale)
        .i32(sizes.window.unwrap_or(sizes.tokens) as i32)
}

fn flash(sizes: &Sizes, dtype: DType, name: &'static str, shape: LaunchShape, backward: bool) -> Launch {
    let variant = FlashVariant { head_dim: sizes.head_dim, soft_cap: sizes.soft_cap };
    let source = match (dtype, backward) {
        (DType::F32, _) => Source::FlashF32(variant),
        (_, false) => Source::FlashForward(variant),
        (_, true) => Source::FlashBackward(variant),
    };
    Launch { source, dtype, name, shape, bytes: 0 }
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
