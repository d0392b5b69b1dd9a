//! Memory on wgpu.

use burn_tensor::{DType, Tensor};
use cubecl::wgpu::WgpuDevice;

use super::engine::{Engine, Wgpu, probe};
use crate::memory::joined;
use crate::{HostBuffer, MemoryOps, Readback};

impl MemoryOps for Wgpu {
    /// Opens the device before CubeCL does. There is one for all ranks.
    fn device_of(_: usize) -> WgpuDevice {
        // A missing device is reported by the first operation.
        let _ = probe();
        WgpuDevice::DefaultDevice
    }

    /// WGSL has no bfloat16: such values become f32 on the host, where CubeCL would compute nothing and say nothing.
    fn upload<E>(
        buffers: impl IntoIterator<Item = Result<HostBuffer, E>>,
        shape: [usize; 2],
        dtype: DType,
        device: &WgpuDevice,
    ) -> Result<Tensor<Self, 2>, E> {
        let data = joined(buffers, shape, dtype)?;
        let (data, dtype) = if dtype == DType::BF16 { (data.convert::<f32>(), DType::F32) } else { (data, dtype) };
        Ok(Tensor::from_data(data, (device, dtype)))
    }

    fn read_later(values: Vec<Tensor<Self, 1>>) -> Readback {
        let numbers = |values: Tensor<Self, 1>| values.into_data().iter::<f32>().collect::<Vec<_>>();
        Readback::new(move || Engine::get().pause(|| values.into_iter().flat_map(numbers).collect()))
    }
}
