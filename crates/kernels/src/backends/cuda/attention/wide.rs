//! Attention of heads that are wider than any fused kernel takes: tiles of queries, their scores by GEMMs. Kernels: `wide.cu`.
//!
//! ```text
//! forward    S = Q Kᵀ, P = softmax(S), O = P V
//! backward   S again, dP = dO Vᵀ, dS = P (dP - do·o), dQ = dS K, dK += dSᵀ Q, dV += Pᵀ dO
//! ```
//!
//! The query heads of a key head are rows of the same GEMM. A tile sees the keys from the start of its first document on; what is hidden from a query
//! has the probability zero. Memory is O(tokens x tile) (`planning/wide.rs`).
//! Trade-off: short documents share tiles, whose GEMMs also compute the scores between them. Soft caps go to the reference body.

use std::ops::Range;

use burn_tensor::DType;

use super::case::{BackwardInputs, Gradients, Inputs, Sizes};
use crate::Documents;
use crate::backends::cuda::device::Device;
use crate::backends::cuda::engine::{
    BlockArguments, Cuda, DeviceBlock, Gemm, MatrixView, ScratchSlot, Source, arguments, grid,
};
use crate::backends::planning::wide::{FUSED_HEAD_DIM, KEY_STEP, WideTiles};

/// Queries of consecutive tokens, and the keys that one of them sees.
struct Tile {
    tokens: Range<usize>,
    keys: Range<usize>,
    /// The rows of queries.
    rows: Range<usize>,
}

/// Memory of a tile: scores and their gradients in f32, probabilities and gradients of scores in the compute format.
struct Scores {
    tiles: WideTiles,
    dtype: DType,
    address: u64,
}

impl Scores {
    /// Returns the part of this number in f32, for a tile.
    fn wide(&self, part: usize, tile: &Tile) -> DeviceBlock {
        self.block(part * self.tiles.scores() * 4, tile, DType::F32)
    }

    /// Returns the part of this number in the compute format, after `wide` parts in f32.
    fn rounded(&self, wide: usize, part: usize, tile: &Tile) -> DeviceBlock {
        self.block(self.tiles.scores() * (4 * wide + part * self.dtype.size()), tile, self.dtype)
    }

    fn block(&self, offset: usize, tile: &Tile, dtype: DType) -> DeviceBlock {
        let (rows, width, stride) = (tile.rows.len(), tile.keys.len(), self.tiles.keys);
        DeviceBlock { address: self.address + offset as u64, rows, width, stride, dtype }
    }
}

impl Sizes {
    /// Returns whether heads are so wide that their scores have to be in memory.
    pub(super) fn are_wide(&self) -> bool {
        self.head_dim > FUSED_HEAD_DIM && self.head_dim.is_multiple_of(8) && self.soft_cap.is_none()
    }

    fn group(&self) -> usize {
        self.query_heads / self.key_value_heads
    }

    /// Returns the columns of a key head in rows of keys, and those of its query heads in rows of queries.
    fn columns_of(&self, head: usize, x: DeviceBlock) -> DeviceBlock {
        let width = x.width / self.key_value_heads;
        x.columns(head * width, width)
    }
}

