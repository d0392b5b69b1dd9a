//! NVIDIA GPUs: tensors in CubeCL's memory, GEMMs by cuBLASLt, attention by cuDNN, everything else by hand-written CUDA C++.
//!
//! All work goes to one stream of the engine, which meets CubeCL's stream only at the edges of a section (`section.rs`). Files are
//! named by subject; each implements the trait of its subject for [`Cuda`] and launches the kernels in `source/`.
//! Trade-off: two threads may use one device, but only one of them can be inside a section at a time.

#![allow(unsafe_code, reason = "launching device work is unsafe; this folder is where it is justified")]
#![deny(clippy::undocumented_unsafe_blocks)]

mod adapter_passes;
mod adapters;
mod address;
mod appended;
mod attention;
mod attention_case;
mod cached_attention;
mod collectives;
mod columns;
mod comm;
mod copy;
mod cudnn;
mod cudnn_limits;
mod dropout;
mod embedding;
mod engine;
mod failure;
mod few_rows;
mod flash;
mod fp8;
mod fp8_codes;
mod fp8_rows;
mod fp8_scales;
mod fp8_scaling;
mod gated;
mod gated_low_rank;
mod gemm;
mod handle_number;
mod heads;
mod host_copies;
mod kept;
mod launch;
mod library;
mod linear;
mod linear_backward;
mod live;
mod loss;
mod low_rank;
mod magnitude;
mod matrix;
mod memory;
mod modules;
mod norm;
mod offload;
mod optimizer;
mod pairs;
mod pinned;
mod processors;
mod program;
mod prologue_backward;
mod quantize;
mod recycled;
mod room;
mod routing;
mod row_scaling;
mod scratch;
mod section;
mod self_test;
mod tables;
mod tensor;
mod trace;
mod upload;
mod watch;
mod weights;
mod write_out;

pub use cudnn_limits::CudnnLimits;
pub use engine::{
    device_count, launches_in_graphs, limit_cudnn, limit_shared_memory, probe, refuse_cudnn, scratch_bytes, use_graphs,
};
pub use failure::DeviceFailure;
pub use fp8_scaling::{block_scales, scale_rows};
pub use matrix::Cuda;
pub use row_scaling::RowScaling;
pub use watch::watch_burn_operations;

use failure::check;

impl crate::Kernels for Cuda {
    fn self_test(
        device: &Self::Device,
        dtype: burn_tensor::DType,
        gemms: crate::GemmFormat,
        head_dim: usize,
    ) -> Option<Result<(), String>> {
        Some(self_test::run(device, dtype, gemms, head_dim))
    }

    fn trace<R>(device: &Self::Device, work: impl FnOnce() -> R) -> (R, Vec<crate::TracedOperation>) {
        let engine = engine::engine(device);
        // The trace begins now for both, the host and the device.
        engine.synchronize();
        let origin = check("recording an event", engine.mark());
        check("waiting for the device", origin.synchronize());
        engine.trace.start(origin);
        let result = work();
        engine.synchronize();
        (result, engine.trace.finish())
    }
}
