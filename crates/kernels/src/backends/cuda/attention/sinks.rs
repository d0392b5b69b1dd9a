//! Attention sinks on CUDA: outputs and statistics of any forward corrected in place, and the gradient of the logits. Kernels: `sinks.cu`.

use burn_tensor::{DType, Tensor};
use firebrick_cuda::Arguments;

use super::case::Sizes;
use crate::backends::cuda::device::Device;
use crate::backends::cuda::engine::{
    BlockArguments, Cuda, MatrixView, ScratchSlot, Source, arguments, grid_of, tensor,
};
use crate::{Documents, Sinks, StatisticsLayout};

const MIN_PART_TOKENS: usize = 64;
const MAX_PARTS: usize = 64;

impl Device {
    /// Adds sinks to the softmax of what a forward without sinks has computed.
    pub(super) fn add_sinks(
        &self,
        sinks: &Sinks<Cuda>,
        sizes: &Sizes,
        o: &MatrixView,
        (log_sum_exp, layout): (&MatrixView, StatisticsLayout),
        documents: &Documents<Cuda>,
    ) {
        let logits = self.logits(sinks, sizes);
        let shape = grid_of([sizes.tokens.div_ceil(8), sizes.query_heads, 1], 256);
        let launch = Source::Sinks.launch(o.dtype, "add_sinks", shape, 2 * o.bytes());
        let arguments = arguments! {
            o: rows(o), lse: rows(log_sum_exp), sinks: rows(&logits), o_stride: long(o.stride),
        };
        let arguments = with_order(arguments, sizes, layout, documents);
        // SAFETY: o is [tokens, heads * head_dim] at its stride, sinks have a value per head, and the statistics are heads * tokens values in
        // the order given.
        unsafe { self.launch(launch, &arguments) };
    }

    /// Computes the gradient `[heads]` of the logits from the results of the forward with them.
    pub(super) fn sinks_gradient(
        &self,
        sinks: &Sinks<Cuda>,
        sizes: &Sizes,
        [o, d_o]: [&MatrixView; 2],
        (log_sum_exp, layout): (&MatrixView, StatisticsLayout),
        documents: &Documents<Cuda>,
    ) -> Tensor<Cuda, 1> {
        let logits = self.logits(sinks, sizes);
        let part_tokens = sizes.tokens.div_ceil(MAX_PARTS).max(MIN_PART_TOKENS);
        let parts = sizes.tokens.div_ceil(part_tokens);
        let partial = self.scratch.take(ScratchSlot::Partial, parts * sizes.query_heads * 4);
        let shape = grid_of([parts, sizes.query_heads, 1], 256);
        let launch = Source::Sinks.launch(o.dtype, "sinks_gradient", shape, o.bytes() + d_o.bytes());
        let arguments = arguments! {
            parts: address(partial), o: rows(o), d_o: rows(d_o), lse: rows(log_sum_exp), sinks: rows(&logits),
            o_stride: long(o.stride), do_stride: long(d_o.stride),
        };
        let arguments = with_order(arguments, sizes, layout, documents);
        let arguments = arguments! { arguments => part_tokens: int(part_tokens) };
        // SAFETY: as for `add_sinks`; d_o is like o, of the same format; parts are [parts, heads] f32.
        unsafe { self.launch(launch, &arguments) };
        tensor(self.sum_partial_rows(partial, parts, sizes.query_heads))
    }

    fn logits(&self, sinks: &Sinks<Cuda>, sizes: &Sizes) -> MatrixView {
        let logits = self.flat_as(sinks.logits_h.clone(), DType::F32);
        assert_eq!(logits.count(), sizes.query_heads, "a sink per query head");
        logits
    }
}

/// Appends sizes and the order of the statistics: tokens of a document, and the steps between heads and between tokens.
fn with_order(arguments: Arguments, sizes: &Sizes, layout: StatisticsLayout, documents: &Documents<Cuda>) -> Arguments {
    let Sizes { tokens, query_heads: heads, head_dim, .. } = *sizes;
    let [length, head_step, token_step] = match layout {
        StatisticsLayout::HeadsTokens => [tokens, tokens, 1],
        StatisticsLayout::TokensHeads => [tokens, 1, heads],
        StatisticsLayout::DocumentsHeadsTokens => [documents.longest(), documents.longest(), 1],
    };
    arguments! {
        arguments =>
        tokens: int(tokens), heads: int(heads), head_dim: int(head_dim), length: int(length),
        head_step: int(head_step), token_step: int(token_step),
    }
}
