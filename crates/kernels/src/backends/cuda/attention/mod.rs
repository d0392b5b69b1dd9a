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

use crate::attention::reference;
use crate::backends::cuda::device::{Device, in_section};
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
        in_section(&qkv.q.device(), |device| device.attention(qkv, sinks, spec, documents))
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
            let d_sinks = reference::trained(sinks).map(|sinks| {
                let sizes = Sizes::new(spec, documents);
                let [o, log_sum_exp] = [&output.o, &output.statistics.log_sum_exp].map(|x| device.flat(x.clone()));
                let d_o = device.flat_as(d_o.clone(), o.dtype);
                let statistics = (&log_sum_exp, output.statistics.layout);
                device.sinks_gradient(sinks, &sizes, [&o, &d_o], statistics, documents)
            });
            (device.attention_backward(qkv, sinks, spec, output, d_o, documents), d_sinks)
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
            device.store_in_cache(cache, qkv.k.clone(), qkv.v.clone(), tokens);
            match prompts {
                Some(documents) => device.attention(qkv, sinks, spec, documents).o,
                None => device.cached_attention(qkv.q.clone(), sinks, cache, tokens, spec),
            }
        })
    }
}

impl Device {
    fn attention(
        &self,
        qkv: &Qkv<Cuda>,
        sinks: Option<&Sinks<Cuda>>,
        spec: &AttentionSpec,
        documents: &Documents<Cuda>,
    ) -> AttentionOutput<Cuda> {
        let sizes = Sizes::new(spec, documents);
        let dense = [&qkv.q, &qkv.k, &qkv.v].map(|x| self.flat(x.clone()));
        let inputs = dense.each_ref();
        let [q, k, v] = inputs;
        if !sizes.are_wide() && !self.takes(&sizes, q.dtype, documents) {
            return self.pause(|| reference::forward_by(matmul, qkv, sinks, spec, documents));
        }
        let mut o = self.empty_matrix(sizes.tokens, q.width, q.dtype);
        let log_sum_exp = self.empty_matrix(sizes.query_heads, sizes.tokens, DType::F32);
        let add_sinks = |o: &MatrixView, layout| {
            if let Some(sinks) = sinks {
                self.add_sinks(sinks, &sizes, o, (&log_sum_exp, layout), documents);
            }
        };
        let by_cudnn = match sizes.are_wide() {
            true => None,
            false => self.cudnn_forward(&sizes, inputs, &o, &log_sum_exp, documents),
        };
        let layout = match by_cudnn {
            None if sizes.are_wide() => {
                self.wide_forward(&sizes, inputs, &o, &log_sum_exp, documents);
                add_sinks(&o, StatisticsLayout::HeadsTokens);
                StatisticsLayout::HeadsTokens
            }
            Some(layout) => {
                add_sinks(&o, layout);
                layout
            }
            None => {
                let Some(format) = self.flash_format(q.dtype, sizes.head_dim) else {
                    return self.pause(|| reference::forward_by(matmul, qkv, sinks, spec, documents));
                };
                let [q, k, v] = [q, k, v].map(|x| self.in_format(x.clone(), format));
                let wide = self.empty_in(&o, format);
                self.flash_forward(&sizes, [&q, &k, &v], &wide, &log_sum_exp, documents);
                add_sinks(&wide, StatisticsLayout::HeadsTokens);
                o = self.in_format(wide, o.dtype);
                StatisticsLayout::HeadsTokens
            }
        };
        let statistics = SoftmaxStatistics { log_sum_exp: tensor(log_sum_exp.tensor), layout };
        AttentionOutput { o: tensor(o.tensor), statistics }
    }

    /// Returns a new matrix of the same size in another format, or the same matrix if it already has the format.
    fn empty_in(&self, like: &MatrixView, dtype: DType) -> MatrixView {
        if like.dtype == dtype { like.clone() } else { self.empty_matrix(like.rows, like.width, dtype) }
    }

