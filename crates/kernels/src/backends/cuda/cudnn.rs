//! cuDNN's attention: which calls it is given, its plans, and their launches.
//!
//! Documents of one length are one plain batch to cuDNN; packed ones are ragged. A plan is made once per shape, and making one takes
//! longer than a layer runs, so the number of documents and the longest are rounded up to powers of two: a whole run uses a handful
//! of plans. Rows are always dense, forward and backward.
//! Not supported: f32, sliding windows, soft caps, and packed documents before cuDNN 9.18 (their backward was seen to be wrong in 9.14).

use std::hash::{Hash, Hasher};
use std::sync::Arc;

use burn_tensor::DType;
use firebrick_cuda::cudnn::{
    self, AttentionShape, BackwardPointers, Element, ForwardPointers, Layout, Plan, RowStrides,
};
use firebrick_cuda::{Arguments, CudaError, Cudnn};

use super::attention_case::{BackwardInputs, Gradients, Inputs, Sizes};
use super::engine::Engine;
use super::failure::check;
use super::launch::{Launch, at, grid};
use super::matrix::{Cuda, MatrixView};
use super::program::Source;
use super::scratch::{Contents, ScratchSlot};
use super::trace::Cost;
use crate::backends::cuda_memory::MAX_BACKWARD_TOKENS;
use crate::{Documents, StatisticsLayout};

/// First version of cuDNN that packed documents are given to.
const PACKED_SINCE: (u32, u32, u32) = (9, 18, 0);
/// Widest head of packed documents.
const PACKED_HEAD_DIM: usize = 128;
/// Fewest documents that a ragged plan is made for.
const MIN_DOCUMENTS: usize = 8;
/// Shortest longest document that a ragged plan is made for.
const MIN_LONGEST: usize = 256;
/// Row strides that `packed_index` has room for, as `source/packed_index.cu` has it.
const MAX_STRIDES: usize = 12;

/// The backward calls of documents: a plan and the first token of each.
pub(super) struct BackwardPlans {
    calls: Vec<(Arc<Plan>, AttentionShape, usize)>,
}

/// A call with its addresses.
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

