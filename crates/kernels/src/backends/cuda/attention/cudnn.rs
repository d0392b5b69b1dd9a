//! Attention by cuDNN: the calls that it supports, their plans, and their launches.
//!
//! Documents of one length form one plain batch for cuDNN; packed ones are ragged. A plan is built once per shape, which takes longer than a layer
//! runs, so the number of documents and the longest length are rounded up to powers of two: a whole run uses a handful of plans. Rows are always
//! dense, forward and backward. A backward call processes a part of the documents, since its workspace grows with the tokens of a call.
//! Not supported: f32, sliding windows, soft caps, and packed documents before cuDNN 9.18 (their backward was wrong in
//! 9.14). Short packed documents go to the flash kernels, which are as fast and need no workspace. Where sums need a fixed order, so do gradients of
//! packed documents and of those that are so long that the gradients of their scores, which cuDNN then keeps, are too large.

use std::hash::{Hash, Hasher};
use std::sync::Arc;

use burn_tensor::DType;
use firebrick_arch::AttentionSpec;
use firebrick_cuda::cudnn::{AttentionShape, BackwardPointers, Element, ForwardPointers, Layout, Plan};
use firebrick_cuda::{CudaError, Cudnn};

use super::case::{BackwardInputs, Gradients, Inputs, Sizes};
use super::library::parts_of;
use crate::backends::cuda::device::Device;
use crate::backends::cuda::engine::{
    BlockArguments, Cost, Cuda, MAX_STRIDES, MatrixView, ScratchSlot, Source, arguments, check, grid,
};
use crate::backends::planning::cuda::documents_in_order;
use crate::{Documents, StatisticsLayout};

/// Maximum head width for packed documents.
const PACKED_HEAD_DIM: usize = 128;
const MIN_DOCUMENTS: usize = 8;
/// Minimum longest length in a ragged plan.
const MIN_LONGEST: usize = 256;
/// Tokens of a part that is one long document are rounded up to a multiple of this, so that few lengths have separate plans.
const LONG_MULTIPLE: usize = 2048;
/// A single document of a multiple of this length, or of many tokens, is uniform; others use the ragged plan of their class.
const SINGLE_MULTIPLE: usize = 128;
const MAX_SINGLE: usize = 16_384;

pub(super) struct BackwardPlans {
    calls: Vec<(Arc<Plan>, Part)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Part {
    shape: AttentionShape,
    first_document: usize,
    documents: usize,
    start: usize,
    tokens: usize,
}

struct Call<P> {
    cudnn: Arc<Cudnn>,
    plan: Arc<Plan>,
    pointers: P,
}

impl<P: Hash> Hash for Call<P> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (Arc::as_ptr(&self.plan), &self.pointers).hash(state);
    }
}

impl Device {
    /// Returns the call as cuDNN plans it; `None` if another kernel runs it.
    pub(super) fn cudnn_shape(
        &self,
        sizes: &Sizes,
        dtype: DType,
        documents: &Documents<Cuda>,
    ) -> Option<AttentionShape> {
        let element = match dtype {
            DType::BF16 => Element::Bf16,
            DType::F16 => Element::F16,
            _ => return None,
        };
        let cudnn = self.library.cudnn.as_ref()?;
        // A plan for documents of one token has no backward; there, attention returns the value.
        if sizes.window.is_some() || sizes.soft_cap.is_some() || documents.longest() == 1 {
            return None;
        }
        let takes_packed = cudnn.takes_packed() && sizes.head_dim <= PACKED_HEAD_DIM;
        let layout = layout([documents.count(), documents.tokens(), documents.longest()], takes_packed);
        let (is_packed, in_order) = (matches!(layout, Layout::Packed { .. }), self.library.in_order.get());
        let is_short = documents.count() > 1
            && documents.tokens() < self.library.limits.get().min_mean_tokens * documents.count()
            && self.flash_format(dtype, sizes.head_dim) == Some(dtype);
        if is_packed && (!takes_packed || is_short || in_order) {
            return None;
        }
        // The flash kernels read the statistics of one document, and would have to compute those of several again.
        let is_for_flash = in_order && documents_in_order(sizes.query_heads, documents.longest()).is_none();
        if is_for_flash && documents.count() > 1 {
            return None;
        }
        Some(AttentionShape {
            element,
            layout,
            query_heads: sizes.query_heads,
            key_value_heads: sizes.key_value_heads,
            head_dim: sizes.head_dim,
            in_order,
        })
    }

    /// Starts to build the plans of both passes over these documents on other threads, if cuDNN supports the case.
    pub(in crate::backends::cuda) fn prepare_attention(
        &self,
        spec: &AttentionSpec,
        dtype: DType,
        documents: &Documents<Cuda>,
    ) {
        let sizes = &Sizes::new(spec, documents);
        if let (Some(cudnn), Some(whole)) = (&self.library.cudnn, self.cudnn_shape(sizes, dtype, documents)) {
            let parts = self.backward_parts(whole, documents);
            parts.iter().flatten().for_each(|part| cudnn.begin(&whole, &part.shape));
        }
    }

