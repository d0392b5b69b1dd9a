//! Attention on CUDA: cuDNN where it is installed and does the case, our own flash kernels where not.
//!
//! Documents of one length are one plain batch to cuDNN; packed ones are ragged. A plan is made once a shape, and making one
//! takes longer than a layer runs, so the number of documents and the longest are rounded up to powers of two: a whole run
//! uses a handful of plans. Head widths that neither library nor kernels take go to the portable body.

use std::cell::{Cell, RefCell};
use std::collections::HashSet;
use std::sync::Arc;

use burn_tensor::{DType, Tensor};
use firebrick_cuda::cudnn::{AttentionShape, BackwardPointers, Element, ForwardPointers, Layout, RowStrides};
use firebrick_cuda::{Context, CudaError, Cudnn};

use super::Cuda;
use super::engine::{Engine, engine};
use super::failure::check;
use super::gemm::Block;
use super::scratch::{Contents, Purpose};
use super::tensor::{Matrix, tensor};
use crate::portable::attention as portable;
use crate::{AttentionOutput, Documents};

/// First version of cuDNN that packed documents are given to.
const PACKED_SINCE: (u32, u32, u32) = (9, 18, 0);
/// Fewest documents that a ragged plan is made for.
const FEWEST_DOCUMENTS: usize = 8;
/// Tokens of documents of one length that one backward call takes.
const TOKENS_TOGETHER: usize = 16_384;
/// Shortest longest document that a ragged plan is made for.
const SHORTEST: usize = 256;

/// The library, if there is one, and the shapes it has refused.
pub(super) struct Attention {
    cudnn: Option<Cudnn>,
    refused: RefCell<HashSet<AttentionShape>>,
    /// Set by tests: leaves the library out.
    own_only: Cell<bool>,
}

impl Attention {
    pub(super) fn new(context: &Context) -> Result<Self, CudaError> {
        let cudnn = match Cudnn::load(context) {
            Ok(cudnn) => Some(cudnn),
            // The plan says that attention is slower without it, and what to install.
            Err(CudaError::CudnnNotFound { .. } | CudaError::BrokenCudnn { .. }) => None,
            Err(error) => return Err(error),
        };
        Ok(Self { cudnn, refused: RefCell::default(), own_only: Cell::new(false) })
    }

    /// Whether the library does packed documents right: its backward of them was seen to be wrong in 9.14 at a head width of
    /// 256 and with deterministic sums, and right in 9.19.
    fn packs(&self, head_dim: usize) -> bool {
        self.cudnn.as_ref().is_some_and(|cudnn| cudnn.version() >= PACKED_SINCE && head_dim <= 128)
    }

    /// Leaves cuDNN out, or takes it in again.
    pub(super) fn use_own_kernels(&self, own: bool) {
        self.own_only.set(own);
    }
}

/// Sizes of a call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    pub tokens: usize,
    pub query_heads: usize,
    pub key_value_heads: usize,
    pub head_dim: usize,
}

impl Sizes {
    fn of(q_nhk: &Tensor<Cuda, 3>, k_ngk: &Tensor<Cuda, 3>) -> Self {
        let ([tokens, query_heads, head_dim], [_, key_value_heads, _]) = (q_nhk.dims(), k_ngk.dims());
        Self { tokens, query_heads, key_value_heads, head_dim }
    }

    /// What both passes are scaled by.
    pub(super) fn scale(&self) -> f32 {
        1.0 / (self.head_dim as f32).sqrt()
    }

    /// Operations of the two products of the forward pass, the causal half.
    pub(super) fn forward_flops(&self, documents: &Documents<Cuda>) -> f64 {
        let pairs: f64 = documents.ranges().map(|range| (range.len() as f64).powi(2)).sum();
        2.0 * pairs * (self.query_heads * self.head_dim) as f64
    }
}

