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

use std::sync::atomic::{AtomicBool, Ordering};

use cubecl::Runtime;
use cubecl::wgpu::{WgpuDevice, WgpuRuntime};

pub use engine::Wgpu;
pub(super) use engine::probe;
pub(super) use self_test::{refusals, self_test};

use crate::linear::GemmFormat;
use crate::session::{Hint, RunShape};
use engine::Engine;

/// Whether attention and the head multiply by matrix units.
static IN_HALF: AtomicBool = AtomicBool::new(false);

fn is_in_half() -> bool {
    IN_HALF.load(Ordering::Relaxed)
}

super::by_default! { Wgpu: MoeOps, ConvOps, DeltaOps }

/// Returns the maximum bytes of a tensor, which launches bind whole.
pub(super) fn largest_tensor_bytes() -> Option<u64> {
    probe().is_ok().then(|| Engine::get().most_values() as u64 * 4)
}

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
    fn open(_: &Self::Device, shape: &RunShape) {
        IN_HALF.store(shape.gemms == GemmFormat::F16, Ordering::Relaxed);
    }

    fn hint(_: &Self::Device, hint: Hint<'_, Self>) {
        if matches!(hint, Hint::NewSizes) {
            Engine::get().release();
        }
    }

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