    /// Runs cuDNN's forward pass and returns the order of its statistics; `None` if cuDNN does not support the case.
    pub(super) fn cudnn_forward(
        &self,
        sizes: &Sizes,
        [q, k, v]: Inputs<'_>,
        o: &MatrixView,
        log_sum_exp: &MatrixView,
        documents: &Documents<Cuda>,
    ) -> Option<StatisticsLayout> {
        let shape = self.cudnn_shape(sizes, q.dtype, documents)?;
        let cudnn = self.library.cudnn.as_ref().filter(|_| !self.library.refuses_forward.get())?;
        let plan = supported(cudnn.forward_plan(&shape))?;
        let pointers = ForwardPointers {
            query: q.address,
            key: k.address,
            value: v.address,
            output: o.address,
            statistics: log_sum_exp.address,
            index: self.packed_index(&shape, documents, None),
            workspace: self.scratch.take(ScratchSlot::AttentionWorkspace, plan.workspace_bytes()),
            scale: sizes.scale,
        };
        let cost = Cost { flops: sizes.forward_flops(documents), ..Cost::default() };
        let call = Call { cudnn: cudnn.clone(), plan, pointers };
        // SAFETY: the buffers are tensors that the caller holds and scratch memory of the sizes that the plan says; all rows
        // are dense, as the plan was made for.
        unsafe {
            self.submit("attention", cost, call, |call, stream| call.cudnn.forward(stream, &call.plan, &call.pointers));
        }
        Some(statistics_layout(&shape))
    }

    /// Returns the plans of a backward pass over statistics in this order; `None` if cuDNN does not support the case or reads another order.
    pub(super) fn cudnn_backward_plans(
        &self,
        sizes: &Sizes,
        dtype: DType,
        documents: &Documents<Cuda>,
        statistics: StatisticsLayout,
    ) -> Option<BackwardPlans> {
        let whole = self.cudnn_shape(sizes, dtype, documents)?;
        let cudnn = self.library.cudnn.as_ref().filter(|_| !self.library.refuses_backward.get())?;
        if statistics_layout(&whole) != statistics {
            return None;
        }
        let parts = self.backward_parts(whole, documents)?.into_iter();
        let calls = parts.map(|part| Some((supported(cudnn.backward_plan(&part.shape))?, part)));
        Some(BackwardPlans { calls: calls.collect::<Option<_>>()? })
    }

    /// Returns the calls of a backward; `None` if the gradients of a document's scores are too large.
    fn backward_parts(&self, whole: AttentionShape, documents: &Documents<Cuda>) -> Option<Vec<Part>> {
        let mut most = self.library.limits.get().max_backward_tokens;
        if whole.in_order {
            most = most.min(whole.longest() * documents_in_order(whole.query_heads, whole.longest())?);
        }
        Some(backward_parts(whole, documents, most))
    }

    pub(super) fn cudnn_backward(
        &self,
        plans: &BackwardPlans,
        sizes: &Sizes,
        inputs: BackwardInputs<'_>,
        [dq, dk, dv]: &Gradients,
        documents: &Documents<Cuda>,
    ) {
        let cudnn = self.library.cudnn.as_ref().expect("plans come from the library");
        let [q, k, v] = inputs.forward;
        for (number, (plan, part)) in plans.calls.iter().enumerate() {
            let from = |matrix: &MatrixView| matrix.block.rows(part.start, part.tokens).address;
            let pointers = BackwardPointers {
                forward: ForwardPointers {
                    query: from(q),
                    key: from(k),
                    value: from(v),
                    output: from(inputs.o),
                    // Statistics are ordered by document, or by token.
                    statistics: inputs.log_sum_exp.address + (4 * part.start * sizes.query_heads) as u64,
                    index: self.packed_index(&part.shape, documents, Some((number, part))),
                    workspace: self.scratch.take(ScratchSlot::AttentionWorkspace, plan.workspace_bytes()),
                    scale: sizes.scale,
                },
                output_gradient: from(inputs.d_o),
                query_gradient: from(dq),
                key_gradient: from(dk),
                value_gradient: from(dv),
            };
            let share = part.tokens as f64 / sizes.tokens as f64;
            let cost = Cost { flops: 2.5 * share * sizes.forward_flops(documents), ..Cost::default() };
            let call = Call { cudnn: cudnn.clone(), plan: plan.clone(), pointers };
            // SAFETY: as for the forward pass; the documents of this part begin at its first token in every buffer, and the statistics are in
            // the order that the plan reads.
            unsafe {
                self.submit("attention_backward", cost, call, |call, stream| {
                    call.cudnn.backward(stream, &call.plan, &call.pointers)
                });
            }
        }
    }

