//! NVIDIA through CubeCL's memory, with the heavy work done elsewhere: products by cuBLASLt, attention by cuDNN, the rest by
//! CUDA C++ kernels of ours, all on one stream of ours that meets CubeCL's only at the edges of a section.
//!
//! `engine` is what operations share, `tensor` how they see Burn's tensors, `launch*` where addresses become device accesses.
//! Every operation works alone, in a section of its own; inside a model's section they follow each other without a word to
//! CubeCL. What this gives up: tensors on a thread that did not make the engine get a stream of their own, ordered by events.

mod attention;
mod engine;
mod failure;
mod gemm;
mod launch;
mod launch_elementwise;
mod launch_flash;
mod launch_loss;
mod launch_nf4;
mod launch_offload;
mod launch_optimizer;
mod launch_rows;
mod linear;
mod loss;
mod program;
mod scratch;
mod self_test;
mod tables;
mod tensor;
mod trace;
mod weights;

use burn_cubecl::CubeBackend;
use burn_tensor::backend::Backend;
use burn_tensor::{DType, Int, Tensor, TensorMetadata};
use cubecl::cuda::{CudaDevice, CudaRuntime};
use firebrick_cuda::Driver;

use crate::{
    AdamW, AttentionOutput, CrossEntropy, CrossEntropyOptions, Documents, EightBitMoments, EightBitUpdate, Heads,
    HostBuffer, Kernels, Nf4Weight, Offloaded, Projection, ProjectionGradients, RotaryTables, SwigluProjectGradients,
    TracedOperation, TrainedPositions, Weight,
};
use engine::engine;
pub use failure::DeviceFailure;
use tensor::{float, tensor};

/// f32 defaults; half formats are chosen tensor by tensor.
pub type Cuda = CubeBackend<CudaRuntime, f32, i32, u8>;

/// Loads the driver, counts its devices and looks for the libraries, all of which CubeCL would panic over.
pub(crate) fn probe() -> Result<(), String> {
    let devices = Driver::load().and_then(|driver| driver.devices()).map_err(|error| error.to_string())?;
    if devices.is_empty() {
        return Err("the NVIDIA driver is there, but it lists no device".to_owned());
    }
    engine::configure();
    Ok(())
}

/// Leaves cuDNN out of this thread's attention on a device, or takes it in again: for tests of our own kernels, and where the
/// library misbehaves.
pub fn use_own_attention(device: &CudaDevice, own: bool) {
    engine(device).attention.use_own_kernels(own);
}

impl Kernels for Cuda {
    fn nf4_quantize(values_oi: Tensor<Self, 2>, double_quant: bool) -> Nf4Weight<Self> {
        launch_nf4::quantize(values_oi, double_quant)
    }

    fn host_buffer(device: &Self::Device, bytes: usize) -> HostBuffer {
        launch_offload::host_buffer(device, bytes)
    }

    fn upload(buffer: HostBuffer, shape: [usize; 2], dtype: DType, device: &Self::Device) -> Tensor<Self, 2> {
        launch_offload::upload(buffer, shape, dtype, device)
    }

    fn packs_on_device() -> bool {
        true
    }

    fn reserve_offload(device: &Self::Device, count: usize, bytes: usize) {
        engine(device).copies.reserve(count, bytes);
    }

    fn nf4_dequantize(weight: &Nf4Weight<Self>) -> Tensor<Self, 2> {
        launch_nf4::dequantize(weight)
    }

    fn trace<R>(device: &Self::Device, work: impl FnOnce() -> R) -> (R, Vec<TracedOperation>) {
        let engine = engine(device);
        engine.trace.start();
        let result = work();
        (result, engine.trace.finish(&engine))
    }

    fn release_memory(device: &Self::Device) {
        let engine = engine(device);
        engine.scratch.release();
        engine.copies.release();
        Self::memory_cleanup(device);
    }

    fn self_test(device: &Self::Device, dtype: DType, head_dim: usize) -> Result<(), String> {
        self_test::run(device, dtype, head_dim)
    }

    fn section<R>(device: &Self::Device, work: impl FnOnce() -> R) -> R {
        engine(device).section(work)
    }

    fn project(x_ni: Tensor<Self, 2>, projections: &[Projection<Self>]) -> Vec<Tensor<Self, 2>> {
        linear::project(x_ni, projections)
    }

    fn project_add(
        x_ni: Tensor<Self, 2>,
        projection: &Projection<Self>,
        residual_no: Tensor<Self, 2>,
    ) -> Tensor<Self, 2> {
        linear::project_add(x_ni, projection, residual_no)
    }

