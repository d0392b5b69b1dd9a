//! Memory on wgpu.

use burn_tensor::Tensor;
use cubecl::wgpu::WgpuDevice;

use super::engine::{Engine, Wgpu, probe};
use crate::{MemoryOps, Readback};

impl MemoryOps for Wgpu {
    /// Opens the device before CubeCL does. There is one for all ranks.
    fn device_of(_: usize) -> WgpuDevice {
        // A missing device is reported by the first operation.
        let _ = probe();
        WgpuDevice::DefaultDevice
    }

    fn read_later(values: Vec<Tensor<Self, 1>>) -> Readback {
        let number = |value: Tensor<Self, 1>| value.into_data().iter::<f32>().next().expect("a value");
        Readback::new(move || Engine::get().pause(|| values.into_iter().map(number).collect()))
    }
}