/// See [`crate::Kernels::packed_attention`].
pub(super) fn forward(
    q_nhk: Tensor<Cuda, 3>,
    k_ngk: Tensor<Cuda, 3>,
    v_ngk: Tensor<Cuda, 3>,
    documents: &Documents<Cuda>,
) -> AttentionOutput<Cuda> {
    let engine = engine(&q_nhk.device());
    let sizes = Sizes::of(&q_nhk, &k_ngk);
    if !super::launch_flash::takes(q_nhk.dtype(), sizes.head_dim) && q_nhk.dtype() == DType::F32 {
        return engine.pause(|| portable::forward(q_nhk, k_ngk, v_ngk, documents));
    }
    engine.section(|| {
        let [q, k, v] = [q_nhk.clone(), k_ngk.clone(), v_ngk.clone()].map(|x| engine.matrix(x));
        let o = engine.empty([sizes.tokens, sizes.query_heads, sizes.head_dim], q.dtype);
        let log_sum = engine.empty_matrix(sizes.query_heads, sizes.tokens, DType::F32);
        let o_rows = engine.matrix_of(o.clone());
        let done = engine.library_forward(&sizes, [&q, &k, &v, &o_rows], &log_sum, documents)
            || engine.own_forward(&sizes, [&q, &k, &v, &o_rows], &log_sum, documents);
        if done {
            AttentionOutput { o_nhk: tensor(o), log_sum_exp_hn: tensor(log_sum.tensor) }
        } else {
            engine.pause(|| portable::forward(q_nhk, k_ngk, v_ngk, documents))
        }
    })
}

/// See [`crate::Kernels::packed_attention_backward`].
pub(super) fn backward(
    q_nhk: Tensor<Cuda, 3>,
    k_ngk: Tensor<Cuda, 3>,
    v_ngk: Tensor<Cuda, 3>,
    output: &AttentionOutput<Cuda>,
    do_nhk: Tensor<Cuda, 3>,
    documents: &Documents<Cuda>,
) -> (Tensor<Cuda, 3>, Tensor<Cuda, 3>, Tensor<Cuda, 3>) {
    let engine = engine(&q_nhk.device());
    let sizes = Sizes::of(&q_nhk, &k_ngk);
    engine.section(|| {
        let [q, k, v] = [q_nhk.clone(), k_ngk.clone(), v_ngk.clone()].map(|x| engine.matrix(x));
        let (o, d_o) = (engine.matrix(output.o_nhk.clone()), engine.matrix(do_nhk.clone()));
        let log_sum = engine.matrix(output.log_sum_exp_hn.clone());
        let gradients = Gradients::new(&engine, &sizes, q.dtype, engine.joined(documents));
        let inputs = [&q, &k, &v, &o, &d_o];
        let done = engine.library_backward(&sizes, inputs, &log_sum, &gradients, documents)
            || engine.own_backward(&sizes, inputs, &log_sum, &gradients, documents);
        if done {
            gradients.tensors(&engine, &sizes)
        } else {
            engine.pause(|| portable::backward(q_nhk, k_ngk, v_ngk, output, do_nhk, documents))
        }
    })
}

/// Where the gradients of queries, keys and values go.
pub(super) struct Gradients {
    /// Each as rows with the stride of its buffer.
    pub parts: [Matrix; 3],
}

impl Gradients {
    /// Side by side in one buffer, so that the projections before attention take them as one matrix; or in three, where
    /// ragged plans need room for each row stride again.
    fn new(engine: &Engine, sizes: &Sizes, dtype: DType, joined: bool) -> Self {
        let (query, key) = (sizes.query_heads * sizes.head_dim, sizes.key_value_heads * sizes.head_dim);
        if !joined {
            return Self { parts: [query, key, key].map(|width| engine.empty_matrix(sizes.tokens, width, dtype)) };
        }
        let whole = engine.empty_matrix(sizes.tokens, query + 2 * key, dtype);
        let part = |start: usize, width| engine.matrix_of(engine.columns(&whole, start, &[sizes.tokens, width]));
        Self { parts: [part(0, query), part(query, key), part(query + key, key)] }
    }

    fn tensors(self, engine: &Engine, sizes: &Sizes) -> (Tensor<Cuda, 3>, Tensor<Cuda, 3>, Tensor<Cuda, 3>) {
        let [q, k, v] = self.parts.map(|part| {
            let shape = [part.rows, part.width / sizes.head_dim, sizes.head_dim];
            tensor(engine.columns(&part, 0, &shape))
        });
        (q, k, v)
    }
}