    fn project_backward(
        x_ni: Tensor<Self, 2>,
        projections: &[Projection<Self>],
        dys_no: Vec<Tensor<Self, 2>>,
    ) -> (Tensor<Self, 2>, Vec<ProjectionGradients<Self>>) {
        linear::project_backward(x_ni, projections, dys_no)
    }

    fn project_heads(
        x_nd: Tensor<Self, 2>,
        projections: &[Projection<Self>; 3],
        tables: &RotaryTables<Self>,
        head_dim: usize,
    ) -> Heads<Self> {
        linear::project_heads(x_nd, projections, tables, head_dim)
    }

    fn project_heads_backward(
        x_nd: Tensor<Self, 2>,
        projections: &[Projection<Self>; 3],
        tables: &RotaryTables<Self>,
        d_heads: Heads<Self>,
    ) -> (Tensor<Self, 2>, Vec<ProjectionGradients<Self>>) {
        linear::project_heads_backward(x_nd, projections, tables, d_heads)
    }

    fn swiglu_project_add(
        gate_nf: Tensor<Self, 2>,
        up_nf: Tensor<Self, 2>,
        projection: &Projection<Self>,
        residual_nd: Tensor<Self, 2>,
        keep: bool,
    ) -> (Tensor<Self, 2>, Option<Tensor<Self, 2>>) {
        linear::swiglu_project_add(gate_nf, up_nf, projection, residual_nd, keep)
    }

    fn swiglu_project_backward(
        gate_nf: Tensor<Self, 2>,
        up_nf: Tensor<Self, 2>,
        activated_nf: Option<Tensor<Self, 2>>,
        projection: &Projection<Self>,
        dy_nd: Tensor<Self, 2>,
    ) -> SwigluProjectGradients<Self> {
        linear::swiglu_project_backward(gate_nf, up_nf, activated_nf, projection, dy_nd)
    }

    fn offload(x_nd: Tensor<Self, 2>) -> Offloaded<Self> {
        launch_offload::offload(x_nd)
    }

    fn prefetch(offloaded: &mut Offloaded<Self>, device: &Self::Device) {
        launch_offload::prefetch(offloaded, &engine(device));
    }

    fn restore(offloaded: Offloaded<Self>, device: &Self::Device) -> Tensor<Self, 2> {
        launch_offload::restore(offloaded, &engine(device))
    }

    fn accumulate(sum: Tensor<Self, 1>, gradient: Tensor<Self, 1>) -> Tensor<Self, 1> {
        let engine = engine(&sum.device());
        engine.section(|| {
            let gradient = engine.flat(gradient);
            let sum = engine.owned(float(sum));
            engine.accumulate(tensor::address(&sum), gradient.address, gradient.width);
            tensor(sum)
        })
    }

    fn embed(table_vd: Tensor<Self, 2>, ids_n: Tensor<Self, 1, Int>, dtype: DType) -> Tensor<Self, 2> {
        let engine = engine(&table_vd.device());
        engine.section(|| tensor(engine.embed(&engine.flat(table_vd), &engine.int_matrix(ids_n), dtype).tensor))
    }

    fn embed_backward(ids_n: Tensor<Self, 1, Int>, dy_nd: Tensor<Self, 2>, vocab_size: usize) -> Tensor<Self, 2> {
        let engine = engine(&dy_nd.device());
        engine.section(|| {
            let (ids, dy) = (engine.int_matrix(ids_n), engine.flat(dy_nd));
            tensor(engine.embed_backward(&ids, &dy, vocab_size).tensor)
        })
    }

    fn rms_norm(x_nd: Tensor<Self, 2>, weight_d: Tensor<Self, 1>, epsilon: f64) -> Tensor<Self, 2> {
        let engine = engine(&x_nd.device());
        engine.section(|| tensor(engine.rms_norm(&engine.flat(x_nd), &engine.flat(weight_d), epsilon).tensor))
    }

    fn rms_norm_backward(
        x_nd: Tensor<Self, 2>,
        weight_d: Tensor<Self, 1>,
        epsilon: f64,
        dy_nd: Tensor<Self, 2>,
        dx_residual: Option<Tensor<Self, 2>>,
        weight_gradient: bool,
    ) -> (Tensor<Self, 2>, Option<Tensor<Self, 1>>) {
        let engine = engine(&x_nd.device());
        engine.section(|| {
            let (x, weight, dy) = (engine.flat(x_nd), engine.flat(weight_d), engine.flat(dy_nd));
            let residual = dx_residual.map(|residual| engine.flat(residual));
            let (dx, d_weight) =
                engine.rms_norm_backward(&x, &weight, epsilon, &dy, residual.as_ref(), weight_gradient);
            (tensor(dx.tensor), d_weight.map(tensor))
        })
    }

