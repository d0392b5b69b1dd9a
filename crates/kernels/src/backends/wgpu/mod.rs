//! Vulkan, Metal, DirectX and WebGPU through burn-wgpu: the portable bodies on CubeCL's kernels, and own kernels where those
//! would give up what the operation is for.

mod nf4;

use burn_cubecl::CubeBackend;
use burn_tensor::{IntDType, Tensor};
use cubecl::future::block_on;
use cubecl::wgpu::{AutoGraphicsApi, GraphicsApi, WgpuRuntime};
use firebrick_precision::nf4::Nf4Quantized;

use crate::{Kernels, Nf4Weight};

/// f32 values, i32 indices, booleans as u32: WebGPU has no 8-bit storage.
pub type Wgpu = CubeBackend<WgpuRuntime, f32, i32, u32>;

impl Kernels for Wgpu {
    fn code_dtype() -> IntDType {
        IntDType::I32
    }

    fn nf4_upload(quantized: &Nf4Quantized, device: &Self::Device) -> Nf4Weight<Self> {
        nf4::upload(quantized, device)
    }

    fn nf4_dequantize(weight: &Nf4Weight<Self>) -> Tensor<Self, 2> {
        nf4::dequantize(weight)
    }
}

/// Asks for the adapter that CubeCL will ask for, which panics where there is none.
pub(crate) fn probe() -> Result<(), String> {
    let backend = AutoGraphicsApi::backend();
    let descriptor =
        wgpu::InstanceDescriptor { backends: backend.into(), ..wgpu::InstanceDescriptor::new_without_display_handle() };
    let options = wgpu::RequestAdapterOptions::default();
    match block_on(wgpu::Instance::new(descriptor).request_adapter(&options)) {
        Ok(_) => Ok(()),
        Err(error) => Err(format!("no {backend:?} adapter ({error})")),
    }
}
