//! The operations of a transformer training step, forward and backward, as one trait over every Burn backend.
//!
//! Each default body is ordinary Burn tensor ops ([`crate::oracle`]), so a backend works on the day it compiles; a backend
//! overrides what it can do faster, and is tested against the default. Forward and backward are separate functions on plain
//! tensors, not nodes of an autodiff graph: the model's block decides what is kept between them (docs/decisions.md).
//!
//! Suffixes: `n` tokens (all rows of the micro-batch, flattened), `d` model width, `i`/`o` input and output width of a linear
//! layer, `r` LoRA rank, `h` query heads, `g` key/value heads, `k` head width, `v` vocabulary.

use std::convert::Infallible;

use burn_tensor::{DType, Int, Tensor, TensorData, backend::Backend};
use firebrick_precision::nf4::Nf4Quantized;

use crate::portable::{attention, cross_entropy, embedding, linear, nf4, norm, optimizer, rotary, swiglu, to_dtype};
use crate::{Documents, HostBuffer, LoraPair, Nf4Weight, Offloaded, RotaryTables, Weight};

/// One linear layer as the ops below take it: what it multiplies with, and which of its gradients are wanted.
#[derive(Clone, Debug)]
pub struct Projection<B: Backend> {
    /// The base weight `[o, i]`.
    pub weight: Weight<B>,
    /// The LoRA pair beside it; its gradients are always wanted.
    pub lora: Option<LoraPair<B>>,
    /// Whether the base trains.
    pub weight_gradient: bool,
}

/// Gradients of one [`Projection`], f32.
#[derive(Clone, Debug)]
pub struct ProjectionGradients<B: Backend> {
    /// Gradients of LoRA's A `[r, i]` and B `[o, r]`.
    pub lora: Option<(Tensor<B, 2>, Tensor<B, 2>)>,
    /// Gradient of the weight `[o, i]`, where it was asked for.
    pub weight_oi: Option<Tensor<B, 2>>,
}

/// Queries, keys and values of a layer, the first two rotated.
#[derive(Clone, Debug)]
pub struct Heads<B: Backend> {
    /// `[n, h, k]`.
    pub q_nhk: Tensor<B, 3>,
    /// `[n, g, k]`.
    pub k_ngk: Tensor<B, 3>,
    /// `[n, g, k]`.
    pub v_ngk: Tensor<B, 3>,
}

/// What [`Kernels::swiglu_project_backward`] returns.
#[derive(Clone, Debug)]
pub struct SwigluProjectGradients<B: Backend> {
    /// Gradient of the gate, `[n, f]`.
    pub d_gate_nf: Tensor<B, 2>,
    /// Gradient of the up projection's output, `[n, f]`.
    pub d_up_nf: Tensor<B, 2>,
    /// Gradients of the projection.
    pub projection: ProjectionGradients<B>,
}

/// Result of [`Kernels::packed_attention`].
#[derive(Clone, Debug)]
pub struct AttentionOutput<B: Backend> {
    /// `[n, h, k]`.
    pub o_nhk: Tensor<B, 3>,
    /// Log of the sum of exponentials of each query's scaled scores, `[h, n]` f32; in an order of the backend's own where
    /// a library keeps it (only its own backward reads it).
    pub log_sum_exp_hn: Tensor<B, 2>,
}

/// The tokens of a micro-batch that count in the loss.
#[derive(Clone, Debug)]
pub struct TrainedPositions<B: Backend> {
    /// Which of the `n` tokens predict a trained target, `[m]`, rising.
    pub positions_m: Tensor<B, 1, Int>,
    /// Their targets, `[m]`.
    pub targets_m: Tensor<B, 1, Int>,
    /// `m`.
    pub count: usize,
}

/// What [`Kernels::linear_cross_entropy`] computes beside the loss.
#[derive(Clone, Copy, Debug)]
pub struct CrossEntropyOptions {
    /// Rows of logits that exist at a time.
    pub chunk_tokens: usize,
    /// Factor of the gradients: one over the trained tokens of the whole step. `None`: loss only.
    pub gradient_scale: Option<f64>,
    /// Whether the head trains.
    pub weight_gradient: bool,
}

