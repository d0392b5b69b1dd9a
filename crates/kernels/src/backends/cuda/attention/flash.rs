//! The flash attention kernels: supported heads, and launches. Kernels: `flash*.cu`.
//!
//! They use O(tokens) memory, support any documents, sliding windows and soft caps, and return the same bits every time.
//! Trade-off: about half of cuDNN's speed on an H100 over long documents; over short ones they are as fast.

use burn_tensor::DType;
use firebrick_cuda::{Arguments, LaunchShape};

use super::case::{BackwardInputs, Gradients, Inputs, Sizes};
use crate::Documents;
use crate::backends::cuda::device::Device;
use crate::backends::cuda::engine::{
    BlockArguments, Cost, Cuda, FlashVariant, Launch, MatrixView, ScratchSlot, Source, arguments, grid_of,
};
use crate::backends::planning::flash::{FlashTiles, flash_takes_f32};

fn tiles(heads: usize, rows: usize, tile: usize, warps: usize, shared: usize) -> LaunchShape {
    LaunchShape { shared_bytes: shared as u32, ..grid_of([heads, rows.div_ceil(tile), 1], 32 * warps as u32) }
}

/// Returns a grid of rows by heads: f32 kernels place rows on the axis without a limit.
fn f32_rows(heads: usize, rows: usize) -> LaunchShape {
    grid_of([rows.div_ceil(4), heads, 1], 128)
}

impl Device {
    /// Returns the format in which the kernels support heads of this width on this card: that of the values, or f32 after a conversion
    /// if only the f32 kernels support it. `None` for the reference body.
    pub(crate) fn flash_format(&self, dtype: DType, head_dim: usize) -> Option<DType> {
        let has_tiles = dtype != DType::F32 && FlashTiles::of(head_dim, self.shared_bytes()).is_some();
        if has_tiles { Some(dtype) } else { flash_takes_f32(head_dim).then_some(DType::F32) }
    }

    /// Returns the programs of both passes without a soft cap, with their format; none if the reference body runs.
    pub(crate) fn flash_programs(&self, dtype: DType, head_dim: usize) -> Vec<(Source, DType)> {
        let variant = FlashVariant { head_dim, soft_cap: None };
        let of_format = |format| [false, true].map(|backward| (self.flash_source(variant, format, backward), format));
        self.flash_format(dtype, head_dim).map(of_format).into_iter().flatten().collect()
    }

    fn flash_source(&self, variant: FlashVariant, dtype: DType, backward: bool) -> Source {
        match (dtype, backward) {
            (DType::F32, _) => Source::FlashF32(variant),
            (_, false) => Source::FlashForward(variant, self.flash_tiles(variant.head_dim)),
            (_, true) => Source::FlashBackward(variant, self.flash_tiles(variant.head_dim)),
        }
    }

    /// Returns the tiles of the 16-bit kernels for heads of this width.
    fn flash_tiles(&self, head_dim: usize) -> FlashTiles {
        FlashTiles::of(head_dim, self.shared_bytes())
            .expect("`flash_format` chooses 16 bits only where there are tiles")
    }

    /// Runs the forward pass; statistics are `[heads, tokens]`.
    pub(crate) fn flash_forward(
        &self,
        sizes: &Sizes,
        [q, k, v]: Inputs<'_>,
        o: &MatrixView,
        log_sum_exp: &MatrixView,
        documents: &Documents<Cuda>,
    ) {
        let boundaries = self.int_matrix(documents.cu_seqlens.clone());
        let shape = if q.dtype == DType::F32 {
            f32_rows(sizes.query_heads, sizes.tokens)
        } else {
            let (of, heads) = (self.flash_tiles(sizes.head_dim), heads_of_a_tile(sizes));
            let [blocks, rows] = [sizes.query_heads / heads, of.forward[0] / heads];
            tiles(blocks, sizes.tokens, rows, of.forward[2], of.forward_shared(sizes.head_dim))
        };
        let arguments = arguments! {
            o: rows(o), lse: rows(log_sum_exp), q: rows(q), k: rows(k), v: rows(v), q_stride: long(q.stride),
            k_stride: long(k.stride), v_stride: long(v.stride), o_stride: long(o.stride),
        };
        let arguments = size_arguments(arguments, sizes, boundaries.address, documents);
        let cost = Cost { flops: sizes.forward_flops(documents), ..Cost::default() };
        // SAFETY: rows of all matrices have the strides given and the heads of `sizes`; boundaries lie in the tokens.
        unsafe { self.launch_with_cost(self.flash(sizes, q.dtype, "flash_forward", shape, false), cost, &arguments) };
    }

