//! Attention on CUDA: by cuDNN if it is installed and supports the case, else by the engine's flash kernels.
//!
//! The output carries the order of its softmax statistics for the backward: cuDNN's backward only reads its own order, the flash kernels only
//! `[heads, tokens]`. If the forward that computed the statistics cannot be followed by its own backward, the flash forward recomputes them. Sliding
//! windows that hide anything, soft caps and short packed documents (`library.rs`) go to the flash kernels. 16-bit heads of a width that only the f32
//! kernels support, such as 32, are converted; heads above 256 have their scores in memory (`wide.rs`), and other widths go to the reference body. Sinks
//! are added to what any of them computed.
//! Trade-off: if cuDNN rejects a backward after its own forward, every call runs a second forward.

mod cached_attention;
mod case;
mod cudnn;
mod flash;
pub(super) mod library;
mod sinks;
mod wide;

use burn_tensor::{DType, Tensor};
use firebrick_arch::AttentionSpec;

use crate::attention::reference::{self, MAX_SCORES};
use crate::backends::cuda::device::in_section;
use crate::backends::cuda::engine::{Cuda, MatrixView, tensor};
use crate::{
    AttentionOps, AttentionOutput, CachedTokens, Documents, KvCache, Qkv, Sinks, SoftmaxStatistics, StatisticsLayout,
};
use case::{BackwardInputs, Sizes, into_qkv};

impl AttentionOps for Cuda {
    fn packed_attention(
        qkv: &Qkv<Self>,
        sinks: Option<&Sinks<Self>>,
        spec: &AttentionSpec,
        documents: &Documents<Self>,
    ) -> AttentionOutput<Self> {
        in_section(&qkv.q.device(), |device| {
            let sizes = Sizes::new(spec, documents);
            let dense = [&qkv.q, &qkv.k, &qkv.v].map(|x| device.flat(x.clone()));
            let inputs = dense.each_ref();
            let [q, k, v] = inputs;
            let is_flash = device.flash_format(q.dtype, sizes.head_dim).is_some();
            if !sizes.are_wide() && !is_flash && device.cudnn_shape(&sizes, q.dtype, documents).is_none() {
                return device.pause(|| reference::forward_by(matmul, MAX_SCORES, qkv, sinks, spec, documents));
            }
            let o = device.empty_matrix(sizes.tokens, q.width, q.dtype);
            let log_sum_exp = device.empty_matrix(sizes.query_heads, sizes.tokens, DType::F32);
            let (o, layout) = if sizes.are_wide() {
                device.wide_forward(&sizes, inputs, &o, &log_sum_exp, documents);
                (o, StatisticsLayout::HeadsTokens)
            } else if let Some(layout) = device.cudnn_forward(&sizes, inputs, &o, &log_sum_exp, documents) {
                (o, layout)
            } else {
                let Some(format) = device.flash_format(q.dtype, sizes.head_dim) else {
                    return device.pause(|| reference::forward_by(matmul, MAX_SCORES, qkv, sinks, spec, documents));
                };
                let [q, k, v] = [q, k, v].map(|x| device.in_format(x.clone(), format));
                let o = if o.dtype == format { o } else { device.empty_matrix(o.rows, o.width, format) };
                device.flash_forward(&sizes, [&q, &k, &v], &o, &log_sum_exp, documents);
                (o, StatisticsLayout::HeadsTokens)
            };
            if let Some(sinks) = sinks {
                device.add_sinks(sinks, &sizes, &o, (&log_sum_exp, layout), documents);
            }
            let o = device.in_format(o, q.dtype);
            let statistics = SoftmaxStatistics { log_sum_exp: tensor(log_sum_exp.tensor), layout };
            AttentionOutput { o: tensor(o.tensor), statistics }
        })
    }