/// Result of [`Kernels::linear_cross_entropy`].
pub struct CrossEntropy<B: Backend> {
    /// Sum over the trained positions of `-log softmax(logits)[target]`, `[1]` f32, not scaled.
    pub loss_sum: Tensor<B, 1>,
    /// Gradient of the hidden states `[n, d]`, scaled; zero rows where nothing is trained.
    pub d_hidden_nd: Option<Tensor<B, 2>>,
    /// Gradient of the head `[v, d]`, scaled.
    pub d_weight_vd: Option<Tensor<B, 2>>,
}

/// Device time of one launch, and the work it could not avoid.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TracedOperation {
    /// What was launched.
    pub name: &'static str,
    /// Device time.
    pub milliseconds: f64,
    /// Operations of matrix units; 0 for what only moves memory.
    pub flops: f64,
    /// Bytes read and written, each once.
    pub bytes: f64,
    /// `m`, `n` and `k` of a matrix product.
    pub product: Option<[usize; 3]>,
}

/// The numbers of one AdamW step (Loshchilov and Hutter, Decoupled weight decay regularization, 2019).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// Learning rate of this step.
    pub learning_rate: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub epsilon: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Which step this is, from 1.
    pub step: u64,
}

/// Both moments of a parameter in 8 bits a value, in blocks of 256 (Dettmers et al., 8-bit optimizers, 2022).
#[derive(Clone, Debug)]
pub struct EightBitMoments<B: Backend> {
    /// First moment, codes of the signed dynamic map, `[blocks * 256]`.
    pub first_codes: Tensor<B, 1, Int>,
    /// `[blocks]` f32.
    pub first_absmax: Tensor<B, 1>,
    /// Second moment, codes of the unsigned dynamic map, `[blocks * 256]`.
    pub second_codes: Tensor<B, 1, Int>,
    /// `[blocks]` f32.
    pub second_absmax: Tensor<B, 1>,
}

/// What [`Kernels::adamw_8bit_many`] updates.
#[derive(Clone, Debug)]
pub struct EightBitUpdate<B: Backend> {
    /// The parameter, f32.
    pub parameter: Tensor<B, 1>,
    /// Its gradient, f32.
    pub gradient: Tensor<B, 1>,
    /// Its moments.
    pub moments: EightBitMoments<B>,
}

/// Every operation that the training step is made of.
///
/// Inputs may be f32 or a half format; reductions, norms and exponentials are computed in f32 and results come back in the
/// dtype of the first input unless said otherwise. CubeCL does not check dtypes, so mixed operands are cast here.
pub trait Kernels: Backend {
    /// The integer dtype in which codes of at most 8 bits are stored: a byte, where the backend has bytes.
    fn code_dtype() -> burn_tensor::IntDType {
        burn_tensor::IntDType::U8
    }

    /// Uploads a packed weight.
    fn nf4_upload(quantized: &Nf4Quantized, device: &Self::Device) -> Nf4Weight<Self> {
        nf4::upload(quantized, device)
    }

    /// Host memory to fill with a tensor's bytes for [`Kernels::upload`]; from any thread.
    fn host_buffer(device: &Self::Device, bytes: usize) -> HostBuffer {
        let _ = device;
        HostBuffer::new(vec![0; bytes])
    }

    /// A tensor of the bytes of a buffer, row-major and in the machine's byte order.
    ///
    /// # Panics
    /// If the buffer does not have the bytes of the shape.
    fn upload(buffer: HostBuffer, shape: [usize; 2], dtype: DType, device: &Self::Device) -> Tensor<Self, 2> {
        let bytes: Vec<u8> = buffer.into_memory().expect("the default buffer is a Vec");
        let data = TensorData::from_bytes_vec(bytes, shape, dtype);
        Tensor::from_data(data, (device, dtype))
    }

    /// Whether [`Kernels::nf4_quantize`] runs on the device, so that weights are best uploaded as they are stored.
    fn packs_on_device() -> bool {
        false
    }

    /// Allocates, beside other work, what [`Kernels::offload`] will put `count` tensors of `bytes` bytes into.
    fn reserve_offload(device: &Self::Device, count: usize, bytes: usize) {
        let _ = (device, count, bytes);
    }

    /// Packs a matrix of finite values where it is; the same bytes as packing on the host.
    fn nf4_quantize(values_oi: Tensor<Self, 2>, double_quant: bool) -> Nf4Weight<Self> {
        nf4::quantize(values_oi, double_quant)
    }