    fn rotary(x_nhk: Tensor<Self, 3>, tables: &RotaryTables<Self>) -> Tensor<Self, 3> {
        rotated(x_nhk, tables, false)
    }

    fn rotary_backward(dy_nhk: Tensor<Self, 3>, tables: &RotaryTables<Self>) -> Tensor<Self, 3> {
        rotated(dy_nhk, tables, true)
    }

    fn packed_attention(
        q_nhk: Tensor<Self, 3>,
        k_ngk: Tensor<Self, 3>,
        v_ngk: Tensor<Self, 3>,
        documents: &Documents<Self>,
    ) -> AttentionOutput<Self> {
        attention::forward(q_nhk, k_ngk, v_ngk, documents)
    }

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

    fn swiglu(gate_nf: Tensor<Self, 2>, up_nf: Tensor<Self, 2>) -> Tensor<Self, 2> {
        let engine = engine(&gate_nf.device());
        engine.section(|| tensor(engine.swiglu(&engine.matrix(gate_nf), &engine.matrix(up_nf)).tensor))
    }

    fn swiglu_backward(
        gate_nf: Tensor<Self, 2>,
        up_nf: Tensor<Self, 2>,
        dy_nf: Tensor<Self, 2>,
    ) -> (Tensor<Self, 2>, Tensor<Self, 2>) {
        let engine = engine(&gate_nf.device());
        engine.section(|| {
            let dy = engine.flat(dy_nf);
            let [gate, up] = engine.swiglu_backward(float(gate_nf), float(up_nf), &dy, false);
            (tensor(gate), tensor(up))
        })
    }

    fn cross_entropy(
        logits_cv: Tensor<Self, 2>,
        targets_c: Tensor<Self, 1, Int>,
        gradient_scale: Option<f64>,
    ) -> (Tensor<Self, 1>, Option<Tensor<Self, 2>>) {
        loss::cross_entropy(logits_cv, targets_c, gradient_scale)
    }

    fn linear_cross_entropy(
        hidden_nd: Tensor<Self, 2>,
        head: &Weight<Self>,
        trained: &TrainedPositions<Self>,
        options: CrossEntropyOptions,
    ) -> CrossEntropy<Self> {
        loss::linear_cross_entropy(hidden_nd, head, trained, options)
    }

    fn squared_norm(tensors: &[Tensor<Self, 1>]) -> Tensor<Self, 1> {
        launch_optimizer::squared_norm(tensors)
    }

    fn adamw(
        parameter: Tensor<Self, 1>,
        gradient: Tensor<Self, 1>,
        moments: (Tensor<Self, 1>, Tensor<Self, 1>),
        gradient_scale: Tensor<Self, 1>,
        hyper: &AdamW,
    ) -> (Tensor<Self, 1>, (Tensor<Self, 1>, Tensor<Self, 1>)) {
        launch_optimizer::adamw(parameter, gradient, moments, gradient_scale, hyper)
    }

    fn adamw_8bit_many(
        updates: Vec<EightBitUpdate<Self>>,
        gradient_scale: Tensor<Self, 1>,
        hyper: &AdamW,
    ) -> Vec<(Tensor<Self, 1>, EightBitMoments<Self>)> {
        launch_optimizer::adamw_8bit_many(updates, gradient_scale, hyper)
    }

    fn adamw_8bit(
        parameter: Tensor<Self, 1>,
        gradient: Tensor<Self, 1>,
        moments: EightBitMoments<Self>,
        gradient_scale: Tensor<Self, 1>,
        hyper: &AdamW,
    ) -> (Tensor<Self, 1>, EightBitMoments<Self>) {
        launch_optimizer::adamw_8bit(parameter, gradient, moments, gradient_scale, hyper)
    }
}

/// Heads rotated into a new tensor.
fn rotated(x_nhk: Tensor<Cuda, 3>, tables: &RotaryTables<Cuda>, backward: bool) -> Tensor<Cuda, 3> {
    let engine = engine(&x_nhk.device());
    let [_, heads, head_dim] = x_nhk.dims();
    engine.section(|| {
        let x = engine.matrix(x_nhk);
        let y = engine.empty(x.tensor.shape(), x.dtype);
        let rows = engine.matrix_of(y.clone());
        engine.rotate(&rows, &x, tables, heads, head_dim, backward);
        tensor(y)
    })
}