    /// Runs the backward pass, from statistics `[heads, tokens]`.
    pub(crate) fn flash_backward(
        &self,
        sizes: &Sizes,
        inputs: BackwardInputs<'_>,
        [dq, dk, dv]: &Gradients,
        documents: &Documents<Cuda>,
    ) {
        let BackwardInputs { forward: [q, k, v], o, d_o, log_sum_exp } = inputs;
        let boundaries = self.int_matrix(documents.cu_seqlens.clone());
        let delta = self.scratch.take(ScratchSlot::Partial, sizes.query_heads * sizes.tokens * 4);
        let [queries_shape, keys_shape] = match q.dtype {
            DType::F32 => [sizes.query_heads, sizes.key_value_heads].map(|heads| f32_rows(heads, sizes.tokens)),
            _ => backward_shapes(sizes, self.flash_tiles(sizes.head_dim)),
        };
        let flops = sizes.forward_flops(documents);

        let with_sizes = |arguments| size_arguments(arguments, sizes, boundaries.address, documents);
        let queries = with_sizes(arguments! {
            dq: rows(dq), delta: address(delta), q: rows(q), k: rows(k), v: rows(v), o: rows(o), d_o: rows(d_o),
            lse: rows(log_sum_exp), dq_stride: long(dq.stride), q_stride: long(q.stride), k_stride: long(k.stride),
            v_stride: long(v.stride), o_stride: long(o.stride), do_stride: long(d_o.stride),
        });
        let keys = with_sizes(arguments! {
            dk: rows(dk), dv: rows(dv), q: rows(q), k: rows(k), v: rows(v), d_o: rows(d_o), lse: rows(log_sum_exp),
            delta: address(delta), dk_stride: long(dk.stride), dv_stride: long(dv.stride), q_stride: long(q.stride),
            k_stride: long(k.stride), v_stride: long(v.stride), do_stride: long(d_o.stride),
        });
        let cost = |share: f64| Cost { flops: share * flops, ..Cost::default() };
        let launch = |name, shape| self.flash(sizes, q.dtype, name, shape, true);
        // SAFETY: as for the forward pass; each gradient has the rows and heads of its tensor; the pass over queries writes delta, which
        // that over keys reads.
        unsafe {
            self.launch_with_cost(launch("flash_backward_queries", queries_shape), cost(1.0), &queries);
            self.launch_with_cost(launch("flash_backward_keys", keys_shape), cost(1.5), &keys);
        }
    }

    fn flash(&self, sizes: &Sizes, dtype: DType, name: &'static str, shape: LaunchShape, backward: bool) -> Launch {
        let variant = FlashVariant { head_dim: sizes.head_dim, soft_cap: sizes.soft_cap };
        self.flash_source(variant, dtype, backward).launch(dtype, name, shape, 0)
    }
}

/// Returns the number of query heads of one key head that share a tile, so that each of its four warps has one head.
fn heads_of_a_tile(sizes: &Sizes) -> usize {
    let group = sizes.query_heads / sizes.key_value_heads;
    [4, 2].into_iter().find(|heads| group.is_multiple_of(*heads)).unwrap_or(1)
}

/// Returns the grids of the backward pass's two kernels for 16-bit values.
fn backward_shapes(sizes: &Sizes, of: FlashTiles) -> [LaunchShape; 2] {
    let Sizes { tokens, query_heads, key_value_heads, head_dim, .. } = *sizes;
    let mut keys = tiles(key_value_heads, tokens, of.keys[0], of.keys[3], of.keys_shared(head_dim));
    // At 256 the sums of both gradients do not fit into the registers together.
    keys.grid[2] = if head_dim == 256 { 2 } else { 1 };
    let heads = heads_of_a_tile(sizes);
    let [blocks, rows] = [query_heads / heads, of.queries[0] / heads];
    [tiles(blocks, tokens, rows, of.queries[3], of.queries_shared(head_dim)), keys]
}

/// Appends documents, sizes, scale, window, and heads per tile. Without a window a query may attend to all tokens.
fn size_arguments(arguments: Arguments, sizes: &Sizes, boundaries: u64, documents: &Documents<Cuda>) -> Arguments {
    arguments! {
        arguments =>
        cu_seqlens: address(boundaries), documents: int(documents.count()), tokens: int(sizes.tokens),
        query_heads: int(sizes.query_heads), kv_heads: int(sizes.key_value_heads), scale: f32(sizes.scale),
        window: int(sizes.window.unwrap_or(sizes.tokens)), heads: int(heads_of_a_tile(sizes)),
    }
}