impl Engine {
    /// The call as cuDNN plans it; `None` where it is not asked.
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
        // A plan for documents of one token has no backward; their attention is their value.
        if sizes.window.is_some() || sizes.soft_cap.is_some() || documents.longest() == 1 {
            return None;
        }
        let layout = layout(documents);
        let is_packed = matches!(layout, Layout::Packed { .. });
        if is_packed && (cudnn.version() < PACKED_SINCE || sizes.head_dim > PACKED_HEAD_DIM) {
            return None;
        }
        Some(AttentionShape {
            element,
            layout,
            query_heads: sizes.query_heads,
            key_value_heads: sizes.key_value_heads,
            head_dim: sizes.head_dim,
            strides: RowStrides::contiguous(sizes.query_heads, sizes.key_value_heads, sizes.head_dim),
            deterministic: false,
        })
    }

    /// Begins to make the plans of both passes on other threads, if cuDNN takes the case.
    pub(super) fn begin_cudnn(&self, sizes: &Sizes, dtype: DType, documents: &Documents<Cuda>) {
        if let (Some(cudnn), Some(whole)) = (&self.library.cudnn, self.cudnn_shape(sizes, dtype, documents)) {
            cudnn.begin(&whole, &backward_call(whole, 0));
        }
    }

    /// cuDNN's forward pass and the order of the statistics it leaves; `None` where it does not take the case.
    pub(super) fn cudnn_forward(
        &self,
        sizes: &Sizes,
        inputs: Inputs<'_>,
        o: &MatrixView,
        log_sum_exp: &MatrixView,
        documents: &Documents<Cuda>,
    ) -> Option<StatisticsLayout> {
        let shape = self.cudnn_shape(sizes, inputs.q.dtype, documents)?;
        let cudnn = self.library.cudnn.as_ref().filter(|_| !self.library.refuses_forward.get())?;
        let plan = supported(cudnn.forward_plan(&shape))?;
        let pointers = ForwardPointers {
            query: inputs.q.address,
            key: inputs.k.address,
            value: inputs.v.address,
            output: o.address,
            statistics: log_sum_exp.address,
            index: self.packed_index(&shape, documents),
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

    /// The plans of a backward pass over statistics in this order; `None` where cuDNN does not take the case or reads another
    /// order. Documents of one length go a few at a time.
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
        let Layout::Uniform { documents: count, length } = whole.layout else {
            let plan = supported(cudnn.backward_plan(&whole))?;
            return Some(BackwardPlans { calls: vec![(plan, whole, 0)] });
        };
        let call = |first: usize| {
            let shape = backward_call(whole, first);
            Some((supported(cudnn.backward_plan(&shape))?, shape, first * length))
        };
        let calls = (0..count).step_by(backward_call(whole, 0).documents()).map(call);
        Some(BackwardPlans { calls: calls.collect::<Option<_>>()? })
    }

    /// cuDNN's backward pass.
    pub(super) fn cudnn_backward(
        &self,
        plans: &BackwardPlans,
        sizes: &Sizes,
        inputs: BackwardInputs<'_>,
        gradients: &Gradients,
        documents: &Documents<Cuda>,
    ) {
        let cudnn = self.library.cudnn.as_ref().expect("plans come from the library");
        for (plan, shape, start) in &plans.calls {
            let rows = sizes.tokens - start;
            let from = |matrix: &MatrixView| matrix.block().rows(*start, rows).address;
            let pointers = BackwardPointers {
                forward: ForwardPointers {
                    query: from(inputs.forward.q),
                    key: from(inputs.forward.k),
                    value: from(inputs.forward.v),
                    output: from(inputs.o),
                    // The statistics of documents of one length lie document by document.
                    statistics: inputs.log_sum_exp.address + (4 * start * sizes.query_heads) as u64,
                    index: self.packed_index(shape, documents),
                    workspace: self.scratch.take(ScratchSlot::AttentionWorkspace, plan.workspace_bytes()),
                    scale: sizes.scale,
                },
                output_gradient: from(inputs.d_o),
                query_gradient: from(&gradients.dq),
                key_gradient: from(&gradients.dk),
                value_gradient: from(&gradients.dv),
            };
            let share = shape.tokens().min(sizes.tokens) as f64 / sizes.tokens as f64;
            let cost = Cost { flops: 2.5 * share * sizes.forward_flops(documents), ..Cost::default() };
            let call = Call { cudnn: cudnn.clone(), plan: plan.clone(), pointers };
            // SAFETY: as for the forward pass; the documents of this call begin at `start` in every buffer, and the
            // statistics are in the order that the plan reads.
            unsafe {
                self.submit("attention_backward", cost, call, |call, stream| {
                    call.cudnn.backward(stream, &call.plan, &call.pointers)
                });
            }
        }
    }

    /// Address of the index of packed documents, computed once per section; null for uniform ones.
    fn packed_index(&self, shape: &AttentionShape, documents: &Documents<Cuda>) -> u64 {
        if !shape.is_packed() {
            return 0;
        }
        let boundaries = self.int_matrix(documents.cu_seqlens.clone());
        let strides = shape.index_strides();
        let most = shape.documents();
        let sizes = std::iter::once(most as u64).chain(strides.iter().map(|&stride| stride as u64));
        let sources = self.source(&boundaries.tensor).into_iter().chain(sizes).collect();
        let contents = Contents { section: self.section_number(), dtype: DType::I32, sources };
        let (index, is_held) =
            self.scratch.holding(ScratchSlot::AttentionIndex, shape.packed_index_len() * 4, contents);
        if is_held {
            return index;
        }
        let mut table = [0_i32; MAX_STRIDES];
        assert!(strides.len() <= table.len(), "attention has at most {} row strides", table.len());
        for (slot, &stride) in table.iter_mut().zip(&strides) {
            *slot = stride as i32;
        }
        let arguments = Arguments::new()
            .pointer(at(index))
            .pointer(at(boundaries.address))
            .i32(documents.count() as i32)
            .i32(most as i32)
            .i32(strides.len() as i32)
            .value(&table);
        let launch = Launch {
            source: Source::PackedIndex,
            dtype: DType::F32,
            name: "packed_index",
            shape: grid(1, 256),
            bytes: 4 * (most + 1) * (strides.len() + 1),
        };
        // SAFETY: the index has room for the lengths and one list of offsets per stride; boundaries has documents + 1 values.
        unsafe { self.launch(launch, &arguments) };
        index
    }
}

/// The plan; `None` for a case that cuDNN does not take.
fn supported(plan: Result<Arc<Plan>, CudaError>) -> Option<Arc<Plan>> {
    match plan {
        Ok(plan) => Some(plan),
        Err(CudaError::CudnnUnsupported { .. } | CudaError::AttentionShape { .. }) => None,
        Err(error) => check("planning attention", Err(error)),
    }
}

/// The order in which cuDNN writes and reads the statistics of a shape.
fn statistics_layout(shape: &AttentionShape) -> StatisticsLayout {
    match shape.statistics_layout() {
        cudnn::StatisticsLayout::DocumentsHeadsTokens => StatisticsLayout::DocumentsHeadsTokens,
        cudnn::StatisticsLayout::TokensHeads => StatisticsLayout::TokensHeads,
    }
}

/// The part of a backward that is one call, from document `first` on: of documents of one length as many as make [`MAX_BACKWARD_TOKENS`],
/// packed ones at once.
fn backward_call(whole: AttentionShape, first: usize) -> AttentionShape {
    let Layout::Uniform { documents, length } = whole.layout else { return whole };
    let together = (MAX_BACKWARD_TOKENS / length).clamp(1, documents);
    AttentionShape { layout: Layout::Uniform { documents: together.min(documents - first), length }, ..whole }
}

/// How documents lie, in classes that plans are made for.
fn layout(documents: &Documents<Cuda>) -> Layout {
    let (count, tokens, longest) = (documents.count(), documents.tokens(), documents.longest());
    if count * longest == tokens {
        return Layout::Uniform { documents: count, length: longest };
    }
    Layout::Packed {
        documents: count.next_power_of_two().max(MIN_DOCUMENTS),
        longest: longest.next_power_of_two().max(MIN_LONGEST).min(tokens),
        tokens,
    }
}
