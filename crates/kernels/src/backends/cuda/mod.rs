//! NVIDIA GPUs: tensors in CubeCL's memory, GEMMs by cuBLASLt, attention by cuDNN, everything else by hand-written CUDA C++.
//!
//! All work runs on one stream of the engine, which synchronizes with CubeCL's stream only at the edges of a section (`engine/section.rs`). Each
//! other folder is one subject: it implements the trait of that subject for [`Cuda`], with the sources of its kernels next to it. Operations are
//! methods of `Device`: the engine, and what the subjects keep from one operation to the next (`device.rs`).

#![allow(unsafe_code, reason = "launching device work is unsafe; this folder is where it is justified")]
#![deny(clippy::undocumented_unsafe_blocks)]

mod attention;
mod comm;
mod conv;
mod delta;
mod device;
mod embedding;
mod engine;
mod fp8_self_test;
mod linear;
mod loss;
mod memory;
mod moe;
mod norm;
mod optimizer;
mod self_test;
mod session;
mod tables;

pub use attention::library::CudnnLimits;
pub use device::{launches_in_graphs, limit_cudnn, limit_shared_memory, refuse_cudnn, scratch_bytes, use_graphs};
pub use engine::{Cuda, device_count, every_program, probe, watch_burn_operations};
pub use linear::modules::{planned_routes, take_routes};
pub use linear::operands::fp8::codes::RowScaling;
pub use linear::operands::fp8::rows::{block_scales, scale_rows};

pub(super) use comm::connect;
use device::Device;
use engine::check;
pub(super) use engine::format_refusal;
pub(super) use memory::stay_near;
pub(super) use self_test::self_test;

impl crate::Kernels for Cuda {
    fn trace<R>(device: &Self::Device, work: impl FnOnce() -> R) -> (R, Vec<crate::TracedOperation>) {
        let device = Device::of(device);
        // Start the trace at the same time for host and device.
        device.synchronize();
        let origin = check("recording an event", device.mark());
        check("waiting for the device", origin.synchronize());
        device.trace.start(origin);
        let result = work();
        device.synchronize();
        (result, device.trace.finish())
    }
}