    /// The values of an NF4 weight, `[o, i]` f32.
    fn nf4_dequantize(weight: &Nf4Weight<Self>) -> Tensor<Self, 2> {
        nf4::dequantize(weight)
    }

    /// Runs every operation that training in this format uses once on small random input, against the portable body. `Err`
    /// names the operation that is wrong: a broken driver must not train on zeros.
    fn self_test(device: &Self::Device, dtype: DType, head_dim: usize) -> Result<(), String> {
        let _ = (device, dtype, head_dim);
        Ok(())
    }

    /// Runs work and measures the device time of each operation in it; empty where the backend cannot.
    fn trace<R>(device: &Self::Device, work: impl FnOnce() -> R) -> (R, Vec<TracedOperation>) {
        let _ = device;
        (work(), Vec::new())
    }

    /// Gives memory that is kept for reuse back to the driver: after loading, or when the sizes of tensors change.
    fn release_memory(device: &Self::Device) {
        Self::memory_cleanup(device);
    }

    /// Runs a stretch of work in which nothing but operations of this trait touches the device.
    ///
    /// A backend with a queue of its own meets the rest of the device's work only at the edges of the stretch, instead of
    /// around each operation. Stretches may nest; the outermost counts.
    fn section<R>(device: &Self::Device, work: impl FnOnce() -> R) -> R {
        let _ = device;
        work()
    }

    /// Projections of one input, `[n, o]` each: `y = x Wᵀ + scale (x Aᵀ) Bᵀ`.
    fn project(x_ni: Tensor<Self, 2>, projections: &[Projection<Self>]) -> Vec<Tensor<Self, 2>> {
        projections.iter().map(|projection| linear::forward(x_ni.clone(), projection)).collect()
    }

    /// `residual + project(x)` of one projection.
    fn project_add(
        x_ni: Tensor<Self, 2>,
        projection: &Projection<Self>,
        residual_no: Tensor<Self, 2>,
    ) -> Tensor<Self, 2> {
        linear::forward(x_ni, projection).add(residual_no)
    }

    /// Backward of [`Kernels::project`]: the gradient of the shared input, and those of each projection.
    fn project_backward(
        x_ni: Tensor<Self, 2>,
        projections: &[Projection<Self>],
        dys_no: Vec<Tensor<Self, 2>>,
    ) -> (Tensor<Self, 2>, Vec<ProjectionGradients<Self>>) {
        linear::backward(x_ni, projections, dys_no)
    }

    /// Queries, keys and values of one input, the first two rotated: three [`Kernels::project`] and two [`Kernels::rotary`].
    fn project_heads(
        x_nd: Tensor<Self, 2>,
        projections: &[Projection<Self>; 3],
        tables: &RotaryTables<Self>,
        head_dim: usize,
    ) -> Heads<Self> {
        linear::heads(x_nd, projections, tables, head_dim)
    }

    /// Backward of [`Kernels::project_heads`], from the gradients of rotated queries and keys.
    fn project_heads_backward(
        x_nd: Tensor<Self, 2>,
        projections: &[Projection<Self>; 3],
        tables: &RotaryTables<Self>,
        d_heads: Heads<Self>,
    ) -> (Tensor<Self, 2>, Vec<ProjectionGradients<Self>>) {
        linear::heads_backward(x_nd, projections, tables, d_heads)
    }

    /// `residual + project(swiglu(gate, up))`: the end of a feed-forward part. With `keep`, the product of gate and up too.
    fn swiglu_project_add(
        gate_nf: Tensor<Self, 2>,
        up_nf: Tensor<Self, 2>,
        projection: &Projection<Self>,
        residual_nd: Tensor<Self, 2>,
        keep: bool,
    ) -> (Tensor<Self, 2>, Option<Tensor<Self, 2>>) {
        let activated_nf = Self::swiglu(gate_nf, up_nf);
        let kept = keep.then(|| activated_nf.clone());
        (Self::project_add(activated_nf, projection, residual_nd), kept)
    }

    /// Backward of [`Kernels::swiglu_project_add`]; `activated` is computed again where it was not kept. The residual's
    /// gradient is `dy` itself.
    fn swiglu_project_backward(
        gate_nf: Tensor<Self, 2>,
        up_nf: Tensor<Self, 2>,
        activated_nf: Option<Tensor<Self, 2>>,
        projection: &Projection<Self>,
        dy_nd: Tensor<Self, 2>,
    ) -> SwigluProjectGradients<Self> {
        linear::swiglu_backward(gate_nf, up_nf, activated_nf, projection, dy_nd)
    }