impl Engine {
    /// Whether gradients of queries, keys and values share a buffer.
    fn joined(&self, documents: &Documents<Cuda>) -> bool {
        matches!(layout(documents), Layout::Uniform { .. }) || !self.has_library()
    }

    fn has_library(&self) -> bool {
        self.attention.cudnn.is_some() && !self.attention.own_only.get()
    }

    /// cuDNN's forward pass; false where it does not do the case.
    fn library_forward(
        &self,
        sizes: &Sizes,
        [q, k, v, o]: [&Matrix; 4],
        log_sum: &Matrix,
        documents: &Documents<Cuda>,
    ) -> bool {
        let strides = RowStrides {
            query: q.stride,
            key: k.stride,
            value: v.stride,
            output: o.stride,
            ..RowStrides::contiguous(sizes.query_heads, sizes.key_value_heads, sizes.head_dim)
        };
        let Some(shape) = self.library_shape(sizes, q.dtype, strides, documents) else { return false };
        let Some(cudnn) = &self.attention.cudnn else { return false };
        let Some(plan) = self.supported(cudnn.forward_plan(&shape), shape) else { return false };
        let pointers = ForwardPointers {
            query: q.address,
            key: k.address,
            value: v.address,
            output: o.address,
            statistics: log_sum.address,
            index: self.index(&shape, documents),
            workspace: self.scratch.take(Purpose::AttentionWorkspace, plan.workspace_bytes()),
            scale: sizes.scale(),
        };
        self.launch_attention(cudnn, &plan, &pointers, sizes.forward_flops(documents));
        true
    }

    /// cuDNN's backward pass; false where it does not do the case. Documents of one length go a few at a time: cuDNN's
    /// workspace grows with the tokens of a call, and a few thousand of them fill the device.
    fn library_backward(
        &self,
        sizes: &Sizes,
        inputs: [&Matrix; 5],
        log_sum: &Matrix,
        gradients: &Gradients,
        documents: &Documents<Cuda>,
    ) -> bool {
        let Layout::Uniform { documents: count, length } = layout(documents) else {
            // Seen in 9.14 and 9.19: gradients of packed documents are wrong, or the call dies, unless queries, keys and
            // values have the row strides of their gradients.
            let dense = inputs.map(|input| self.dense(input.clone()));
            let dense = dense.each_ref();
            return self.library_backward_of(sizes, dense, log_sum, gradients, documents, layout(documents), 0);
        };
        let together = (TOKENS_TOGETHER / length).clamp(1, count);
        (0..count).step_by(together).all(|first| {
            let part = Layout::Uniform { documents: together.min(count - first), length };
            self.library_backward_of(sizes, inputs, log_sum, gradients, documents, part, first * length)
        })
    }

    /// The backward pass of the documents of a layout that begins `start` tokens on.
    #[allow(clippy::too_many_arguments, reason = "the tensors of an attention call")]
    fn library_backward_of(
        &self,
        sizes: &Sizes,
        [q, k, v, o, d_o]: [&Matrix; 5],
        log_sum: &Matrix,
        gradients: &Gradients,
        documents: &Documents<Cuda>,
        layout: Layout,
        start: usize,
    ) -> bool {
        let [dq, dk, dv] = &gradients.parts;
        let strides = RowStrides {
            query: q.stride,
            key: k.stride,
            value: v.stride,
            output: o.stride,
            output_gradient: d_o.stride,
            query_gradient: dq.stride,
            key_gradient: dk.stride,
            value_gradient: dv.stride,
        };
        let Some(whole) = self.library_shape(sizes, q.dtype, strides, documents) else { return false };
        let shape = AttentionShape { layout, ..whole };
        let Some(cudnn) = &self.attention.cudnn else { return false };
        let Some(plan) = self.supported(cudnn.backward_plan(&shape), whole) else {
            // The forward pass of this shape was the library's, whose log-sums may lie in an order of its own.
            let again = self.empty_matrix(o.rows, o.width, o.dtype);
            return self.own_forward(sizes, [q, k, v, &again], log_sum, documents)
                && self.own_backward(sizes, [q, k, v, o, d_o], log_sum, gradients, documents);
        };
        let from = |matrix: &Matrix| Block::from(matrix).at_row(start).address;
        let pointers = BackwardPointers {
            forward: ForwardPointers {
                query: from(q),
                key: from(k),
                value: from(v),
                output: from(o),
                // The statistics of documents of one length lie document by document.
                statistics: log_sum.address + (4 * start * sizes.query_heads) as u64,
                index: self.index(&shape, documents),
                workspace: self.scratch.take(Purpose::AttentionWorkspace, plan.workspace_bytes()),
                scale: sizes.scale(),
            },
            output_gradient: from(d_o),
            query_gradient: from(dq),
            key_gradient: from(dk),
            value_gradient: from(dv),
        };
        let share = shape.tokens().min(sizes.tokens) as f64 / sizes.tokens as f64;
        self.launch_attention_backward(cudnn, &plan, &pointers, 2.5 * share * sizes.forward_flops(documents));
        true
    }