impl Device {
    /// Runs the forward pass; statistics are `[heads, tokens]`.
    pub(super) fn wide_forward(
        &self,
        sizes: &Sizes,
        [q, k, v]: Inputs<'_>,
        o: &MatrixView,
        log_sum_exp: &MatrixView,
        documents: &Documents<Cuda>,
    ) {
        let scores = self.wide_scores(sizes, o.dtype, documents, false);
        let starts = self.document_starts(documents);
        for head in 0..sizes.key_value_heads {
            let (queries, _owner) = self.copied_queries(sizes, q, head);
            let keys_and_values = [k, v].map(|x| sizes.columns_of(head, x.block));
            let (out, _out_owner) = self.query_rows(sizes, o, head);
            for tile in tiles(sizes, documents, &scores.tiles) {
                let (s, p) = (scores.wide(0, &tile), scores.rounded(1, 0, &tile));
                let [k, v] = keys_and_values.map(|x| x.rows(tile.keys.start, tile.keys.len()));
                let [q, out] = [queries, out].map(|x| x.rows(tile.rows.start, tile.rows.len()));
                self.plain_gemm(Gemm::forward("attention scores", q, k), s);
                let arguments = arguments! {
                    p: rows(&p), lse: rows(log_sum_exp), s: rows(&s), starts: rows(&starts), stride: long(s.stride),
                    first: int(tile.tokens.start), group: int(sizes.group()), first_head: int(head * sizes.group()),
                    key0: int(tile.keys.start), keys: int(tile.keys.len()),
                    window: int(sizes.window.unwrap_or(sizes.tokens)), tokens: int(sizes.tokens), scale: f32(sizes.scale),
                };
                let shape = grid(tile.rows.len(), 256);
                let launch = Source::WideAttention.launch(p.dtype, "wide_softmax", shape, s.bytes() + p.bytes());
                // SAFETY: s and p have a row per query of the tile at the same stride, starts a value per token, statistics one per head and token;
                // the tile's keys begin at or before all that its queries see.
                unsafe { self.launch(launch, &arguments) };
                self.plain_gemm(Gemm::input_gradient("attention outputs", p, v), out);
            }
            self.write_back(sizes, out, o, head);
        }
    }

    /// Runs the backward pass, from statistics `[heads, tokens]`.
    pub(super) fn wide_backward(
        &self,
        sizes: &Sizes,
        BackwardInputs { forward: [q, k, v], o, d_o, log_sum_exp }: BackwardInputs<'_>,
        [dq, dk, dv]: &Gradients,
        documents: &Documents<Cuda>,
    ) {
        let scores = self.wide_scores(sizes, dq.dtype, documents, true);
        let starts = self.document_starts(documents);
        let [dk_sum, dv_sum] = [(); 2].map(|()| self.empty_matrix(sizes.tokens, sizes.head_dim, DType::F32));
        for head in 0..sizes.key_value_heads {
            let (queries, _owner) = self.copied_queries(sizes, q, head);
            let [keys, values] = [k, v].map(|x| sizes.columns_of(head, x.block));
            let ((d_out, _d_out_owner), (d_query, _d_query_owner)) =
                (self.copied_queries(sizes, d_o, head), self.query_rows(sizes, dq, head));
            [&dk_sum, &dv_sum].into_iter().for_each(|sum| self.fill_zero(sum.block));
            for tile in tiles(sizes, documents, &scores.tiles) {
                let [s, d_p] = [0, 1].map(|part| scores.wide(part, &tile));
                let [p, d_s] = [0, 1].map(|part| scores.rounded(2, part, &tile));
                let of_keys = |x: DeviceBlock| x.rows(tile.keys.start, tile.keys.len());
                let [k, v, dk_sum, dv_sum] = [keys, values, dk_sum.block, dv_sum.block].map(of_keys);
                let of_rows = |x: DeviceBlock| x.rows(tile.rows.start, tile.rows.len());
                let [q, d_out, d_query] = [queries, d_out, d_query].map(of_rows);
                self.plain_gemm(Gemm::forward("attention scores", q, k), s);
                self.plain_gemm(Gemm::forward("attention scores", d_out, v), d_p);
                let arguments = arguments! {
                    p: rows(&p), d_s: rows(&d_s), s: rows(&s), d_p: rows(&d_p), lse: rows(log_sum_exp), o: rows(o),
                    d_o: rows(d_o), starts: rows(&starts), stride: long(s.stride), o_stride: long(o.stride),
                    do_stride: long(d_o.stride), head_dim: int(sizes.head_dim), first: int(tile.tokens.start),
                    group: int(sizes.group()), first_head: int(head * sizes.group()), key0: int(tile.keys.start),
                    keys: int(tile.keys.len()), window: int(sizes.window.unwrap_or(sizes.tokens)),
                    tokens: int(sizes.tokens), scale: f32(sizes.scale),
                };
                let shape = grid(tile.rows.len(), 256);
                let bytes = 2 * s.bytes() + 2 * p.bytes();
                let launch = Source::WideAttention.launch(p.dtype, "wide_softmax_backward", shape, bytes);
                // SAFETY: as in the forward; the four parts of the scores do not overlap, and o and d_o have rows of all heads at their strides.
                unsafe { self.launch(launch, &arguments) };
                self.plain_gemm(Gemm::input_gradient("attention queries", d_s, k), d_query);
                for (left, right, sum) in [(d_s, q, dk_sum), (p, d_out, dv_sum)] {
                    self.plain_gemm(Gemm { c: Some(sum), ..Gemm::token_sum("attention keys", left, right) }, sum);
                }
            }
            self.write_back(sizes, d_query, dq, head);
            for (sum, gradient) in [(&dk_sum, dk), (&dv_sum, dv)] {
                let sum = self.in_format(sum.clone(), gradient.dtype);
                self.copy_rows(sum.block, sizes.columns_of(head, gradient.block));
            }
        }
    }