    /// Puts a tensor away until its backward; where the backend can, in host memory, copied beside its work.
    fn offload(x_nd: Tensor<Self, 2>) -> Offloaded<Self> {
        Offloaded::on_device(x_nd)
    }

    /// Begins to bring a tensor back, so that [`Kernels::restore`] need not wait.
    fn prefetch(offloaded: &mut Offloaded<Self>, device: &Self::Device) {
        let _ = (offloaded, device);
    }

    /// The tensor that was put away, bit for bit.
    fn restore(offloaded: Offloaded<Self>, device: &Self::Device) -> Tensor<Self, 2> {
        let _ = device;
        match offloaded.into_parts::<Infallible>() {
            Ok(x_nd) => x_nd,
            Err(never) => match never {},
        }
    }

    /// Adds a gradient to what earlier micro-batches left, both f32.
    fn accumulate(sum: Tensor<Self, 1>, gradient: Tensor<Self, 1>) -> Tensor<Self, 1> {
        sum.add(gradient)
    }

    /// Rows `ids` of the table in the given dtype, `[n, d]`.
    fn embed(table_vd: Tensor<Self, 2>, ids_n: Tensor<Self, 1, Int>, dtype: DType) -> Tensor<Self, 2> {
        to_dtype(embedding::forward(table_vd, ids_n), dtype)
    }

    /// Gradient of the table `[v, d]` f32: rows of `dy` summed by id.
    fn embed_backward(ids_n: Tensor<Self, 1, Int>, dy_nd: Tensor<Self, 2>, vocab_size: usize) -> Tensor<Self, 2> {
        embedding::backward(ids_n, dy_nd, vocab_size)
    }

    /// `x / sqrt(mean(x²) + eps) * w`, computed in f32 (Zhang and Sennrich, Root mean square layer normalization, 2019).
    fn rms_norm(x_nd: Tensor<Self, 2>, weight_d: Tensor<Self, 1>, epsilon: f64) -> Tensor<Self, 2> {
        norm::forward(x_nd, weight_d, epsilon)
    }

    /// Backward of [`Kernels::rms_norm`] at input `x`: `(dx, d_weight)`. `dx_residual` is added to `dx`: what flows past
    /// the norm on the residual path.
    fn rms_norm_backward(
        x_nd: Tensor<Self, 2>,
        weight_d: Tensor<Self, 1>,
        epsilon: f64,
        dy_nd: Tensor<Self, 2>,
        dx_residual: Option<Tensor<Self, 2>>,
        weight_gradient: bool,
    ) -> (Tensor<Self, 2>, Option<Tensor<Self, 1>>) {
        norm::backward(x_nd, weight_d, epsilon, dy_nd, dx_residual, weight_gradient)
    }

    /// Rotary position embedding in the rotate-half form that Hugging Face checkpoints are stored for
    /// (Su et al., RoFormer, 2021). `x` is `[n, heads, k]`.
    fn rotary(x_nhk: Tensor<Self, 3>, tables: &RotaryTables<Self>) -> Tensor<Self, 3> {
        rotary::forward(x_nhk, tables)
    }

    /// Backward of [`Kernels::rotary`]: the rotation the other way round.
    fn rotary_backward(dy_nhk: Tensor<Self, 3>, tables: &RotaryTables<Self>) -> Tensor<Self, 3> {
        rotary::backward(dy_nhk, tables)
    }

    /// Causal grouped-query attention inside each document, scores scaled by `1 / sqrt(k)`.
    fn packed_attention(
        q_nhk: Tensor<Self, 3>,
        k_ngk: Tensor<Self, 3>,
        v_ngk: Tensor<Self, 3>,
        documents: &Documents<Self>,
    ) -> AttentionOutput<Self> {
        attention::forward(q_nhk, k_ngk, v_ngk, documents)
    }

    /// Backward of [`Kernels::packed_attention`]: `(dq, dk, dv)`.
    fn packed_attention_backward(
        q_nhk: Tensor<Self, 3>,
        k_ngk: Tensor<Self, 3>,
        v_ngk: Tensor<Self, 3>,
        output: &AttentionOutput<Self>,
        do_nhk: Tensor<Self, 3>,
        documents: &Documents<Self>,
    ) -> (Tensor<Self, 3>, Tensor<Self, 3>, Tensor<Self, 3>) {
        attention::backward(q_nhk, k_ngk, v_ngk, output, do_nhk, documents)
    }