    /// The call as cuDNN plans it; `None` where our own kernels are to run.
    fn library_shape(
        &self,
        sizes: &Sizes,
        dtype: DType,
        strides: RowStrides,
        documents: &Documents<Cuda>,
    ) -> Option<AttentionShape> {
        let element = match dtype {
            DType::BF16 => Element::Bf16,
            DType::F16 => Element::F16,
            _ => return None,
        };
        // A plan for documents of one token has no backward; their attention is their value.
        if !self.has_library() || documents.longest() == 1 {
            return None;
        }
        let packed = matches!(layout(documents), Layout::Packed { .. });
        if packed && !self.attention.packs(sizes.head_dim) {
            return None;
        }
        let shape = AttentionShape {
            element,
            layout: layout(documents),
            query_heads: sizes.query_heads,
            key_value_heads: sizes.key_value_heads,
            head_dim: sizes.head_dim,
            strides,
            deterministic: false,
        };
        (!self.attention.refused.borrow().contains(&forward_part(shape))).then_some(shape)
    }

    /// The plan; a case that cuDNN does not do is remembered, since its backward must then take the same way.
    fn supported<P>(&self, plan: Result<Arc<P>, CudaError>, shape: AttentionShape) -> Option<Arc<P>> {
        match plan {
            Ok(plan) => Some(plan),
            Err(CudaError::CudnnUnsupported { .. } | CudaError::AttentionShape { .. }) => {
                self.attention.refused.borrow_mut().insert(forward_part(shape));
                None
            }
            Err(error) => check("planning attention", Err(error)),
        }
    }

    /// Address of the index of packed documents; null for uniform ones.
    fn index(&self, shape: &AttentionShape, documents: &Documents<Cuda>) -> u64 {
        if !shape.is_packed() {
            return 0;
        }
        let boundaries = self.int_matrix(documents.cu_seqlens.clone());
        let strides = shape.index_strides();
        let sources = std::iter::once(boundaries.address).chain(strides.iter().map(|&stride| stride as u64)).collect();
        let contents = Contents { section: self.section_number(), sources };
        let (index, held) = self.scratch.holding(Purpose::AttentionIndex, shape.packed_index_len() * 4, contents);
        if !held {
            self.launch_index(index, boundaries.address, documents.count(), shape.documents(), &strides);
        }
        index
    }
}

/// How documents lie, in classes that plans are made for.
fn layout(documents: &Documents<Cuda>) -> Layout {
    let (count, tokens, longest) = (documents.count(), documents.tokens(), documents.longest());
    if count * longest == tokens {
        return Layout::Uniform { documents: count, length: longest };
    }
    Layout::Packed {
        documents: count.next_power_of_two().max(FEWEST_DOCUMENTS),
        longest: longest.next_power_of_two().max(SHORTEST).min(tokens),
        tokens,
    }
}

/// The part of a shape that the forward pass knows: both passes must take the same way.
fn forward_part(mut shape: AttentionShape) -> AttentionShape {
    let RowStrides { query, key, value, output, .. } = shape.strides;
    let dense = RowStrides::contiguous(shape.query_heads, shape.key_value_heads, shape.head_dim);
    shape.strides = RowStrides { query, key, value, output, ..dense };
    shape
}