    fn wide_scores(&self, sizes: &Sizes, dtype: DType, documents: &Documents<Cuda>, backward: bool) -> Scores {
        let seen = sizes.window.unwrap_or(usize::MAX);
        let tiles = WideTiles::new(sizes.group(), [sizes.tokens, documents.longest(), seen]);
        let address = self.scratch.take(ScratchSlot::AttentionScores, tiles.bytes(dtype.size(), backward));
        Scores { tiles, dtype, address }
    }

    /// Returns where the document of each token begins, `[tokens]` i32.
    fn document_starts(&self, documents: &Documents<Cuda>) -> DeviceBlock {
        let (tokens, boundaries) = (documents.tokens(), self.int_matrix(documents.cu_seqlens.clone()));
        let address = self.scratch.take(ScratchSlot::DocumentStarts, 4 * tokens);
        let arguments = arguments! {
            starts: address(address), cu_seqlens: address(boundaries.address), documents: int(documents.count()),
            tokens: int(tokens),
        };
        let launch =
            Source::WideAttention.launch(DType::F32, "document_starts", grid(tokens.div_ceil(256), 256), 8 * tokens);
        // SAFETY: starts have room for a value per token, and boundaries are one more than documents.
        unsafe { self.launch(launch, &arguments) };
        DeviceBlock::dense(address, [1, tokens], DType::F32)
    }

    /// Returns the rows of the query heads of a key head, copied unless they lie without gaps.
    fn copied_queries(&self, sizes: &Sizes, x: &MatrixView, head: usize) -> (DeviceBlock, Option<MatrixView>) {
        let (rows, owner) = self.query_rows(sizes, x, head);
        if let Some(copy) = &owner {
            self.copy_rows(sizes.columns_of(head, x.block), copy.block);
        }
        (rows, owner)
    }

    /// Returns memory for the rows of the query heads of a key head: their own, if they lie without gaps.
    fn query_rows(&self, sizes: &Sizes, x: &MatrixView, head: usize) -> (DeviceBlock, Option<MatrixView>) {
        let own = sizes.columns_of(head, x.block);
        let copy = (!own.is_dense()).then(|| self.empty_matrix(own.rows, own.width, own.dtype));
        let address = copy.as_ref().map_or(own.address, |copy| copy.address);
        (DeviceBlock::dense(address, [own.rows * sizes.group(), sizes.head_dim], own.dtype), copy)
    }

    /// Copies rows of [`Self::query_rows`] to where they belong, if they were elsewhere.
    fn write_back(&self, sizes: &Sizes, rows: DeviceBlock, x: &MatrixView, head: usize) {
        let own = sizes.columns_of(head, x.block);
        if rows.address != own.address {
            self.copy_rows(DeviceBlock::dense(rows.address, [own.rows, own.width], own.dtype), own);
        }
    }
}

fn tiles(sizes: &Sizes, documents: &Documents<Cuda>, of: &WideTiles) -> Vec<Tile> {
    let starts: Vec<usize> = documents.ranges().map(|range| range.start).collect();
    let tile = |first: usize| {
        let tokens = first..sizes.tokens.min(first + of.tokens);
        let document = starts[starts.partition_point(|start| *start <= first).saturating_sub(1)];
        let seen = document.max((first + 1).saturating_sub(sizes.window.unwrap_or(sizes.tokens)));
        let keys = tokens.end.saturating_sub((tokens.end - seen).next_multiple_of(KEY_STEP))..tokens.end;
        let rows = tokens.start * of.group..tokens.end * of.group;
        Tile { tokens, keys, rows }
    };
    (0..sizes.tokens).step_by(of.tokens).map(tile).collect()
}