    /// Attention of the newest `n` tokens of one sequence over all its `t` tokens so far (a KV cache), `[n, h, k]`.
    fn attention_with_past(q_nhk: Tensor<Self, 3>, k_tgk: Tensor<Self, 3>, v_tgk: Tensor<Self, 3>) -> Tensor<Self, 3> {
        attention::one_sequence(q_nhk, k_tgk, v_tgk).0
    }

    /// `silu(gate) * up` (Shazeer, GLU variants improve transformer, 2020).
    fn swiglu(gate_nf: Tensor<Self, 2>, up_nf: Tensor<Self, 2>) -> Tensor<Self, 2> {
        swiglu::forward(gate_nf, up_nf)
    }

    /// Backward of [`Kernels::swiglu`]: `(d_gate, d_up)`.
    fn swiglu_backward(
        gate_nf: Tensor<Self, 2>,
        up_nf: Tensor<Self, 2>,
        dy_nf: Tensor<Self, 2>,
    ) -> (Tensor<Self, 2>, Tensor<Self, 2>) {
        swiglu::backward(gate_nf, up_nf, dy_nf)
    }

    /// Sum of `-log softmax(logits)[target]` over the rows, `[1]`, and with a scale the gradient of that sum times the scale,
    /// `[c, v]`. Logits are f32.
    fn cross_entropy(
        logits_cv: Tensor<Self, 2>,
        targets_c: Tensor<Self, 1, Int>,
        gradient_scale: Option<f64>,
    ) -> (Tensor<Self, 1>, Option<Tensor<Self, 2>>) {
        cross_entropy::of_logits(logits_cv, targets_c, gradient_scale)
    }

    /// Output projection and cross entropy over the trained positions only, in chunks: the full logits never exist.
    fn linear_cross_entropy(
        hidden_nd: Tensor<Self, 2>,
        head: &Weight<Self>,
        trained: &TrainedPositions<Self>,
        options: CrossEntropyOptions,
    ) -> CrossEntropy<Self> {
        cross_entropy::forward(hidden_nd, head, trained, options)
    }

    /// Sum of the squares of all elements of all tensors, `[1]` f32: the square of the global norm.
    fn squared_norm(tensors: &[Tensor<Self, 1>]) -> Tensor<Self, 1> {
        optimizer::squared_norm(tensors)
    }

    /// One AdamW step with f32 moments: new `(parameter, first moment, second moment)`. The gradient is first multiplied by
    /// `gradient_scale` `[1]`, which stays on the device (clipping).
    fn adamw(
        parameter: Tensor<Self, 1>,
        gradient: Tensor<Self, 1>,
        moments: (Tensor<Self, 1>, Tensor<Self, 1>),
        gradient_scale: Tensor<Self, 1>,
        hyper: &AdamW,
    ) -> (Tensor<Self, 1>, (Tensor<Self, 1>, Tensor<Self, 1>)) {
        optimizer::adamw(parameter, gradient, moments, gradient_scale, hyper)
    }

    /// [`Kernels::adamw_8bit`] of many parameters, which a backend may take in few launches: an adapter is hundreds of small
    /// tensors.
    fn adamw_8bit_many(
        updates: Vec<EightBitUpdate<Self>>,
        gradient_scale: Tensor<Self, 1>,
        hyper: &AdamW,
    ) -> Vec<(Tensor<Self, 1>, EightBitMoments<Self>)> {
        let one = |update: EightBitUpdate<Self>| {
            Self::adamw_8bit(update.parameter, update.gradient, update.moments, gradient_scale.clone(), hyper)
        };
        updates.into_iter().map(one).collect()
    }

    /// One AdamW step with moments in 8 bits, as bitsandbytes' block-wise kernel does it: `(parameter, moments)`.
    fn adamw_8bit(
        parameter: Tensor<Self, 1>,
        gradient: Tensor<Self, 1>,
        moments: EightBitMoments<Self>,
        gradient_scale: Tensor<Self, 1>,
        hyper: &AdamW,
    ) -> (Tensor<Self, 1>, EightBitMoments<Self>) {
        optimizer::adamw_8bit(parameter, gradient, moments, gradient_scale, hyper)
    }
}
