//! Vulkan, Metal, DirectX and WebGPU through burn-wgpu: the portable bodies on CubeCL's kernels.

use burn_cubecl::CubeBackend;
use burn_tensor::IntDType;
use cubecl::wgpu::WgpuRuntime;

use crate::Kernels;

/// f32 values, i32 indices, booleans as u32: WebGPU has no 8-bit storage.
pub type Wgpu = CubeBackend<WgpuRuntime, f32, i32, u32>;

impl Kernels for Wgpu {
    fn code_dtype() -> IntDType {
        IntDType::I32
    }
}
