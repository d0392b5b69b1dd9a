//! Vulkan, Metal, DirectX and WebGPU through burn-wgpu: the reference bodies on CubeCL's kernels, and a kernel of our own to
//! dequantize.
//!
//! Trade-off: each arithmetic step is a launch and a pass over memory.

mod weights;

use burn_cubecl::CubeBackend;
use cubecl::Runtime;
use cubecl::future::block_on;
use cubecl::wgpu::{AutoGraphicsApi, GraphicsApi, WgpuRuntime};

use crate::{AttentionOps, EmbeddingOps, Kernels, LinearOps, LossOps, MemoryOps, MoeOps, NormOps, OptimizerOps};

/// f32 values, i32 indices, booleans as u32: WebGPU has no 8-bit storage.
pub type Wgpu = CubeBackend<WgpuRuntime, f32, i32, u32>;

impl MemoryOps for Wgpu {}
impl NormOps for Wgpu {}
impl LinearOps for Wgpu {}
impl AttentionOps for Wgpu {}
impl MoeOps for Wgpu {}
impl EmbeddingOps for Wgpu {}
impl LossOps for Wgpu {}
impl OptimizerOps for Wgpu {}
impl Kernels for Wgpu {}

/// Looks for a device that wgpu can compute on: asks for the adapter that CubeCL will ask for, which panics where there is none.
///
/// # Errors
/// What was looked for, in the library's words.
pub(super) fn probe() -> Result<(), String> {
    adapter().map(|_| ())
}

/// Bytes that this thread's memory pools hold on the default device.
pub(super) fn allocated_bytes() -> Option<u64> {
    WgpuRuntime::client(&Default::default()).memory_usage().ok().map(|usage| usage.bytes_reserved)
}

/// Whether the adapter's shaders have float16; CubeCL turns on all that the adapter has.
pub(super) fn has_f16() -> bool {
    adapter().is_ok_and(|adapter| adapter.features().contains(wgpu::Features::SHADER_F16))
}

fn adapter() -> Result<wgpu::Adapter, String> {
    let backend = AutoGraphicsApi::backend();
    let descriptor =
        wgpu::InstanceDescriptor { backends: backend.into(), ..wgpu::InstanceDescriptor::new_without_display_handle() };
    let options = wgpu::RequestAdapterOptions::default();
    let adapter = block_on(wgpu::Instance::new(descriptor).request_adapter(&options));
    adapter.map_err(|error| format!("no {backend:?} adapter ({error})"))
}