    fn packed_attention_backward(
        qkv: Qkv<Self>,
        sinks: Option<&Sinks<Self>>,
        spec: &AttentionSpec,
        output: AttentionOutput<Self>,
        d_o: Tensor<Self, 2>,
        documents: &Documents<Self>,
    ) -> (Qkv<Self>, Option<Tensor<Self, 1>>) {
        in_section(&qkv.q.device(), |device| {
            let sizes = Sizes::new(spec, documents);
            let layout = output.statistics.layout;
            let dense =
                [&qkv.q, &qkv.k, &qkv.v, &output.o, &output.statistics.log_sum_exp].map(|x| device.flat(x.clone()));
            let [q, k, v, o, log_sum_exp] = dense.each_ref();
            let forward = [q, k, v];
            let like = |x: &MatrixView| device.empty_matrix(x.rows, x.width, x.dtype);
            let d_o_dense = device.flat_as(d_o.clone(), q.dtype);
            let of_sinks = (log_sum_exp, layout);
            let d_sinks = reference::trained(sinks)
                .map(|sinks| device.sinks_gradient(sinks, &sizes, [o, &d_o_dense], of_sinks, documents));
            let inputs = BackwardInputs { forward, o, d_o: &d_o_dense, log_sum_exp };
            if sizes.are_wide() {
                let gradients = forward.map(like);
                device.wide_backward(&sizes, inputs, &gradients, documents);
                return (into_qkv(gradients), d_sinks);
            }
            if let Some(plans) = device.cudnn_backward_plans(&sizes, q.dtype, documents, layout) {
                let gradients = forward.map(like);
                device.cudnn_backward(&plans, &sizes, inputs, &gradients, documents);
                return (into_qkv(gradients), d_sinks);
            }
            if let Some(format) = device.flash_format(q.dtype, sizes.head_dim) {
                let dtype = q.dtype;
                let [q, k, v, o, d_o] = [q, k, v, o, &d_o_dense].map(|x| device.in_format(x.clone(), format));
                let forward = [&q, &k, &v];
                let inputs = BackwardInputs { forward, o: &o, d_o: &d_o, log_sum_exp };
                let is_of_one = layout == StatisticsLayout::DocumentsHeadsTokens && documents.count() == 1;
                let recomputed = (layout != StatisticsLayout::HeadsTokens && !is_of_one).then(|| {
                    let log_sum_exp = device.empty_matrix(sizes.query_heads, sizes.tokens, DType::F32);
                    let recomputed_o = like(&o);
                    device.flash_forward(&sizes, forward, &recomputed_o, &log_sum_exp, documents);
                    if let Some(sinks) = sinks {
                        let statistics = (&log_sum_exp, StatisticsLayout::HeadsTokens);
                        device.add_sinks(sinks, &sizes, &recomputed_o, statistics, documents);
                    }
                    log_sum_exp
                });
                let gradients = forward.map(like);
                let log_sum_exp = recomputed.as_ref().unwrap_or(log_sum_exp);
                device.flash_backward(&sizes, BackwardInputs { log_sum_exp, ..inputs }, &gradients, documents);
                return (into_qkv(gradients.map(|gradient| device.in_format(gradient, dtype))), d_sinks);
            }
            let gradients = device.pause(|| {
                let is_readable = layout == StatisticsLayout::HeadsTokens;
                let again = || reference::forward_by(matmul, MAX_SCORES, &qkv, sinks, spec, documents);
                let output = if is_readable { output } else { again() };
                reference::backward_by(matmul, MAX_SCORES, qkv, spec, output, d_o, documents)
            });
            (gradients, d_sinks)
        })
    }

    fn cached_attention(
        qkv: &Qkv<Self>,
        sinks: Option<&Sinks<Self>>,
        cache: &mut KvCache<Self>,
        tokens: &CachedTokens<Self>,
        prompts: Option<&Documents<Self>>,
        spec: &AttentionSpec,
    ) -> Tensor<Self, 2> {
        in_section(&qkv.q.device(), |device| {
            let Some(documents) = prompts else {
                return device.cached_attention(qkv.clone(), sinks, cache, tokens, spec);
            };
            device.store_in_cache(cache, qkv.k.clone(), qkv.v.clone(), tokens);
            Self::packed_attention(qkv, sinks, spec, documents).o
        })
    }
}

/// Computes `a b` for each matrix of the last two axes, `[g, m, n]` from `[g, m, k]` and `[g, k, n]`, for reference
/// bodies: Burn's own matmul first rounds f32 to TF32.
fn matmul(a: Tensor<Cuda, 3>, b: Tensor<Cuda, 3>) -> Tensor<Cuda, 3> {
    in_section(&a.device(), |device| device.batched_gemm(a, b))
}