    /// Returns the address of the index of all packed documents, or of a numbered part of them, computed once per section; null for uniform ones.
    fn packed_index(&self, shape: &AttentionShape, documents: &Documents<Cuda>, part: Option<(usize, &Part)>) -> u64 {
        if !shape.is_packed() {
            return 0;
        }
        let [first, count] = part.map_or([0, documents.count()], |(_, part)| [part.first_document, part.documents]);
        let boundaries = self.int_matrix(documents.cu_seqlens.clone());
        let strides = shape.index_strides();
        let most = shape.documents();
        let sizes = [most, first, count].into_iter().chain(strides.iter().copied()).map(|size| size as u64);
        let sources: Vec<u64> = self.source(&boundaries.tensor).into_iter().chain(sizes).collect();
        let contents = self.contents(DType::I32, sources);
        let slot = ScratchSlot::AttentionIndex(part.map(|(number, _)| number));
        let (index, is_held) = self.scratch.holding(slot, shape.packed_index_len() * 4, contents);
        if is_held {
            return index;
        }
        let mut table = [0_i32; MAX_STRIDES];
        assert!(strides.len() <= table.len(), "attention has at most {} row strides", table.len());
        for (slot, &stride) in table.iter_mut().zip(&strides) {
            *slot = stride as i32;
        }
        let arguments = arguments! {
            index: address(index), boundaries: address(boundaries.address + 4 * first as u64), documents: int(count),
            most: int(most), strides: int(strides.len()), stride: value(&table),
        };
        let bytes = 4 * (most + 1) * (strides.len() + 1);
        let launch = Source::PackedIndex.launch(DType::F32, "packed_index", grid(1, 256), bytes);
        // SAFETY: the index has room for the lengths and one list of offsets per stride; boundaries has count + 1 values from `first` on.
        unsafe { self.launch(launch, &arguments) };
        index
    }
}

/// Returns the plan; `None` for a case that cuDNN does not support.
fn supported(plan: Result<Arc<Plan>, CudaError>) -> Option<Arc<Plan>> {
    match plan {
        Ok(plan) => Some(plan),
        Err(CudaError::CudnnUnsupported { .. } | CudaError::AttentionShape { .. }) => None,
        Err(error) => check("planning attention", Err(error)),
    }
}

/// Returns the order in which cuDNN writes and reads the statistics of a shape.
fn statistics_layout(shape: &AttentionShape) -> StatisticsLayout {
    if shape.is_packed() { StatisticsLayout::TokensHeads } else { StatisticsLayout::DocumentsHeadsTokens }
}

/// Splits a backward into calls: as many documents as fit into `most` tokens each, or one longer document.
fn backward_parts(whole: AttentionShape, documents: &Documents<Cuda>, most: usize) -> Vec<Part> {
    let lengths: Vec<usize> = documents.ranges().map(|range| range.len()).collect();
    parts_of(&lengths, most)
        .into_iter()
        .map(|(first_document, start, lengths)| {
            let (count, tokens) = (lengths.len(), lengths.iter().sum());
            let layout = match whole.layout {
                Layout::Uniform { length, .. } => Layout::Uniform { documents: count, length },
                // A single part uses the plan of its size; several share the plans of whole parts.
                Layout::Packed { .. } if count == documents.count() => whole.layout,
                Layout::Packed { longest, .. } => {
                    packed_layout(count, longest, most.max(documents.longest()).next_multiple_of(LONG_MULTIPLE))
                }
            };
            Part { shape: AttentionShape { layout, ..whole }, first_document, documents: count, start, tokens }
        })
        .collect()
}

/// Returns the layout class of documents for which plans are built: rows of many lengths share a few plans. If cuDNN
/// does not support packed documents, each length of uniform ones has separate plans.
fn layout([count, tokens, longest]: [usize; 3], takes_packed: bool) -> Layout {
    let is_of_any_length = !longest.is_multiple_of(SINGLE_MULTIPLE) && longest < MAX_SINGLE;
    if count * longest == tokens && !(count == 1 && takes_packed && is_of_any_length) {
        return Layout::Uniform { documents: count, length: longest };
    }
    // Rows after the last document are neither read nor written.
    packed_layout(count, longest, tokens.next_multiple_of(LONG_MULTIPLE))
}

fn packed_layout(count: usize, longest: usize, tokens: usize) -> Layout {
    Layout::Packed {
        documents: count.next_power_of_two().max(MIN_DOCUMENTS),
        longest: longest.next_power_of_two().max(MIN_LONGEST).min(tokens),
        tokens,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_many_lengths_share_a_few_plans() {
        let plans = |takes_packed| {
            let lengths = (1..=256).map(|row| row * 16);
            let layouts: std::collections::HashSet<Layout> =
                lengths.map(|tokens| layout([1, tokens, tokens], takes_packed)).collect();
            layouts.len()
        };
        // Multiples of 128, and ragged ones of at most 256, 512, 1024, 2048 and 4096 tokens in 2048 or 4096.
        assert_eq!((plans(true), plans(false)), (32 + 5, 256));
        let ragged = [3000, 3001].map(|tokens| layout([7, tokens, 900], true));
        assert_eq!(ragged[0], ragged[1]);
        let rows_of_one_length = layout([3, 3 * 4090, 4090], true);
        assert_eq!(rows_of_one_length, Layout::Uniform { documents: 3, length: 4090 });
    }
}