    /// Returns whether the flash kernels or cuDNN may run a case; the reference body needs no allocation here.
    fn takes(&self, sizes: &Sizes, dtype: DType, documents: &Documents<Cuda>) -> bool {
        self.flash_format(dtype, sizes.head_dim).is_some() || self.cudnn_shape(sizes, dtype, documents).is_some()
    }

    fn attention_backward(
        &self,
        qkv: Qkv<Cuda>,
        sinks: Option<&Sinks<Cuda>>,
        spec: &AttentionSpec,
        output: AttentionOutput<Cuda>,
        d_o: Tensor<Cuda, 2>,
        documents: &Documents<Cuda>,
    ) -> Qkv<Cuda> {
        let sizes = Sizes::new(spec, documents);
        let layout = output.statistics.layout;
        let dense = [&qkv.q, &qkv.k, &qkv.v, &output.o, &output.statistics.log_sum_exp].map(|x| self.flat(x.clone()));
        let [q, k, v, o, log_sum_exp] = dense.each_ref();
        let forward = [q, k, v];
        let like = |x: &MatrixView| self.empty_matrix(x.rows, x.width, x.dtype);
        let d_o_dense = self.flat_as(d_o.clone(), q.dtype);
        let inputs = BackwardInputs { forward, o, d_o: &d_o_dense, log_sum_exp };
        if sizes.are_wide() {
            let gradients = forward.map(like);
            self.wide_backward(&sizes, inputs, &gradients, documents);
            return into_qkv(gradients);
        }
        if let Some(plans) = self.cudnn_backward_plans(&sizes, q.dtype, documents, layout) {
            let gradients = forward.map(like);
            self.cudnn_backward(&plans, &sizes, inputs, &gradients, documents);
            return into_qkv(gradients);
        }
        if let Some(format) = self.flash_format(q.dtype, sizes.head_dim) {
            let dtype = q.dtype;
            let [q, k, v, o, d_o] = [q, k, v, o, &d_o_dense].map(|x| self.in_format(x.clone(), format));
            let forward = [&q, &k, &v];
            let inputs = BackwardInputs { forward, o: &o, d_o: &d_o, log_sum_exp };
            let recomputed = (!is_heads_tokens(layout, documents)).then(|| {
                let log_sum_exp = self.empty_matrix(sizes.query_heads, sizes.tokens, DType::F32);
                let recomputed_o = like(&o);
                self.flash_forward(&sizes, forward, &recomputed_o, &log_sum_exp, documents);
                if let Some(sinks) = sinks {
                    let statistics = (&log_sum_exp, StatisticsLayout::HeadsTokens);
                    self.add_sinks(sinks, &sizes, &recomputed_o, statistics, documents);
                }
                log_sum_exp
            });
            let gradients = forward.map(like);
            let log_sum_exp = recomputed.as_ref().unwrap_or(log_sum_exp);
            self.flash_backward(&sizes, BackwardInputs { log_sum_exp, ..inputs }, &gradients, documents);
            return into_qkv(gradients.map(|gradient| self.in_format(gradient, dtype)));
        }
        self.pause(|| {
            let is_readable = layout == StatisticsLayout::HeadsTokens;
            let output = if is_readable { output } else { reference::forward_by(matmul, &qkv, sinks, spec, documents) };
            reference::backward_by(matmul, qkv, spec, output, d_o, documents)
        })
    }
}

/// Computes `a b` for each matrix of the last two axes, `[g, m, n]` from `[g, m, k]` and `[g, k, n]`, for reference
/// bodies: Burn's own matmul first rounds f32 to TF32.
fn matmul(a: Tensor<Cuda, 3>, b: Tensor<Cuda, 3>) -> Tensor<Cuda, 3> {
    in_section(&a.device(), |device| device.batched_gemm(a, b))
}

/// Returns whether statistics are `[heads, tokens]`, as the flash kernels read them.
fn is_heads_tokens(layout: StatisticsLayout, documents: &Documents<Cuda>) -> bool {
    match layout {
        StatisticsLayout::HeadsTokens => true,
        StatisticsLayout::DocumentsHeadsTokens => documents.count() == 1,
        StatisticsLayout::TokensHeads => false,
    }
}
