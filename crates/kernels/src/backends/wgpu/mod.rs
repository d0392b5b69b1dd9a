//! Vulkan, Metal, DirectX and WebGPU: tensors in CubeCL's memory, kernels of our own in WGSL on the same device, and reference bodies on CubeCL's.
//!
//! `engine/` records launches; each other folder is one subject, with the sources of its kernels next to it. Activations and sums are f32: float16
//! ends at 65,504. What has no kernel is paused for and runs in Burn's operations, each a launch and a pass over memory.

#![allow(
    unsafe_code,
    reason = "programs are compiled without bounds on their loops; this folder is where it is justified"
)]
#![deny(clippy::undocumented_unsafe_blocks)]

mod attention;
mod codes;
mod engine;
mod linear;
mod loss;
mod memory;
mod norm;
mod optimizer;
mod self_test;

use cubecl::Runtime;
use cubecl::wgpu::{WgpuDevice, WgpuRuntime};

pub use engine::Wgpu;
pub(super) use engine::{has_f16, probe};
pub(super) use self_test::self_test;

use engine::Engine;

super::by_default! { Wgpu: MoeOps, ConvOps, DeltaOps }

/// Returns the bytes that this thread's memory pools hold on the default device.
pub(super) fn allocated_bytes() -> Option<u64> {
    WgpuRuntime::client(&WgpuDevice::DefaultDevice).memory_usage().ok().map(|usage| usage.bytes_reserved)
}

impl crate::Kernels for Wgpu {
    fn trace<R>(_: &Self::Device, work: impl FnOnce() -> R) -> (R, Vec<crate::TracedOperation>) {
        let engine = Engine::get();
        engine.synchronize();
        engine.trace.start();
        let result = work();
        engine.synchronize();
        (result, engine.trace.finish())
    }
}

impl crate::Session for Wgpu {
    fn section<R>(_: &Self::Device, work: impl FnOnce() -> R) -> R {
        Engine::get().section(work)
    }

    fn pause<R>(_: &Self::Device, work: impl FnOnce() -> R) -> R {
        Engine::get().pause(work)
    }

    fn release_memory(_: &Self::Device) {
        Engine::get().release();
    }
}
